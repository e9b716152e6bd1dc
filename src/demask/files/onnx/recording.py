"""Recordings of a graph's calls on tensors for inputs of certain sizes, without size arithmetic.

The first call with inputs of certain sizes runs node by node, and every call on tensors is recorded
with its other arguments. Later calls replay the recording. Sizes that depend on values (such as
NonZero's) are compared where the graph reads them; if they differ, the graph runs node by node. A
run that calls subgraphs or reads numbers from tensors is not recorded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.compat.dispatch import count_dispatch_modes, count_function_modes, peek_interpreter_stack, tracing_state
from demask.files.onnx.model import OnnxNode
from demask.files.onnx.plan import OnnxPlan, OnnxStep
from demask.files.onnx.values import Host, Value

MOST = 16  # recordings of a module; the least recently used is removed first
_OF_SHAPE = ("Shape", "Size")


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
    """A run of a graph. paths: of module tensors, by names of values. outputs: values known from
    sizes, or names. literals: storage addresses of recorded constant tensors, which must
    be copied before a caller can write to them."""

    steps: tuple[TensorCall | ShapeCheck, ...]
    paths: Mapping[str, str]
    outputs: tuple[Host | str, ...]
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
        return [self._own(values[v]) if isinstance(v, str) else v for v in self.outputs]

    def _own(self, output: Tensor) -> Tensor:
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
            self._choose(step.node, branch, outputs)
        else:
            self.works = self.works and self._note(step.node, inputs, outputs, drops, call)

    def _choose(self, node: OnnxNode, branch: OnnxPlan, outputs: Sequence[Value]) -> None:
        """Record that the outputs of an If node are those of its branch."""
        for name, inner, value in zip(node.outputs, branch.outputs, outputs, strict=False):
            if isinstance(value, Tensor):
                self.steps.append(TensorCall(_same, (None,), {}, ((0, inner),), (name,), ()))
            elif not isinstance(value, Host):
                self.works = False

    def _note(self, node: OnnxNode, inputs: Any, outputs: Any, drops: Any, call: Any) -> bool:
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
                name = self._source(value, tensors, inputs)
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

    def _source(self, value: Tensor, read: Any, inputs: Any) -> str | None:
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


def _same(value: Tensor) -> Tensor:
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
