"""ONNX files that optimum exports from masked checkpoints, with caches: smaller, with the same
tokens in optimum."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from demask.cli.options import NetworkOptions
from demask.cli.read_network import read_to_edit
from demask.files.onnx.check import Judge
from demask.files.onnx.edit.edit_file import edit_file, save_edited
from demask.ops import TABLE
from families import FAMILIES
from loaders import environment_of
from masked_folders import build, mask_model

STEPS = Path(__file__).with_name("optimum_steps.py")
TEXT = "text-generation-with-past", "ORTModelForCausalLM"
MODELS = {
    "llama": TEXT,
    "gpt2": TEXT,
    "t5": ("text2text-generation-with-past", "ORTModelForSeq2SeqLM"),
    "whisper": ("automatic-speech-recognition-with-past", "ORTModelForSpeechSeq2Seq"),
}
WIDER = {"vocab_size": 200, "max_position_embeddings": 256, "n_positions": 256}
SPEECH = {"num_mel_bins": 80, "max_source_positions": 1500}  # as its exporter draws examples


def run(python: Path, *words: object) -> str:
    call = [str(python), str(STEPS), *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_exports_with_caches_generate_the_same(name: str, tmp_path: Path) -> None:
    python = environment_of("optimum")
    (task, runner), (kind, config) = MODELS[name], FAMILIES[name]
    more: dict[str, Any] = {k: v for k, v in WIDER.items() if k in config}
    with torch.no_grad():
        model = build(kind, name, **{**config, **more, **(SPEECH if name == "whisper" else {})})
        mask_model(model, "read")
        model.save_pretrained(tmp_path / "in")
    folder, slim = tmp_path / "onnx", tmp_path / "slim"
    run(python, "export", tmp_path / "in", folder, task)
    shutil.copytree(folder, slim)
    for path in sorted(folder.glob("*.onnx")):
        args = read_to_edit(path, NetworkOptions()).args
        edited = edit_file(path, args, TABLE)
        if edited is None:  # branches that share tensors
            assert "merged" in path.name
            continue
        Judge.of_file(str(path), args).compare(edited.model.SerializeToString())
        save_edited(edited, slim / path.name)
        assert (slim / path.name).stat().st_size < path.stat().st_size
    answers = run(python, "generate", runner, folder, slim).splitlines()
    first, second = (json.loads(a.removeprefix("TOKENS")) for a in answers if a[:6] == "TOKENS")
    assert first == second
