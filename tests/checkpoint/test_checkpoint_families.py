"""Each family, masked by the slices that it has: smaller, read by transformers, and the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import demask
from demask import checkpoint
from demask.checkpoint.slices import example_of
from families import FAMILIES, KEPT, OTHERS
from masked_folders import build, load, mask_model, write
from night import at_night

LIMIT = 1e-5
MASKS = ("computed", "computed-but-biases", "read")
CASES = [(name, mask, dtype) for name in FAMILIES for mask in MASKS for dtype in ("float32", "bfloat16")]
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


@pytest.mark.filterwarnings("ignore:save_pretrained writes sizes:UserWarning")
@pytest.mark.parametrize("name", at_night("qwen2_moe", "mixtral", "t5", "gpt2"))
def test_saved_as_slim_writes(tmp_path: Path, name: str) -> None:
    kind, config = FAMILIES[name]
    with torch.no_grad():
        model = build(kind, name, **config)
        mask_model(model, "read")
        source = write(model, tmp_path / "in")
        checkpoint.slim(source, tmp_path / "out", multiple=1)
        demask.demask(model, (), dict(example_of(model))).save_pretrained(tmp_path / "saved")
        expected, saved = load(model, tmp_path / "out"), load(model, tmp_path / "saved")
        assert [p.shape for p in saved.parameters()] == [p.shape for p in expected.parameters()]
        assert (result_of(saved) - result_of(model)).abs().max() <= LIMIT * result_of(model).abs().max()
