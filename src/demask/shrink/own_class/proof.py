"""Does a network compute a program? Proved by capturing the network and comparing the programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from demask.errors import DemaskError
from demask.failures import described, is_strict
from demask.graph.normalize.program_equality import difference
from demask.graph.program import Program, module_of
from demask.graph.provenance import Cut
from demask.graph.result.uncalled_modules import is_holder
from demask.shrink.check import Inputs, call, in_eval

Form = Callable[[Program], Program]


class Unlike(DemaskError):
    """How a network differs from a program. place: the module where."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


@dataclass(slots=True)
class Proof:
    """What a network has to compute, and how to find out whether it does.

    before, after: the program that was captured, and the smaller one it became. cuts: of the
    constants of `after`. inputs: the example's, args and kwargs. capture: the programs of a network
    that is called as the model was. forms: normal forms to compare programs in, the cheapest first.
    """

    before: Program
    after: Program
    cuts: Mapping[str, Cut]
    inputs: Inputs
    capture: Callable[[nn.Module], Iterator[Program]]
    forms: Sequence[Form]
    _normal: dict[int, Program] = field(default_factory=dict)

    def target(self, k: int) -> Program:
        """`after` in the form number k, computed when it is first needed."""
        if k not in self._normal:
            self._normal[k] = self.forms[k](self.after)
        return self._normal[k]

    def run(self, network: nn.Module) -> Any:
        """Call a network on the example, in eval mode. Raises Unlike where it does not run."""
        with _placed(network):
            # With gradients on: some modules take a shorter way without.
            return call(in_eval(network), self.inputs, grad=True)

    def unlike(self, network: nn.Module) -> Unlike | None:
        """How a network fails to compute `after`, in any form; None where it does not."""
        try:
            self.run(network)
            with _placed(network):
                for program in self.capture(network):
                    if _dynamic(program) != _dynamic(self.before):
                        continue
                    node = None
                    for k, form in enumerate(self.forms):
                        node = difference(self.target(k), form(program))
                        if node is None:
                            return None
                    assert node is not None
                    place = path_of(node) if node.op == "call_function" else ""
                    text = f"{place or 'the network'} makes another call than shapes say"
                    return Unlike(f"{text} ({node.target})", place)
        except Unlike as error:
            return error
        return Unlike("the network is captured for other sizes than the model")


def path_of(node: fx.Node) -> str:
    """The path of the module whose code makes a call, however often it is called."""
    return module_of(node).partition("@")[0]


def _dynamic(program: Program) -> list[list[bool]]:
    """Which sizes of a program's inputs are dynamic."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    return [[not isinstance(size, int) for size in v.shape] for v in values
            if isinstance(v, Tensor)]  # fmt: skip


# What a network's own code raises where sizes or parts are not what it expects.
_OF_NETWORKS = (DemaskError, RuntimeError, ValueError, AttributeError, IndexError)


@contextlib.contextmanager
def _placed(network: nn.Module) -> Iterator[None]:
    """Have errors of a network be Unlike, with the path of the module that runs then."""
    stack: list[str] = []
    handles = [handle for path, module in network.named_modules() if not is_holder(module)
               for handle in _watch(module, path, stack)]  # fmt: skip
    try:
        yield
    except (MemoryError, Unlike):
        raise
    except Exception as error:
        if is_strict() and not isinstance(error, _OF_NETWORKS):
            raise
        place = stack[-1] if stack else ""
        text = f"{place or 'the network'} does not run: {described(error)}"
        raise Unlike(text, place) from error
    finally:
        for handle in handles:
            handle.remove()


def _watch(module: nn.Module, path: str, stack: list[str]) -> list[Any]:
    """Keep the paths of the modules that run on a stack; what raises stays on top."""

    def enter(*_: Any) -> None:
        if not path:
            stack.clear()
        stack.append(path)

    def leave(*_: Any) -> None:
        del stack[-1:]

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
