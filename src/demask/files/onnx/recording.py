"""The calls on tensors that a graph makes for inputs of certain sizes, without its arithmetic on
sizes.

The first call with such inputs runs node by node, and is recorded: every call on tensors, with its
other arguments as they were. Later calls replay those. Sizes that depend on values (of NonZero, for
one) are compared where the graph reads them; where they differ, the nodes run as before. What runs
subgraphs, or takes numbers from tensors, is not recorded.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.compat.dispatch import (
    count_dispatch_modes,
    count_function_modes,
    peek_interpreter_stack,
    tracing_state,
)
from demask.files.onnx.model import OnnxNode
from demask.files.onnx.plan import OnnxPlan, OnnxStep
from demask.files.onnx.values import Host, Value

MOST = 16  # recordings of a module; the one used longest ago goes first
_OF_SHAPE = ("Shape", "Size")


@dataclass(frozen=True, slots=True)
class TensorCall:
    """A call on tensors. fills: which of its arguments are tensors of this run (places, or names of
    keywords), and their names. drops: the tensors that nobody reads behind it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    fills: tuple[tuple[int | str, str], ...]
    outputs: tuple[str, ...]
    drops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShapeCheck:
    """The shape and dtype of a tensor that arithmetic on sizes has read."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OnnxRecording:
    """A run of a graph. held: tensors of the module that it reads, by the names they have here;
    outputs: values known from sizes, or names; literals: where tensors made from numbers lie, which
    no caller may get to write into."""

    steps: tuple[TensorCall | ShapeCheck, ...]
    held: Mapping[str, str]
    outputs: tuple[Host | str, ...]
    literals: frozenset[int]

    def run(
        self, inputs: Mapping[str, Tensor], tensor: Callable[[str], Tensor]
    ) -> list[Value] | None:
        """The outputs; None where a size differs. tensor: of the module, by name."""
        values = {**inputs, **{name: tensor(path) for name, path in self.held.items()}}
        for step in self.steps:
            if isinstance(step, ShapeCheck):
                found = values[step.name]
                if found.shape != step.shape or found.dtype != step.dtype:
                    return None
                continue
            args, named = step.args, step.named
            if step.fills:
                args, named = list(args), dict(named)
                for place, name in step.fills:
                    (named if isinstance(place, str) else args)[place] = values[name]  # type: ignore
            made = step.function(*args, **named)
            if isinstance(made, tuple):
                values.update(zip(step.outputs, made, strict=False))
            else:
                values[step.outputs[0]] = made
            for name in step.drops:
                values.pop(name, None)
        return [self._own(values[v]) if isinstance(v, str) else v for v in self.outputs]

    def _own(self, output: Tensor) -> Tensor:
        return output.clone() if output.untyped_storage().data_ptr() in self.literals else output


class OnnxRecorder:
    """Records a run of a graph, unless it turns out to be of a kind that cannot be replayed.
    tensor: those of the module by path."""

    def __init__(self, plan: OnnxPlan, tensor: Callable[[str], Tensor]) -> None:
        self.plan, self.tensor = plan, tensor
        self.held = {name: path for name, path in plan.constants.items() if isinstance(path, str)}
        self.steps: list[TensorCall | ShapeCheck] = []
        self.literals: set[int] = set()
        self.works = True
        self.chosen: dict[tuple[str, ...], OnnxPlan] = {}  # by what their nodes make
        self.call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]] | None = None

    def branch(
        self, plan: OnnxPlan, node: OnnxNode, values: Mapping[str, Value]
    ) -> OnnxRecorder | None:
        """What records a subgraph: this, for the branch that sizes choose; None for any other."""
        if node.op != "If" or isinstance(values[node.inputs[0]], Tensor):
            self.works = False
            return None
        self.chosen[node.outputs] = plan
        self.held |= {name: path for name, path in plan.constants.items() if isinstance(path, str)}
        return self

    def called(self, function: Callable[..., Any], args: Any, named: Any) -> None:
        """Note the call on tensors that the present node makes."""
        self.call = function, args, named

    def node(
        self, step: OnnxStep, plan: OnnxPlan, inputs: Sequence[Value], made: Sequence[Value]
    ) -> None:
        """Note what a node of a graph read and made."""
        call, self.call = self.call, None
        drops = step.drops if plan is self.plan else ()  # what others drop may be read outside
        if branch := self.chosen.pop(step.node.outputs, None):
            self._choose(step.node, branch, made)
        else:
            self.works = self.works and self._note(step.node, inputs, made, drops, call)

    def _choose(self, node: OnnxNode, branch: OnnxPlan, made: Sequence[Value]) -> None:
        """Note that a node makes what a branch has made."""
        for name, inner, value in zip(node.outputs, branch.outputs, made, strict=False):
            if isinstance(value, Tensor):
                self.steps.append(TensorCall(_same, (None,), {}, ((0, inner),), (name,), ()))
            elif not isinstance(value, Host):
                self.works = False

    def _note(self, node: OnnxNode, inputs: Any, made: Any, drops: Any, call: Any) -> bool:
        read = [(n, v) for n, v in zip(node.inputs, inputs, strict=True) if isinstance(v, Tensor)]
        if all(v is None or isinstance(v, Host) for v in made):
            if read and (node.domain or node.op not in _OF_SHAPE):
                return False
            self.steps += [ShapeCheck(name, v.shape, v.dtype) for name, v in read]
            return True
        if call is None or not all(v is None or isinstance(v, Tensor) for v in made):
            return False
        function, args, named = call
        if "run" in named:
            return False
        fills = []
        for place, value in (*enumerate(args), *named.items()):
            if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
                return False
            if isinstance(value, Tensor):
                name = self._source(value, read, inputs)
                if name is None:
                    return False
                if name:
                    fills.append((place, name))
                else:
                    self.literals.add(value.untyped_storage().data_ptr())
        filled = {name for _, name in fills}
        if not all(name in filled for name, _ in read):
            return False  # numbers were taken from a tensor
        self.steps.append(
            TensorCall(function, tuple(args), dict(named), tuple(fills), tuple(node.outputs),
                       tuple(drops))
        )  # fmt: skip
        return True

    def _source(self, value: Tensor, read: Any, inputs: Any) -> str | None:
        """The name of a tensor that the node read, or of the module's; "" for one made from
        numbers, None for one that is computed anew whenever the module is asked for it."""
        for name, tensor in read:
            if tensor is value:
                return name
        for path in (v.held for v in inputs if isinstance(v, Host) and v.held is not None):
            tensor = self.tensor(path)
            if tensor is value:
                self.held[f" {path}"] = path  # which no value of a graph is called
                return f" {path}"
            if tensor is not self.tensor(path):
                return None
        return ""

    def recording(self, made: Sequence[Value]) -> OnnxRecording | None:
        """What was recorded; None if it cannot be replayed. made: the values of the outputs."""
        outputs = self.plan.outputs
        if not self.works or not all(isinstance(v, Tensor | Host) for v in made):
            return None
        kept = tuple(v if isinstance(v, Host) else n for n, v in zip(outputs, made, strict=True))
        return OnnxRecording(tuple(self.steps), self.held, kept, frozenset(self.literals))


def _same(value: Tensor) -> Tensor:
    return value


class Recordings:
    """The recordings of a module, by what its inputs are like; at most MOST. Copies of a module,
    and pickles, begin with none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: OrderedDict[Any, OnnxRecording | None] = OrderedDict()

    def get(self, key: Any) -> Any:
        """The recording, None where there can be none, or ... where none was tried."""
        with self.lock:
            if key in self.found:
                self.found.move_to_end(key)
            return self.found.get(key, ...)

    def put(self, key: Any, recording: OnnxRecording | None) -> None:
        """Keep a recording, or that there can be none."""
        with self.lock:
            self.found[key] = recording
            while len(self.found) > MOST:
                self.found.popitem(last=False)

    def __deepcopy__(self, memo: Any) -> Recordings:
        return Recordings()

    def __reduce__(self) -> Any:
        return Recordings, ()


def key_of(inputs: Sequence[Any], module: nn.Module) -> Any:
    """What a recording depends on; None where a call is traced, or its inputs are no plain tensors,
    so that there is none."""
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
