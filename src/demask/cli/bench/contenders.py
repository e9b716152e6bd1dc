"""The networks that `demask bench` times, their inputs, and how far their outputs differ."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.cli.ports import NetworkInput
from demask.cli.read_network import NetworkFile, example
from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.graph.example_inputs import expected_domains
from demask.graph.result.demasked_module import Demasked
from demask.judge import compare

ORIGINAL, DEMASKED, OPTIMIZED = "original", "demasked", "optimized"
REASON = 60  # characters of an error that a row shows

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A network that is timed.

    parameters: as in reports. preparation: seconds that demask(), optimize() or torch.compile took;
    None for the original. failure: why it cannot run; empty where it can.
    """

    name: str
    module: nn.Module
    parameters: int = 0
    preparation: float | None = None
    failure: str = ""

    @classmethod
    def of(cls, name: str, module: nn.Module, parameters: int = 0, preparation: float | None = None) -> Contender:
        """The module, which is put in eval mode, as a contender."""
        for part in module.modules():
            part.training = False  # not eval(): the module of an exported program refuses it
        return cls(name, module, parameters, preparation)


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What `make` returns, and the seconds it took."""
    start = perf_counter()
    return make(), perf_counter() - start


def optimized(network: NetworkFile, inputs: Inputs, threads: int) -> Contender:
    """The result of optimize() for these inputs and threads."""
    from demask.optimize import optimize

    fast, seconds = timed(lambda: optimize(network.model, *inputs, threads=threads))
    return Contender.of(OPTIMIZED, fast, fast.demasked.after.parameters, seconds)


@torch.no_grad()
def compiled(contender: Contender, inputs: Inputs) -> Contender:
    """The contender compiled as one graph for these sizes; a graph break is a failure."""
    name = f"{contender.name}, compiled"
    try:
        with _alone():
            module = torch.compile(contender.module, fullgraph=True, dynamic=False)
            _, seconds = timed(lambda: module(*inputs[0], **inputs[1]))
    except Exception as error:  # whatever a compiler, a toolchain or generated code may raise
        return replace(contender, name=name, preparation=None, failure=reason(error))
    return Contender(name, cast(nn.Module, module), contender.parameters, seconds)


def set_up_compiler() -> None:
    """Compile a small module, so that the first contender does not pay for imports."""
    compiled(Contender("", nn.Softplus()), ((torch.zeros(64),), {}))


@contextmanager
def _alone() -> Iterator[None]:
    """Without torch's caches, so that every compilation starts from nothing, and without its
    warnings and logs, which describe its internals."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    uncached = torch.compiler.config.patch(force_disable_caches=True)  # type: ignore[attr-defined]
    try:
        with uncached, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def reason(error: Exception) -> str:
    """An error in few words: its first line, or its type."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    words = lines[0] if lines else type(error).__name__
    return shorten(words, REASON, placeholder="…")


def batches_of(slim: Demasked, requested: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes to measure: the requested ones, by default that of the example.

    Raises BadInput for another batch size where dimension 0 of no input is dynamic.
    """
    sized = [spec for spec in slim.demasked.inputs if spec.sizes]
    dynamic = [spec for spec in sized if isinstance(spec.sizes[0], str)]
    own = (dynamic or sized)[0].example[0] if sized else 1
    others = [batch for batch in requested if batch != own]
    if others and not dynamic:
        raise BadInput(
            f"cannot run batch {others[0]}: dimension 0 of the inputs is fixed to {own} in this "
            "file; export the model with a dynamic dimension 0, or leave --batch out"
        )
    return tuple(requested) or (own,)


def inputs_of(slim: Demasked, batch: int, args: Sequence[Tensor] = ()) -> Inputs:
    """Arguments of that batch size for the original of `slim`: `args` where they fit, else seeded
    random numbers.

    Raises BadInput where the network takes inputs that are not tensors.
    """
    specs = slim.demasked.inputs
    names = {spec.sizes[0] for spec in specs if spec.sizes and isinstance(spec.sizes[0], str)}
    leaves, domains = [], expected_domains(slim)
    for k, spec in enumerate(specs):
        sizes = zip(spec.sizes, spec.example, strict=True)
        sized = tuple(batch if size in names else own for size, own in sizes)
        port = NetworkInput.of(spec.name, spec.sizes, getattr(torch, spec.dtype))
        fits = len(args) == len(specs) and tuple(args[k].shape) == sized
        leaves.append(args[k] if fits else example(port, sized, domains.get(spec.name)))
    tree = signature_of(slim.graph).in_spec
    if len(leaves) != tree.num_leaves:
        odd = ", ".join(slim.demasked.values) or "some"
        raise BadInput(f"cannot make inputs for this network: {odd} of them are no tensors")
    return pytree.tree_unflatten(leaves, tree)


def difference(expected: Any, got: Any) -> float:
    """The largest difference of any tensor, relative to the largest value of that tensor.

    Infinite where only one of the two is finite, or the shapes differ.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    0.25
    """
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True)
    return max((compare(a, b).relative for a, b in pairs if isinstance(a, Tensor)), default=0.0)
