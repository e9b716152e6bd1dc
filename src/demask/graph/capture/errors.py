"""Errors of a capture: checks of its arguments, and reasons of failed exports."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from demask.errors import BadInput, NotExportable

NAMED = 3  # modules named in a message
DATA_DEPENDENT = "this line branches on the values of a tensor"


def check_args(args: Any) -> None:
    """Raise BadInput for positional inputs that are no tuple."""
    if not isinstance(args, tuple):
        raise BadInput(
            f"args must be a tuple of the model's inputs, got {type(args).__name__}: write (x,) for one input"
        )


def check_call(model: Any, args: Any, kwargs: Any, dynamic_shapes: Any) -> None:
    """Raise BadInput for arguments of `capture` of other types."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected an nn.Module or an ExportedProgram, got {type(model).__name__}")
    check_args(args)
    if isinstance(model, torch.jit.ScriptModule):
        raise BadInput(
            "a TorchScript module cannot be captured: torch.export needs Python code. Pass the "
            "Python model with its weights loaded (model.load_state_dict(script.state_dict())), or "
            "export the model to ONNX and read that with demask.from_onnx"
        )
    if not isinstance(kwargs or {}, Mapping) or any(not isinstance(k, str) for k in kwargs or {}):
        raise BadInput(
            f"kwargs must be a mapping from names to the model's keyword inputs, or None, got {type(kwargs).__name__}"
        )
    if isinstance(dynamic_shapes, str | int | float) and dynamic_shapes != "all":
        raise BadInput(
            'dynamic_shapes must be None, "all", or what torch.export takes, such as '
            f'({{0: "n", 2: "h"}},) for one tensor, got {dynamic_shapes!r}'
        )


def part_of(model: Any) -> str:
    """The argument that demasks a part of a network: its largest submodule, if it has one."""
    sizes = {
        name: sum(tensor.numel() for tensor in module.parameters())
        for name, module in (model.named_modules() if isinstance(model, nn.Module) else ())
        if name and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    }
    name = max(sizes, key=sizes.__getitem__, default="")
    return f"modules=[{name!r}]" if name else "modules='auto'"


def export_error(error: Exception, model: nn.Module) -> NotExportable:
    """The error for a failed export of a model: the first line, where, and what to change."""
    packed = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith("torch.ao.nn.quantized") and not name.endswith("_packed_params")
    ]
    if packed:
        return NotExportable(
            "layers of torch.ao.quantization have their weights in objects that torch.export "
            "cannot read, packed for this machine",
            ", ".join(packed[:NAMED]) + (" and more" if len(packed) > NAMED else ""),
            "quantize later: pass the float network, write it by demask.to_onnx, and quantize the "
            "file by onnxruntime.quantization.quantize_dynamic",
        )
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and "/demask/" not in f.filename and "<" not in f.filename
    ]
    last = frames[-1] if frames else None
    where = f"{last.filename}:{last.lineno} ({last.line})" if last else "unknown"
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first.strip()}"
    if any(word in str(error) for word in ("data-dependent", "data dependent", "DataDependent")):
        advice = (
            f"{DATA_DEPENDENT}; compute both sides and select with "
            f"torch.where, use torch.cond, or demask only a part, such as {part_of(model)}"
        )
    elif "Cache" in text:
        advice = "a cache of keys and values is an object with a state: pass use_cache=False"
    else:
        advice = (
            "torch.export(model, args) must succeed; rewrite the line named here, or "
            f"demask only the parts that export, such as {part_of(model)}"
        )
    return NotExportable(text, where, advice)
