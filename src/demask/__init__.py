"""demask: pruned and masked neural networks, actually smaller and faster, computing the same.

`demask` removes pruned weights, `optimize` finds the fastest implementation, `verify` compares two
networks, and `report` lists what was removed. `carry` lets training go on in the smaller network,
`expand` writes its weights back into the original. `save`, `load`, `to_onnx`, `from_onnx` and
`to_pt2` write and read files; `resize` loads tensors of a demasked network into its original class.

Example:
    >>> import demask, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> net[0].weight.data[:5] = 0  # outputs 0 to 4 are constants
    >>> slim = demask.demask(net, (torch.ones(1, 4),))
    >>> demask.verify(net, slim).ok, slim.get_parameter("0.weight").shape
    (True, torch.Size([3, 4]))
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from demask.errors import BadInput, DemaskError, Mismatch, NeedsGraph, NotExportable, RefusedFile
from demask.installation import VERSION
from demask.plugins import PUBLIC_MODULES, PUBLIC_NAMES

if TYPE_CHECKING:
    from demask import checkpoint, ops, pilot, prune, sparse, stride, traverse
    from demask.files.archive import load, save
    from demask.files.into_class import resize
    from demask.files.onnx import from_onnx, to_onnx
    from demask.files.pt2 import to_pt2
    from demask.optimize import optimize
    from demask.optimize_onnx import optimize_onnx
    from demask.report import Report, report
    from demask.shrink import Trace, demask, explain
    from demask.shrink.training import carry, expand
    from demask.verify import Verification, verify

__version__ = VERSION
__all__ = [
    "BadInput",
    "DemaskError",
    "Mismatch",
    "NeedsGraph",
    "NotExportable",
    "RefusedFile",
    "Report",
    "Trace",
    "Verification",
    "carry",
    "checkpoint",
    "demask",
    "expand",
    "explain",
    "from_onnx",
    "load",
    "ops",
    "optimize",
    "optimize_onnx",
    "pilot",
    "prune",
    "report",
    "resize",
    "save",
    "sparse",
    "stride",
    "to_onnx",
    "to_pt2",
    "traverse",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A public name at its first use; ModuleNotFoundError says which package it needs."""
    home = PUBLIC_NAMES.get(name) or PUBLIC_MODULES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(home)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "demask":
            raise
        package = error.name.partition(".")[0]
        raise ModuleNotFoundError(
            f"demask.{name} needs {package}, which is not installed: pip install {package}", name=error.name
        ) from error
    globals()[name] = getattr(module, name) if name in PUBLIC_NAMES else module
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Facade(ModuleType):
    """A package whose functions go before modules of their names.

    Python binds a module that it has imported to its package: `import demask.verify` would put the
    module where `demask.verify()` is looked for.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        taken = name in PUBLIC_NAMES and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if taken else value)


sys.modules[__name__].__class__ = _Facade

# Graphs that torch.export.load reads may call demask's ops. A command line that prints its help
# alone imports no torch.
if "torch" in sys.modules:
    import_module(PUBLIC_MODULES["sparse"])
