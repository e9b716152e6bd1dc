"""GGUF files of llama.cpp in which every layer has sizes of its own.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp makes of sizes by
layer is known by experiment (`demask.checkpoint.targets`). A feed-forward of 0 units loads, and
drops the attention of its layer: at least one unit stays.

The tokenizer of a folder in a GGUF file.

llama.cpp has code of its own for how texts are split before pairs of tokens are merged, by name.
Folders say it in tokenizer.json; those that are listed here are written, others are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from demask.checkpoint.family import Family
from demask.checkpoint.folder import read_json
from demask.checkpoint.plan import CheckpointPlan, cut_tensor, new_shape
from demask.checkpoint.proof import CheckpointProof, prove
from demask.checkpoint.streamed import StreamedModel
from demask.checkpoint.targets import (
    TARGETS,
    GgufArchitecture,
    differs_from_llama,
    frequency_factors,
    has_biases,
    head_size,
)
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput, DemaskError
from demask.files import atomic_write as atomic
from demask.installation import install_command
from demask.machine.allocator import release_free_memory
from demask.progress import ProgressStep

TOKENIZER = "tokenizer.json"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By pattern of words, and whether words that are tokens are not split: what llama.cpp calls it.
_SPLITS = {(None, False): "gpt-2", (_WORDS % r"\p{N}{1,3}", True): "llama-bpe", (_WORDS % r"\p{N}", False): "qwen2"}


def add_vocabulary(writer: Any, folder: Path, size: int) -> list[str]:
    """Add a folder's tokenizer to a file, and return notes. size: of the model's embedding."""
    import gguf

    data, split, tokens = dict[str, Any](), None, list[tuple[str, int]]()
    if (folder / TOKENIZER).exists():
        with suppress(DemaskError, AttributeError, LookupError, TypeError, ValueError):
            data = read_json(folder, TOKENIZER)
            split, tokens = _find_split(data), _tokens(data, size)
    if split is None or not tokens:
        writer.add_tokenizer_model("no_vocab")
        reason = "is of no kind that is written" if data else "is not in the folder"
        return [f"the file has no tokenizer: {TOKENIZER} {reason}; programs must give llama.cpp tokens by number"]
    model, prefix = split
    writer.add_tokenizer_model("llama" if model is None else "gpt2")
    writer.add_tokenizer_pre(model or "default")
    writer.add_token_list([text for text, _ in tokens])
    if model is None:  # of pairs, that with the largest score is merged first
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(data["model"]["merges"]):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            ranks.setdefault("".join(pair), rank)
        writer.add_token_scores([-float(ranks.get(text, -1) + 1) for text, _ in tokens])
        writer.add_add_space_prefix(prefix)
    writer.add_token_types([kind for _, kind in tokens])
    special = gguf.SpecialVocab(folder, model is not None, n_vocab=size)
    for name in ("bos", "eos"):  # what llama.cpp puts around texts otherwise depends on the split
        special.add_special_token.setdefault(name, False)
    special.add_to_gguf(writer, quiet=True)
    return []


def _find_split(data: dict[str, Any]) -> tuple[str | None, bool] | None:
    """What llama.cpp calls the way in which a tokenizer splits texts, None for SentencePiece's, and
    whether it puts a space in front; None if it knows no such way."""
    model, normal, pre = (data.get(key) or {} for key in ("model", "normalizer", "pre_tokenizer"))
    if model.get("type") != "BPE" or not model.get("merges"):  # llama.cpp refuses a file of none
        return None
    steps = pre.get("pretokenizers", [pre] if pre else [])
    changes = normal.get("normalizers", [normal] if normal else [])
    kinds = [step["type"] for step in (*changes, *steps)]
    if model.get("byte_fallback"):
        if kinds not in (["Prepend", "Replace"], ["Replace"], ["Metaspace"]):
            return None
        scheme = steps[0].get("prepend_scheme", "always") if steps else "always"
        return None, kinds[0] == "Prepend" or (kinds[0] == "Metaspace" and scheme != "never")
    if kinds[:1] == ["NFC"]:  # which llama.cpp leaves out, for all tokenizers
        kinds = kinds[1:]
    pattern = None
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0]["pattern"].get("Regex")
    elif kinds != ["ByteLevel"] or steps[0].get("add_prefix_space", True):
        return None
    name = _SPLITS.get((pattern, bool(model.get("ignore_merges"))))
    return None if name is None else (name, False)


def _tokens(data: dict[str, Any], size: int) -> list[tuple[str, int]]:
    """Text and type of each token; [] if a token is none of the model's. Numbers between them are
    unused."""
    import gguf

    kind = gguf.TokenType
    tokens = [(f"[PAD{k}]", int(kind.UNUSED)) for k in range(size)]
    for text, k in data["model"]["vocab"].items():
        is_byte = data["model"].get("byte_fallback") and len(text) == 6 and text[:3] == "<0x"
        tokens[k] = text, int(kind.BYTE if is_byte else kind.NORMAL)
    for token in data.get("added_tokens", []):
        special = kind.CONTROL if token["special"] else kind.USER_DEFINED
        unknown = token["content"] == data["model"].get("unk_token")
        tokens[token["id"]] = token["content"], int(kind.UNKNOWN if unknown else special)
    return tokens if len(tokens) == size else []


_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 32)}
_QKV = ("attn_q", "attn_k", "attn_v")
_CONVERT = "write the folder for transformers, and convert that with llama.cpp's own script"


@dataclass(frozen=True, slots=True)
class GgufPart:
    """A tensor of a folder in a GGUF file. heads: by how many its rows are sorted into neighbors;
    0 if they are in the order of the folder."""

    tensor: str
    shape: tuple[int, ...]
    heads: int


def check_gguf(model: Any) -> GgufArchitecture:
    """The architecture of the file for a model, which is on the meta device. Raises BadInput, with
    the reason, where none with sizes by layer computes what the model does."""
    config, kind = model.config, type(model).__name__
    architecture = TARGETS["llama.cpp"].architectures.get(config.model_type)
    if architecture is None:
        raise BadInput(f"llama.cpp: it has no architecture with sizes by layer for {kind}; {_CONVERT}")
    problem = differs_from_llama(model)
    if not problem and not architecture.frequencies and bool((frequency_factors(model) != 1).any()):
        problem = "takes no scaled rotation"
    elif not problem and not architecture.untied and not config.tie_word_embeddings:
        problem = "has no output weight but the embedding"
    elif not problem and not architecture.biases and has_biases(model):
        problem = "has no biases"
    if problem:
        raise BadInput(f"llama.cpp: its {architecture.name} {problem}; {_CONVERT}")
    return architecture


def find_parts(
    stored: StoredTensors, plan: CheckpointPlan, architecture: GgufArchitecture
) -> dict[str, list[GgufPart]]:
    """By tensor of the file, the tensors of the folder that are one below the other in it."""
    import gguf

    (stack,), config = stored.stacks, stored.model.config
    layers = list(plan.layers[stack.path])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, len(layers))
    by_name: dict[str, dict[int, GgufPart]] = {}
    for tensor, parameter in stored.parameter_of.items():
        if parameter is None or (parameter == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if tensor in plan.dropped:
            continue
        split = stack.split(parameter)
        if split is not None and split[0] not in layers:
            continue
        new = parameter if split is None else stack.name(layers.index(split[0]), split[1])
        name = names.get_name(new, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise BadInput(f"llama.cpp: its {architecture.name} has no {parameter}; {_CONVERT}")
        base, _, leaf = name.rpartition(".")
        prefix, _, own = base.rpartition(".")
        shape = new_shape(stored, plan, tensor)
        heads = order = 0
        if own in ("attn_q", "attn_k") and architecture.pairs:
            heads = shape[0] // head_size(config)
        if own in _QKV and architecture.fused:
            name, order = f"{prefix}.attn_qkv.{leaf}", _QKV.index(own)
        by_name.setdefault(name, {})[order] = GgufPart(tensor, shape, heads)
    return {name: [parts[k] for k in sorted(parts)] for name, parts in by_name.items()}


def write_gguf(
    stored: StoredTensors,
    plan: CheckpointPlan,
    architecture: GgufArchitecture,
    family: Family,
    out: Path,
    original: StreamedModel | None,
    step: ProgressStep,
) -> tuple[tuple[int, int], CheckpointProof | None, list[str]]:
    """Write a GGUF file, complete or not at all, one tensor in memory at a time.

    Args:
        original: what it is compared with, if at all.

    Returns:
        Bytes and elements of its tensors, how it was compared with the original, and notes.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise BadInput(f"GGUF files need gguf: {install_command('gguf')}") from error

    parts = find_parts(stored, plan, architecture)
    writer: Any = gguf.GGUFWriter(None, architecture.name)
    _add_sizes(writer, stored.model, len(plan.layers[stored.stacks[0].path]), parts)
    notes = add_vocabulary(writer, stored.folder.path, stored.model.config.vocab_size)
    factors = frequency_factors(stored.model)
    scaled = {"rope_freqs.weight": factors} if not bool((factors == 1).all()) else {}
    total = count = 0
    kinds: list[torch.dtype] = []
    for name, shape in {
        **{n: t.shape for n, t in scaled.items()},
        **{n: (sum(p.shape[0] for p in ps), *ps[0].shape[1:]) for n, ps in parts.items()},
    }.items():
        own = stored.folder.stored(parts[name][0].tensor).dtype if name in parts else torch.float32
        if own not in _TYPES:
            raise BadInput(f"llama.cpp: expected float32, float16 or bfloat16, got {name} of {own}")
        kind = torch.float32 if len(shape) == 1 else own  # as llama.cpp's ops take them
        kinds.append(kind)
        elements = math.prod(shape)
        writer.add_tensor_info(
            name, shape, np.dtype(np.float32), elements * kind.itemsize, gguf.GGMLQuantizationType[_TYPES[kind][0]]
        )
        total, count = total + elements * kind.itemsize, count + elements
    matrices = [kind for kind in kinds if kind != torch.float32]
    writer.add_file_type(_TYPES[matrices[0] if matrices else torch.float32][1])
    with atomic.write(out) as file:
        writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        step(f"writing {len(kinds)} tensors")
        for name, kind in zip([*scaled, *parts], kinds, strict=True):
            release_free_memory()
            values = (
                [scaled[name]]
                if name in scaled
                else [_in_order(cut_tensor(stored, plan, part.tensor), part.heads, paired=True) for part in parts[name]]
            )
            value = (torch.cat(values) if len(values) > 1 else values[0]).to(kind).contiguous()
            # Not by `write_tensor_data`: numpy's `tofile` says nothing where a disk is full.
            writer.write_padding(file, file.tell())
            file.write(value.view(-1).view(torch.uint8).numpy().data)
            writer.write_padding(file, file.tell())
        file.flush()
        proof = None
        if original is not None:
            slim = GgufModel(family, stored, plan, parts, file)
            proof = prove(original, slim, bool(plan.added), step)
    return (total, count), proof, notes


def _add_sizes(writer: Any, model: Any, layers: int, parts: Mapping[str, Sequence[GgufPart]]) -> None:
    """Add what the config says, and the sizes of each layer."""
    config, size = model.config, head_size(model.config)

    def heads(layer: int, name: str) -> int:
        every = parts.get(f"blk.{layer}.attn_output.weight")
        queries = 0 if every is None else every[0].shape[1] // size
        shared = config.num_attention_heads // config.num_key_value_heads
        return queries if name == "q" else queries // shared

    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length([parts[f"blk.{k}.ffn_down.weight"][0].shape[1] for k in range(layers)])
    writer.add_head_count([heads(k, "q") for k in range(layers)])
    writer.add_head_count_kv([heads(k, "kv") for k in range(layers)])
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _in_order(tensor: Tensor, heads: int, *, paired: bool) -> Tensor:
    """Rows of q or k with those that are rotated together as neighbors, or, if not `paired`, from
    that order to the folder's: one in each half of a head."""
    if not heads:
        return tensor
    shape = (heads, 2, -1) if paired else (heads, -1, 2)
    return tensor.view(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class GgufModel(StreamedModel):
    """The original with the tensors of a GGUF file in place of its own, and zeros where they were
    cut: what the file computes, in the class of transformers.

    Args:
        parts: from `find_parts`.
        file: the file, open for reading.
    """

    def __init__(
        self,
        family: Family,
        stored: StoredTensors,
        plan: CheckpointPlan,
        parts: Mapping[str, Sequence[GgufPart]],
        file: BinaryIO,
    ):
        import gguf

        super().__init__(family, stored.folder)
        self.plan = plan
        self.file: Any = file
        reader: Any = gguf.GGUFReader
        written = {tensor.name: tensor for tensor in reader(file).tensors}
        dtypes = {name: dtype for dtype, (name, _) in _TYPES.items()}
        # By tensor of the folder, its dtype in the file and the byte where it begins.
        self.places: dict[str, tuple[GgufPart, torch.dtype, int]] = {}
        for name, own in parts.items():
            start, dtype = written[name].data_offset, dtypes[written[name].tensor_type.name]
            for part in own:
                self.places[part.tensor] = part, dtype, start
                start += math.prod(part.shape) * dtype.itemsize

    def read(self, name: str) -> Tensor:
        tensor = self.stored.name_of(self._source.get(name, name))
        if tensor is None:
            return super().read(name)
        stored = self.stored.folder.stored(tensor)
        if tensor not in self.places:  # of a layer, or of a layer's attention, that is gone
            return torch.zeros(stored.shape, dtype=stored.dtype)
        part, dtype, start = self.places[tensor]
        value = torch.empty(part.shape, dtype=dtype)
        self.file.seek(start)
        self.file.readinto(value.view(-1).view(torch.uint8).numpy().data)
        value = _in_order(value.to(stored.dtype), part.heads, paired=False)
        for axis, positions in self.plan.cuts.get(tensor, {}).items():
            shape = list(value.shape)
            shape[axis] = stored.shape[axis]
            value = torch.zeros(shape, dtype=value.dtype).index_copy_(axis, positions, value)
        return value
