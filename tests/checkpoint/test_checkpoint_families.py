"""Each family, masked by the slices that it has: smaller, read by transformers, and the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from demask import checkpoint
from demask.checkpoint.slices import example_of
from families import FAMILIES, KEPT, OTHERS
from masked_folders import build, load, mask_model, write
from night import at_night

LIMIT = 1e-5
MASKS = ("computed", "computed-but-biases", "read")
CASES = [(name, mask, dtype) for name in FAMILIES for mask in MASKS
         for dtype in ("float32", "bfloat16")]  # fmt: skip
CASES += [(name, "read", "float32") for name in {**OTHERS, **KEPT}]


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
