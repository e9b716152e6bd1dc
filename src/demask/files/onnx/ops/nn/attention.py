"""ONNX ops that mix positions of a sequence: attention and its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from demask.errors import BadInput
from demask.files.onnx.op_functions import Ops
from demask.files.onnx.read.reader import DTYPES

OPS = Ops()


def _split_heads(x: Tensor, count: int | None) -> Tensor:
    """(batch, time, heads * size) as (batch, heads, time, size)."""
    if count is None:
        raise BadInput("expected the number of heads for inputs of 3 axes, got none")
    return x.unflatten(-1, (count, x.shape[-1] // count)).transpose(1, 2)


def _merge_heads(x: Tensor) -> Tensor:
    """The inverse of `_split_heads`."""
    return x.transpose(1, 2).flatten(2)


@OPS("Attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    outputs: int,
) -> Any:
    """softmax(q k + mask) v, all keys and values, and the scores."""
    flat = q.ndim == 3
    if flat:
        q, k, v = _split_heads(q, q_num_heads), _split_heads(k, kv_num_heads), _split_heads(v, kv_num_heads)
    offset: Any = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    elif nonpad_kv_seqlen is not None:
        offset = nonpad_kv_seqlen.reshape(-1, 1, 1, 1) - q.shape[2]
    bounds = (left_window_size, 0 if is_causal else right_window_size)
    if min(bounds) < -1:
        raise BadInput(f"expected window sizes of -1 or more, got {bounds}")
    fused = not softcap and outputs < 4 and softmax_precision in (None, 1, 10, 16)
    # Causal from the first key on: torch has an option for it.
    causal = bool(
        fused
        and bounds == (-1, 0)
        and mask is None
        and isinstance(offset, int)
        and offset == 0
        and nonpad_kv_seqlen is None
    )
    mask = _combine_masks(q, k, mask, (-1, -1) if causal else bounds, offset, nonpad_kv_seqlen)
    if fused:
        result = functional.scaled_dot_product_attention(
            q, k, v.to(q.dtype), mask, 0.0, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        scores = None
    else:
        result, scores = _attention_steps(q, k, v, mask, scale, softcap, softmax_precision, qk_matmul_output_mode)
    return (_merge_heads(result) if flat else result, k, v, scores)[:outputs]


def _combine_masks(
    q: Tensor, k: Tensor, mask: Tensor | None, bounds: tuple[int, int], offset: Any, lengths: Tensor | None
) -> Tensor | None:
    """The mask that combines all restrictions: boolean, except where `mask` is a float tensor."""
    allowed = []
    if bounds != (-1, -1):
        i = torch.arange(q.shape[2], device=q.device).unsqueeze(-1) + offset
        j = torch.arange(k.shape[2], device=q.device)
        allowed += [j >= i - bounds[0]] if bounds[0] >= 0 else []
        allowed += [j <= i + bounds[1]] if bounds[1] >= 0 else []
    if lengths is not None:
        j = torch.arange(k.shape[2], device=q.device)
        allowed.append(j < lengths.reshape(-1, 1, 1, 1))
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        mask = mask if mask.ndim > 1 else mask.unsqueeze(0)
        missing = k.shape[2] - mask.shape[-1]
        if missing:
            fill = False if mask.dtype == torch.bool else -torch.inf
            mask = functional.pad(mask, (0, missing), value=fill)
        if mask.dtype == torch.bool:
            allowed.append(mask)
    if not allowed:
        return mask
    combined = allowed[0]
    for other in allowed[1:]:
        combined = combined & other
    if mask is None or mask.dtype == torch.bool:
        return combined
    return torch.where(combined, mask, -torch.inf)


def _attention_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
    softmax_precision: int | None,
    mode: int,
) -> tuple[Tensor, Tensor]:
    """The output and scores of attention. mode: 0 raw scores, 1 capped, 2 masked, 3 softmax."""
    k, v = _repeat_heads(k, q), _repeat_heads(v, q)
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = [(q * root) @ (k * root).transpose(-2, -1)]
    scores.append(softcap * torch.tanh(scores[0] / softcap) if softcap else scores[0])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    scores.append(scores[1] if mask is None else scores[1] + mask)
    dtype = None if softmax_precision is None else DTYPES[softmax_precision]
    weights = torch.softmax(scores[2], -1, dtype=dtype).to(q.dtype)
    if mask is not None:
        is_all_masked = mask.amax(-1, keepdim=True) == -torch.inf
        weights = torch.where(is_all_masked, 0.0, weights)
    scores.append(weights)
    if mode not in range(4):
        raise BadInput(f"expected qk_matmul_output_mode 0, 1, 2 or 3, got {mode}")
    return weights @ v.to(q.dtype), scores[mode]


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """Heads of keys or values, repeated to the number of heads of queries."""
    count = q.shape[1] // x.shape[1]
    return x if count == 1 else x.repeat_interleave(count, 1)


@OPS("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """x with pairs of features rotated by angles of their positions."""
    flat = x.ndim == 3
    heads = _split_heads(x, num_heads) if flat else x
    if position_ids is not None:
        cos, sin = functional.embedding(position_ids, cos), functional.embedding(position_ids, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    size = rotary_embedding_dim or heads.shape[-1]
    rotated = heads[..., :size] if rotary_embedding_dim else heads
    a, b = (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    parts = [cos * a - sin * b, sin * a + cos * b]
    result = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    if rotary_embedding_dim:
        result = torch.cat([result, heads[..., size:]], -1)
    return _merge_heads(result) if flat else result


_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


@OPS("LinearAttention")
def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    kv_num_heads: int,
    q_num_heads: int,
    chunk_size: int = 64,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
) -> tuple[Tensor, Tensor]:
    """Outputs of all steps, read by queries from a state of keys and values, and the last state."""
    if _RULES.get(update_rule) != (decay is not None, beta is not None):
        raise BadInput(f"expected decay and beta as {update_rule!r} (of {sorted(_RULES)}) asks")
    exact = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (
        _split_heads(t.to(exact), n) for t, n in ((query, q_num_heads), (key, kv_num_heads), (value, kv_num_heads))
    )
    gates = None if decay is None else _split_heads(decay.to(exact), kv_num_heads).exp()
    rates = None if beta is None else beta.to(exact).transpose(1, 2)  # batch, heads or 1, time
    shape = (k.shape[0], kv_num_heads, k.shape[-1], v.shape[-1])
    state = k.new_zeros(shape) if past_state is None else past_state.to(exact)
    outputs = []
    for t in range(k.shape[2]):
        k_t, v_t = k[:, :, t], v[:, :, t]
        if gates is not None:
            state = state * gates[:, :, t].unsqueeze(-1)
        if rates is not None:
            v_t = rates[:, :, t, None] * (v_t - torch.einsum("bhdm,bhd->bhm", state, k_t))
        state = state + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
        outputs.append((q[:, :, t, None] @ _repeat_heads(state, q)).squeeze(2))
    result = torch.stack(outputs, 2) * (scale or q.shape[-1] ** -0.5)
    state_dtype = query.dtype if past_state is None else past_state.dtype
    return _merge_heads(result).to(query.dtype), state.to(state_dtype)


_AFTER: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "silu": functional.silu, "swish": functional.silu}


@OPS("CausalConvWithState")
def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, past_state: Tensor | None = None, *, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    """The causal depthwise convolution, and the last inputs, which are the next call's state."""
    if activation not in _AFTER:
        raise BadInput(f"expected an activation of {sorted(_AFTER)}, got {activation!r}")
    length, before = x.shape[2], weight.shape[2] - 1
    x = functional.pad(x, (before, 0)) if past_state is None else torch.cat([past_state, x], 2)
    result = functional.conv1d(x, weight, bias, groups=weight.shape[0])
    return _AFTER[activation](result), x[:, :, length:]


@OPS("FlexAttention", domain="ai.onnx.preview")
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any = None,
    prob_mod: Any = None,
    scale: float | None = None,
    softmax_precision: int | None = None,
    run: Callable[[Any, Sequence[Tensor]], Sequence[Any]],
) -> Tensor:
    """softmax(q k) v, with graphs of the file applied to the scores and to their softmax."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    dtype = dtype if softmax_precision is None else DTYPES[softmax_precision]
    k, values = _repeat_heads(k, q), _repeat_heads(v, q).to(dtype)
    root = (q.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = ((q * root) @ (k * root).transpose(-2, -1)).to(dtype)
    (scores,) = (scores,) if score_mod is None else run(score_mod, [scores])
    weights = torch.softmax(scores, -1)
    (weights,) = (weights,) if prob_mod is None else run(prob_mod, [weights])
    return (weights @ values).to(v.dtype)
