"""Results: from a Program to one GraphModule over plain modules with the original names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen

from demask.compat.fx_internals import PyTreeInfo, codegen_of, signature_of
from demask.failures import warn_caller
from demask.graph.editor import drop_unread
from demask.graph.input_specs import input_specs
from demask.graph.node_records import NodeRecord, TensorType, graph_of, records_of
from demask.graph.program import Constant, Program
from demask.graph.provenance import Provenance, Sizes
from demask.graph.result.codegen import Codegen
from demask.graph.result.hooks import describe_lost_hooks
from demask.graph.result.origin import get_origin, set_origin
from demask.graph.result.resize import tensors_of
from demask.graph.result.restore_modules import Originals, restore_modules, set_module
from demask.graph.result.uncalled_modules import is_holder, refuse_hooks
from demask.graph.split_recurrent import join_recurrent
from demask.ops.custom import custom_op_of

# Attributes of a GraphModule that are generated from its graph.
_GENERATED = {"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec"}

_GRAPH = "demasked_graph"  # in the metadata of a state dict, by path


def graphs_in(state_dict: Mapping[str, Any]) -> list[str]:
    """Paths of the modules that are graphs in the network whose state dict this is, as far as it
    has what `state_dict()` says beside the tensors; files of tensors alone do not."""
    metadata: Mapping[str, Any] = getattr(state_dict, "_metadata", {})
    return [path for path, row in metadata.items() if row.get(_GRAPH)]


class Demasked(fx.GraphModule):
    """A demasked network: a GraphModule with a Provenance.

    demasked: its Provenance, which copies and pickles contain (`torch.save` of the full module,
    spawned processes). A pickle runs code when it is read (`torch.load` requires
    `weights_only=False`), so read only your own; `demask.save` and `demask.load` use no pickles.
    """

    demasked: Provenance
    codegen: type[Codegen] = Codegen
    trains: bool = True  # layers are modules: hooks and training modes work

    @classmethod
    def of(cls, root: nn.Module, graph: fx.Graph, specs: PyTreeInfo, provenance: Provenance) -> Self:
        """The module of a graph. root: has its tensors and modules; specs: pytrees of the call."""
        graph.set_codegen(cls.codegen(specs, provenance))
        module = cls(root, graph, class_name=cls.__name__)
        _copy_names(root, module, {})
        _copy_persistence(root, module)
        refuse_hooks(module)
        module.demasked = provenance
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        specs: PyTreeInfo = signature_of(self.graph)
        memo |= {id(spec): spec for spec in (specs.in_spec, specs.out_spec)}
        plain = super().__deepcopy__(memo)
        _copy_names(self, plain, memo)
        _copy_persistence(self, plain)
        copied = type(self).graph_module().of(plain, plain.graph, specs, self.demasked)
        copied.training = self.training
        set_origin(copied, get_origin(self))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """The pickled form: the graph node by node, since torch.fx would trace the generated code,
        which fails at its checks of sizes."""
        state = {name: value for name, value in vars(self).items() if name not in _GENERATED}
        kind = type(self).graph_module()
        return _unpickled, (kind, records_of(self.graph), codegen_of(self.graph)), state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As of any module; the state dict says which modules are graphs, whose code no class has:
        a class may have tensors of the same names and sizes, and compute something else."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        record = vars(self).get("demasked")
        if self.trains and record is not None and record.form == "graph":
            getattr(destination, "_metadata", {}).get(prefix[:-1], {})[_GRAPH] = True

    def _archived(self) -> dict[str, Any] | None:
        """The data of a file in addition to graph, tensors and provenance, in JSON types. The name
        is private, since modules of a network may have any public name."""
        return None

    def _unarchived(self, extra: Any) -> None:
        """Restore the data of `_archived`. Raises BadInput if it is damaged."""

    def plain(self) -> Demasked:
        """The network without custom ops (except quantization), sharing tensors; itself if it has
        none."""
        custom_ops = [custom_op_of(node.target) for node in self.graph.nodes]
        passes = dict.fromkeys(op.lower for op in custom_ops if op and op.lower)
        return reduce(apply_pass, passes, self)

    @classmethod
    def graph_module(cls) -> type[Self]:
        """The class itself: torch.fx derives a new class for each module."""
        return next(kind for kind in cls.__mro__ if "<locals>" not in kind.__qualname__)


def apply_pass(module: Demasked, change: Callable[[Program], Program]) -> Demasked:
    """The network after an output-preserving pass; it shares tensors."""
    info: PyTreeInfo = signature_of(module.graph)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        value = TensorType.of(node.meta.get("val"))
        if value is not None:  # its original dtype
            del node.meta["val"]
            node.meta.setdefault("value", value)
    constants = {
        name: Constant(tensor, name, isinstance(tensor, nn.Parameter), tensor.requires_grad)
        for name, tensor in tensors_of(module)
    }
    edited = change(Program(graph, constants, info.in_spec, info.out_spec, tuple(info.orig_args)))
    root = nn.Module()
    for node in edited.graph.find_nodes(op="call_module"):
        set_module(root, str(node.target), module.get_submodule(str(node.target)))
    for name, tensor in tensors_of(module):
        attach(root, name, tensor)
    _copy_persistence(module, root)
    for name, constant in edited.constants.items():
        if name not in constants:
            _place(root, (name,), constant, {})
    for path, part in root.named_modules():
        part.training = getattr(_get(module, path) if path else module, "training", module.training)
    return Demasked.of(root, edited.graph, info, module.demasked)


def _unpickled(kind: type[Demasked], rows: Sequence[NodeRecord], codegen: CodeGen) -> Demasked:
    """The module of a pickled graph, without tensors and modules, which pickle sets later."""
    module = kind(nn.Module(), fx.Graph(), class_name=kind.__name__)
    graph = graph_of(rows)
    graph.set_codegen(codegen)
    module.graph = graph
    return module


def _copy_names(source: nn.Module, target: nn.Module, copies: Mapping[int, Any]) -> None:
    """Add the other names that tensors and layers of `target` have in `source`: torch.fx copies
    only one name of each. copies: the object in `target`, by id of the object in `source`."""
    layers = {id(layer) for layer in target.modules() if not is_holder(layer)}
    for path, layer in source.named_modules(remove_duplicate=False):
        twin = copies.get(id(layer), layer)
        if path and id(twin) in layers and _get(target, path) is not twin:
            set_module(target, path, twin)
    present = dict(tensors_of(target))
    tensor_ids = {id(tensor) for tensor in present.values()}
    for name, tensor in tensors_of(source):
        twin = copies.get(id(tensor), tensor)
        if name not in present and id(twin) in tensor_ids:
            attach(target, name, twin)


def attach(root: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    """Register a parameter or buffer under its name; missing parent modules are created."""
    *path, leaf = name.split(".")
    module = root
    for step in path:
        if not hasattr(module, step):
            module.add_module(step, nn.Module())
        module = getattr(module, step)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)


def _copy_persistence(source: nn.Module, target: nn.Module) -> None:
    """Mark the buffers that are not persistent in `source` in `target`, too: torch.fx registers all
    as persistent."""
    for path, module in source.named_modules():
        twin = _get(target, path) if path else target
        if twin is not None:
            twin._non_persistent_buffers_set |= module._non_persistent_buffers_set & set(twin._buffers)


def build(
    program: Program, provenance: Provenance, kind: type[Demasked] = Demasked, originals: Originals | None = None
) -> Demasked:
    """The program as a module with the call signature and outputs of the captured model.

    Parameters and buffers have their fully qualified names. Layers, norms, activations and dropouts
    are modules with their original names, so that hooks and training work. originals: the model's
    modules whose class and hooks these retain (`originals_of`); a warning names the modules whose
    hooks are lost. The result has its provenance in `demasked`.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs: Any = graph.graph_copy(program.graph, mapping)
    inputs = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    end = len(outputs) - len(program.written)
    for name, value in zip(program.written, outputs[end:], strict=True):
        graph.call_function(torch.ops.aten.copy_.default, (inputs[name], value))
    graph.output(outputs[:end])
    root = nn.Module()
    shared: dict[int, Tensor] = {}
    for name, constant in program.constants.items():
        names = [alias for alias in constant.aliases if alias not in program.constants or alias == name]
        _place(root, names if name in names else (name, *names), constant, shared)
    if kind.trains:
        join_recurrent(graph)
        restore_modules(graph, root, originals.modules if originals is not None else {}, kind)
    if originals is not None and (lost := tuple(describe_lost_hooks(originals.model, root))):
        warn_caller("; ".join(lost))
        provenance = replace(provenance, notes=(*provenance.notes, *lost))
    drop_unread(graph)
    for node in graph.nodes:
        value = TensorType.of(node.meta.get("val"))
        if value is not None and (not kind.trains or any(map(_is_lowered, node.users))):
            node.meta["value"] = value
    specs = PyTreeInfo(list(program.names), program.in_spec, program.out_spec)
    return kind.of(root, graph, specs, provenance).train(program.training and kind.trains)


def _is_lowered(node: fx.Node) -> bool:
    """Whether `plain` replaces a call by ATen calls, which depend on its operands' types."""
    own = custom_op_of(node.target)
    return own is not None and own.lower is not None


def to_exportable(model: nn.Module) -> nn.Module:
    """A network that torch.export accepts: a demasked one without custom ops."""
    return model.plain() if isinstance(model, Demasked) else model


def unmeasured(program: Program, **more: Any) -> Provenance:
    """The record of a program in which nothing was changed, without sizes. more: its other fields."""
    nothing = Sizes(0, 0, 0)
    return Provenance({}, (), {}, program.notes, input_specs(program), nothing, nothing, guards=program.guards, **more)


def build_plain(program: Program) -> fx.GraphModule:
    """The program as a module with copies of its tensors and an empty provenance."""
    own = {n: replace(c, tensor=c.tensor.clone()) for n, c in program.constants.items()}
    nothing = Sizes(0, 0, 0)
    empty = Provenance({}, (), {}, (), (), nothing, nothing)
    return build(program.with_graph(program.graph, own), empty).eval()


def _place(root: nn.Module, names: Iterable[str], constant: Constant, shared: dict[int, Tensor]) -> None:
    """Register a constant under its names. shared: parameters by id of the tensor."""
    tensor = constant.tensor
    if constant.parameter:
        # Tied tensors were cut once: one parameter with all their names.
        tensor = shared.setdefault(id(tensor), nn.Parameter(tensor, constant.requires_grad))
    for name in names:
        attach(root, name, tensor, persistent=constant.persistent)


def _get(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path, or None."""
    module: Any = root
    for step in path.split("."):
        module = getattr(module, step, None)
        if module is None:
            return None
    return module
