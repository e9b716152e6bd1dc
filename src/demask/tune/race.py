"""Networks raced: called in turns with one example, and compared on draws like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.graph.program import Program
from demask.graph.provenance import GIVEN, Speed
from demask.graph.result.demasked_module import build_plain
from demask.machine.benchmark import ALLOWED, PAIRS, lower_bound, synchronized
from demask.machine.describe import machine
from demask.machine.threads import set_threads
from demask.machine.timing import Timing, sampled
from demask.numerics import ULPS, compare, is_as_exact, readable, to_double, widen
from demask.shrink.check import Inputs, draws_like, in_eval
from demask.shrink.on_device import CPU
from demask.tune.candidates import Candidate

LOOKS, ROUNDS, SECONDS = 5, 15, 20.0  # in which forms are compared; the last one for longer
WARMUP = 1  # calls before each of these: all have been called before
FAR = 1.5  # times what the fastest form took: no form that took more is looked at again


def own_inputs(inputs: Any) -> Any:
    """The inputs with tensors of their own."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


@dataclass(slots=True)
class CandidateRace:
    """Networks that are called with one example, in turns, the network as given among them.

    With copies of the caller's inputs: a network may write to what it is given. program: of the
    network as given, if it was captured whole. exact: what lossy networks come near to. expected:
    what inputs are, the inputs and what the network as given makes of them. wide: its outputs in
    float64, by the name of the inputs, once they are asked for.
    """

    given: nn.Module
    program: Program | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    threads: int
    modules: dict[str, nn.Module] = field(default_factory=dict)
    made_by: dict[str, Candidate] = field(default_factory=dict)
    exact: dict[str, nn.Module] = field(default_factory=dict)
    seen: dict[str, float] = field(default_factory=dict)
    expected: list[tuple[str, Inputs, list[Any]]] = field(default_factory=list)
    wide: dict[str, list[Any]] = field(default_factory=dict)

    def forms(self) -> dict[str, float]:
        """Median seconds of the forms; those that are far behind are not called for long."""
        whole = self.looked()
        near = [name for name in whole if whole[name] <= FAR * min(whole.values())]
        return whole | self.medians(near, ROUNDS) if len(near) > 1 else whole

    def looked(self) -> dict[str, float]:
        """Median seconds of the forms made so far, each called a few times, once in all."""
        new = [name for name in self.modules if name not in self.seen]
        if new:
            self.seen |= self.medians(new, LOOKS)
        return self.seen

    def medians(self, names: Sequence[str], pairs: int) -> dict[str, float]:
        """Median seconds of some forms."""
        found = self.rounds(names, pairs, SECONDS)
        return {name: median(taken) for name, taken in found.items()}

    def beside(self, name: str) -> dict[str, list[float]]:
        """The seconds of each round of a form and the network as given."""
        return self.rounds([GIVEN, name], PAIRS, float("inf"))

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        everyone = {GIVEN: self.given, **self.modules}
        calls = {name: partial(everyone[name], *self.args, **self.kwargs) for name in names}
        contenders = {name: synchronized(call, self.device) for name, call in calls.items()}
        with torch.no_grad(), set_threads(self.threads):
            return sampled(contenders, pairs, WARMUP, seconds=seconds)

    def outputs(self, module: nn.Module, inputs: Inputs | None = None) -> list[Any]:
        """What a network makes of the example, or of other inputs."""
        args, kwargs = own_inputs((self.args, self.kwargs) if inputs is None else inputs)
        with torch.no_grad(), set_threads(self.threads):
            return pytree.tree_leaves(module(*args, **kwargs))

    def compared_on(self) -> list[tuple[str, Inputs, list[Any]]]:
        """The example and draws like it; of those none that the network as given refuses or makes
        no finite numbers of."""
        for name, inputs in draws_like((self.args, self.kwargs)) if not self.expected else ():
            try:
                outputs = self.outputs(self.given, inputs)
            except Exception:
                if not self.expected:  # the example
                    raise
                continue
            if not self.expected or all(map(_is_finite, outputs)):
                self.expected.append((name, inputs, outputs))
        return self.expected

    def is_rounding(self, name: str, inputs: Inputs, k: int, given: Tensor, made: Tensor) -> bool:
        """Whether an output is about as near to that of float64 as the network as given is: of an
        ill-conditioned one, rounding moves outputs far."""
        if name not in self.wide:
            self.wide[name] = self._widened(inputs)
        wide = self.wide[name]
        exact = wide[k] if k < len(wide) else None
        if not isinstance(exact, Tensor) or exact.shape != given.shape:
            return False
        return is_as_exact(exact, given, made)

    def speed(self, name: str) -> tuple[Speed, bool]:
        """How fast a form is beside the network as given, and whether it is certain to be slower
        (the upper 95 % bound of the ratio is too low)."""
        taken = self.beside(name)
        speed = replace(speed_of(taken[GIVEN], taken[name]), threads=self.threads)
        return speed, 1 / lower_bound(taken[name], taken[GIVEN]) < ALLOWED

    def difference(self, network: nn.Module) -> str:
        """How outputs for the example and draws like it differ, in words; none if they are the same
        up to rounding."""
        for name, inputs, given in self.compared_on():
            made = self.outputs(network, inputs)
            for k, (a, b) in enumerate(zip(given, made, strict=True)):
                if text := _gap(a, b, partial(self.is_rounding, name, inputs, k)):
                    return f"output {k} {text}, on {name}"
        return ""

    def _widened(self, inputs: Inputs) -> list[Any]:
        try:
            wide = self.given if self.program is None else build_plain(self.program)
            wide = in_eval(wide, share=False).double()
            widen(wide)
            args, kwargs = pytree.tree_map(_double_on_cpu, inputs)
            with torch.no_grad():
                return pytree.tree_leaves(wide(*args, **kwargs))
        except Exception:  # of any kind: then units in the last place decide
            return []


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or bool(torch.isfinite(readable(leaf)).all())


def _double_on_cpu(leaf: Any) -> Any:
    return to_double(leaf).to(CPU) if isinstance(leaf, Tensor) else leaf


def _gap(given: Any, made: Any, is_rounding: Callable[[Tensor, Tensor], bool]) -> str:
    """How an output differs, in words."""
    difference = compare(given, made)
    if difference.text:
        return difference.text
    if difference.has_other_infinities:
        return "has other values that are not finite"
    if difference.ulps() > ULPS and not is_rounding(given, made):
        return f"by {difference.ulps():.3g} units in the last place"
    return ""


def speed_of(given: list[float], result: list[float]) -> Speed:
    timings = [Timing.of(taken) for taken in (given, result)]
    rows = [(t.median, t.low, t.high) for t in timings]
    return Speed(rows[0], rows[1], rows[0][0] / rows[1][0], lower_bound(given, result),
                 len(given), torch.get_num_threads(), machine())  # fmt: skip
