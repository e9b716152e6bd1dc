"""The laws of every entry of the table of rewrites; faults that break each law."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from demask.ops import TABLE
from demask.rewrites import laws
from demask.rewrites.normalize import glu, squeeze_dim
from demask.rewrites.rule import Rule, case
from docs.generate.rewrites import PHASES

ENTRIES = {entry.name: entry for phase in PHASES for entry in phase.entries}
RULES = {name: entry for name, entry in ENTRIES.items() if isinstance(entry, Rule)}


@pytest.mark.parametrize("name", ENTRIES)
def test_laws(name: str) -> None:
    assert ENTRIES[name].cases and ENTRIES[name].reason
    assert laws.check(ENTRIES[name], TABLE) == ""


@pytest.mark.parametrize("name", RULES)
def test_every_guard_is_needed(name: str) -> None:
    for condition, other in laws.without_guards(RULES[name]):
        try:
            broken = laws.check(other, TABLE)
        except Exception as error:  # a rule without its guard may do anything
            broken = str(error) or type(error).__name__
        assert broken, condition


@pytest.mark.parametrize(
    ("apply", "text"),
    [
        (lambda out, x, dim: None, "is not changed"),
        (lambda out, x, dim: x.slice(dim, 0, 2), "its output differs"),
        (lambda out, x, dim: x.slice(dim, 0, 1), "its output is torch.float64 of (2, 1, 6), was"),
        (lambda out, x, dim: x.to(torch.float32).slice(dim, 0, 2), "its output is torch.float32"),
        (lambda out, x, dim: out.like(), "is changed again"),
    ],
)
def test_faults_are_seen(apply, text: str) -> None:
    assert text in laws.check(replace(glu, apply=apply, cases=glu.cases[:1]), TABLE)


def test_a_refused_case_that_is_changed_is_seen() -> None:
    changed = replace(squeeze_dim, refused=(case(lambda x: x.squeeze(1), (2, 4, 6)),))
    assert laws.check(changed, TABLE) == "refused case 0 is changed"
