"""Restore modules: ATen calls of modules of torch.nn become calls of such modules."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from demask.graph.program import Program
from demask.graph.result.computed_tensors import computes_tensor
from demask.graph.result.module_calls import (
    READS,
    ROWS,
    STATE,
    EvalCall,
    constructor_arguments,
    constructor_parameters,
    create_without_memory,
    kind_of,
    row_for,
)
from demask.graph.result.recurrent_modules import begins_with_zeros, is_state, remove_unnamed
from demask.graph.result.resize import module_at, update_attributes
from demask.graph.result.returned_values import is_returned, read_from_module
from demask.graph.result.uncalled_modules import is_holder
from demask.ops import schema
from demask.ops.schema import fake
from demask.ops.traits import DROPOUTS

aten = torch.ops.aten
_QUALIFIED = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in ROWS}
_DEFAULTS = {row.op: kind for kind, rows in ROWS.items() for row in rows if row.default}
_BATCH_NORMS = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by rank of the input; others are one-dimensional
_LEAST = {"unflattened_size": (1,)}  # of a constructor argument, if that is not 1


@dataclass(frozen=True, slots=True)
class Originals:
    """The modules of a model whose class and hooks the modules of a graph retain, by path."""

    model: nn.Module
    modules: Mapping[str, nn.Module]


def originals_of(model: Any, program: Program) -> Originals | None:
    """The modules of a model of which only their own calls were captured: their hooks only observe.
    What other hooks compute is in the program. program: as captured."""
    if not isinstance(model, nn.Module):
        return None
    calls: dict[tuple[str, str], list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and (path := _containing_module(node)[0]):
            call_key = list(node.meta["nn_module_stack"])[-1]  # of several calls: "L__self__act@1"
            calls.setdefault((path.partition("@")[0], call_key), []).append(node)
    candidates: dict[str, nn.Module] = {}
    changed: set[str] = set()
    for (name, _), nodes in calls.items():
        module = module_at(model, name)
        kind = module and kind_of(module)
        ops = [node for node in nodes if not (is_state(node) or node.target is operator.getitem)]
        if kind is None or len(ops) != 1 or row_for(kind, ops[0].target) is None:
            changed.add(name)
        elif module is not None:
            candidates[name] = module
    observed = {id(module) for name, module in candidates.items() if name not in changed}
    modules = model.named_modules(remove_duplicate=False)
    return Originals(model, {name: module for name, module in modules if id(module) in observed})


def _containing_module(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module that contains a call: ("conv@1", "torch.nn...Conv2d")."""
    stack = node.meta.get("nn_module_stack")
    path, kind = list(stack.values())[-1] if stack else ("", "")
    return path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def restore_modules(
    graph: fx.Graph, root: nn.Module, originals: Mapping[str, nn.Module], network: type[nn.Module]
) -> None:
    """Replace ATen calls by calls of modules, which are added below `root`, if a module of the
    table with the tensors under its name computes the same in all of its calls. network: the class
    of the result; modules may not have the names of its attributes."""
    calls: dict[str, list[tuple[fx.Node, type[nn.Module]]]] = {}
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        path, kind = _place_of(node, root, originals)
        if kind is not None and not _is_taken(root, path, network):
            calls.setdefault(path, []).append((node, kind))
    for path, restorable in calls.items():
        kinds = {kind for _, kind in restorable}
        if len(kinds) == 1:
            _restore(path, kinds.pop(), [node for node, _ in restorable], root, originals.get(path))
    join_twins(graph, root)


def join_twins(graph: fx.Graph, root: nn.Module) -> None:
    """Set a module that a graph calls under all names whose parent contains only the same tensors:
    there the model has the same module under another name."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    known = {key: module for path in called if (key := _key(module := root.get_submodule(path)))}
    for path, module in list(root.named_modules(remove_duplicate=False)):
        twin = known.get(_key(module))
        if path not in called and twin is not None and (is_holder(module) or kind_of(module)):
            set_module(root, path, twin)


def _key(module: nn.Module) -> frozenset[Any]:
    """A key for a module's tensors by identity; empty for a module with submodules."""
    tensors = {**module._parameters, **module._buffers}
    return frozenset(
        (leaf, id(tensor))
        for leaf, tensor in tensors.items()
        if tensor is not None and leaf != "num_batches_tracked" and not module._modules
    )


def _is_taken(root: nn.Module, path: str, network: type[nn.Module]) -> bool:
    """Whether a step of a path to a module is the name of another attribute or tensor."""
    steps = path.split(".")
    names = [".".join(steps[: k + 1]) for k in range(len(steps))]
    return (
        hasattr(network, steps[0])
        or any(hasattr(nn.Module, step) for step in steps)
        or any(tensor_at(root, name) is not None for name in names)
    )


def _place_of(node: fx.Node, root: nn.Module, originals: Mapping[str, nn.Module]) -> tuple[str, type[nn.Module] | None]:
    """The path and class of the module that a call is restored to: from the module that contains
    it, or from the names of its tensors. The class is None if there is none."""
    path, text = _containing_module(node)
    path = path.partition("@")[0]
    kind = _QUALIFIED.get(text)
    if kind is None and path in originals:
        kind = kind_of(originals[path])
    if kind is not None and path and row_for(kind, node.target) is not None:
        return _first_name(node, path, kind, originals), kind
    if node.target in DROPOUTS:
        return _dropout(node, root)
    kind = _DEFAULTS.get(node.target)
    if kind is None:
        return "", None
    if node.target is aten.batch_norm.default:
        kind = _BATCH_NORMS.get(fake(node.args[0]).ndim, nn.BatchNorm1d)
    path = _common_module(node, kind)
    return (path, kind) if path else ("", None)


def _common_module(node: fx.Node, kind: type[nn.Module]) -> str:
    """The path of the module that all tensors of a call belong to; "" if there are several."""
    row = row_for(kind, node.target)
    reads = row.leaves(schema.arguments(node)).values() if row is not None else ()
    names = {str(n.target).rpartition(".")[0] for n in reads if isinstance(n, fx.Node)}
    return names.pop() if len(names) == 1 else ""


def _first_name(node: fx.Node, path: str, kind: type[nn.Module], originals: Mapping[str, nn.Module]) -> str:
    """The first name of a module with several names, by which its tensors are read. Modules that
    share running statistics are one."""
    first = _common_module(node, kind)
    same = path in originals and originals.get(first) is originals[path]
    unknown = not originals and node.target is aten.batch_norm.default
    return first if first and (same or unknown) else path


def _dropout(node: fx.Node, root: nn.Module) -> tuple[str, type[nn.Module] | None]:
    """A functional dropout as a module with a new name, since it depends on the training mode: one
    module per rate."""
    if node.target is not aten.dropout.default or schema.draws_random_numbers(node):
        return "", None
    k = 0
    while True:
        name = f"dropout_{k}" if k else "dropout"
        there = module_at(root, name)
        if there is None:
            root.add_module(name, nn.Dropout(schema.arguments(node)["p"]))
            return name, nn.Dropout
        if type(there) is nn.Dropout and there.p == schema.arguments(node)["p"]:
            return name, nn.Dropout
        k += 1


def _restore(path: str, kind: type[nn.Module], calls: list[fx.Node], root: nn.Module, own: nn.Module | None) -> None:
    """Replace calls by calls of one module, if the module computes the same."""
    first = calls[0]
    row = row_for(kind, first.target)
    if row is None or any(not _is_whole(call, row) for call in calls):
        return
    tensors = _tensors_of_call(first, path, row, root)
    old = module_at(root, path)
    if tensors is None or (old is not None and not _holds_only(old, tensors)):
        return
    for other in calls[1:]:
        if (
            row.call_arguments(other) != row.call_arguments(first)
            or _tensors_of_call(other, path, row, root) != tensors
        ):
            return
    module = _new_module(kind, row, first, tensors, own)
    if module is None:
        return
    if old is not None:
        module._non_persistent_buffers_set |= old._non_persistent_buffers_set
    set_module(root, path, module)
    for node in calls:
        _call(node, path, row)


def _is_whole(call: fx.Node, row: EvalCall) -> bool:
    """Whether a call has tensor inputs and static arguments, and only outputs are read that the
    module returns."""
    arguments = schema.arguments(call)
    inputs = (arguments[name] for name in row.inputs)
    return (
        call.target is row.op
        and all(isinstance(x, (fx.Node, list, tuple)) for x in inputs)
        and not schema.is_dynamic(list(row.call_arguments(call).values()))
        and is_returned(call, row.returns)
    )


def _call(node: fx.Node, path: str, row: EvalCall) -> None:
    """Replace a call of an op by a call of the module at a path, with the same inputs."""
    arguments = schema.arguments(node)
    reads = {n: r.meta.get("val") for n, r in row.leaves(arguments).items() if r is not None}
    node.meta[READS] = {n: value for n, value in reads.items() if value is not None}
    inputs = [arguments[name] for name in row.inputs]
    if row.inputs[-1] == STATE and begins_with_zeros(node):
        del inputs[-1]
    args = tuple(tuple(x) if isinstance(x, list) else x for x in inputs)
    node.op, node.target, node.args, node.kwargs = "call_module", path, args, {}
    read_from_module(node, row.returns)


def _tensors_of_call(node: fx.Node, path: str, row: EvalCall, root: nn.Module) -> dict[str, Any] | None:
    """The tensors of the module at a path that a call reads, by name; None if it reads others."""
    tensors: dict[str, Any] = {}
    for leaf, read in row.leaves(schema.arguments(node)).items():
        tensor = tensor_at(root, f"{path}.{leaf}")
        if read is None and tensor is None:
            tensors[leaf] = None
            continue
        if not isinstance(read, fx.Node) or read.op != "get_attr":
            return None
        # Tied tensors are read by one name, and registered under all.
        if tensor is None or tensor_at(root, str(read.target)) is not tensor:
            return None
        tensors[leaf] = tensor
    return tensors


def _holds_only(old: nn.Module, tensors: Mapping[str, Any]) -> bool:
    """Whether a module that only holds names contains the tensors of one module, and no others."""
    if type(old) is not nn.Module:
        return kind_of(old) is not None and not tensors
    names = {*old._parameters, *old._buffers}
    return not old._modules and names <= {*tensors, "num_batches_tracked"}


def _new_module(
    kind: type[nn.Module], row: EvalCall, call: fx.Node, tensors: Mapping[str, Any], own: nn.Module | None
) -> nn.Module | None:
    """A module of a class that computes a call: a copy of the model's own module, or a new one;
    None if it would compute something else."""
    has_own = own is not None and kind_of(own) is kind
    module = _copy_of(own) if has_own and own is not None else _create_minimal(kind)
    arguments = row.call_arguments(call)
    for leaf, tensor in tensors.items():
        if not _take(module, leaf, tensor, tensors):
            return None
    for name, attribute in row.numbers.items():
        value = arguments[name]
        if value != row.value(module, name):
            value = None if name == "padding_idx" and value == -1 else value
            setattr(module, attribute, tuple(value) if isinstance(value, list) else value)
    for name, value in row.set.items():
        setattr(module, name, value)
    _describe_tensors(module, call, tensors)
    update_attributes(module, [call])
    _own_counter(module)
    return module if row.module_arguments(module) == arguments and _is_plain(module, kind, row) else None


def _is_plain(module: nn.Module, kind: type[nn.Module], row: EvalCall) -> bool:
    """Whether the constructor of a class returns an equal module for its attributes."""
    try:
        plain = create_without_memory(kind, dict(constructor_arguments(module, kind)))
    except (RuntimeError, TypeError, ValueError):
        return False
    shapes = [{name: tensor.shape for name, tensor in m.state_dict().items()} for m in (module, plain)]
    return shapes[0] == shapes[1] and row.module_arguments(module) == row.module_arguments(plain)


def _copy_of(module: nn.Module) -> nn.Module:
    """A copy of a module that shares hooks and tensors, without masks and parametrizations, which
    the program's tensors include."""
    kind: Any = type(module)
    if parametrize.is_parametrized(module):
        kind = kind.__bases__[0]
    copy = kind.__new__(kind)
    copy.__dict__ = {
        name: value.copy() if isinstance(value, (dict, set)) else value for name, value in vars(module).items()
    }
    copy._modules.pop("parametrizations", None)
    for key, hook in list(copy._forward_pre_hooks.items()):
        if computes_tensor(hook):
            del copy._forward_pre_hooks[key]
    return copy


def _create_minimal(kind: type[nn.Module]) -> Any:
    """A module of a class with minimal sizes and without memory for tensors."""
    known = constructor_parameters(kind)
    least = [
        _LEAST.get(p.name, 1) for p in known.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return kind(*least, **({"device": "meta"} if "device" in known else {}))


def _take(module: nn.Module, leaf: str, tensor: Any, tensors: Mapping[str, Any]) -> bool:
    """Set a tensor of a module; a new bias becomes a parameter. Whether the tensor has the right
    kind (parameter or buffer)."""
    buffer = leaf.startswith("running_")
    for other in ("_orig", "_g", "_v", "_u", "_mask"):
        module._parameters.pop(leaf + other, None)
        module._buffers.pop(leaf + other, None)
    vars(module).pop(leaf, None)
    slots: dict[str, Any] = module._buffers if buffer else module._parameters
    if tensor is not None and isinstance(tensor, nn.Parameter) == buffer:
        weight = tensors.get("weight")
        if buffer or leaf != "bias" or weight is None:
            return False
        tensor = nn.Parameter(tensor, weight.requires_grad)
    slots[leaf] = tensor
    return True


def _describe_tensors(module: Any, call: fx.Node, tensors: Mapping[str, Any]) -> None:
    """Set the attributes of a module that describe its tensors, except for sizes."""
    attributes = vars(module)
    if "_flat_weights_names" in attributes:
        remove_unnamed(module, list(tensors))
    if "bias_ih" in tensors:
        module.bias = tensors["bias_ih"] is not None
    if "in1_features" in attributes:
        module.out_features, module.in1_features, module.in2_features = module.weight.shape
    for name in ("num_features", "num_channels"):
        if name in attributes and tensors.get("weight") is None:
            setattr(module, name, int(fake(call.args[0]).shape[1]))
    if "kernel_size" in attributes and "weight" in tensors:
        module.kernel_size = tuple(module.weight.shape[2:])
        padding = module.padding if isinstance(module.padding, tuple) else ()
        module._reversed_padding_repeated_twice = [n for n in reversed(padding) for _ in range(2)]
    for name in ("affine", "elementwise_affine"):
        if name in attributes:
            setattr(module, name, module.weight is not None)
    if "track_running_stats" in attributes:
        module.track_running_stats = module.running_mean is not None


def _own_counter(module: Any) -> None:
    """Replace the batch counter of a batch norm by a copy, which is not shared with the model."""
    if "num_batches_tracked" not in module._buffers:
        return
    count, mean = module._buffers["num_batches_tracked"], module.running_mean
    if mean is None:
        count = None
    elif count is None or count.is_meta:
        count = torch.zeros((), dtype=torch.long, device=mean.device)
    else:
        count = count.detach().clone()
    module._buffers["num_batches_tracked"] = count


def tensor_at(root: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer with a name; None if there is none."""
    path, _, leaf = name.rpartition(".")
    module = module_at(root, path)
    if module is None:
        return None
    parameter = module._parameters.get(leaf)
    return module._buffers.get(leaf) if parameter is None else parameter


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Set the module at a path; missing parent modules are created."""
    *parents, leaf = path.split(".")
    for step in parents:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root._modules.pop(leaf, None)
    root.add_module(leaf, module)
