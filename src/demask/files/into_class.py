"""Load the tensors of a demasked network into an instance of its original class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from demask.errors import BadInput
from demask.failures import public
from demask.graph.module_copy import structural_copy
from demask.graph.provenance import Cut
from demask.graph.result.computed_tensors import computed_tensors, remove_parametrizations, run_hooks
from demask.graph.result.demasked_module import Demasked, graphs_in
from demask.graph.result.resize import assign_tensor, has_numbers, module_at, numbers_of, tensors_of, update_attributes
from demask.shrink.demask import check_loaded_saves
from demask.shrink.own_class.pretrained import fitting_configs

Numbers = Mapping[str, Mapping[str, Any]]


@public
def resize(model: nn.Module, state_dict: Mapping[str, Tensor], numbers: Numbers | None = None) -> nn.Module:
    """A copy of `model` with the tensors of a demasked network, whose layers may be smaller.

    Sizes of torch's layers and configs of transformers' models are updated. Tensors keep the dtypes
    of `state_dict`. Whether successive layers fit each other is not checked. `model` is not
    changed.

    Args:
        model: an instance of the network's class, with the sizes before the network was demasked.
        state_dict: tensors by name, from `state_dict()` of a network that `demask.demask` returned
            in the model's own class, or from a safetensors file. They are copied. Parametrizations
            of the model whose tensors are not among them become plain. Modules that became graphs
            do not fit (`demask.demask(..., result="class")` makes none): their code is not in it.
        numbers: by name of a module, new values of attributes that the module's code reads and that
            layers do not have, such as {"layers.0.attention": {"num_heads": 2}}. The demasked
            network has them as `slim.demasked.numbers`. Default: None, which derives them from the
            shapes.

    Raises:
        BadInput: names of tensors or modules differ from the model's, a tensor is larger than the
            model's, modules became graphs, or the shapes do not determine an attribute and
            `numbers` is None.

    Example:
        >>> import torch, demask
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> state = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3),
        ...          "1.weight": torch.zeros(2, 3), "1.bias": torch.zeros(2)}
        >>> demask.resize(net, state)
        Sequential(
          (0): Linear(in_features=4, out_features=3, bias=True)
          (1): Linear(in_features=3, out_features=2, bias=True)
        )
    """
    if not isinstance(model, nn.Module) or not isinstance(state_dict, Mapping):
        kinds = f"{type(model).__name__} and {type(state_dict).__name__}"
        raise BadInput(f"expected an nn.Module and its state dict, got {kinds}")
    wrong = next((n for n, t in state_dict.items() if not isinstance(t, Tensor)), None)
    if wrong is not None:
        raise BadInput(f"expected a tensor for {wrong!r}, got {type(state_dict[wrong]).__name__}")
    rows = [] if numbers is None else numbers.values() if isinstance(numbers, Mapping) else [numbers]
    if not all(isinstance(row, Mapping) for row in rows):
        raise BadInput(
            "expected numbers as a mapping from names of modules to mappings from "
            f"attributes to values, got {numbers!r:.60}"
        )
    graphs = [p for p in graphs_in(state_dict) if not isinstance(module_at(model, p), Demasked)]
    if graphs:
        raise BadInput(describe_graphs(graphs))
    copy = structural_copy(model, share=True)
    remove_parametrizations(copy, lambda c: not state_dict.keys() >= set(c.source_names()))
    computed = {c.name: c.value() for c in computed_tensors(copy)}
    state_dict = {name: t for name, t in state_dict.items() if name not in computed}
    originals = dict(tensors_of(copy))
    _check_names(originals.keys(), copy.state_dict().keys(), state_dict.keys())
    cuts: dict[str, Cut] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in state_dict.items():
        old = originals.get(name)
        if old is not None and tuple(old.shape) != tuple(tensor.shape):
            cuts[name] = _first_positions_cut(name, old, tensor)
        if id(tensor) not in tensors:
            grad = old is None or old.requires_grad or not isinstance(old, nn.Parameter)
            tensors[id(tensor)] = tensor.detach().clone()
            if old is None or isinstance(old, nn.Parameter):
                tensors[id(tensor)] = nn.Parameter(tensors[id(tensor)], grad)
        if not assign_tensor(copy, name, tensors[id(tensor)]):
            raise BadInput(f"the model has no place for {name!r}")
    _copy_other_buffers(copy, set(state_dict))
    run_hooks(copy)
    for c in computed_tensors(copy):
        if computed[c.name].shape != (value := c.value()).shape:
            cuts[c.name] = _first_positions_cut(c.name, computed[c.name], value)
    modes = {module: module.training for module in copy.modules()}
    copy.eval()  # weights of a spectral norm change when they are read in train mode
    for module, training in modes.items():
        update_attributes(module)
        module.training = training
    check_loaded_saves(copy)
    for _ in fitting_configs(copy):
        if _has_numbers(copy, numbers):
            return copy
    _set_numbers(copy, cuts, numbers)
    return copy


def describe_graphs(paths: Sequence[str]) -> str:
    """Why the class of a network cannot compute what modules at these paths do, and what to do."""
    names = [path or "all of it" for path in paths]
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    verb = "is a graph" if len(names) == 1 else "are graphs"
    return (
        f"{', '.join([*names[:3], *more])} {verb} in the demasked network, and the class does "
        "not have their code: load its file without into=, or make it by "
        'demask.demask(..., result="class")'
    )


def _has_numbers(copy: nn.Module, numbers: Numbers | None) -> bool:
    return all(
        _as_stored_number(getattr(module_at(copy, path), name, None)) == _as_stored_number(value)
        for path, values in (numbers or {}).items()
        for name, value in values.items()
    )


def _as_stored_number(value: Any) -> Any:
    """A number, or a list of numbers where the attribute is a tuple, as JSON files store it."""
    return list(value) if isinstance(value, tuple) else value


def _check_names(known: Set[str], needed: Set[str], names: Set[str]) -> None:
    """Raise BadInput unless a state dict has all needed names and only known names or new biases.

    known: all tensors of the model, with buffers that only files have (not persistent). needed: the
    names in the model's own state dict.
    """
    missing = sorted(needed - names)
    more = sorted(name for name in names - known if not name.endswith("bias"))
    if missing or more:
        raise BadInput(
            "expected the state dict of a slim network of this class, but it "
            + " and ".join(
                f"{verb} {', '.join(names[:3])}" for verb, names in (("lacks", missing), ("has", more)) if names
            )
            + '; of modules that became graphs, it has others: use demask(..., result="class")'
        )


def _first_positions_cut(name: str, old: Tensor, new: Tensor) -> Cut:
    """The cut of a tensor, of which only the sizes are known: its first positions remain."""
    if old.ndim != new.ndim or any(a < b for a, b in zip(old.shape, new.shape, strict=True)):
        shapes = f"{tuple(new.shape)} is not cut from {tuple(old.shape)}"
        raise BadInput(f"{name}: {shapes}; give a model as large as the one that was demasked")
    remaining = tuple(None if a == b else tuple(range(b)) for a, b in zip(old.shape, new.shape, strict=True))
    return Cut(name, tuple(old.shape), remaining)


def _copy_other_buffers(copy: nn.Module, done: set[str]) -> None:
    """Copy the buffers that are in no state dict, so that the copy shares no tensor."""
    for name, buffer in list(copy.named_buffers(remove_duplicate=False)):
        if name not in done:
            assign_tensor(copy, name, buffer.clone())


def _set_numbers(copy: nn.Module, cuts: Mapping[str, Cut], numbers: Numbers | None) -> None:
    """Set attributes that modules' own code reads: `numbers`, or those that follow from shapes."""
    for path, values in (numbers or {}).items():
        module = module_at(copy, path)
        if module is None:
            raise BadInput(f"numbers: the model has no module {path!r}")
        for name, value in values.items():
            setattr(module, name, value)
    if numbers is not None:
        return
    for path, module in copy.named_modules():
        if has_numbers(module):
            continue
        single: dict[str, int] = {}  # numbers that no shape has
        for name, value in numbers_of(module).items():
            sizes = set(_new_axis_sizes(path, value, cuts))
            if not sizes and isinstance(value, int):
                single[name] = value
            if len(sizes) > 1:
                options = ", ".join(map(str, sorted(sizes)))
                raise BadInput(
                    f"{path or 'the model'}: shapes do not determine whether {name} = {value} "
                    f"became one of {options}; pass numbers=slim.demasked.numbers"
                )
            if sizes:
                setattr(module, name, sizes.pop())
        for (a, x), (b, y) in combinations(single.items(), 2):
            if sizes := set(_new_axis_sizes(path, x * y, cuts)) - {x * y}:
                raise BadInput(
                    f"{path or 'the model'}: shapes do not determine {a} = {x} and {b} = {y}, "
                    f"where {x * y} became {', '.join(map(str, sorted(sizes)))}; pass "
                    "numbers=slim.demasked.numbers, of a network without graphs in it "
                    '(demask(..., result="class"))'
                )


def _new_axis_sizes(path: str, value: Any, cuts: Mapping[str, Cut]) -> Iterator[int]:
    """New sizes of axes whose size was `value`, in a module's tensors and those of its layers."""
    for name, cut in cuts.items():
        owner = name.rpartition(".")[0]
        if path in (owner, owner.rpartition(".")[0]):
            for size, remaining in zip(cut.shape, cut.kept, strict=True):
                if size == value:
                    yield size if remaining is None else len(remaining)
