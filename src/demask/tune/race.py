"""Alternating timings of candidate networks, and comparison of their outputs with the original."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import Mismatch
from demask.failures import is_strict
from demask.graph.example_runs import Inputs, copy_in_eval
from demask.graph.input_domains import Domains
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, Speed
from demask.graph.result.demasked_module import build_plain
from demask.machine.benchmark import ALLOWED, PAIRS, lower_bound, wait_for_device
from demask.machine.describe import describe_machine
from demask.machine.threads import set_threads
from demask.machine.timing import Timing, sample_seconds
from demask.numerics import compare, is_about_as_exact, to_computable, to_double, to_wide
from demask.shrink.check import draw_inputs
from demask.shrink.on_device import CPU
from demask.tune.candidates import Candidate

LOOKS, ROUNDS, SECONDS = 5, 15, 20.0  # rounds of the screening and of the final; seconds at most
WARMUP = 1  # calls before the timed ones: every network has been called before
CLEAR, FEW = 1.25, 10  # times as fast as the baseline for which so few rounds are enough
FAR = 1.25  # candidates slower than this many times the fastest do not enter the final


def first_line(error: Exception) -> str:
    """Type and first line of an exception."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} {line:.120}".strip()


def clone_inputs(inputs: Any) -> Any:
    """The inputs, a pytree, with copies of the tensors."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


@dataclass(slots=True)
class CandidateRace:
    """Candidate networks and the original one, timed in turns on one example.

    args, kwargs: copies of the caller's inputs, since a network may write to its inputs. baseline:
    the original network. program: of the baseline, if it was captured whole. modules, candidates:
    by name of the candidate. exact: exact versions of lossy candidates. screening: median seconds
    of the first, short timing. expected: name, inputs and outputs of the baseline for each input to
    compare on. wide: outputs of the baseline in float64, by name of the inputs, computed on demand.
    """

    baseline: nn.Module
    program: Program | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    threads: int
    modules: dict[str, nn.Module] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    exact: dict[str, nn.Module] = field(default_factory=dict)
    screening: dict[str, float] = field(default_factory=dict)
    expected: list[tuple[str, Inputs, list[Any]]] = field(default_factory=list)
    wide: dict[str, list[Any]] = field(default_factory=dict)
    stated: Domains = field(default_factory=dict)

    def times(self) -> dict[str, float]:
        """Median seconds of the candidates; far slower ones are only screened."""
        whole = self.screened()
        near = [name for name in whole if whole[name] <= FAR * min(whole.values())]
        return whole | self.medians(near, ROUNDS) if len(near) > 1 else whole

    def screened(self) -> dict[str, float]:
        """Median seconds of all candidates so far, from a few calls of each new one."""
        new = [name for name in self.modules if name not in self.screening]
        if new:
            self.screening |= self.medians(new, LOOKS)
        return self.screening

    def medians(self, names: Sequence[str], pairs: int) -> dict[str, float]:
        """Median seconds of the named candidates."""
        rounds = self.rounds(names, pairs, SECONDS)
        return {name: median(seconds) for name, seconds in rounds.items()}

    def against_baseline(self, name: str, pairs: int | None = None) -> dict[str, list[float]]:
        """Seconds of each round of a candidate and of the baseline."""
        return self.rounds([GIVEN, name], PAIRS if pairs is None else pairs, float("inf"))

    def rounds(self, names: Sequence[str], pairs: int, seconds: float) -> dict[str, list[float]]:
        """Seconds of each round by name: `pairs` rounds, fewer after `seconds`."""
        everyone = {GIVEN: self.baseline, **self.modules}
        calls = {name: partial(everyone[name], *self.args, **self.kwargs) for name in names}
        contenders = {name: wait_for_device(call, self.device) for name, call in calls.items()}
        with torch.no_grad(), set_threads(self.threads):
            return sample_seconds(contenders, pairs, WARMUP, seconds=seconds)

    def outputs(self, module: nn.Module, inputs: Inputs | None = None) -> list[Any]:
        """The flattened outputs of a network for the example, or for other inputs."""
        args, kwargs = clone_inputs((self.args, self.kwargs) if inputs is None else inputs)
        with torch.no_grad(), set_threads(self.threads):
            return pytree.tree_leaves(module(*args, **kwargs))

    def compared_on(self) -> list[tuple[str, Inputs, list[Any]]]:
        """Name, inputs and baseline outputs of the example and of random inputs like it, without
        inputs for which the baseline raises or returns values that are not finite."""
        drawn = draw_inputs((self.args, self.kwargs), self.stated)
        for name, inputs in drawn if not self.expected else ():
            try:
                outputs = self.outputs(self.baseline, inputs)
            except Exception:
                if not self.expected:  # the example
                    raise
                continue
            if not self.expected or all(map(_is_finite, outputs)):
                self.expected.append((name, inputs, outputs))
        return self.expected

    def is_rounding(self, name: str, inputs: Inputs, k: int, expected: Tensor, output: Tensor) -> bool:
        """Whether output `k` is about as near to the float64 output as the baseline's is. Rounding
        changes outputs of an ill-conditioned network by much."""
        if name not in self.wide:
            self.wide[name] = self._widened(inputs)
        wide = self.wide[name]
        exact = wide[k] if k < len(wide) else None
        if not isinstance(exact, Tensor) or exact.shape != expected.shape:
            return False
        return is_about_as_exact(exact, expected, output)

    def speed(self, name: str) -> tuple[Speed, bool]:
        """Speed of a candidate relative to the baseline, and whether it is certainly slower (the
        upper 95 % bound of the ratio is too low)."""
        rounds = rounds_until_clear(partial(self.against_baseline, name), name, PAIRS)
        speed = replace(speed_of(rounds[GIVEN], rounds[name]), threads=self.threads)
        return speed, 1 / lower_bound(rounds[name], rounds[GIVEN]) < ALLOWED

    def admit(self, name: str, network: nn.Module) -> list[str]:
        """Add a network that computes what the baseline does; the reason why not, if it does
        not."""
        try:
            failure = self.difference(network)
        except Exception as error:  # of any type: another network is returned
            if is_strict():
                raise
            failure = f"it fails ({first_line(error)})"
        if failure and is_strict():
            raise Mismatch(f"{name}: {failure}")
        if failure:
            return [f"{name}: left out, {failure}"]
        self.modules[name] = network
        return []

    def difference(self, network: nn.Module) -> str:
        """Description of the first output that differs by more than rounding, on the example or on
        random inputs like it; "" for none."""
        for name, inputs, expected in self.compared_on():
            outputs = self.outputs(network, inputs)
            for k, (a, b) in enumerate(zip(expected, outputs, strict=True)):
                if text := _gap(a, b, partial(self.is_rounding, name, inputs, k)):
                    return f"output {k} {text}, on {name}"
        return ""

    def _widened(self, inputs: Inputs) -> list[Any]:
        try:
            wide = self.baseline if self.program is None else build_plain(self.program)
            wide = to_wide(copy_in_eval(wide, share=False))
            args, kwargs = pytree.tree_map(_double_on_cpu, inputs)
            with torch.no_grad():
                return pytree.tree_leaves(wide(*args, **kwargs))
        except Exception:  # of any type: then units in the last place decide
            return []


def rounds_until_clear(
    measure: Callable[[int], dict[str, list[float]]], name: str, pairs: int
) -> dict[str, list[float]]:
    """Seconds of each round of a network and of the baseline: of FEW rounds if the network is
    clearly faster, else of `pairs`. measure: returns those of some rounds."""
    rounds = measure(min(FEW, pairs))
    if pairs > FEW and lower_bound(rounds[GIVEN], rounds[name]) < CLEAR:
        more = measure(pairs - FEW)
        rounds = {each: seconds + more[each] for each, seconds in rounds.items()}
    return rounds


def _is_finite(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or bool(torch.isfinite(to_computable(leaf)).all())


def _double_on_cpu(leaf: Any) -> Any:
    return to_double(leaf).to(CPU) if isinstance(leaf, Tensor) else leaf


def _gap(expected: Any, output: Any, is_rounding: Callable[[Tensor, Tensor], bool]) -> str:
    """Description of how an output differs from the expected one; "" if only by rounding."""
    difference = compare(expected, output)
    if difference.text:
        return difference.text
    if difference.has_other_infinities:
        return "has other values that are not finite"
    if not difference.is_rounding() and not is_rounding(expected, output):
        return f"by {difference.ulps():.3g} units in the last place"
    return ""


def speed_of(baseline: list[float], result: list[float]) -> Speed:
    """Speed of a result relative to the original network, from seconds of alternating calls."""
    timings = [Timing.of(seconds) for seconds in (baseline, result)]
    rows = [(t.median, t.low, t.high) for t in timings]
    return Speed(
        rows[0],
        rows[1],
        rows[0][0] / rows[1][0],
        lower_bound(baseline, result),
        len(baseline),
        torch.get_num_threads(),
        describe_machine(),
    )
