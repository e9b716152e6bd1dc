"""`slim()`: a masked checkpoint folder becomes a smaller one that computes the same.

    folder -> family, stacks of layers -> slices, by the op table -> zeros of the tensors
           -> fates of slices, in a small network -> sizes that a config can say -> tensors

One tensor at a time is in memory.
"""

from __future__ import annotations

import contextlib
import copy as copies
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demask.checkpoint.adapter import LoraAdapter
from demask.checkpoint.blocks import CODE, CODE_FILE, BlockModel, check_blocks, config_of_blocks, fit_blocks
from demask.checkpoint.family import ConfigData
from demask.checkpoint.folder import (
    CONFIG,
    INDEX,
    QUANTIZATION,
    SINGLE,
    STATE,
    CheckpointFolder,
    copy_files,
    cut_shape,
    write_index,
    write_json,
)
from demask.checkpoint.gguf_file import check_gguf, write_gguf
from demask.checkpoint.packed_weights import PackedWeight, empty_weight, linear_layers, settings_of
from demask.checkpoint.plan import CheckpointPlan, cut_tensor, new_name, plan_checkpoint
from demask.checkpoint.proof import prove
from demask.checkpoint.report import CheckpointReport, describe_plan
from demask.checkpoint.requested import cut_vocabulary, drop_experts
from demask.checkpoint.slices import apply_changes
from demask.checkpoint.streamed import StreamedModel
from demask.checkpoint.targets import TARGETS
from demask.checkpoint.tensors import StoredTensors, check_output, open_checkpoint
from demask.errors import BadInput, NotExportable
from demask.failures import CallFailed, public
from demask.files import atomic_write as atomic
from demask.files.weight_file import WeightFile
from demask.installation import VERSION
from demask.machine.allocator import release_free_memory
from demask.progress import ProgressStep, no_progress
from demask.registry import RUNNERS
from demask.sparse.csr_matrix import NUMBERS
from demask.sparse.products.packed import PackedMatrix, form_of_density, pack

EXPERTS = ("keep", "drop")
ADAPTER = "adapter"  # the folder in the new one


@public
def slim(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target: str = "transformers",
    per_layer: bool = False,
    multiple: int | None = None,
    vocabulary: str | Sequence[int] | None = None,
    experts: str = "keep",
    adapter: str | os.PathLike[str] | None = None,
    sparse: bool = False,
    check: bool = True,
    progress: ProgressStep = no_progress,
) -> CheckpointReport:
    """Write a checkpoint folder that computes the same as a masked one, with smaller tensors.

    Removed is what zeros make useless, by the op table: units of feed-forward layers and experts,
    heads of attention with the keys and values that they share, layers that return their inputs.
    A unit that is always the same number is added to the bias that reads it. The result is a folder
    of the same class that `from_pretrained` and other loaders read. Its config has one size for all
    layers, so each keeps as many zeros as the layer with most live units or heads needs. A GGUF
    file, which llama.cpp reads, has sizes by layer.

    Args:
        folder: a folder of Hugging Face: config.json, safetensors files, an index if there are
            several. Its class must be one of transformers, whose code is not in the folder.
        out: the new folder, or for llama.cpp a .gguf file. It appears complete or not at all; while
            a folder is written, it is `out` + ".partial", from which a later call with the same
            arguments continues.
        target: what is to load it: "transformers" (default), "vllm" or "mlx", which differ in
            whether they load a family with fewer heads, or "llama.cpp", for LLaMA, Mistral, Qwen2
            and Qwen3 (with tied embeddings).
        per_layer: whether a folder for vLLM or mlx is of the class nemotron-nas, which has sizes by
            layer: of a LLaMA, or Mistral without a sliding window, without biases. transformers has
            no such class, and vLLM loads it with `trust_remote_code`.
        multiple: units are rounded up to a multiple of it: libraries that quantize or multiply in
            blocks take no others. By default 64, for llama.cpp 32 (its K-quants take 256).
        vocabulary: rows of the vocabulary that may go: "drop-zero", those that are zero and that no
            token of the tokenizer has, or their numbers. Only rows at the end go, and tokens keep
            their numbers; logits of the removed ones are no longer computed.
        experts: "keep" (default), or "drop" those that add nothing, with their rows of the router.
            That is not exact: other experts are chosen in their place. The report says by how much
            outputs change.
        adapter: the folder of a LoRA adapter, as peft writes it, that is cut with `folder`, into
            `out`/adapter. What it makes of zeros counts: a unit that it computes stays.
        sparse: whether weights of linear layers with many zeros in no pattern are stored without
            them, as a `demask.sparse.PackedLinear` has them. `demask.checkpoint.load` reads the
            folder, other loaders do not.
        check: whether the result is loaded with transformers and compared with the original, for
            texts of two lengths, with padding, and 32 tokens one by one, before it appears. Of a
            GGUF file the tensors are.
        progress: called with a text at each step.

    Returns:
        What was removed, and the sizes before and after.

    Raises:
        BadInput: the folder is incomplete or damaged, or `out` exists.
        NotExportable: transformers cannot build or run the class, or it cannot be captured.
        Mismatch: the result computes something else.

    Example:
        >>> import demask
        >>> try:
        ...     print(demask.checkpoint.slim("Llama-masked", "Llama-slim"))
        ... except demask.BadInput as error:  # there is no such folder here
        ...     print(error)
        Llama-masked: expected a checkpoint folder with config.json and model.safetensors
    """
    source, final = Path(folder), Path(out)
    if multiple is not None and multiple < 1:
        raise BadInput(f"expected a multiple of at least 1, got {multiple}")
    if target not in TARGETS:
        raise BadInput(f"expected a target of {', '.join(TARGETS)}, got {target!r}")
    if experts not in EXPERTS:
        raise BadInput(f"expected experts to be {' or '.join(EXPERTS)}, got {experts!r}")
    loader = TARGETS[target]
    if per_layer and not (loader.blocks or loader.architectures):
        raise BadInput(f"per_layer: {target} loads no folder with sizes by layer; expected vllm or mlx")
    if sparse and (target != "transformers" or adapter is not None):
        raise BadInput("sparse: packed weights are for transformers, without an adapter; leave out the other option")
    multiple = loader.multiple if multiple is None else multiple
    if loader.architectures and final.suffix != ".gguf":
        raise BadInput(f"expected the name of a .gguf file for {target}, got {final}")
    check_output(source, final)
    progress("reading the headers")
    family, data, stored = open_checkpoint(source)
    architecture = check_gguf(stored.model) if loader.architectures else None
    blocks = check_blocks(stored.model, loader) if per_layer and architecture is None else None
    layer_format = architecture or blocks
    original, others, notes = stored.folder, stored.folder.others, list[str]()
    if (layer_format is not None or sparse) and original.scales:
        raise BadInput(
            f"{source}: its weights have scales, which the format does not; give a folder that is not quantized"
        )
    if adapter is not None:
        own = LoraAdapter.read(Path(adapter), stored.model, stored.parameter_of.values())
        stored = StoredTensors(original, stored.model, stored.stacks, own)
        if layer_format is not None:
            raise BadInput(f"{final}: its format has no adapters; merge that into the folder")
        here, root = Path(adapter).resolve(), source.resolve()
        if root in here.parents:
            inside = here.relative_to(root).as_posix() + "/"
            others = tuple(name for name in others if not name.startswith(inside))
        if any(name.startswith(f"{ADAPTER}/") for name in others):
            raise BadInput(f"{source} has a folder {ADAPTER}, where the adapter is written; rename it")
    try:
        if experts == "drop":
            stored, data, note = drop_experts(stored, family, data, progress)
            notes.append(note)
        reference = stored
        if vocabulary is not None:
            stored, data, note = cut_vocabulary(stored, family, data, vocabulary, multiple)
            notes.append(note)
        plan = plan_checkpoint(stored, family, data, loader, layer_format, multiple, progress)
    except CallFailed as error:
        raise NotExportable(
            f"what its zeros make useless is not known ({error})", "unknown", "its checkpoint stays as it is"
        ) from error
    expected = StreamedModel(family, reference.folder) if check else None
    if architecture is not None:
        size, proof, more = write_gguf(stored, plan, architecture, family, final, expected, progress)
        return describe_plan(stored, plan, final, original, size, proof, (*notes, *more))
    if blocks is not None:
        plan = fit_blocks(stored, plan, blocks)
        config = config_of_blocks(stored, plan, blocks)
    else:
        config = copies.deepcopy(dict(stored.folder.config))
        apply_changes(config, data, plan.config)
    if loader.old_keys is not None:
        add_old_keys(config, plan.config, loader.old_keys.get(plan.config["model_type"], {}))
    if QUANTIZATION in config:
        config[QUANTIZATION] = renumbered(stored, plan, config[QUANTIZATION])
    if original.left:
        first = ", ".join(original.left[:5]) + ", ..." * (len(original.left) > 5)
        notes.append(f"not copied, as weights in other formats, links or hidden: {first}")
    if original.scales:
        notes.append(
            "compared with weights as numbers times scales: a runtime that also quantizes "
            "activations by row may round them otherwise than before"
        )
    partial = final.with_name(final.name + ".partial")
    own = stored.adapter
    packed: dict[str, PackedWeight] = {}
    if sparse:
        packed = find_packed_weights(stored, plan, progress)
        note = "no linear layer has so many zeros that it is stored without them"
        if packed:
            config[QUANTIZATION] = settings_of(packed)
            note = f"{len(packed)} linear layers are stored without their zeros; demask.checkpoint.load reads them"
        notes.append(note)
    elif target == "transformers" and adapter is None and not (notes or plan.notes) and not any(plan.cuts.values()):
        notes.append(
            "no units, heads or layers are zero; sparse=True (--sparse) stores zeros in no pattern in fewer bytes"
        )
    options = (
        target,
        per_layer,
        sparse,
        multiple,
        experts,
        repr(vocabulary),
        str(adapter),
        own.file.modified if own is not None else 0,
    )
    with unfinished_folder(partial, fingerprint(original, *options)):
        write_tensors(stored, plan, packed, partial, progress)
        copy_files(source, others, partial)
        if stored.adapter is not None:
            own = stored.adapter.cut_with(stored.parameter_of, plan.cuts)
            own.write(partial / ADAPTER, final, stored.stacks, plan.layers)
        write_json(partial / CONFIG, config)
        if blocks is not None and blocks.code:
            (partial / CODE_FILE).write_text(CODE)
        proof = None
        if expected is not None:
            before = StreamedModel(family, original) if reference.folder is not original else None
            folder_written = CheckpointFolder.read(partial)
            written = (
                StreamedModel(plan.family, folder_written)
                if blocks is None
                else BlockModel(family, folder_written, stored, blocks)
            )
            proof = prove(expected, written, bool(plan.added), progress, before)
            if reference.adapter is not None:
                expected.change = reference.adapter.applied
                written.change = LoraAdapter.read(
                    partial / ADAPTER, written.stored.model, written.stored.parameter_of.values()
                ).applied
                notes.append(f"with the adapter: {prove(expected, written, False, progress)}")
        os.replace(partial, final)
        (final / STATE).unlink()
    new = CheckpointFolder.read(final)
    size = new.nbytes, new.parameters
    return describe_plan(stored, plan, final, original, size, proof, notes)


def renumbered(stored: StoredTensors, plan: CheckpointPlan, value: Any) -> Any:
    """Settings with the names of modules as they are in the new folder, without those of layers
    that are removed. Raises BadInput for a pattern that names layers by their numbers."""
    if isinstance(value, dict):
        return {k: renumbered(stored, plan, v) for k, v in value.items()}
    if isinstance(value, list):
        every = [renumbered(stored, plan, v) for v in value]
        return [new for new, old in zip(every, value, strict=True) if new is not None or old is None]
    if not isinstance(value, str):
        return value
    same = all(len(plan.layers[stack.path]) == len(stack.kinds) for stack in stored.stacks)
    if not same and value.startswith("re:") and re.search(r"\W\d+(\W|$)", value):
        raise BadInput(
            f"{stored.folder.path / CONFIG}: {value!r:.80} names layers by number, and "
            "some are removed; name the modules there"
        )
    name = new_name(stored, plan, value + ".weight")
    return None if name is None else name.removesuffix(".weight")


def fingerprint(folder: CheckpointFolder, *options: str | int) -> str:
    """A hash of the origin of a folder, to tell whether an unfinished one can go on. options: all
    that its tensors depend on but the original."""
    files = {name: (file.size, file.modified) for name, file in folder.files.items()}
    origin = [str(folder.path.resolve()), dict(folder.config), files, options, VERSION]
    return hashlib.sha256(json.dumps(origin).encode()).hexdigest()


@contextlib.contextmanager
def unfinished_folder(path: Path, state: str) -> Iterator[None]:
    """An unfinished folder that this process alone writes, with the complete files of an earlier
    call with the same state. It stays where the block raises."""
    with atomic.locked_folder(path):
        names = [name for name in os.listdir(path) if not name.startswith(atomic.PREFIX)]
        if names and STATE not in names:
            raise BadInput(f"{path}: exists, and no unfinished folder of demask; remove it")
        if names and (path / STATE).read_text() != state:
            for entry in os.scandir(path):
                remove = shutil.rmtree if entry.is_dir(follow_symlinks=False) else os.unlink
                remove(entry)
        with atomic.write(path / STATE) as file:
            file.write(state.encode())
        yield


def find_packed_weights(stored: StoredTensors, plan: CheckpointPlan, step: ProgressStep) -> dict[str, PackedWeight]:
    """The linear layers, by name in the new folder, whose weights are stored packed: those for which that takes
    less time with one token."""
    old_names = {new_name(stored, plan, name): name for name in stored.folder.file_of}
    packed: dict[str, PackedWeight] = {}
    for layer, _ in linear_layers(plan.family.build(plan.config)):
        name = old_names.get(f"{layer}.weight")
        if name is None or stored.folder.stored(name).dtype not in NUMBERS:
            continue
        step(f"counting zeros of {layer}")
        weight = cut_tensor(stored, plan, name)
        count = int(weight.count_nonzero())
        form = form_of_density(count / max(weight.numel(), 1), weight.dtype)
        if form != "dense":
            packed[layer] = PackedWeight(form, (weight.shape[0], weight.shape[1]), count)
    return packed


def write_tensors(
    stored: StoredTensors, plan: CheckpointPlan, packed: Mapping[str, PackedWeight], target: Path, step: ProgressStep
) -> None:
    """Write the tensors that stay into files of the same names, and their index. Files that are
    complete stay."""
    folder, written = stored.folder, dict[str, WeightFile]()
    zeros = new_zeros(stored, plan)
    for number, (file_name, file) in enumerate(folder.files.items(), 1):
        step(f"writing file {number} of {len(folder.files)}")
        hollow: dict[str, Tensor] = {}
        sources: dict[str, tuple[str, int | None]] = {}  # by new name, the tensor, and which part of it packed
        for name, own in file.tensors.items():
            new = new_name(stored, plan, name)
            layer = (new or "").removesuffix(".weight")
            if new is not None and layer in packed and new != layer:
                tensors = packed[layer].empty(own.dtype).tensors
                parts = dict(zip(packed[layer].names(layer), tensors, strict=True))
                sources |= {part: (name, k) for k, part in enumerate(parts)}
                hollow |= parts
                hollow[new], sources[new] = empty_weight(own.dtype), (name, None)
            elif new is not None:
                shape = cut_shape(own.shape, plan.cuts.get(name, {}))
                hollow[new], sources[new] = torch.empty(shape, dtype=own.dtype, device="meta"), (name, None)
        if number == len(folder.files):
            hollow |= zeros
        path = target / file_name
        if path.exists():
            written[file_name] = WeightFile.read(path)
            continue
        last: dict[str, PackedMatrix] = {}  # the weight that is packed, of which the parts follow one another

        def read(
            new: str, sources: Mapping[str, tuple[str, int | None]] = sources, last: dict[str, PackedMatrix] = last
        ) -> Tensor:
            release_free_memory()
            if new in zeros:
                return torch.zeros(zeros[new].shape, dtype=zeros[new].dtype)
            name, part = sources[new]
            if new.removesuffix(".weight") in packed:
                return empty_weight(folder.stored(name).dtype)
            if part is None:
                return cut_tensor(stored, plan, name)
            if name not in last:
                last.clear()
                last[name] = pack(cut_tensor(stored, plan, name), packed[new.rpartition(".")[0]].form)
            return last[name].tensors[part]

        written[file_name] = WeightFile.write(path, hollow, read, file.metadata)
    if set(written) != {SINGLE} or INDEX in os.listdir(folder.path):
        write_index(target, written)


def new_zeros(stored: StoredTensors, plan: CheckpointPlan) -> dict[str, Tensor]:
    """By name in the new folder, what only its class has, on the meta device: zeros."""
    if plan.family.model is type(stored.model):
        return {}
    zeros: dict[str, Tensor] = {}
    for parameter, value in plan.family.build(plan.config).state_dict().items():
        if parameter not in stored.shapes:
            path, _, leaf = parameter.rpartition(".")
            name = stored.name_of(f"{path}.weight")
            assert name is not None
            dtype = stored.folder.stored(name).dtype
            zeros[name.removesuffix("weight") + leaf] = value.to(dtype)
    return zeros


def add_old_keys(config: ConfigData, full: ConfigData, others: Mapping[str, str]) -> None:
    """Add to a config, in place, keys of transformers 4: those of rotations, and `others`, with the
    values of which keys. full: the config with all keys of its class."""
    rotation = full.get("rope_parameters")
    if isinstance(rotation, dict):
        own = rotation.get("full_attention", rotation)
        scaling = {name: value for name, value in own.items() if name not in ("rope_theta", "partial_rotary_factor")}
        is_scaled = scaling.get("rope_type", "default") != "default"
        config |= {name: own[name] for name in ("rope_theta", "partial_rotary_factor") if name in own}
        config["rope_scaling"] = scaling if is_scaled else None
        if "sliding_attention" in rotation:
            config["rope_local_base_freq"] = rotation["sliding_attention"]["rope_theta"]
    for new, old in others.items():
        value = config.get(old, full.get(old))
        if value is not None:
            config.setdefault(new, value)


def with_smaller_sizes(model: Any) -> Any | None:
    """A network of transformers as `slim` writes it: of the same class, with fewer zeros. None
    where `slim` cannot."""
    with atomic.temporary_folder() as root:
        folder, out = root / "larger", root / "smaller"
        try:
            type(model).save_pretrained(model, folder)
            slim(folder, out, multiple=1, check=False)
        except (BadInput, NotExportable, OSError):  # another class, or a full disk
            return None
        return type(model).from_pretrained(out, dtype="auto")


RUNNERS.register("smaller", with_smaller_sizes)
