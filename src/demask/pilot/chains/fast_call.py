"""Direct calls of a graph that is a single chain, without the graph interpreter.

To run a graph of one call costs some 40 µs (flattened arguments, module attributes, op dispatch),
as long as the chain itself may take, and several times as much where that code is not in a cache.
So the plan of the last call (`pilot.chains.chain_op`) is tried first, if everything that the graph
would check is as it was then: the weights and their versions, dtype and shape of the input,
threads, gradients, hooks, modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.dispatch import count_dispatch_modes, count_function_modes, has_functorch_transforms, tracing_state
from demask.compat.fx_internals import signature_of
from demask.compat.modules import has_any_global_hook
from demask.kernels.llvm.availability import NoPlan
from demask.kernels.memory_probe import MemoryProbe
from demask.kernels.plan_cache import plans_of
from demask.pilot.chains.chain_op import CHAIN, ROWS, ChainPlans

Call = Callable[..., Any]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """A tensor of a network: its module path, its name, and its state at the last call. memory:
    keeps that memory alive, so that no other tensor gets its address."""

    path: tuple[str, ...]
    name: str
    tensor: Tensor
    memory: Tensor
    version: int
    address: int

    @classmethod
    def of(cls, network: nn.Module, target: str) -> BoundTensor:
        """The tensor at a `get_attr` target of a network."""
        *path, name = target.split(".")
        owner = network.get_submodule(".".join(path))
        tensor = owner._parameters.get(name)
        tensor = owner._buffers[name] if tensor is None else tensor
        assert tensor is not None
        version = -1 if tensor.is_inference() else tensor._version
        return cls(tuple(path), name, tensor, tensor.detach(), version, tensor.data_ptr())

    def same(self, network: nn.Module) -> bool:
        """Whether the network still has this tensor there, unchanged."""
        owner: Any = network
        for part in self.path:
            owner = owner._modules.get(part)
            if owner is None:
                return False
        current = owner._parameters.get(self.name)
        current = owner._buffers.get(self.name) if current is None else current
        return (
            current is self.tensor
            and current._version == self.version
            and current.data_ptr() == self.address
            and current.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class Direct:
    """The plan of the last call with an input of this shape, and the state under which it holds."""

    plan: Callable[[Tensor], Tensor]
    probe: MemoryProbe | None
    weights: tuple[BoundTensor, ...]
    shape: torch.Size
    threads: int
    trained: bool  # a weight wants gradients

    @classmethod
    def of(cls, network: fx.GraphModule, x: Tensor) -> Direct | None:
        """The state after a call with x; None where the graph is more than a chain, or there is no
        plan."""
        if type(x) is not Tensor or x.ndim < 2 or x.shape[:-1].numel() > ROWS:
            return None
        call = only_chain(network)
        if call is None:
            return None
        _, reads, program = call.args
        targets = [str(read.target) for read in reads]  # type: ignore[union-attr]
        weights = tuple(BoundTensor.of(network, target) for target in targets)
        tensors = [weight.tensor for weight in weights]
        if not all(w.is_contiguous() and not w.is_inference() for w in tensors):
            return None
        plans, threads = plans_of(tensors, str(program), ChainPlans), torch.get_num_threads()
        plan, _ = plans.plans.get((plans.versions_of(tensors), threads), (None, ()))
        trained = any(w.requires_grad for w in tensors)
        return plan and cls(plan, plans.probe, weights, x.shape, threads, trained)

    def __call__(self, network: nn.Module, x: Any) -> Tensor | None:
        """The output; None where this call must run through the graph."""
        if (
            type(x) is not Tensor
            or x.shape != self.shape
            or x.dtype is not torch.float32
            or not (x.is_cpu and x.is_contiguous())
            or (torch.is_grad_enabled() and (self.trained or x.requires_grad))
            or torch.get_num_threads() != self.threads
            or not is_unobserved()
            or not all(weight.same(network) for weight in self.weights)
            or self.probe is None
            or not self.probe.same()
        ):
            return None
        try:
            if len(self.shape) == 2:
                return self.plan(x)
            return self.plan(x.view(-1, self.shape[-1])).view(*self.shape[:-1], -1)
        except NoPlan:  # no memory for it at this moment
            return None


def is_unobserved() -> bool:
    """Whether no mode, transform, trace or hook observes the calls of this thread."""
    return not (
        count_dispatch_modes()
        or count_function_modes()
        or has_functorch_transforms()
        or tracing_state()
        or has_any_global_hook()
    )


def only_chain(network: fx.GraphModule) -> fx.Node | None:
    """The call of a graph that is one chain call, with one input and one output; else None."""
    nodes = [node for node in network.graph.nodes if node.op != "get_attr"]
    if [node.op for node in nodes] != ["placeholder", "call_function", "output"]:
        return None
    placeholder, call, output = nodes
    specs: Any = signature_of(network.graph)
    leaf = pytree.tree_structure(0)
    whole = pytree.tree_structure(((0,), {}))
    if call.target is not CHAIN or call.args[0] is not placeholder:
        return None
    if specs.in_spec != whole or specs.out_spec != leaf or list(output.args[0]) != [call]:
        return None
    return call


def call_directly(through: Call) -> Call:
    """The `__call__` of a class that torch.fx generated for one module: the plan directly, or
    `through`, which runs the graph.

    The state of the last call is stored at the class, so that copies and pickles have none of it.
    """

    def call(self: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return nn.Module.__call__(self, *args, **kwargs)
        if kwargs or len(args) != 1:
            return through(self, *args, **kwargs)
        if any(getattr(self, hooks) for hooks in HOOKS):
            return through(self, *args)
        kind: Any = type(self)
        direct = vars(kind).get("direct")
        output = direct and direct(self, args[0])
        if output is None:
            output = through(self, *args)
            if isinstance(output, Tensor) and not output.requires_grad and is_unobserved():
                kind.direct = Direct.of(self, args[0])
        return output

    return call
