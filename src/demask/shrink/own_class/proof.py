"""Proves that a network computes a program: captures the network and compares programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from demask.errors import DemaskError
from demask.failures import described, is_strict
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.program import Program, path_of
from demask.graph.program_equality import find_difference
from demask.graph.provenance import Cut
from demask.graph.result.uncalled_modules import is_holder

NormalForm = Callable[[Program], Program]


class ProgramMismatch(DemaskError):
    """How a network differs from a program. place: the path of the module."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


@dataclass(slots=True)
class Proof:
    """The program that a network has to compute, and how to test whether it does.

    before, after: the captured program, and the smaller one it became. cuts: of the constants of
    `after`. inputs: the example's args and kwargs. capture: the programs of a network that is
    called like the model. forms: normal forms in which programs are compared, the cheapest first.
    own: the program of the last network that was proved to compute `after`, as its code calls it:
    it may compute what `after` skips since nothing reads it.
    """

    before: Program
    after: Program
    cuts: Mapping[str, Cut]
    inputs: Inputs
    capture: Callable[[nn.Module], Iterator[Program]]
    forms: Sequence[NormalForm]
    own: Program | None = None
    _normal: dict[int, Program] = field(default_factory=dict)

    def target(self, k: int) -> Program:
        """`after` in normal form k, computed at first use."""
        if k not in self._normal:
            self._normal[k] = self.forms[k](self.after)
        return self._normal[k]

    def run(self, network: nn.Module) -> Any:
        """The outputs of a network on the example, in eval mode. Raises ProgramMismatch."""
        with _locate_errors(network):
            # With gradients enabled: some modules use a fused kernel without.
            return run_seeded(copy_in_eval(network), self.inputs, grad=True)

    def find_difference(self, network: nn.Module) -> ProgramMismatch | None:
        """How a network fails to compute `after`, in every form; None if it computes it."""
        try:
            self.run(network)
            with _locate_errors(network):
                for program in self.capture(network):
                    if _dynamic_sizes(program) != _dynamic_sizes(self.before):
                        continue
                    node = None
                    for k, form in enumerate(self.forms):
                        node = find_difference(self.target(k), form(program))
                        if node is None:
                            self.own = program
                            return None
                    assert node is not None
                    place = path_of(node) if node.op == "call_function" else ""
                    text = f"{place or 'the network'} differs in a call by more than shapes"
                    return ProgramMismatch(f"{text} ({node.target})", place)
        except ProgramMismatch as error:
            return error
        return ProgramMismatch("the network is captured for other sizes than the model")


def _dynamic_sizes(program: Program) -> list[list[bool]]:
    """Which sizes of a program's inputs are dynamic."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    return [[not isinstance(size, int) for size in v.shape] for v in values if isinstance(v, Tensor)]


# Errors that a network's own code raises for sizes or modules that it does not expect.
_NETWORK_ERRORS = (DemaskError, RuntimeError, ValueError, AttributeError, IndexError)


@contextlib.contextmanager
def _locate_errors(network: nn.Module) -> Iterator[None]:
    """Convert errors of a network to ProgramMismatch, with the path of the module that raised."""
    stack: list[str] = []
    handles = [
        handle
        for path, module in network.named_modules()
        if not is_holder(module)
        for handle in _track_calls(module, path, stack)
    ]
    try:
        yield
    except (MemoryError, ProgramMismatch):
        raise
    except Exception as error:
        if is_strict() and not isinstance(error, _NETWORK_ERRORS):
            raise
        place = stack[-1] if stack else ""
        text = f"{place or 'the network'} does not run: {described(error)}"
        raise ProgramMismatch(text, place) from error
    finally:
        for handle in handles:
            handle.remove()


def _track_calls(module: nn.Module, path: str, stack: list[str]) -> list[Any]:
    """Push the paths of running modules on a stack; the one that raises stays on top."""

    def enter(*_: Any) -> None:
        if not path:
            stack.clear()
        stack.append(path)

    def leave(*_: Any) -> None:
        del stack[-1:]

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
