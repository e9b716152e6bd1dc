"""The version of demask, and how to install more of it where it is installed now."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

VERSION = "0.1.0"  # its only copy: pyproject.toml reads it here


def install_command(extra: str) -> str:
    """The shell command that installs the packages of an optional extra, such as "onnx".

    It names where demask came from, so that it also works for a checkout or a wheel that no package
    index has: PEP 610 has the installer write that down.

    Example:
        >>> install_command("onnx").startswith("pip install ")
        True
    """
    from importlib import metadata  # it takes longer to import than `demask --version` may

    origin: dict[str, Any] = {}
    try:
        origin = json.loads(metadata.distribution("demask").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:  # run from a source tree
        folder = Path(__file__).parents[2]
        if (folder / "pyproject.toml").is_file():
            origin = {"url": folder.as_uri()}
    if not origin:
        return f'pip install "demask[{extra}]"'
    url = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        folder = unquote(urlsplit(url).path)
        return f"pip install --editable {shlex.quote(f'{folder}[{extra}]')}"
    if version := origin.get("vcs_info"):
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f'pip install "demask[{extra}] @ {url}"'
