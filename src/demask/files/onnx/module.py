"""An ONNX file as a PyTorch module.

Replacement of inputs of an ONNX file by constants.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput, DemaskError
from demask.failures import is_strict, public
from demask.files.onnx.model import OnnxFile, OnnxNode
from demask.files.onnx.op_functions import OnnxCall
from demask.files.onnx.plan import EntryOf, OnnxPlan, OnnxPlanner, OnnxStep
from demask.files.onnx.read.reader import read
from demask.files.onnx.recording import OnnxRecorder, OnnxRecording, Recordings, key_of
from demask.files.onnx.values import NUMPY, Host, Value, tensor_of
from demask.graph.provenance import NAMELESS, Interface, OnnxPort
from demask.graph.result.demasked_module import attach

#: by the kind of number that an input takes, the kinds (of numpy) that its value may have
_KINDS = {"bool": "b", "int": "iu", "float": "iuf", "complex": "iufc"}


def fix_inputs(file: OnnxFile, values: Mapping[str, Any]) -> OnnxFile:
    """The file with constants in place of some inputs; sizes that those inputs name become numbers.

    Args:
        values: a number, list, array or tensor by the name of the input.

    Raises:
        BadInput: no input has the name, or the value does not fit it.
    """
    ports = {port.name: port for port in file.graph.inputs}
    for name in values:
        if name not in ports:
            raise BadInput(f"no input {name!r} to fix; expected one of {list(ports)}")
    tensors = {name: _fitted(ports[name], value) for name, value in values.items()}
    sizes = _named_sizes(ports, tensors)
    nodes = [OnnxNode("Constant", "", "", (), (name,), {"value": t}) for name, t in tensors.items()]
    graph = replace(
        file.graph,
        nodes=(*nodes, *file.graph.nodes),
        inputs=tuple(_sized(p, sizes) for p in file.graph.inputs if p.name not in tensors),
        outputs=tuple(_sized(p, sizes) for p in file.graph.outputs),
    )
    return replace(file, graph=graph)


def _fitted(port: OnnxPort, value: Any) -> Tensor:
    """A value as a tensor of an input's dtype and sizes; BadInput where it does not fit."""
    what, dtype = f"input {port.name!r}", getattr(torch, port.dtype or "-", None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{what} takes no tensor of numbers ({port.dtype or 'text'}): leave it open")
    try:
        array = _array(value)
        source = torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{what}: expected a number, a list or an array, got {value!r}") from error
    if array.size and array.dtype.kind not in _KINDS[_kind(dtype)]:
        raise BadInput(f"{what}: expected {port.dtype}, got {array.dtype}")
    tensor = source.to(dtype)
    if not _is_exact(tensor, array):
        raise BadInput(f"{what}: expected numbers that {port.dtype} has, got {value!r}")
    sizes = array.shape if port.sizes is None else port.sizes
    pairs = list(zip(sizes, array.shape, strict=False))
    if len(sizes) != array.ndim or any(isinstance(n, int) and n != m for n, m in pairs):
        raise BadInput(f"{what}: expected sizes {list(sizes)}, got {list(array.shape)}")
    return tensor


def _array(value: Any) -> np.ndarray:
    """A copy of a caller's value, as an array of native byte order."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype in NUMPY else value.float()).numpy()
    array = np.array(value)
    # By name: torch does not accept some 64-bit dtypes and byte orders.
    return array.astype(np.dtype(array.dtype.newbyteorder("=").str))


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def _is_exact(tensor: Tensor, array: np.ndarray) -> bool:
    """Whether a tensor has the numbers of an array, except for rounding: no overflow."""
    if not array.size or _kind(tensor.dtype) in ("bool", "complex"):
        return True
    if _kind(tensor.dtype) == "int":
        limits = torch.iinfo(tensor.dtype)
        return limits.min <= int(array.min()) and int(array.max()) <= limits.max
    return bool((tensor.float().isfinite() | ~torch.from_numpy(array).isfinite()).all())


def _named_sizes(ports: Mapping[str, OnnxPort], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The numbers of named sizes, from the shapes of the constants."""
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        for size, n in zip(ports[name].sizes or (), tensor.shape, strict=False):
            if isinstance(size, int) or size in NAMELESS:
                continue
            if sizes.setdefault(size, n) != n:
                raise BadInput(f"size {size!r}: expected one number, got {sizes[size]} and {n}")
    return sizes


def _sized(port: OnnxPort, sizes: Mapping[str, int]) -> OnnxPort:
    if port.sizes is None:
        return port
    return replace(port, sizes=tuple(n if isinstance(n, int) else sizes.get(n, n) for n in port.sizes))


@public
def from_onnx(path: str | os.PathLike[str], *, inputs: Mapping[str, Any] | None = None) -> OnnxModule:
    """The network in an ONNX file, an `nn.Module` in eval mode on the CPU.

    Call the module with one tensor per input of the file, by position; it returns a tensor per
    output: one, or a tuple. Constants of the file are parameters or buffers with the file's names,
    so that they can be pruned, trained and demasked; quantized weights are parameters of whole
    numbers, without gradients. Needs the extra `onnx`.

    Args:
        path: name of the file. Weights in separate files are read from its folder.
        inputs: constants for some inputs, by name: a number, list, array or tensor of the input's
            dtype and shape. The module then takes the other inputs only. An `If` or `Loop` whose
            condition depends only on these constants can be captured by `demask.demask`. Default:
            None, for no constants.

    Raises:
        BadInput: the file is missing or damaged, has no ONNX network, or has an op that demask does
            not support; `inputs` has an unknown name or a value that does not fit; or the package
            onnx is not installed. A call of the module raises it if an op fails on the inputs.
        RefusedFile: the file has sizes that exhaust memory, or names a file outside of its folder.
        TypeError: the module is called with another number of inputs.

    Example:
        >>> import demask, tempfile, torch
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), torch.ones(3, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demask.to_onnx(net, f"{folder}/net.onnx", (x,))
        ...     again = demask.from_onnx(f"{folder}/net.onnx")
        >>> sorted(again.state_dict()), torch.allclose(again(x), net(x), atol=1e-6)
        (['0.bias', '0.weight'], True)
    """
    try:
        return OnnxModule(fix_inputs(read(path), inputs or {}))
    except BadInput as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


class OnnxModule(nn.Module):
    """The graph of an ONNX file, run node by node with PyTorch ops, to be demasked, pruned, trained
    or exported. entry_of: as in `OnnxPlanner`."""

    def __init__(self, file: OnnxFile, entry_of: EntryOf | None = None):
        super().__init__()
        planner = OnnxPlanner(file, entry_of)
        try:
            self.plan = planner.plan()
        except RecursionError as error:
            raise BadInput("expected functions that do not call themselves") from error
        self.interface = Interface(
            file.graph.inputs, file.graph.outputs, file.graph.name, file.doc, dict(file.metadata), planner.grids
        )
        for name, tensor in planner.tensors.items():
            if name not in planner.stored:
                tensor = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            attach(self, name, tensor)
        self.recordings = Recordings()
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        memo[id(self.plan)] = self.plan  # frozen
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__init__(clone)
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def forward(self, *inputs: Any) -> Any:
        """The output, or a tuple of outputs, for the file's inputs in their order."""
        names = self.plan.inputs
        if len(inputs) != len(names):
            raise TypeError(f"expected {len(names)} inputs {list(names)}, got {len(inputs)}")
        outputs = [self._tensor(v) for v in self._outputs(inputs)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _outputs(self, inputs: Sequence[Any]) -> list[Value]:
        """The values of the outputs, by replaying a recording if one fits the inputs."""
        key = key_of(inputs, self)
        recording = self.recordings.get(key) if key else None
        if isinstance(recording, OnnxRecording):
            named = dict(zip(self.plan.inputs, inputs, strict=True))
            try:
                if (outputs := recording.run(named, self._tensor_named)) is not None:
                    return outputs
            except Exception:  # run node by node, for an error that names the node
                if is_strict():
                    self._run(self.plan, [_as_value(v) for v in inputs], {})
                    raise
        values = [_as_value(v) for v in inputs]
        if recording is not ...:
            return self._run(self.plan, values, {})
        recorder = OnnxRecorder(self.plan, self._tensor_named)
        outputs = self._run(self.plan, values, {}, recorder)
        self.recordings.put(key, recorder.recording(outputs))
        return outputs

    def _run(
        self, plan: OnnxPlan, inputs: Sequence[Value], outer: Mapping[str, Value], recorder: OnnxRecorder | None = None
    ) -> list[Value]:
        values = self._values(plan, inputs, outer, recorder)
        for name in plan.outputs:
            if name not in values:
                raise BadInput(f"demask does not compute {name!r}, an output that few networks use")
        return [values[name] for name in plan.outputs]

    def _values(
        self, plan: OnnxPlan, inputs: Sequence[Value], outer: Mapping[str, Value], recorder: OnnxRecorder | None = None
    ) -> dict[str, Value]:
        """The values that are left after the last step, by name."""
        values: dict[str, Value] = {**outer, "": None}
        for name, constant in plan.constants.items():
            values[name] = constant if isinstance(constant, Host) else self._tensor_named(constant)
        values |= dict(zip(plan.inputs, inputs, strict=True))
        for step in plan.steps:
            self._do(step, plan, values, recorder)
        return values

    def _do(self, step: OnnxStep, plan: OnnxPlan, values: dict[str, Value], recorder: OnnxRecorder | None) -> None:
        node = step.node
        context: dict[str, Any] = {
            "node": node,
            "version": step.version,
            "outputs": len(node.outputs),
            "run": lambda inner, inputs: self._run(
                inner, inputs, values, recorder and recorder.branch(inner, node, values)
            ),
        }
        try:
            inputs = [values[name] for name in node.inputs]
            context["device"] = device = self._device(inputs)
            context["as_tensor"] = lambda value: tensor_of(value, self._tensor_named, device)
            record = recorder and recorder.called
            outputs = step.entry(node, inputs, OnnxCall(self._tensor_named, device, context, record))
            if recorder:
                recorder.node(step, plan, inputs, outputs)
        except DemaskError as error:
            if str(node) in str(error):
                raise
            raise type(error)(f"{node}: {error}") from error
        except Exception as error:  # torch and numpy may raise anything on invalid sizes and types
            raise BadInput(f"{node}: {type(error).__name__}: {error}") from error
        values.update(zip(node.outputs, outputs, strict=False))
        values[""] = None
        for name in step.drops:
            values.pop(name, None)

    def _tensor_named(self, name: str) -> Tensor:
        return reduce(getattr, name.split("."), self)

    def _device(self, inputs: Sequence[Value]) -> torch.device:
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        owned = next(self.parameters(), None) if not tensors else tensors[0]
        return torch.device("cpu") if owned is None else owned.device

    def _tensor(self, value: Value) -> Any:
        if isinstance(value, list):
            return [self._tensor(v) for v in value]
        if isinstance(value, Host) and value.dtype is None:
            return value.array
        return tensor_of(value, self._tensor_named, self._device([]))


def _as_value(value: Any) -> Any:
    """An argument of the caller as a value; text is an array of numpy's."""
    if isinstance(value, list):
        return [_as_value(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUT":
        return Host.of(value.astype(object))
    return value
