"""The tokenizer of a folder in a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def add_vocabulary(writer: Any, folder: Path, size: int) -> list[str]:
    """Add a folder's tokenizer to a file, and return notes."""
    writer.add_tokenizer_model("no_vocab")
    return ["the file has no tokenizer"]
