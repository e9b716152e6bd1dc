"""Writes the generated pages and pictures: `python -m docs NAME ...`, from the project's folder."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from docs.generate import DOCS, ROOT, blocks

# By name: what is written, and by which modules of docs/generate.
NAMES = {
    "table": ("table.md, the ops", ["table"]),
    "onnx": ("onnx-ops.md, the ops of ONNX", ["onnx"]),
    "networks": ("networks.md, from benchmarks/results/networks.json", ["networks"]),
    "nightly": ("nightly.md, from build/nightly", ["nightly"]),
    "pictures": ("three pictures; two need shared/data", ["before_after", "bands", "statistics"]),
    "blocks": ("what the blocks of pages, and the examples, print", []),
}


def write(name: str) -> Path:
    """Writes the page or picture of a module of docs/generate; returns its path."""
    module = import_module(f"docs.generate.{name}")
    if hasattr(module, "page"):
        module.PATH.write_text(module.page())
    else:
        figure = module.figure()
        figure.savefig(module.PATH, format="jpg", dpi=module.DPI, pil_kwargs={"quality": 88})
    return module.PATH


def main() -> None:
    """Writes what is named on the command line."""
    about = "; ".join(f"{name}: {text}" for name, (text, _) in NAMES.items())
    parser = argparse.ArgumentParser(prog="python -m docs", description=__doc__, epilog=about)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=" ".join(NAMES))
    sys.path[:0] = [str(path) for path in (ROOT / "tests").rglob("*") if path.is_dir()]
    for name in parser.parse_args().names:
        for module in NAMES[name][1]:
            print(write(module).relative_to(DOCS))
        if name == "blocks":
            for path in [*blocks.pages(), *blocks.scripts()]:
                path.write_text(blocks.rerun(path))
                print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
