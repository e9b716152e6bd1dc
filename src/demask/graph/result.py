"""Program -> the module a user gets: one GraphModule over plain modules with original names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import CodeGen, _PyTreeInfo

from demask.graph.codegen import Codegen
from demask.graph.fold import drop_unread
from demask.graph.program import Constant, Program
from demask.graph.provenance import Provenance, Sizes
from demask.graph.rows import Row, Value, graph_of, rows_of
from demask.ops.own import own_of

aten = torch.ops.aten
# Of a GraphModule, made from its graph.
_GENERATED = {"_graph", "_code", "_lineno_map", "_prologue_start", "_in_spec", "_out_spec"}
_NORMS = {
    1: nn.BatchNorm1d,
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}


class Demasked(fx.GraphModule):
    """A demasked network: an ordinary GraphModule that remembers where it came from.

    demasked: its Provenance. Copies keep it, and so do pickles: `torch.save` of the whole module,
    processes that are spawned. Reading a pickle runs what it says (`torch.load` asks for
    `weights_only=False`), so read your own alone; `demask.save` and `demask.load` use none, and are
    for files that come from others.
    """

    demasked: Provenance
    codegen: type[Codegen] = Codegen
    trains: bool = (
        True  # batch norm and dropout are modules, which a training mode means something to
    )

    @classmethod
    def of(
        cls, root: nn.Module, graph: fx.Graph, specs: _PyTreeInfo, provenance: Provenance
    ) -> Self:
        """The module of a graph whose call and result have the given pytrees."""
        graph.set_codegen(cls.codegen(specs, provenance))
        module = cls(root, graph, class_name=cls.__name__)
        module.recompile()
        _keep_names(root, module, {})
        _copy_persistence(root, module)
        module.demasked = provenance
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        specs: _PyTreeInfo = self.graph._codegen.pytree_info  # type: ignore[attr-defined]
        memo |= {id(spec): spec for spec in (specs.in_spec, specs.out_spec)}
        plain = super().__deepcopy__(memo)
        _keep_names(self, plain, memo)
        _copy_persistence(self, plain)
        copied = type(self).graph_module().of(plain, plain.graph, specs, self.demasked)
        copied.training = self.training
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """How to pickle it: the graph node by node, since torch.fx traces the generated code anew,
        and stops at its checks of sizes."""
        state = {name: value for name, value in vars(self).items() if name not in _GENERATED}
        kind = type(self).graph_module()
        return _unpickled, (kind, rows_of(self.graph), self.graph._codegen), state

    def _archived(self) -> dict[str, Any] | None:
        """What a file keeps beside graph, tensors and provenance, in JSON types. The name is
        private: modules of a network may have any other (`extra`)."""
        return None

    def _unarchived(self, extra: Any) -> None:
        """Take over what _archived() gave; BadInput where it is damaged."""

    def plain(self) -> Demasked:
        """The network without ops that demask alone knows (quantization stays), sharing tensors:
        itself, where it has none."""
        found = [own_of(node.target) for node in self.graph.nodes]
        passes = dict.fromkeys(own.spelled for own in found if own and own.spelled)
        return reduce(changed, passes, self)

    @classmethod
    def graph_module(cls) -> type[Self]:
        """The class itself: torch.fx gives each module a class of its own, derived from it."""
        return next(kind for kind in cls.__mro__ if "<locals>" not in kind.__qualname__)


# Kinds of networks that keep something `extra`, by the names that files give them; and the modules
# further down that put them here.
KINDS: dict[str, type[Demasked]] = {}
HOMES = {"tiled": "demask.traverse.module"}


def changed(module: Demasked, change: Callable[[Program], Program]) -> Demasked:
    """The network behind a pass that computes the same; it shares tensors."""
    info: _PyTreeInfo = module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        value = Value.of(node.meta.get("val"))
        if value is not None:  # of what it was in its first dtype
            del node.meta["val"]
            node.meta.setdefault("value", value)
    given = {name: Constant(tensor, name, isinstance(tensor, nn.Parameter), tensor.requires_grad)
             for name, tensor in _tensors(module)}  # fmt: skip
    made = change(Program(graph, given, info.in_spec, info.out_spec, tuple(info.orig_args)))
    root = nn.Module()
    for node in made.graph.find_nodes(op="call_module"):
        _set(root, str(node.target), module.get_submodule(str(node.target)))
    for name, tensor in _tensors(module):
        attach(root, name, tensor)
    _copy_persistence(module, root)
    for name, constant in made.constants.items():
        if name not in given:
            _place(root, (name,), constant, {})
    for path, part in root.named_modules():
        part.training = getattr(_get(module, path) if path else module, "training", module.training)
    return Demasked.of(root, made.graph, info, module.demasked)


def _unpickled(kind: type[Demasked], rows: Sequence[Row], codegen: CodeGen) -> Demasked:
    """The module of a pickled graph; pickle then puts in what its tensors and modules are."""
    module = kind(nn.Module(), fx.Graph(), class_name=kind.__name__)
    graph = graph_of(rows)
    graph.set_codegen(codegen)
    module.graph = graph
    return module


def _keep_names(source: nn.Module, target: nn.Module, copies: Mapping[int, Any]) -> None:
    """Names under which a tensor of `target` also stood in `source`: torch.fx copies what a graph
    reads, so one name each. copies: by id, what a tensor of `source` is in `target`."""
    there = dict(_tensors(target))
    held = {id(tensor) for tensor in there.values()}
    for name, tensor in _tensors(source):
        twin = copies.get(id(tensor), tensor)
        if name not in there and id(twin) in held:
            attach(target, name, twin)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def attach(root: nn.Module, name: str, tensor: Tensor, *, persistent: bool = True) -> None:
    """Register a parameter or buffer under its name, below modules made where there are none."""
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
    """Buffers that are not part of the state stay so (torch.fx registers all as if they were)."""
    for path, module in source.named_modules():
        twin = _get(target, path) if path else target
        if twin is not None:
            twin._non_persistent_buffers_set |= module._non_persistent_buffers_set & set(
                twin._buffers
            )


def build(program: Program, provenance: Provenance, kind: type[Demasked] = Demasked) -> Demasked:
    """The program as an ordinary module: same call and same outputs as the captured model.

    Parameters and buffers stand under their fully qualified names; batch norm and dropout are
    modules again, so that training works. The result carries `demasked`, its provenance.
    """
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    outputs = graph.graph_copy(program.graph, mapping)
    graph.output(outputs)
    root = nn.Module()
    shared: dict[int, Tensor] = {}
    for name, constant in program.constants.items():
        others = [alias for alias in constant.aliases if alias not in program.constants]
        _place(root, (name, *others), constant, shared)
    if kind.trains:
        _Modules(graph, root, program.constants).restore()
    drop_unread(graph)
    for node in graph.nodes:
        value = Value.of(node.meta.get("val"))
        if value is not None and (not kind.trains or any(map(_is_spelled, node.users))):
            node.meta["value"] = value
    specs = _PyTreeInfo(list(program.names), program.in_spec, program.out_spec)
    return kind.of(root, graph, specs, provenance).train(program.training and kind.trains)


def _is_spelled(node: fx.Node) -> bool:
    """Is a call one that ATen calls stand for elsewhere? Which ones depends on what it reads."""
    own = own_of(node.target)
    return own is not None and own.spelled is not None


def exportable(model: nn.Module) -> nn.Module:
    """A network as torch.export takes it: ours in ATen ops alone."""
    return model.plain() if isinstance(model, Demasked) else model


def build_plain(program: Program) -> fx.GraphModule:
    """The program as a module that says nothing of where it came from, with tensors of its own."""
    own = {n: replace(c, tensor=c.tensor.clone()) for n, c in program.constants.items()}
    nothing = Sizes(0, 0, 0)
    empty = Provenance({}, (), {}, (), (), nothing, nothing)
    return build(program.with_graph(program.graph, own), empty).eval()


def _place(
    root: nn.Module, names: Iterable[str], constant: Constant, shared: dict[int, Tensor]
) -> None:
    tensor = constant.tensor
    if constant.parameter:
        # Tied tensors were cut once: one parameter under all their names.
        tensor = shared.setdefault(id(tensor), nn.Parameter(tensor, constant.requires_grad))
    for name in names:
        attach(root, name, tensor, persistent=constant.persistent)


class _Modules:
    """Puts batch norm and dropout back as modules."""

    def __init__(self, graph: fx.Graph, root: nn.Module, constants: Mapping[str, Constant]):
        self.graph, self.root, self.constants = graph, root, constants
        self.made: dict[Any, str] = {}

    def restore(self) -> None:
        for node in list(self.graph.nodes):
            if node.target is aten.batch_norm.default:
                self._batch_norm(node)
            elif node.target is aten.dropout.default:
                self._replace(node, ("dropout", node.args[1]), nn.Dropout(node.args[1]), "dropout")

    def _replace(self, node: fx.Node, key: Any, module: nn.Module, name: str) -> None:
        if key not in self.made:
            free, k = name, 1
            while _get(self.root, free) is not None:
                free, k = f"{name}_{k}", k + 1
            _set(self.root, free, module)
            self.made[key] = free
        with self.graph.inserting_before(node):
            call = self.graph.call_module(self.made[key], (node.args[0],))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        self.graph.erase_node(node)

    def _batch_norm(self, node: fx.Node) -> None:
        args: Any = node.args
        x, weight, bias, mean, var, _, momentum, eps, _ = args
        reads = [n for n in (weight, bias, mean, var) if n is not None]
        plain = all(isinstance(n, fx.Node) and n.op == "get_attr" for n in reads)
        names = [str(n.target) for n in reads] if plain else []
        prefix = names[-1].rpartition(".")[0] if names else ""
        if not plain or mean is None or (weight is None) != (bias is None):
            return
        if any(n.rpartition(".")[0] != prefix for n in names) or not prefix:
            return
        count = self.constants[names[-1]].tensor.shape[0]
        kind = _NORMS[x.meta["val"].ndim]
        module = kind(count, eps=eps, momentum=momentum, affine=weight is not None)
        old = _get(self.root, prefix)
        assert old is not None
        expected = ["weight", "bias"] if weight is not None else []
        leaves = [name.rpartition(".")[2] for name in names]
        if leaves != [*expected, "running_mean", "running_var"] or len(list(old.children())):
            return
        self._fill(module, old)
        for twin in self._twins(names):
            attach(self.root, f"{twin}.num_batches_tracked", module.num_batches_tracked)
        key = tuple(names)
        if key not in self.made:
            _set(self.root, prefix, module)
            self.made[key] = prefix
        self._replace(node, key, module, prefix)

    def _twins(self, names: Sequence[str]) -> set[str]:
        """Where else the model held the very batch norm whose tensors have these names."""
        paths = [{alias.removesuffix(f".{name.rpartition('.')[2]}")
                  for alias in self.constants[name].aliases} for name in names]  # fmt: skip
        shared = set.intersection(*paths)
        return {path for path in shared if _get(self.root, path) is not None}

    def _fill(self, module: nn.Module, old: nn.Module) -> None:
        """The module's tensors are the cut ones; what else stood there stays."""
        for name, parameter in old._parameters.items():
            module._parameters[name] = parameter
        for name, buffer in old._buffers.items():
            module._buffers[name] = buffer
        counter = module._buffers.get("num_batches_tracked")
        device = next(iter(old._buffers.values())).device  # type: ignore[union-attr]
        if counter is not None:
            module._buffers["num_batches_tracked"] = counter.to(device)


def _get(root: nn.Module, path: str) -> nn.Module | None:
    module: Any = root
    for step in path.split("."):
        module = getattr(module, step, None)
        if module is None:
            return None
    return module


def _set(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, leaf = path.split(".")
    here = root
    for step in parents:
        if not hasattr(here, step):
            here.add_module(step, nn.Module())
        here = getattr(here, step)
    here._modules.pop(leaf, None)
    here.add_module(leaf, module)
