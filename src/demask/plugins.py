"""Modules that are imported at the first use of what they define. No other file names modules in
strings."""

from demask.registry import CUSTOM_OPS, RESULT_KINDS, RUNNERS

# Public names of `demask` and their modules; and names that are modules themselves.
PUBLIC_NAMES = {
    "Report": "demask.report",
    "Trace": "demask.shrink",
    "Verification": "demask.verify",
    "carry": "demask.shrink.training",
    "demask": "demask.shrink",
    "expand": "demask.shrink.training",
    "explain": "demask.shrink",
    "from_onnx": "demask.files.onnx",
    "load": "demask.files.archive",
    "optimize": "demask.optimize",
    "optimize_onnx": "demask.optimize_onnx",
    "report": "demask.report",
    "resize": "demask.files.into_class",
    "save": "demask.files.archive",
    "to_onnx": "demask.files.onnx",
    "to_pt2": "demask.files.pt2",
    "verify": "demask.verify",
}
PUBLIC_MODULES = {
    "checkpoint": "demask.checkpoint",
    "ops": "demask.ops",
    "pilot": "demask.pilot",
    "prune": "demask.prune",
    "sparse": "demask.sparse",
    "stride": "demask.stride",
    "traverse": "demask.traverse",
}

CUSTOM_OPS.declare("chain", "demask.pilot.chains.chain_op")
CUSTOM_OPS.declare("dequantize", "demask.ops.quantization")
CUSTOM_OPS.declare("moments", "demask.exec.analysis.split_global_ops")
CUSTOM_OPS.declare("packed_linear", "demask.sparse.lower_packed")
CUSTOM_OPS.declare("quantize", "demask.ops.quantization")
CUSTOM_OPS.declare("segment", "demask.sparse.segment.inline")
RESULT_KINDS.declare("tiled", "demask.traverse.execution.tiled_module")
RUNNERS.declare("checkpoint", "demask.checkpoint.mask")
RUNNERS.declare("packed", "demask.checkpoint.transformers_loader")
RUNNERS.declare("smaller", "demask.checkpoint.slim")
RUNNERS.declare("optimize", "demask.optimize")
RUNNERS.declare("segment", "demask.sparse.segment.one_layer")
