"""demask: pruned and masked neural networks, actually smaller and faster, computing the same."""

from demask import ops, pilot, sparse, stride, traverse
from demask.errors import BadInput, DemaskError, Mismatch, NotExportable, RefusedFile
from demask.files.archive import load, save
from demask.files.onnx import from_onnx, to_onnx
from demask.files.pt2 import to_pt2
from demask.optimize import optimize
from demask.report import Report, report
from demask.shrink import demask
from demask.verify import Verification, verify

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "DemaskError",
    "Mismatch",
    "NotExportable",
    "RefusedFile",
    "Report",
    "Verification",
    "demask",
    "from_onnx",
    "load",
    "ops",
    "optimize",
    "pilot",
    "report",
    "save",
    "sparse",
    "stride",
    "to_onnx",
    "to_pt2",
    "traverse",
    "verify",
]
