"""GGUF files of llama.cpp in which every layer has sizes of its own.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp makes of sizes by
layer is known by experiment (`demask.checkpoint.targets`). A feed-forward of 0 units loads, and
drops the attention of its layer: at least one unit stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from demask.checkpoint.family import Family
from demask.checkpoint.gguf_vocabulary import add_vocabulary
from demask.checkpoint.llama_like import differs_from_llama, frequency_factors, has_biases, head_size
from demask.checkpoint.plan import CheckpointPlan, cut_tensor, new_shape
from demask.checkpoint.proof import CheckpointProof, prove
from demask.checkpoint.streamed import StreamedModel
from demask.checkpoint.targets import TARGETS, GgufArchitecture
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput
from demask.files import atomic_write as atomic
from demask.installation import install_command
from demask.machine.allocator import release_free_memory
from demask.progress import ProgressStep

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
