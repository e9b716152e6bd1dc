"""An ONNX file in another version of ONNX's op set, with all else as it was."""

from __future__ import annotations

from typing import Any

from demask.errors import NotExportable
from demask.files.onnx.edit.protos import is_standard


def opset_of(model: Any) -> int:
    """The version of ONNX's op set that a file has."""
    return next((e.version for e in model.opset_import if is_standard(e)), 1)


def with_opset(model: Any, opset: int) -> Any:
    """A ModelProto converted by `onnx.version_converter`; itself if it has that version.

    Raises:
        NotExportable: the converter has no form of an op in that version.
    """
    from onnx import helper, version_converter

    if opset_of(model) == opset:
        return model
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:  # of C++, or a RuntimeError
        reason = (str(error).strip().splitlines() or ["no reason"])[-1]
        raise NotExportable(
            f"onnx's version converter fails from op set {opset_of(model)} to {opset}: {reason}",
            "the file",
            "leave --opset (opset=) out, or choose one nearer to the file's",
        ) from error
    least = helper.find_min_ir_version_for(converted.opset_import, ignore_unknown=True)
    converted.ir_version = max(model.ir_version, least)
    # What describes values is no matter of versions, but the converter drops some of it.
    described = {tensor.name: tensor for tensor in model.graph.initializer}
    described |= {tuple(node.output): node for node in model.graph.node}
    new = [(tensor.name, tensor) for tensor in converted.graph.initializer]
    new += [(tuple(node.output), node) for node in converted.graph.node]
    for key, item in new:
        if key in described:
            item.doc_string = described[key].doc_string
            item.ClearField("metadata_props")
            item.metadata_props.extend(described[key].metadata_props)
    for ports in ("input", "output", "quantization_annotation", "metadata_props"):
        converted.graph.ClearField(ports)
        getattr(converted.graph, ports).extend(getattr(model.graph, ports))
    converted.ClearField("training_info")
    converted.training_info.extend(model.training_info)
    converted.functions.extend(model.functions[len(converted.functions) :])
    return converted
