"""Writes the generated pages and pictures: `python -m docs NAME ...`, from the project's folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from docs.generate import ROOT, blocks, texts

# By name: what is written, and by which modules of docs/generate.
NAMES = {
    "table": ("table.md, the ops", ["table"]),
    "rewrites": ("rewrites.md, the rewrites of programs", ["rewrites"]),
    "onnx": ("onnx-ops.md, the ops of ONNX", ["onnx"]),
    "commands": ("commands.md, what --help prints", ["commands"]),
    "networks": ("networks.md, from benchmarks/results/networks.json", ["networks"]),
    "nightly": ("nightly.md, from build/nightly", ["nightly"]),
    "pictures": ("drawings", ["before_after", "strips"]),
    "photographs": ("what traverse.md shows; needs shared/data", ["bands", "statistics"]),
    "blocks": ("what the blocks of pages, and the examples, print", []),
}


def write(name: str) -> Iterator[Path]:
    """Writes the pages or the picture of a module of docs/generate; returns their paths."""
    module = import_module(f"docs.generate.{name}")
    if hasattr(module, "figure"):
        figure = module.figure()
        figure.savefig(module.PATH, format="jpg", dpi=module.DPI, pil_kwargs={"quality": 88})
        yield module.PATH
        return
    for path, text in texts(module).items():
        path.write_text(text)
        yield path


def main() -> None:
    """Writes what is named on the command line."""
    about = "; ".join(f"{name}: {text}" for name, (text, _) in NAMES.items())
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__, epilog=about)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=" ".join(NAMES))
    sys.path[:0] = [str(path) for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    for name in parser.parse_args().names:
        for module in NAMES[name][1]:
            for path in write(module):
                print(path.relative_to(ROOT))
        if name == "blocks":
            with contextlib.suppress(ImportError):  # its ops are not compiled for every torch
                import_module("networks").torchvision()
            for path in [*blocks.pages(), *blocks.scripts()]:
                path.write_text(blocks.rerun(path))
                print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
