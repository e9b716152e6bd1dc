"""Proof that a slim folder computes what the original does: both are loaded and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from demask.checkpoint.family import Family
from demask.checkpoint.slices import example_of
from demask.errors import Mismatch, NotExportable
from demask.failures import described
from demask.progress import ProgressStep
from demask.shrink.check import describe_difference

TOKENS = 32  # generated one by one
_KEYS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def prove(family: Family, source: Path, target: Path, step: ProgressStep) -> None:
    """Compare the folder at `target` with that at `source`, both as transformers loads them.

    Raises:
        Mismatch: an output differs by more than the original itself does in another order of
            sums, a token differs, or the loader misses a tensor.
        NotExportable: the original cannot be loaded or run.
    """
    step("loading both")
    try:
        original, problems = _load(family, source)
    except Exception as error:
        raise NotExportable(f"{source} cannot be loaded: {described(error)}", "unknown",
                            "check=False writes without a comparison") from error  # fmt: skip
    slim, others = _load(family, target)
    for key in _KEYS:
        more = sorted(set(map(str, others.get(key) or ())) - set(map(str, problems.get(key) or ())))
        if more:
            raise Mismatch(f"transformers loads the result with {key.replace('_', ' ')}: {more[0]}")
    for length, padded in ((3, False), (11, False), (11, True)):
        step(f"comparing texts of {length} tokens")
        example = _example(original, length, padded)
        wrong = describe_difference(slim, original, (), example)
        if wrong:
            raise Mismatch(f"the result computes something else: {wrong}")
    if original.can_generate():
        step(f"comparing {TOKENS} tokens one by one")
        prompt = _example(original, 5, False)
        prompt = {k: v for k, v in prompt.items() if k in (original.main_input_name, "input_ids")}
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False,
                   "num_beams": 1}  # fmt: skip
        own, expected = (_generate(model, prompt, options) for model in (slim, original))
        if expected is not None and (own is None or not torch.equal(own, expected)):
            raise Mismatch("the result generates other tokens one by one than the original")


def _generate(model: Any, prompt: dict[str, Any], options: dict[str, Any]) -> torch.Tensor | None:
    """The tokens that a model generates; None for one that does not, such as one without a first
    token."""
    with torch.no_grad():
        try:
            return model.generate(**prompt, **options)
        except (ValueError, NotImplementedError):
            return None


def _load(family: Family, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model, and what its loader says of missing tensors and others."""
    model, problems = family.model.from_pretrained(
        folder, config=family.config.from_pretrained(folder), local_files_only=True,
        output_loading_info=True, dtype=torch.float32,
    )  # fmt: skip
    return model.eval(), problems


def _example(model: Any, length: int, padded: bool) -> dict[str, Any]:
    """Inputs of random tokens and numbers, of two rows, the second with padding on the left."""
    generator = torch.Generator().manual_seed(length)
    example = example_of(model)
    for name, value in example.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point():
            example[name] = torch.randn(2, *value.shape[1:], generator=generator)
        else:
            size = model.config.get_text_config().vocab_size
            example[name] = torch.randint(3, size, (2, length), generator=generator)
    if padded and "input_ids" in example:
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[1, : length // 3] = 0
        example["attention_mask"] = mask
    return example
