"""Each family, masked by the slices that it has: smaller, read by transformers, and the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demask import checkpoint
from demask.checkpoint.family import Family, find_stacks
from demask.checkpoint.slices import ReducedModel, SliceGroup, example_of
from families import FAMILIES, KEPT, OTHERS
from masked_folders import build, load, write
from night import at_night

UNITS, HEADS = (0.5, 0.3, 0.6, 1.0), (0.5, 0.5, 0.25, 1.0)  # dead, by layer
LIMIT = 1e-5
MASKS = ("computed", "computed-but-biases", "read")
CASES = [(name, mask, dtype) for name in FAMILIES for mask in MASKS
         for dtype in ("float32", "bfloat16")]  # fmt: skip
CASES += [(name, "read", "float32") for name in {**OTHERS, **KEPT}]


def mask_slices(model: Any, group: SliceGroup, layer: int, dead: torch.Tensor, how: str) -> None:
    """Zero slices in a layer: where they are computed, or where they are read."""
    tensors = dict(model.named_parameters())
    for member in group.members:
        name = f"{member.kind.stack}.{layer}.{member.name}" if member.kind else member.name
        is_left = how == "computed-but-biases" and member.rank == 1
        if name in tensors and member.produces == (how != "read") and not is_left:
            positions = member.positions[dead].reshape(-1)
            tensors[name].data.movedim(member.axis, 0)[positions] = 0


def mask_model(model: Any, how: str) -> None:
    data = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    family = Family.of(Path("in"), data)
    data = family.full_config(data)
    stacks = find_stacks(family, data, family.build(data))
    generator = torch.Generator().manual_seed(2)
    for group in ReducedModel(family, data, stacks).groups:
        alike = torch.randperm(group.size, generator=generator)[: group.size // 4]
        for kind in sorted(group.kinds):
            kinds = next(s.kinds for s in stacks if s.path == kind.stack)
            for layer in (k for k, first in enumerate(kinds) if first == kind.layer):
                share = (UNITS if group.kind == "unit" else HEADS)[layer % 4]
                order = torch.randperm(group.size, generator=generator)
                dead = alike if group.is_shared else order[: int(group.size * share)]
                mask_slices(model, group, layer, dead, how)


def result_of(model: Any) -> torch.Tensor:
    outputs = model(**example_of(model))
    return outputs.logits if hasattr(outputs, "logits") else outputs.logits_per_image


@pytest.mark.parametrize(("name", "how", "dtype"), at_night(*CASES))
def test_families(tmp_path: Path, name: str, how: str, dtype: str) -> None:
    kind, config = {**FAMILIES, **OTHERS, **KEPT}[name]
    with torch.no_grad():
        model = build(kind, name, **config)
        mask_model(model, how)
        shard = "5GB" if dtype == "float32" else "60KB"
        source, out = write(model, tmp_path / "in", getattr(torch, dtype), shard), tmp_path / "out"
        report = checkpoint.slim(source, out, multiple=8)
        assert report.proof is not None and report.removed <= report.removable
        assert all(row.live[1] <= row.written <= row.before for row in report.slices)
        if name in KEPT or name == "bloom":
            assert report.removed == 0
        else:
            assert report.removed > 0.02
        original, smaller = load(model, source), load(model, out)
        if dtype == "float32":
            expected = result_of(original)
            difference = (expected - result_of(smaller)).abs().max()
            assert difference <= LIMIT * expected.abs().max()
