"""A network in the making: every step is tried on example values before it is kept."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fuzz.program import PREAMBLE, Input, Step

LARGEST = 3000  # elements per sample: small networks find the same bugs sooner


class Draft:
    """Collects steps; `values` holds what each variable is on the example."""

    def __init__(self, rng: random.Random, inputs: Sequence[Input], seed: int):
        self.rng, self.steps = rng, []
        self.space: dict[str, object] = {"self": nn.Module()}
        before = torch.get_default_dtype()
        try:
            exec(PREAMBLE, self.space)
        finally:
            torch.set_default_dtype(before)
        self.values: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.modules: dict[str, tuple[str, tuple[int, ...]]] = {}
        draw = torch.Generator().manual_seed(seed)
        for each in inputs:
            self.values[each.name] = each.example(2, draw)
            self.space[each.name] = self.values[each.name]
        self.inputs = {each.name for each in inputs}
        self.count = len(inputs)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def floats(self) -> list[str]:
        return [n for n, v in self.values.items() if v.is_floating_point()]

    def new(self) -> str:
        """A fresh variable; `m` + its number names its module."""
        name = f"v{self.count}"
        self.count += 1
        return name

    def owned(self, name: str) -> bool:
        """May the value be written to? Not if it shares memory with an input or a weight."""
        module = self.space["self"]
        assert isinstance(module, nn.Module)
        kept = [self.values[i] for i in self.inputs]
        kept += [*module.parameters(), *module.buffers()]
        places = {t.untyped_storage().data_ptr() for t in kept}
        return self.values[name].untyped_storage().data_ptr() not in places

    def add(
        self,
        op: str,
        reads: Sequence[str],
        body: str | Sequence[str],
        init: Sequence[str] = (),
        outs: Sequence[str] = (),
    ) -> str | None:
        """Try a step; the name of its (first) output, or None if it does not fit."""
        made = tuple(outs) or (f"v{self.count - 1}",)
        lines = (body,) if isinstance(body, str) else tuple(body)
        if not self._runs([*init, *lines], made):
            return None
        for name in made:
            self.values[name] = self.space[name]  # type: ignore[assignment]
        self.used |= set(reads)
        self.steps.append(Step(op, tuple(reads), made, tuple(init), lines))
        return made[0]

    def _runs(self, lines: Sequence[str], made: Sequence[str]) -> bool:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec("\n".join(lines), self.space)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            return False
        finally:
            torch.set_default_dtype(before)
        found = [self.space[name] for name in made]
        return all(isinstance(v, Tensor) and _sane(v) for v in found)


def _sane(value: Tensor) -> bool:
    few = value.ndim >= 2 and value.shape[0] == 2 and 0 < value.numel() <= 2 * LARGEST
    return few and bool(torch.isfinite(value).all()) and float(value.abs().max()) < 1e4
