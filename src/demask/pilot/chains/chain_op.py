"""The op `demask::chain`: linear, ReLU, linear, … as one call of a graph.

    torch.ops.demask.chain(Tensor x, Tensor[] weights, str program) -> Tensor

Up to 4 rows of float32 on the CPU are run by plans (`pilot.chains.chain_plan`), which are built at
the first call and live as long as the weights. Everything else is run by torch's own linear and
relu: gradients, transforms, and weights with NaN or infinities. The bits of the two differ, since
torch sums in another order.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from demask.compat.dispatch import BelowAutograd, has_functorch_transforms, needs_no_dispatch
from demask.compat.symbolic_shapes import require
from demask.errors import BadInput
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.kernels.llvm import availability as llvm
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.plan_cache import PlanCache, Planned, plans_of
from demask.ops.custom import CustomOp
from demask.pilot.chains.chain_plan import MODES, ChainLayer, ChainPlan
from demask.registry import CUSTOM_OPS

ROWS = 4  # of x, at most, for plans: with more rows, torch's matrix products are faster

_LIBRARY = Library("demask", "FRAGMENT")
_LIBRARY.define("chain(Tensor x, Tensor[] weights, str program) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One layer of a chain: its mode (`chain_plan.MODES`), whether it has a bias, whether ReLU
    follows."""

    mode: str
    bias: bool
    relu: bool

    def __str__(self) -> str:
        return self.mode + "+bias" * self.bias + "+relu" * self.relu


@functools.lru_cache(maxsize=256)
def steps(text: str) -> tuple[ChainStep, ...]:
    """The layers of a text; raises BadInput for a text that is no chain.

    >>> steps("certified+bias+relu,dense")[0]
    ChainStep(mode='certified', bias=True, relu=True)
    """
    layers = []
    for part in text.split(","):
        mode, *more = part.split("+")
        if mode not in MODES or more not in ([], ["bias"], ["relu"], ["bias", "relu"]):
            raise BadInput(f"expected layers such as 'columns+bias+relu', got {part!r:.80}")
        layers.append(ChainStep(mode, "bias" in more, "relu" in more))
    return tuple(layers)


def pairs(weights: Sequence[Any], text: str) -> list[tuple[Any, Any]]:
    """(weight, bias or None) of each layer; raises BadInput where their number does not fit."""
    tensors, layers = list(weights), []
    expected = sum(1 + step.bias for step in steps(text))
    if len(tensors) != expected:
        raise BadInput(f"expected {expected} weights and biases for {text!r:.80}, got {len(tensors)}")
    for step in steps(text):
        weight = tensors.pop(0)
        layers.append((weight, tensors.pop(0) if step.bias else None))
    return layers


def plain(x: Tensor, weights: Sequence[Tensor], layers: str) -> Tensor:
    """The output of the chain by torch's own ops."""
    for (weight, bias), step in zip(pairs(weights, layers), steps(layers), strict=True):
        x = F.linear(x, weight, bias)
        x = torch.relu(x) if step.relu else x
    return x


def chain(x: Tensor, weights: Sequence[Tensor], layers: str) -> Tensor:
    """linear, ReLU, … of x [..., columns], floating point -> [..., rows of the last layer].

    weights: of each layer its matrix [rows, columns] and, where it has one, its bias. layers: per
    layer its mode, "+bias", "+relu". Raises BadInput where these do not fit. In-place writes to a
    weight are noticed; of writes through `.data` or NumPy, which torch does not count, those that
    change most of it.

    >>> w = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    >>> chain(torch.tensor([[1.0, 1.0]]), [w], "columns+relu")
    tensor([[0., 7.]])
    """
    return torch.ops.demask.chain.default(x, weights, layers)


class ChainPlans(PlanCache):
    """Plans of a chain."""

    parse = staticmethod(steps)

    def run(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        """The output, by a plan or by torch."""
        key = self.versions_of(weights), torch.get_num_threads()
        plan, _ = self.plan(key, [x], weights)
        if plan is None:
            return plain(x, weights, self.text)
        columns = weights[0].shape[1]
        if x.shape[-1] != columns:
            raise BadInput(f"expected {columns} numbers in each row, got {tuple(x.shape)}")
        try:
            y = plan(x.reshape(-1, columns).contiguous() if x.ndim != 2 else x.contiguous())
        except NoPlan:  # no memory for it at this moment
            return plain(x, weights, self.text)
        return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])

    def new_plan(self, inputs: list[Tensor], weights: list[Tensor]) -> Planned:
        fake(inputs[0], weights, self.text)
        if not llvm.is_installed():
            return None, ()
        modes = [step.mode for step in self.program]
        layers = []
        for (weight, bias), step in zip(pairs(weights, self.text), self.program, strict=True):
            borrowed_bias = None if bias is None else borrowed(bias)
            layers.append(ChainLayer(borrowed(weight), borrowed_bias, step.relu))
        try:
            return ChainPlan(layers, modes, torch.get_num_threads()), ()
        except NoPlan:
            return None, ()


def borrowed(t: Tensor) -> Tensor:
    """A tensor of the same memory that does not keep it alive, since a cache that lives until a
    weight is freed must not reference the weight. A contiguous copy where the memory is not
    contiguous."""
    if not t.is_contiguous() or not t.numel():
        return t.detach().contiguous()
    memory = (ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())
    return torch.frombuffer(memory, dtype=t.dtype).view(t.shape)


def on_cpu(x: Tensor, weights: list[Tensor], layers: str) -> Tensor:
    """The op's kernel on the CPU."""
    if x.dtype is not torch.float32 or not 0 < prod(x.shape[:-1]) <= ROWS or not x.ndim:
        return plain(x, weights, layers)
    if any(w.dtype is not torch.float32 for w in weights):
        return plain(x, weights, layers)
    return plans_of(weights, layers, ChainPlans).run(x, weights)


def fake(x: Tensor, weights: Sequence[Tensor], layers: str) -> Tensor:
    """The output without values; sizes may be symbolic. BadInput for what does not fit."""
    width: Any = x.shape[-1] if x.ndim else None
    for weight, bias in pairs(weights, layers):
        if weight.ndim != 2 or (bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])):
            raise BadInput(f"expected matrices and their biases, got {tuple(weight.shape)}")
        require(width is not None and weight.shape[1] == width)
        width = weight.shape[0]
    return x.new_empty((*x.shape[:-1], width))


def with_gradients(x: Tensor, weights: list[Tensor], layers: str) -> Tensor:
    """The op's autograd kernel: torch's own ops record what gradients need."""
    if has_functorch_transforms():
        return plain(x, weights, layers)
    if torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights)):
        return plain(x, weights, layers)
    if needs_no_dispatch((x, *weights)):
        return on_cpu(x, weights, layers)
    with BelowAutograd():
        return torch.ops.demask.chain.default(x, weights, layers)


def mapped(info: Any, dims: Any, x: Any, weights: Any, text: str) -> tuple[Tensor, int]:
    """The op under torch.vmap: one call after the other."""
    x_dim, weight_dims, _ = dims

    def part(tensor: Tensor, axis: int | None, k: int) -> Tensor:
        return tensor if axis is None else tensor.select(axis, k)

    outputs = []
    for k in range(info.batch_size):
        own = [part(w, axis, k) for w, axis in zip(weights, weight_dims, strict=True)]
        outputs.append(chain(part(x, x_dim, k), own, text))
    return torch.stack(outputs), 0


_LIBRARY.impl("chain", on_cpu, "CPU")
_LIBRARY.impl("chain", plain, "CompositeExplicitAutograd")
_LIBRARY.impl("chain", with_gradients, "Autograd")
torch.library.register_fake("demask::chain", fake, lib=_LIBRARY)
torch.library.register_vmap("demask::chain", mapped, lib=_LIBRARY)
CHAIN = torch.ops.demask.chain.default


def expand_chains(program: Program) -> Program:
    """The program with torch's linear and relu instead of chains."""
    editor, aten = GraphEditor(program), torch.ops.aten
    for node in editor.calls(CHAIN):
        x, weights, text = node.args
        layers: Any = pairs(weights, text), steps(text)  # type: ignore[arg-type]
        for (weight, bias), step in zip(*layers, strict=True):
            x = editor.insert(node, node, aten.linear.default, x, weight, bias)
            x = editor.insert(node, node, aten.relu.default, x) if step.relu else x
        editor.replace(node, x)
    return editor.finish()


def check(arguments: Mapping[str, Any]) -> None:
    """Raise BadInput for a call of the op that no input makes valid."""
    width = None
    for weight, bias in pairs(arguments["weights"], arguments["program"]):
        if weight is None:
            continue
        if weight.ndim != 2 or (width is not None and weight.shape[1] != width):
            raise BadInput(f"expected {width} columns, got a weight of {tuple(weight.shape)}")
        if bias is not None and tuple(bias.shape) != tuple(weight.shape[:1]):
            raise BadInput(f"expected a bias of {weight.shape[0]}, got {tuple(bias.shape)}")
        width = weight.shape[0]


CUSTOM_OPS.register("chain", CustomOp(plain, expand_chains, check))
