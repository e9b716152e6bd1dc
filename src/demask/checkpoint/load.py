"""`load()`: the network of a checkpoint folder, also of one with packed weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from demask.checkpoint.family import Family
from demask.checkpoint.folder import CheckpointFolder
from demask.failures import public


@public
def load(folder: str | os.PathLike[str], **options: Any) -> Any:
    """The network of a checkpoint folder, of its own class of transformers, in eval mode.

    Weights that `slim(..., sparse=True)` stored without their zeros, or `save_pretrained` after `sparsify`, stay so
    in memory: their layers are a `demask.sparse.PackedLinear`. Afterwards the `from_pretrained` of transformers
    loads such folders in this process, too.

    Args:
        folder: a folder of Hugging Face: config.json, safetensors files.
        options: those of `from_pretrained`. Default: dtype="auto", that of the folder.

    Returns:
        The network; `generate`, `save_pretrained` and `dequantize`, which makes all layers dense, work.

    Raises:
        BadInput: the folder is incomplete or damaged, or its class is none of transformers.

    Example:
        >>> import demask
        >>> try:
        ...     network = demask.checkpoint.load("Llama-sparse")
        ... except demask.BadInput as error:  # there is no such folder here
        ...     print(error)
        Llama-sparse: expected a checkpoint folder with config.json and model.safetensors
    """
    checked = CheckpointFolder.read(folder)
    family = Family.of(Path(folder), checked.config)
    from demask.checkpoint import transformers_loader  # adds to transformers' registry

    assert transformers_loader
    return family.model.from_pretrained(folder, **{"dtype": "auto", **options}).eval()
