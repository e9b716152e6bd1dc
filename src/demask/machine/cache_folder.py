"""The folder for files that only save time: measured seconds and compiled kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """demask's folder in the user's cache folder; None if there is no such folder. Reads the
    environment, creates nothing."""
    home, system = Path(os.path.expanduser("~")), sys.platform
    usual = home / {"darwin": "Library/Caches", "win32": "AppData/Local"}.get(system, ".cache")
    variable = {"darwin": "", "win32": "LOCALAPPDATA"}.get(system, "XDG_CACHE_HOME")
    variable_path = Path(os.environ.get(variable, ""))
    folder = variable_path if variable_path.is_absolute() else usual  # the XDG standard: ignore relative ones
    return folder / "demask" if folder.is_absolute() else None
