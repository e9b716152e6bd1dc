"""Proof that a slim folder computes what the original does.

Both are run on the same texts in float32, one module's weights at a time in memory; where they
differ by more than rounding, in float64. Then the slim one generates tokens one by one, with its
cache, and the original must choose the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.slices import example_of
from demask.checkpoint.streamed import StreamedModel
from demask.errors import BadInput, Mismatch, NotExportable
from demask.failures import described
from demask.judge import compare, named_leaves, tolerance
from demask.progress import ProgressStep

TOKENS = 32  # generated one by one
LENGTHS = (3, 11)  # of the texts, in tokens


@dataclass(frozen=True, slots=True)
class CheckpointProof:
    """How a slim folder differs from the original.

    Attributes:
        difference: the largest difference of the outputs, relative to the largest of them.
        dtype: of the arithmetic in which that is: float32, or float64 where rounding is larger.
        tokens: how many tokens were generated one by one; 0 for models that generate none.
        flips: at how many of them the original prefers another token by less than it moves when it
            is computed in the dtype of the files instead of float32.
        requested: the same difference between the original and the original without what was
            removed on request; None if nothing was that changes outputs.
    """

    difference: float
    dtype: str
    tokens: int = 0
    flips: int = 0
    requested: float | None = None

    def __str__(self) -> str:
        text = f"outputs differ by {self.difference:.1e} of the largest in {self.dtype}"
        if self.tokens:
            text += f", {self.tokens} tokens generated one by one are the same"
        text += f" but for {self.flips} that rounding decides" if self.flips else ""
        if self.requested is not None:
            text += f"; what was removed on request changes outputs by {self.requested:.1e}"
        return text


def prove(
    original: StreamedModel,
    slim: StreamedModel,
    rounds: bool,
    step: ProgressStep,
    unreduced: StreamedModel | None = None,
) -> CheckpointProof:
    """Compare a slim model with the original, of whose logits it may have the first ones alone.

    Args:
        rounds: whether constants were added to biases, and rounded to their dtype.
        unreduced: the original with what was removed on request.

    Raises:
        Mismatch: an output or a token differs, or the new folder lacks a tensor.
        NotExportable: the original cannot be run.
        BadInput: an output of the original is not a number.
    """
    for attribute in ("missing", "unused"):
        more = sorted(set(getattr(slim, attribute)) - set(getattr(original, attribute)))
        if more:
            raise Mismatch(f"the new folder has {attribute} tensors: {more[0]}")
    examples = [_example_inputs(slim.model, length, padded=length == LENGTHS[-1]) for length in LENGTHS]
    rows = _vocabulary_size(slim)
    prompt = _example_inputs(slim.model, 5, padded=False)
    tokens = _compare_generation(slim, original, prompt, step)
    if tokens is not None:
        is_encoded = original.model.config.is_encoder_decoder
        name = "decoder_input_ids" if is_encoded else "input_ids"
        rest = prompt if is_encoded else {n: v for n, v in prompt.items() if not isinstance(v, Tensor)}
        examples.append({**rest, name: tokens})
    worst, used = 0.0, torch.float32
    requested = None if unreduced is None else 0.0
    expected: list[dict[str, Tensor]] = []
    for k, example in enumerate(examples, 1):
        step(f"comparing text {k} of {len(examples)}")
        try:
            expected.append(_outputs_in(original, example, torch.float32, rows))
        except Exception as error:
            raise NotExportable(
                f"the original cannot be run: {described(error)}", "unknown", "check=False writes without a comparison"
            ) from error
        name = next((n for n, value in expected[-1].items() if value.isnan().any()), None)
        if name is not None:
            path = original.stored.folder.path
            raise BadInput(
                f"{path}: its {name} is not a number (NaN), equal to nothing; repair "
                "its weights, or write without a comparison"
            )
        try:
            actual = _outputs_in(slim, example, torch.float32)
        except Exception as error:
            raise Mismatch(f"the result cannot be run: {described(error)}") from error
        relative, text = _largest_difference(expected[-1], actual)
        limit = tolerance(1.0, torch.finfo(torch.float32).eps)
        if relative > limit and not text:
            step(f"comparing text {k} in float64")
            try:
                exact = _outputs_in(original, example, torch.float64, rows)
            except Exception as error:  # products by groups of rows, of experts, have no float64
                raise Mismatch(
                    f"the result differs by {relative:.1e} in float32, and float64 cannot be run: {described(error)}"
                ) from error
            relative, text = _largest_difference(exact, _outputs_in(slim, example, torch.float64))
            used, limit = torch.float64, tolerance(1.0, torch.finfo(torch.float64).eps)
            if rounds and relative > limit:
                limit = _largest_difference(exact, _outputs_in(original, example, None, rows))[0]
        if text or not relative <= limit:
            raise Mismatch(f"the result computes something else: {text or f'{relative:.1e}'} on text {k}")
        worst = max(worst, relative)
        if unreduced is not None and requested is not None:
            before = _outputs_in(unreduced, example, torch.float32, rows)
            requested = max(requested, _largest_difference(before, expected[-1])[0])
    name = str(used).removeprefix("torch.")
    if tokens is None:
        return CheckpointProof(worst, name, requested=requested)
    flips = _count_flips(original, tokens, examples[-1], expected[-1])
    return CheckpointProof(worst, name, TOKENS, flips, requested)


def _count_flips(original: StreamedModel, tokens: Tensor, example: dict[str, Any], outputs: dict[str, Tensor]) -> int:
    """At how many generated tokens the original's largest logit is another's, by less than rounding
    moves it. Raises Mismatch where it is by more."""
    logits = next(v for k, v in outputs.items() if "logits" in k)
    scores = logits[:, -TOKENS - 1 : -1]
    gaps = scores.amax(-1) - scores.gather(-1, tokens[:, -TOKENS:, None])[..., 0]
    if not gaps.any():
        return 0
    rounded = _outputs_in(original, example, None, logits.shape[-1])
    other = next(v for k, v in rounded.items() if "logits" in k)[:, -TOKENS - 1 : -1]
    noise = 2 * (other.float() - scores).abs().amax()
    if bool((gaps > noise).any()):
        raise Mismatch("the result generates other tokens, one by one, than the original")
    return int((gaps > 0).sum())


def _outputs_in(
    model: StreamedModel, example: dict[str, Any], dtype: torch.dtype | None, rows: int = 0
) -> dict[str, Tensor]:
    """The floating-point outputs of a model, by their names; without those of padding, at which
    attention to nothing may be anything. rows: of the logits of more tokens, how many first ones
    are wanted; 0: all."""
    kind = dtype or model.dtype
    inputs = {name: v.to(kind) if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in example.items()}
    with torch.no_grad(), model.streaming(dtype) as network:
        outputs = network(**inputs)
    mask = inputs.get("attention_mask", torch.ones(0))
    every = {
        name: value[mask.bool()] if value.shape[:2] == mask.shape else value
        for name, value in named_leaves(outputs)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    more = 0 < rows < (all_rows := _vocabulary_size(model))
    return {name: value[..., :rows] if more and value.shape[-1] == all_rows else value for name, value in every.items()}


def _vocabulary_size(model: StreamedModel) -> int:
    """The number of tokens in a model's vocabulary; 0 if it has none."""
    return getattr(model.model.config.get_text_config(), "vocab_size", None) or 0


def _largest_difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative difference of outputs, and a difference other than rounding, in words.
    Caches of keys and values, which have fewer heads in a slim model, are not compared."""
    worst = 0.0
    for name, value in expected.items():
        other = actual.get(name)
        if "key_values" in name or "cache" in name:
            continue
        if other is None or other.shape != value.shape:
            return worst, f"{name} has another shape"
        compared = compare(value, other.to(value.dtype))
        if compared.text:
            return worst, f"{name} {compared.text}"
        worst = max(worst, compared.relative)
    return worst, ""


def _compare_generation(
    slim: StreamedModel, original: StreamedModel, prompt: dict[str, Any], step: ProgressStep
) -> Tensor | None:
    """A text and the tokens that the slim model generates for it one by one, with a cache, in the
    dtype of its files; None if the original generates none."""
    if not slim.model.can_generate():
        return None
    step(f"generating {TOKENS} tokens")
    reason = ""
    for model in (slim, original):
        network: Any = model.model
        inputs = {k: v for k, v in prompt.items() if k in (network.main_input_name, "input_ids")}
        inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        # Settings of the config may end the text, forbid tokens, or lack the decoder's first one.
        first = getattr(network.config, "decoder_start_token_id", None) or 0
        kind = type(network.generation_config)
        network.generation_config = kind(decoder_start_token_id=first, bos_token_id=first)
        if network.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = torch.full((2, 1), first)
        try:
            with torch.no_grad(), model.streaming():
                tokens = network.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, num_beams=1, pad_token_id=0)
        except Exception as error:  # of a class that generates otherwise, or of the cut
            reason = described(error)
            continue
        if model is original:
            raise Mismatch(f"the result generates no tokens: {reason}")
        if tokens.shape[1] == TOKENS:  # Whisper leaves out what the decoder began with
            tokens = nn.functional.pad(tokens, (1, 0), value=first)
        return tokens
    return None


def _example_inputs(model: Any, length: int, padded: bool) -> dict[str, Any]:
    """Inputs of random tokens and numbers, of two rows, the second one padded on the left."""
    generator = torch.Generator().manual_seed(length)
    example = example_of(model)
    for name, value in example.items():
        if not isinstance(value, Tensor):
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
