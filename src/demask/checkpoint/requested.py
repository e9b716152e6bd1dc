"""What is removed on request, since the result has or computes something else without it: rows of
the vocabulary at its end, and experts that add nothing.

Which tensors get smaller, and along which axis, shows by building the class from a config with a
smaller number.
"""

from __future__ import annotations

import copy as copies
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.family import ConfigData, Family, numbers_of_config
from demask.checkpoint.folder import CheckpointFolder, CutFolder, read_json
from demask.checkpoint.plan import KnownSlices, round_units
from demask.checkpoint.slices import ReducedModel, apply_changes
from demask.checkpoint.tensors import StoredTensors
from demask.errors import BadInput, NotExportable
from demask.failures import described
from demask.progress import ProgressStep

DROP_ZERO = "drop-zero"
GENERATION = "generation_config.json"
_IDS = re.compile(r"token.*(_ids?|_index)$|^suppress_tokens$|^begin_suppress|decoder_ids$")
_TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")


def smaller_config(
    family: Family, data: ConfigData, model: nn.Module, names: Collection[str], size: int
) -> tuple[ConfigData, dict[str, int]] | None:
    """A config in which the first axis of some tensors has `size` positions, and by tensor that is
    smaller with it, the axis. None where no number of the config says that.

    Args:
        model: of the class and the config `data`.
        names: of parameters of one length.
    """
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    (full,) = {shapes[name][0] for name in names}
    for keys, value in numbers_of_config(data):
        if value != full:
            continue
        other = copies.deepcopy(data)
        part = other
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = size
        built = family.try_build(other)
        own = {} if built is None else {n: tuple(t.shape) for n, t in built.state_dict().items()}
        if own.keys() != shapes.keys():
            continue
        changed = {
            name: [k for k, pair in enumerate(zip(shapes[name], own[name], strict=False)) if pair == (full, size)]
            for name in own
            if own[name] != shapes[name]
        }
        is_complete = all(
            len(axes) == 1 and cut_to(shapes[name], axes[0], size) == own[name] for name, axes in changed.items()
        )
        if is_complete and all(changed.get(name) == [0] for name in names):
            return other, {name: axis for name, (axis,) in changed.items()}
    return None


def cut_to(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _cut_tensors_of(
    stored: StoredTensors,
    family: Family,
    before: ConfigData,
    after: ConfigData,
    names: Mapping[str, str],
    cuts: Mapping[str, Mapping[int, Tensor]],
) -> StoredTensors:
    """The tensors of a folder as if it had another config, and been cut."""
    config = copies.deepcopy(dict(stored.folder.config))
    apply_changes(config, before, after)
    folder = CutFolder.of(stored.folder, config, names, cuts)
    adapter = None if stored.adapter is None else stored.adapter.cut_with(stored.parameter_of, cuts)
    return StoredTensors(folder, family.build(after), stored.stacks, adapter)


# --- rows of the vocabulary -----------------------------------------------------------------------


def cut_vocabulary(
    stored: StoredTensors, family: Family, data: ConfigData, unused: str | Sequence[int], multiple: int
) -> tuple[StoredTensors, ConfigData, str]:
    """The tensors of a folder without rows at the end of the vocabulary, its config, and a note.

    Args:
        unused: DROP_ZERO: rows that are zero and that no token has; or the numbers of these rows.
        multiple: the rows that stay are rounded up to a multiple of it.

    Raises:
        BadInput: there is no vocabulary, or rows are named that cannot go: others would have to be
            renumbered, and with them the tokenizer and all texts that were split by it.
    """
    path, model = stored.folder.path, stored.model
    embedding = _embedding_of(model)
    if embedding is None:
        raise BadInput(f"{path}: {type(model).__name__} has no vocabulary")
    rows = stored.shapes[embedding][0]
    smaller = smaller_config(family, data, model, [embedding], rows - 1)
    if smaller is None:
        raise BadInput(f"{path}: no number in its config says how many rows {embedding} has")
    tensors = {stored.name_of(name): axis for name, axis in smaller[1].items()}
    tensors = {name: axis for name, axis in tensors.items() if name is not None}
    used, user = _last_used(stored.folder, data, rows)
    numbers = [n for n in unused if type(n) is int and 0 <= n < rows]
    if unused == DROP_ZERO:
        going = torch.ones(rows, dtype=torch.bool)
        for name, axis in tensors.items():
            going &= stored.pattern(name).axes[axis]
        going[: used + 1] = False
    else:
        going = torch.zeros(rows, dtype=torch.bool)
        if isinstance(unused, str) or len(numbers) != len(unused) or not numbers:
            raise BadInput(f"expected {DROP_ZERO!r} or numbers of rows from 0 to {rows - 1}, got {unused!r:.80}")
        going[numbers] = True
        if min(numbers) <= used:
            raise BadInput(
                f"row {min(numbers)} of {rows} cannot go: {user} has number {used}, and tokens are not renumbered"
            )
    last = int(torch.cat([torch.zeros(1, dtype=torch.int64), (~going).nonzero()[:, 0]]).max())
    if unused != DROP_ZERO and min(numbers) < last:
        raise BadInput(
            f"row {min(numbers)} cannot go, and row {last} stay: only rows at the end "
            "can, since tokens are not renumbered"
        )
    size = round_units(last + 1, rows, multiple)
    smaller = smaller_config(family, data, model, [embedding], size) if size < rows else None
    if smaller is None:
        note = f"none of {rows} rows of the vocabulary is removed: number {last} stays"
        return stored, data, note
    cuts = {name: {axis: torch.arange(size)} for name, axis in tensors.items()}
    same = {name: name for name in stored.folder.file_of}
    note = f"{rows} -> {size} rows of the vocabulary: logits of the others are no longer computed"
    return _cut_tensors_of(stored, family, data, smaller[0], same, cuts), smaller[0], note


def _embedding_of(model: Any) -> str | None:
    """The name of the parameter with a row for each token; None if there is none."""
    try:
        module = model.get_input_embeddings()
    except NotImplementedError:
        return None
    if not isinstance(module, nn.Embedding):
        return None
    return next(name for name, p in model.named_parameters(remove_duplicate=False) if p is module.weight)


def _last_used(folder: CheckpointFolder, data: ConfigData, rows: int) -> tuple[int, str]:
    """The largest number of a row that a token has, or that a config names, and which does."""
    used = [(-1, "")]
    if any(name.startswith(_TOKENIZERS) for name in folder.others):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
            numbers = list(tokenizer.get_vocab().values())
        except Exception as error:
            raise BadInput(
                f"{folder.path}: its tokenizer cannot be read ({described(error)}), which tells what rows are used"
            ) from error
        used.append((max(numbers, default=-1), "a token of the tokenizer"))
    configs = [data]
    if GENERATION in folder.others:
        configs.append(read_json(folder.path, GENERATION))
    for config in configs:
        used += [(n, key) for key, n in _ids_of(config) if n < rows]
    return max(used)


def _ids_of(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The numbers of tokens in a config, with their keys."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _ids_of(value)
        elif _IDS.search(str(key)):
            waiting = [value]
            while waiting:
                number = waiting.pop()
                if isinstance(number, list):
                    waiting += number
                elif type(number) is int:
                    yield str(key), number


def read_numbers(path: Path) -> list[int]:
    """The integers in a text file. Raises BadInput for anything else in it."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: expected numbers of rows, separated by spaces or lines: {error}") from error


# --- experts --------------------------------------------------------------------------------------


def drop_experts(
    stored: StoredTensors, family: Family, data: ConfigData, step: ProgressStep
) -> tuple[StoredTensors, ConfigData, str]:
    """The tensors of a folder without experts that add nothing, its config, and a note: as many
    stay in each layer as the layer with most of them needs, and as its class can choose from."""
    slices = KnownSlices.of(stored, family, data, step).slices
    model, layers = stored.model, dict[tuple[str, int], Tensor]()
    names: dict[tuple[str, int], set[str]] = {}
    for mine in slices:
        if len(mine.fates) > 1:
            ((kind, layer),) = mine.layers
            live = torch.tensor([not all(f.dead and not f.constant for f in fates) for fates in mine.fates])
            at = kind.stack, layer
            layers[at] = layers[at] | live if at in layers else live
            names.setdefault(at, set()).update(n for m, n in mine.parameters() if m.rank == 3)
    every = {name for own in names.values() for name in own}
    if not every:
        return stored, data, "no expert is removed: none are known, or their units are not"
    count = len(next(iter(layers.values())))
    smaller = smaller_config(family, data, model, every, count - 1)
    if smaller is None or any(_layer_of_parameter(stored, name) not in layers for name in smaller[1]):
        return stored, data, "no expert is removed: no number of the config says how many there are"
    modules = {name.rpartition(".")[0] for name in every}
    for name, axis in smaller[1].items():
        # What an expert adds without its units is alive: its row of a bias.
        tensor, at = stored.name_of(name), _layer_of_parameter(stored, name)
        if name not in every and tensor is not None and name.rpartition(".")[0] in modules:
            layers[at] = layers[at] | ~stored.pattern(tensor).axes[axis]
    least = max(1, *(int(live.sum()) for live in layers.values()))
    for size in range(least, count):
        smaller = smaller_config(family, data, model, every, size)
        if smaller is not None and _is_capturable(family, smaller[0], stored):
            break
    else:
        return (stored, data, f"none of {count} experts is removed: a layer, or the class, needs them all")
    staying = {at: _fill_up(live, size) for at, live in layers.items()}
    cuts: dict[str, dict[int, Tensor]] = {}
    numbered: dict[str, Tensor] = {}  # by the names before experts' numbers, those that stay
    for name, axis in smaller[1].items():
        own, tensor = staying[_layer_of_parameter(stored, name)], stored.name_of(name)
        if tensor is not None:
            cuts.setdefault(tensor, {})[axis] = own
        elif name in every:
            numbered[_numbered_prefix(stored, name)] = own
    new_names = {name: name for name in stored.folder.file_of}
    for prefix, own in numbered.items():
        new_names = _renumbered(new_names, prefix, own.tolist())
    dead = [int((~live).sum()) for live in layers.values()]
    note = (
        f"{count} -> {size} experts in {len(layers)} layers, where {min(dead)} to {max(dead)} "
        "added nothing; others are chosen in their place, which is not exact"
    )
    return _cut_tensors_of(stored, family, data, smaller[0], new_names, cuts), smaller[0], note


def _layer_of_parameter(stored: StoredTensors, parameter: str) -> tuple[str, int]:
    """The stack and number of the layer of a parameter; ("", 0) if it is in none."""
    every = ((stack.path, split) for stack in stored.stacks if (split := stack.split(parameter)))
    return next(((path, split[0]) for path, split in every), ("", 0))


def _fill_up(live: Tensor, size: int) -> Tensor:
    """`size` numbers, in order: the live ones, and others to fill up."""
    order = (~live).to(torch.int8).argsort(stable=True)
    return order[:size].sort().values


def _is_capturable(family: Family, data: ConfigData, stored: StoredTensors) -> bool:
    """Whether the class of a config computes: an expert fewer than it chooses is too few."""
    try:
        return bool(ReducedModel(family, data, stored.stacks).groups)
    except NotExportable:
        return False


def _numbered_prefix(stored: StoredTensors, name: str) -> str:
    """The names of the tensors of a parameter before the number of an expert. Raises BadInput where
    they have none."""
    parts = [(part.tensor.split("."), str(part.expert)) for part in stored.parts(name, 1)]
    for at in range(min((len(words) for words, _ in parts), default=0)):
        if all(words[at] == number for words, number in parts):
            return ".".join(parts[0][0][:at]) + "."
    raise BadInput(f"{stored.folder.path}: the tensors of {name} are not numbered by expert")


def _renumbered(names: Mapping[str, str], prefix: str, staying: Sequence[int]) -> dict[str, str]:
    """Names of tensors, and of those whose number after a prefix is one of `staying`, its index there."""
    result: dict[str, str] = {}
    for new, old in names.items():
        number, _, rest = new[len(prefix) :].partition(".") if new.startswith(prefix) else ("",) * 3
        if not number.isdigit():
            result[new] = old
        elif int(number) in staying:
            result[f"{prefix}{staying.index(int(number))}.{rest}"] = old
    return result
