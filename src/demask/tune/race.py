"""Alternating timings of candidate networks, and comparison of their outputs with the original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.errors import Mismatch
from demask.failures import is_strict
from demask.graph.example_runs import Inputs, copy_in_eval
from demask.graph.input_domains import Domains, domains_of
from demask.graph.program import Program
from demask.graph.provenance import GIVEN, Speed
from demask.graph.result.demasked_module import build_plain
from demask.judge import Expected, InFloat64, draw_inputs, expected_outputs, judge
from demask.machine import clock
from demask.machine.clock import PAIRS, Timing, is_clear, is_faster, set_threads
from demask.machine.describe import describe_machine
from demask.tune.candidates import Candidate

LOOKS, ROUNDS, SECONDS = 5, 15, 20.0  # rounds of the screening and of the final; seconds at most
WARMUP = 1  # calls before the timed ones: every network has been called before
FAR = 1.25  # candidates slower than this many times the fastest do not enter the final


def first_line(error: Exception) -> str:
    """Type and first line of an exception."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__} {line:.120}".strip()


def clone_inputs(inputs: Any) -> Any:
    """The inputs, a pytree, with copies of the tensors."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)


@dataclass
class CandidateRace:
    """Candidate networks and the original one, timed in turns on one example.

    args, kwargs: copies of the caller's inputs, since a network may write to its inputs. baseline:
    the original network. program: of the baseline, if it was captured whole. modules, candidates:
    by name of the candidate. exact: exact versions of lossy candidates. screening: median seconds
    of the first, short timing. stated: domains of inputs, by the caller.
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

    def medians(self, names: Sequence[str], rounds: int) -> dict[str, float]:
        """Median seconds of the named candidates."""
        return clock.median_seconds(self.rounds(names, rounds, seconds=SECONDS))

    def against_baseline(self, name: str, rounds: int | None = None) -> clock.Samples:
        """Seconds of each round of a candidate and of the baseline: fewer rounds if it is clearly faster."""
        return self.rounds([GIVEN, name], rounds or PAIRS, is_enough=is_clear(GIVEN, name))

    def rounds(self, names: Sequence[str], rounds: int, **limits: Any) -> clock.Samples:
        """Seconds of each round by name. limits: as for `demask.machine.clock.race`."""
        everyone = {GIVEN: self.baseline, **self.modules}
        calls = {name: partial(everyone[name], *self.args, **self.kwargs) for name in names}
        with torch.no_grad():
            return clock.race(calls, rounds, WARMUP, threads=self.threads, device=self.device, **limits)

    def outputs(self, module: nn.Module, inputs: Inputs | None = None) -> Any:
        """The outputs of a network for the example, or for other inputs."""
        args, kwargs = clone_inputs((self.args, self.kwargs) if inputs is None else inputs)
        with torch.no_grad(), set_threads(self.threads):
            return module(*args, **kwargs)

    @cached_property
    def expected(self) -> Expected:
        """The example and random inputs like it, with the baseline's outputs."""
        example = self.args, self.kwargs
        draws = draw_inputs(example, domains_of(pytree.tree_leaves(example), self.stated))
        return expected_outputs(partial(self.outputs, self.baseline), draws)

    @cached_property
    def explain(self) -> InFloat64:
        """Which differences are rounding, by the baseline in float64."""
        copied = partial(copy_in_eval, self.baseline, share=False)
        return InFloat64(copied if self.program is None else partial(build_plain, self.program), self.expected)

    def speed(self, name: str) -> tuple[Speed, bool]:
        """Speed of a candidate relative to the baseline, and whether it is certainly slower (the
        upper 95 % bound of the ratio is too low)."""
        rounds = self.against_baseline(name)
        speed = replace(speed_of(rounds[GIVEN], rounds[name]), threads=self.threads)
        return speed, is_faster(clock.lower_bound(rounds[name], rounds[GIVEN]), 1 / clock.ALLOWED)

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
        """Why a network does not count as the baseline: the first output that differs by more than
        rounding, on the example or on random inputs like it; "" if it does."""
        return judge(partial(self.outputs, network), self.expected, self.explain).failure


def speed_of(baseline: list[float], result: list[float]) -> Speed:
    """Speed of a result relative to the original network, from seconds of alternating calls."""
    timings = [Timing.of(seconds) for seconds in (baseline, result)]
    rows = [(t.median, t.low, t.high) for t in timings]
    return Speed(
        rows[0],
        rows[1],
        rows[0][0] / rows[1][0],
        clock.lower_bound(baseline, result),
        len(baseline),
        torch.get_num_threads(),
        describe_machine(),
    )
