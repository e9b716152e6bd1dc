"""Steps in the environment of optimum: `export IN OUT TASK`, or `generate CLASS FOLDER ...`."""

from __future__ import annotations

import json
import sys


def export(source: str, target: str, task: str) -> None:
    from optimum.exporters.onnx import main_export

    main_export(source, output=target, task=task, do_validation=False)


def generate(kind: str, *folders: str) -> None:
    """Print the tokens that each folder generates, as JSON."""
    import torch
    from optimum import onnxruntime

    for folder in folders:
        model = getattr(onnxruntime, kind).from_pretrained(folder)
        torch.manual_seed(0)
        if kind == "ORTModelForSpeechSeq2Seq":
            inputs = {"input_features": torch.randn(2, 80, 3000)}
        else:
            mask = torch.ones(2, 7, dtype=torch.int64)
            mask[1, :3] = 0
            inputs = {"input_ids": torch.randint(3, 100, (2, 7)), "attention_mask": mask}
        tokens = model.generate(**inputs, max_new_tokens=16, min_new_tokens=16, do_sample=False, num_beams=1)
        print("TOKENS", json.dumps(tokens.tolist()))


if __name__ == "__main__":
    {"export": export, "generate": generate}[sys.argv[1]](*sys.argv[2:])
