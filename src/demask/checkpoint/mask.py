"""`demask.prune.checkpoint`: masks in a checkpoint folder that need not fit into memory."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.decide import bias_of
from demask.checkpoint.family import LayerStack
from demask.checkpoint.folder import CONFIG, INDEX, STATE, CheckpointFolder, copy_files
from demask.checkpoint.slices import ReducedModel
from demask.checkpoint.slim import fingerprint, unfinished_folder
from demask.checkpoint.streamed import StreamedModel
from demask.checkpoint.tensors import StoredTensors, check_output, open_checkpoint
from demask.errors import BadInput
from demask.failures import public
from demask.files.weight_file import WeightFile
from demask.progress import ProgressStep, no_progress
from demask.prune.allocation.shares import Uniform, count_left
from demask.prune.coupling import KINDS_OF
from demask.prune.masks import find_places
from demask.prune.schedules import check_fraction
from demask.prune.scores import L1, InputRecorder, InputStatistics, Score, ScoreView
from demask.prune.structures import GroupSlices, find_candidates, keep_highest
from demask.registry import RUNNERS
from demask.text_table import number_table, render_text

ROWS = 512  # tokens of one text, where a text is a string
STRUCTURES = ("unit", "head", "layer")


@dataclass(frozen=True, slots=True, eq=False)
class MaskedCheckpoint:
    """What was masked in a folder. It prints as a table.

    Attributes:
        out: the new folder.
        structure: "unit", "head" or "layer".
        units: by group (or stack of layers), the number of its units.
        removed: by group, the units that are zero, int64, in order.
        scores: by group, the scores of its units, float64.
    """

    out: Path
    structure: str
    units: Mapping[str, int]
    removed: Mapping[str, Tensor]
    scores: Mapping[str, Tensor]

    def __str__(self) -> str:
        table = number_table("", f"{self.structure}s", "masked", "left")
        for name, count in self.units.items():
            gone = len(self.removed[name])
            table.add_row(name, str(count), str(gone), str(count - gone))
        return f"{render_text(table)}\nwritten to {self.out}"


@public
def checkpoint(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    text: str | Tensor | None = None,
    *,
    score: Score | None = None,
    amount: float = 0.5,
    structure: str = "unit",
    allocation: Callable[..., Mapping[str, int]] | None = None,
    progress: ProgressStep = no_progress,
) -> MaskedCheckpoint:
    """Write a checkpoint folder in which what matters least is zero, a module in memory at a time.

    Scores and masks are those of `prune.Pruner` with the same score, structure and allocation, on
    the model as `from_pretrained` loads it. `demask.checkpoint.slim` then makes it smaller.

    Args:
        folder: a folder of Hugging Face, as `checkpoint.slim` takes it.
        out: the new folder: complete or absent.
        text: what activations are measured on: a text, which the folder's tokenizer splits into
            rows of 512 tokens, or token ids, int64 [rows, length]. Only scores that need inputs
            (`Activation`, `Fluctuation`) and layers need one.
        score: as of `Pruner`; default `L1()`. Layers are always scored by how much they change
            their input: 1 - cosine, the mean over tokens (Men et al., ShortGPT, 2024, equation 1).
        amount: the fraction of units that is masked, from 0 to less than 1.
        structure: "unit" (default): of feed-forward layers; "head": heads of attention, with the
            keys and values that they share; "layer": layers, which then return their input.
        allocation: as of `Pruner`, such as `Global()`, but none that measures the network.

    Raises:
        BadInput: a folder that `checkpoint.slim` refuses, a text that is missing, another
            structure, or a score that needs gradients.
        NotExportable: the class cannot be captured.

    Example:
        >>> import demask
        >>> try:
        ...     print(demask.prune.checkpoint("Llama", "Llama-masked", amount=0.3))
        ... except demask.BadInput as error:  # there is no such folder here
        ...     print(error)
        Llama: expected a checkpoint folder with config.json and model.safetensors
    """
    source, final = Path(folder), Path(out)
    if structure not in STRUCTURES:
        raise BadInput(f"expected a structure of {', '.join(STRUCTURES)}; got {structure!r}")
    check_fraction(amount)
    check_output(source, final)
    family, data, stored = open_checkpoint(source)
    chosen: Score = L1() if score is None else score
    streamed = StreamedModel(family, stored.folder)
    rows = _token_rows(text, source) if text is not None else None
    needs_text = structure == "layer" or bool(getattr(chosen, "needs_inputs", False))
    if needs_text and rows is None:
        raise BadInput("expected a text: what is measured are activations on it")
    progress("capturing one layer of each kind")
    reduced = ReducedModel(family, data, stored.stacks)
    names = KINDS_OF["unit" if structure == "layer" else structure]
    kinds = ("unit", "head") if structure == "layer" else names
    skeleton = {name: p.shape for name, p in family.build(reduced.data).named_parameters()}
    groups = [
        candidates
        for kind in kinds
        for candidates in find_candidates(kind, reduced.coupling, skeleton)
        if isinstance(candidates, GroupSlices)
    ]
    slices = _of_all_layers(groups, stored, reduced.layers)
    if not slices:
        raise BadInput(f"{source}: no {structure} of {family.model.__name__} can be masked: layers share them")
    if structure == "layer":
        assert rows is not None
        scores = _measure_influence(streamed, stored.stacks, rows, progress)
        keep = {name: keep_highest(s, count_left(len(s), amount)) for name, s in scores.items()}
        zeros = _of_silent_layers(slices, stored, keep)
        added: dict[str, Tensor] = {}
    else:
        scores, keep, added = _choose_slices(streamed, slices, chosen, allocation or Uniform(), amount, rows, progress)
        zeros = _zero_positions(slices, keep)
    changes = hashlib.sha256()
    for name, axes in sorted(zeros.items()):
        for axis, gone in sorted(axes.items()):
            changes.update(f"{name} {axis}".encode() + gone.numpy().tobytes())
    for name, change in sorted(added.items()):
        changes.update(name.encode() + change.numpy().tobytes())
    state = fingerprint(stored.folder, changes.hexdigest())
    partial = final.with_name(final.name + ".partial")
    with unfinished_folder(partial, state):
        _write_masked(stored, zeros, added, partial, progress)
        copy_files(source, stored.folder.others, partial)
        for name in (CONFIG, INDEX):
            if (source / name).exists():
                shutil.copyfile(source / name, partial / name)
        os.replace(partial, final)
        (final / STATE).unlink()
    gone = {name: (~mask).nonzero().squeeze(1) for name, mask in keep.items()}
    return MaskedCheckpoint(final, structure, {n: len(m) for n, m in keep.items()}, gone, scores)


RUNNERS.register("checkpoint", checkpoint)


def _token_rows(text: str | Tensor, source: Path) -> Tensor:
    """Token ids of a text, [rows, length]."""
    if isinstance(text, Tensor):
        if text.ndim != 2 or text.is_floating_point() or not text.numel():
            raise BadInput(f"expected token ids [rows, length], got {text.dtype} {tuple(text.shape)}")
        return text
    from transformers import AutoTokenizer

    try:
        tokens = AutoTokenizer.from_pretrained(source, local_files_only=True)(text)["input_ids"]
    except Exception as error:
        raise BadInput(f"{source}: its tokenizer cannot be used ({error}); pass token ids") from error
    if not tokens:
        raise BadInput("expected a text of at least one token")
    length = min(ROWS, len(tokens))
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def _of_all_layers(
    groups: Sequence[GroupSlices], stored: StoredTensors, firsts: Mapping[str, Sequence[int]]
) -> dict[str, GroupSlices]:
    """The slices of every layer by name, in the order of layers, from those of one layer of each
    kind. Left out are those that layers share."""
    shapes = {name: torch.Size(shape) for name, shape in stored.shapes.items()}
    ordered: list[tuple[int, int, GroupSlices]] = []
    for order, stack in enumerate(stored.stacks):
        for own in groups:
            at = {(split[0] if (split := stack.split(m.parameter)) else None) for m in own.members}
            if len(at) != 1 or None in at:
                continue
            (small,) = at
            assert small is not None
            first = firsts[stack.path][small]
            for layer, kind in enumerate(stack.kinds):
                if kind != first:
                    continue

                def there(name: str, stack: LayerStack = stack, layer: int = layer, small: int = small) -> str:
                    inside = name.removeprefix(f"{stack.path}.{small}.")
                    return stack.name(layer, inside)

                members = tuple(replace(m, parameter=there(m.parameter)) for m in own.members)
                if all(stored.is_stored(m.parameter) for m in members):
                    group = replace(own.group, name=there(own.name), members=members)
                    ordered.append((order, layer, GroupSlices(group, shapes)))
    ordered.sort(key=lambda row: row[:2])
    return {slices.name: slices for _, _, slices in ordered}


def _choose_slices(
    streamed: StreamedModel,
    slices: Mapping[str, GroupSlices],
    score: Score,
    allocation: Callable[..., Mapping[str, int]],
    amount: float,
    rows: Tensor | None,
    step: ProgressStep,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """By group, the scores of its slices and which stay; by parameter, what biases change by."""
    places = find_places(streamed.model)
    read = {m.parameter for own in slices.values() for m in own.members if not m.produces}
    statistics: Mapping[str, InputStatistics] = {}
    compensates = getattr(score, "compensation", False)
    if compensates:
        lacking = sorted(n for n in read if streamed.stored.name_of(bias_of(n)) is None)
        if lacking:
            raise BadInput(
                f"{type(score).__name__} adds to biases; {lacking[0]} has none: pass Fluctuation(compensation=False)"
            )
    if getattr(score, "needs_inputs", False):
        assert rows is not None
        statistics = _collect_input_statistics(streamed, {name: places[name] for name in read}, rows, step)
    scores: dict[str, Tensor] = {}
    for name, own in slices.items():
        step(f"scoring {name}")
        with streamed.loaded(dict.fromkeys(m.parameter for m in own.members)):
            scores[name] = score(ScoreView(own, places, statistics)).detach().double()
        if bool(scores[name].isnan().any()):
            raise BadInput(f"scores of {name} are NaN: look for NaN in its weights")
    counts = allocation(scores, amount, None)
    keep = {name: own.choose(scores[name], int(counts[name])) for name, own in slices.items()}
    added: dict[str, Tensor] = {}
    compensate = getattr(score, "compensate", None)
    if compensates and compensate is not None:
        assert rows is not None
        zeros = _zero_positions(slices, keep)
        streamed.change = lambda name, values: _set_zeros(values, zeros.get(name, {}))
        masked = _collect_input_statistics(streamed, {name: places[name] for name in read}, rows, step)
        streamed.change = lambda _, values: values
        for name, own in slices.items():
            with streamed.loaded(dict.fromkeys(m.parameter for m in own.members)):
                view = ScoreView(own, places, statistics)
                for weight, change in compensate(view, ~keep[name], masked).items():
                    bias = bias_of(weight)
                    added[bias] = added[bias] + change if bias in added else change
    return scores, keep, added


def _collect_input_statistics(
    streamed: StreamedModel, layers: Mapping[str, Any], rows: Tensor, step: ProgressStep
) -> Mapping[str, InputStatistics]:
    recorder = InputRecorder(layers)
    try:
        _run_in_chunks(streamed, rows, step)
    finally:
        recorder.remove()
    return recorder.statistics


def _run_in_chunks(streamed: StreamedModel, rows: Tensor, step: ProgressStep) -> None:
    size = max(1, 4096 // rows.shape[1])
    parts = rows.split(size)
    for k, part in enumerate(parts, 1):
        step(f"running text {k} of {len(parts)}")
        with torch.no_grad(), streamed.streaming() as model:
            model(input_ids=part)


def _measure_influence(
    streamed: StreamedModel, stacks: Sequence[LayerStack], rows: Tensor, step: ProgressStep
) -> dict[str, Tensor]:
    """By stack, how much each layer changes its input, float64 [layers]: 1 - cosine of the input
    and the output, the mean over tokens."""
    sums = {stack.path: torch.zeros(len(stack.kinds), dtype=torch.float64) for stack in stacks}
    count = 0

    def hook(path: str, layer: int) -> Callable[..., None]:
        def add(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            cosine = nn.functional.cosine_similarity(before.double(), after.double(), dim=-1)
            sums[path][layer] += float((1 - cosine).sum())

        return add

    handles = [
        streamed.model.get_submodule(f"{s.path}.{k}").register_forward_hook(hook(s.path, k), with_kwargs=True)
        for s in stacks
        for k in range(len(s.kinds))
    ]
    try:
        _run_in_chunks(streamed, rows, step)
    finally:
        for handle in handles:
            handle.remove()
    count = rows.numel()
    return {path: total / count for path, total in sums.items()}


def _of_silent_layers(
    slices: Mapping[str, GroupSlices], stored: StoredTensors, keep: Mapping[str, Tensor]
) -> dict[str, dict[int, Tensor]]:
    """The positions of parameters that are zero where layers add nothing to their inputs: all of
    the weights that read slices, and their biases."""
    zeros: dict[str, dict[int, Tensor]] = {}
    for own in slices.values():
        for member in own.members:
            for stack in stored.stacks:
                split = stack.split(member.parameter)
                if split is None or member.produces or keep[stack.path][split[0]]:
                    continue
                for name, axis in ((member.parameter, member.axis), (bias_of(member.parameter), 0)):
                    if (shape := stored.shapes.get(name)) is not None:
                        zeros[name] = {axis: torch.ones(shape[axis], dtype=torch.bool)}
    return zeros


def _zero_positions(slices: Mapping[str, GroupSlices], keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
    """By parameter and axis, the positions that are zero, bool [length]."""
    zeros: dict[str, dict[int, Tensor]] = {}
    for name, own in slices.items():
        for member in own.group.producers:
            mine, gone = zeros.setdefault(member.parameter, {}), ~member.mask(keep[name])
            mine[member.axis] = mine[member.axis] | gone if member.axis in mine else gone
    return zeros


def _set_zeros(values: Tensor, zeros: Mapping[int, Tensor]) -> Tensor:
    for axis, gone in zeros.items():
        values.movedim(axis, 0)[gone] = 0
    return values


def _write_masked(
    stored: StoredTensors,
    zeros: Mapping[str, Mapping[int, Tensor]],
    added: Mapping[str, Tensor],
    target: Path,
    step: ProgressStep,
) -> None:
    """Write the tensors of a folder, masked, into files of the same names."""
    folder: CheckpointFolder = stored.folder
    own: dict[str, dict[int, Tensor]] = {}  # zeros of tensors: a parameter may be several
    for parameter, axes in zeros.items():
        for axis, gone in axes.items():
            for part in stored.parts(parameter, axis):
                mine = gone if part.positions is None else gone[part.positions]
                own.setdefault(part.tensor, {})[part.axis] = mine

    def read(name: str) -> Tensor:
        parameter = stored.parameter_of.get(name) or ""
        values = _set_zeros(folder.written(name), own.get(name, {}))
        if parameter in added:
            values = (values.double() + added[parameter]).to(values.dtype)
        return values

    for number, (name, file) in enumerate(folder.files.items(), 1):
        step(f"writing file {number} of {len(folder.files)}")
        if not (target / name).exists():
            hollow = {n: t.hollow() for n, t in file.tensors.items()}
            WeightFile.write(target / name, hollow, read, file.metadata)
