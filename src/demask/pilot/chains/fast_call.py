"""A graph that is one chain, called without the graph.

To run a graph of one call costs some 40 µs (flattened arguments, attributes of modules, an op's
dispatch), as long as the chain itself may take, and several times as much where caches hold none of
that code. So the plan of the last call (`pilot.chain_op`) is asked first, if everything the way
through the graph looks at is as it was then: the weights and their versions, the input's kind and
shape, threads, gradients, hooks, modes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.dispatch import (
    count_dispatch_modes,
    count_function_modes,
    has_functorch_transforms,
    tracing_state,
)
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
    """A tensor of a network: in which modules it is, under which name, and what it was. memory: of
    then, kept alive, so that no other tensor has its address."""

    path: tuple[str, ...]
    name: str
    tensor: Tensor
    memory: Tensor
    version: int
    address: int

    @classmethod
    def of(cls, network: nn.Module, target: str) -> BoundTensor:
        """The tensor that a graph names so."""
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
        found = owner._parameters.get(self.name)
        found = owner._buffers.get(self.name) if found is None else found
        return (
            found is self.tensor
            and found._version == self.version
            and found.data_ptr() == self.address
            and found.is_contiguous()
        )


@dataclass(frozen=True, slots=True)
class Direct:
    """What a call with an input of this shape came to, and for as long as that holds."""

    plan: Callable[[Tensor], Tensor]
    probe: MemoryProbe | None
    weights: tuple[BoundTensor, ...]
    shape: torch.Size
    threads: int
    trained: bool  # a weight wants gradients

    @classmethod
    def of(cls, network: fx.GraphModule, x: Tensor) -> Direct | None:
        """After a call with x; None where the graph is more than a chain, or there is no plan."""
        if type(x) is not Tensor or x.ndim < 2 or x.shape[:-1].numel() > ROWS:
            return None
        call = only_chain(network)
        if call is None:
            return None
        _, reads, program = call.args
        weights = tuple(BoundTensor.of(network, str(read.target)) for read in reads)  # type: ignore[union-attr]
        tensors = [weight.tensor for weight in weights]
        if not all(w.is_contiguous() and not w.is_inference() for w in tensors):
            return None
        plans, threads = plans_of(tensors, str(program), ChainPlans), torch.get_num_threads()
        plan, _ = plans.plans.get((plans.versions_of(tensors), threads), (None, ()))
        trained = any(w.requires_grad for w in tensors)
        return plan and cls(plan, plans.probe, weights, x.shape, threads, trained)

    def __call__(self, network: nn.Module, x: Any) -> Tensor | None:
        """The output; None if this call must go through the graph."""
        if (
            type(x) is not Tensor
            or x.shape != self.shape
            or x.dtype is not torch.float32
            or not (x.is_cpu and x.is_contiguous())
            or (torch.is_grad_enabled() and (self.trained or x.requires_grad))
            or torch.get_num_threads() != self.threads
            or not plainly()
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


def plainly() -> bool:
    """Whether nobody looks at the calls of this thread: no modes, transforms, traces or hooks."""
    return not (
        count_dispatch_modes()
        or count_function_modes()
        or has_functorch_transforms()
        or tracing_state()
        or has_any_global_hook()
    )


def only_chain(network: fx.GraphModule) -> fx.Node | None:
    """The call that is all of a graph of one input and one output."""
    nodes = [node for node in network.graph.nodes if node.op != "get_attr"]
    if [node.op for node in nodes] != ["placeholder", "call_function", "output"]:
        return None
    given, call, output = nodes
    specs: Any = signature_of(network.graph)
    leaf = pytree.tree_structure(0)
    whole = pytree.tree_structure(((0,), {}))
    if call.target is not CHAIN or call.args[0] is not given:
        return None
    if specs.in_spec != whole or specs.out_spec != leaf or list(output.args[0]) != [call]:
        return None
    return call


def called(through: Call) -> Call:
    """The `__call__` of a class that torch.fx made for one module: directly, or through the graph.

    What the last call came to is kept at the class, so that copies and pickles have none of it.
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
        made = direct and direct(self, args[0])
        if made is None:
            made = through(self, *args)
            if isinstance(made, Tensor) and not made.requires_grad and plainly():
                kind.direct = Direct.of(self, args[0])
        return made

    return call
