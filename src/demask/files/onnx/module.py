"""An ONNX file as a PyTorch module, with constants in place of some inputs, and recordings of its calls."""

from __future__ import annotations

import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demask.compat.dispatch import count_dispatch_modes, count_function_modes, peek_interpreter_stack, tracing_state
from demask.errors import BadInput, DemaskError
from demask.failures import is_strict, public
from demask.files.onnx.model import OnnxFile, OnnxNode
from demask.files.onnx.op_functions import OnnxCall
from demask.files.onnx.plan import EntryOf, OnnxPlan, OnnxPlanner, OnnxStep
from demask.files.onnx.read.reader import read
from demask.files.onnx.values import NUMPY, Host, Value, tensor_of
from demask.graph.provenance import NAMELESS, Interface, OnnxPort
from demask.graph.result.demasked_module import attach

MOST = 16  # recordings of a module; the least recently used is removed first
_OF_SHAPE = ("Shape", "Size")
#: by the kind of number that an input takes, the kinds (of numpy) that its value may have
_KINDS = {"bool": "b", "int": "iu", "float": "iuf", "complex": "iufc"}


@public
def from_onnx(path: str | os.PathLike[str], *, inputs: Mapping[str, Any] | None = None) -> OnnxModule:
    """The network in an ONNX file, an `nn.Module` in eval mode on the CPU.

    Call the module with one tensor per input of the file, by position; it returns a tensor per
    output: one, or a tuple. Constants of the file are parameters or buffers with the file's names,
    so that they can be pruned, trained and demasked; quantized weights are parameters of
    integers, without gradients. Needs the extra `onnx`.

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
    tensors = {name: _as_constant(ports[name], value) for name, value in values.items()}
    sizes = _named_sizes(ports, tensors)
    nodes = [OnnxNode("Constant", "", "", (), (name,), {"value": t}) for name, t in tensors.items()]
    graph = replace(
        file.graph,
        nodes=(*nodes, *file.graph.nodes),
        inputs=tuple(_with_numbers(p, sizes) for p in file.graph.inputs if p.name not in tensors),
        outputs=tuple(_with_numbers(p, sizes) for p in file.graph.outputs),
    )
    return replace(file, graph=graph)


def _as_constant(port: OnnxPort, value: Any) -> Tensor:
    """A value as a tensor of an input's dtype and sizes; BadInput where it does not fit."""
    what, dtype = f"input {port.name!r}", getattr(torch, port.dtype or "-", None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"{what} takes no tensor of numbers ({port.dtype or 'text'}): leave it open")
    try:
        array = _native_array(value)
        source = torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(f"{what}: expected a number, a list or an array, got {value!r}") from error
    if array.size and array.dtype.kind not in _KINDS[_number_kind(dtype)]:
        raise BadInput(f"{what}: expected {port.dtype}, got {array.dtype}")
    tensor = source.to(dtype)
    if not _is_exact(tensor, array):
        raise BadInput(f"{what}: expected numbers that {port.dtype} has, got {value!r}")
    sizes = array.shape if port.sizes is None else port.sizes
    pairs = list(zip(sizes, array.shape, strict=False))
    if len(sizes) != array.ndim or any(isinstance(n, int) and n != m for n, m in pairs):
        raise BadInput(f"{what}: expected sizes {list(sizes)}, got {list(array.shape)}")
    return tensor


def _native_array(value: Any) -> np.ndarray:
    """A copy of a caller's value, as an array of native byte order."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype in NUMPY else value.float()).numpy()
    array = np.array(value)
    # By name: torch does not accept some 64-bit dtypes and byte orders.
    return array.astype(np.dtype(array.dtype.newbyteorder("=").str))


def _number_kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "int"


def _is_exact(tensor: Tensor, array: np.ndarray) -> bool:
    """Whether a tensor has the numbers of an array, except for rounding: no overflow."""
    if not array.size or _number_kind(tensor.dtype) in ("bool", "complex"):
        return True
    if _number_kind(tensor.dtype) == "int":
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


def _with_numbers(port: OnnxPort, sizes: Mapping[str, int]) -> OnnxPort:
    if port.sizes is None:
        return port
    return replace(port, sizes=tuple(n if isinstance(n, int) else sizes.get(n, n) for n in port.sizes))


@dataclass(frozen=True, slots=True)
class TensorCall:
    """A call on tensors. fills: positions or keywords of arguments that are tensors of the run, and
    their names. drops: names of tensors that no later call reads."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    fills: tuple[tuple[int | str, str], ...]
    outputs: tuple[str, ...]
    drops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShapeCheck:
    """The shape and dtype of a tensor whose size the graph has read."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OnnxRecording:
    """A run of a graph."""

    steps: tuple[TensorCall | ShapeCheck, ...]
    paths: Mapping[str, str]  # of module tensors, by names of values
    outputs: tuple[Host | str, ...]  # values known from sizes, or names
    # storage addresses of recorded constants: they are copied before a caller can write to them
    literals: frozenset[int]

    def run(self, inputs: Mapping[str, Tensor], tensor: Callable[[str], Tensor]) -> list[Value] | None:
        """The outputs; None where a size differs. tensor: returns a module's tensor by path."""
        values = {**inputs, **{name: tensor(path) for name, path in self.paths.items()}}
        for step in self.steps:
            if isinstance(step, ShapeCheck):
                value = values[step.name]
                if value.shape != step.shape or value.dtype != step.dtype:
                    return None
                continue
            args, named = step.args, step.named
            if step.fills:
                args, named = list(args), dict(named)
                for key, name in step.fills:
                    (named if isinstance(key, str) else args)[key] = values[name]  # type: ignore
            result = step.function(*args, **named)
            if isinstance(result, tuple):
                values.update(zip(step.outputs, result, strict=False))
            else:
                values[step.outputs[0]] = result
            for name in step.drops:
                values.pop(name, None)
        return [self._copy_if_literal(values[v]) if isinstance(v, str) else v for v in self.outputs]

    def _copy_if_literal(self, output: Tensor) -> Tensor:
        return output.clone() if output.untyped_storage().data_ptr() in self.literals else output


class OnnxRecorder:
    """Records a run of a graph, unless the run cannot be replayed.
    tensor: returns a tensor of the module by path."""

    def __init__(self, plan: OnnxPlan, tensor: Callable[[str], Tensor]) -> None:
        self.plan, self.tensor = plan, tensor
        self.paths = {name: path for name, path in plan.constants.items() if isinstance(path, str)}
        self.steps: list[TensorCall | ShapeCheck] = []
        self.literals: set[int] = set()
        self.works = True
        self.chosen: dict[tuple[str, ...], OnnxPlan] = {}  # by the outputs of their If nodes
        self.call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None = None

    def branch(self, plan: OnnxPlan, node: OnnxNode, values: Mapping[str, Value]) -> OnnxRecorder | None:
        """The recorder of a subgraph: self for a branch that sizes select, None otherwise."""
        if node.op != "If" or isinstance(values[node.inputs[0]], Tensor):
            self.works = False
            return None
        self.chosen[node.outputs] = plan
        self.paths |= {name: path for name, path in plan.constants.items() if isinstance(path, str)}
        return self

    def called(self, function: Callable[..., Any], args: Any, named: Any) -> None:
        """Record the call on tensors of the current node."""
        self.call = function, args, named

    def node(self, step: OnnxStep, plan: OnnxPlan, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Record the inputs and outputs of a node."""
        call, self.call = self.call, None
        drops = step.drops if plan is self.plan else ()  # a subgraph's values may be read outside
        if branch := self.chosen.pop(step.node.outputs, None):
            self._record_branch(step.node, branch, outputs)
        else:
            self.works = self.works and self._record_node(step.node, inputs, outputs, drops, call)

    def _record_branch(self, node: OnnxNode, branch: OnnxPlan, outputs: Sequence[Value]) -> None:
        """Record that the outputs of an If node are those of its branch."""
        for name, inner, value in zip(node.outputs, branch.outputs, outputs, strict=False):
            if isinstance(value, Tensor):
                self.steps.append(TensorCall(_identity, (None,), {}, ((0, inner),), (name,), ()))
            elif not isinstance(value, Host):
                self.works = False

    def _record_node(self, node: OnnxNode, inputs: Any, outputs: Any, drops: Any, call: Any) -> bool:
        tensors = [(n, v) for n, v in zip(node.inputs, inputs, strict=True) if isinstance(v, Tensor)]
        if all(v is None or isinstance(v, Host) for v in outputs):
            if tensors and (node.domain or node.op not in _OF_SHAPE):
                return False
            self.steps += [ShapeCheck(name, v.shape, v.dtype) for name, v in tensors]
            return True
        if call is None or not all(v is None or isinstance(v, Tensor) for v in outputs):
            return False
        function, args, named = call
        if "run" in named:
            return False
        fills = []
        for key, value in (*enumerate(args), *named.items()):
            if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
                return False
            if isinstance(value, Tensor):
                name = self._source_name(value, tensors, inputs)
                if name is None:
                    return False
                if name:
                    fills.append((key, name))
                else:
                    self.literals.add(value.untyped_storage().data_ptr())
        filled = {name for _, name in fills}
        if not all(name in filled for name, _ in tensors):
            return False  # numbers were taken from a tensor
        self.steps.append(
            TensorCall(function, tuple(args), dict(named), tuple(fills), tuple(node.outputs), tuple(drops))
        )
        return True

    def _source_name(self, value: Tensor, read: Any, inputs: Any) -> str | None:
        """The name of an argument among the node's inputs or the module's tensors; "" for a
        constant, None for a tensor that the module computes at each access."""
        for name, tensor in read:
            if tensor is value:
                return name
        for path in (v.tensor_name for v in inputs if isinstance(v, Host) and v.tensor_name is not None):
            tensor = self.tensor(path)
            if tensor is value:
                self.paths[f" {path}"] = path  # a name that no value of a graph has
                return f" {path}"
            if tensor is not self.tensor(path):
                return None
        return ""

    def recording(self, values: Sequence[Value]) -> OnnxRecording | None:
        """The recording; None if the run cannot be replayed. values: of the graph's outputs."""
        outputs = self.plan.outputs
        if not self.works or not all(isinstance(v, Tensor | Host) for v in values):
            return None
        sources = tuple(v if isinstance(v, Host) else n for n, v in zip(outputs, values, strict=True))
        return OnnxRecording(tuple(self.steps), self.paths, sources, frozenset(self.literals))


def _identity(value: Tensor) -> Tensor:
    return value


class Recordings:
    """The recordings of a module by `key_of` its inputs, at most MOST. Copies and pickles of a
    module have none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_key: OrderedDict[Any, OnnxRecording | None] = OrderedDict()

    def get(self, key: Any) -> Any:
        """The recording, None where the run cannot be recorded, or ... where none was tried."""
        with self.lock:
            if key in self.by_key:
                self.by_key.move_to_end(key)
            return self.by_key.get(key, ...)

    def put(self, key: Any, recording: OnnxRecording | None) -> None:
        """Store a recording, or None where the run cannot be recorded."""
        with self.lock:
            self.by_key[key] = recording
            while len(self.by_key) > MOST:
                self.by_key.popitem(last=False)

    def __deepcopy__(self, memo: Any) -> Recordings:
        return Recordings()

    def __reduce__(self) -> Any:
        return Recordings, ()


def key_of(inputs: Sequence[Any], module: nn.Module) -> Any:
    """The properties of a call that a recording depends on; None where a call must not be recorded:
    when it is traced, or an input is not a plain tensor."""
    if torch.compiler.is_compiling() or tracing_state() is not None:
        return None
    if not all(type(x) is Tensor or type(x) is nn.Parameter for x in inputs):
        return None
    if count_dispatch_modes() or count_function_modes():
        return None
    if peek_interpreter_stack() is not None:  # torch.func, vmap
        return None
    owned = next(module.parameters(), None)
    return (
        tuple((x.shape, x.dtype, x.device) for x in inputs),
        None if owned is None else owned.device,
        torch.is_inference_mode_enabled(),
    )
