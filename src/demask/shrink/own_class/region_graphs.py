"""Graphs of regions, in place of their modules: same arguments, same results."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.graph.program import Constant, Program
from demask.graph.provenance import Provenance
from demask.graph.result.demasked_module import Demasked, build
from demask.graph.result.hooks import HOOKS
from demask.graph.result.resize import put_module
from demask.graph.result.restore_modules import Originals
from demask.shrink.own_class.proof import ProgramMismatch, Proof
from demask.shrink.own_class.region_calls import ModuleCall, match_calls
from demask.shrink.own_class.regions import ModuleRegion
from demask.shrink.pipeline import input_specs
from demask.shrink.program_size import measure_module


def insert_graphs(
    network: nn.Module,
    model: nn.Module,
    proof: Proof,
    regions: Sequence[ModuleRegion],
    originals: Originals | None,
) -> None:
    """Replace the modules of regions by graphs, in a copy of the model with the smaller tensors.
    Raises ProgramMismatch with the path of a module that cannot be a graph."""
    calls = match_calls(network, model, proof, regions)
    for region in regions:
        module = network.get_submodule(region.path)
        graph = _build_graph(region, calls[region.path], proof, module, originals)
        hooks = {k: v for k, v in vars(module).items() if k.startswith(("_forward_", "_backward_"))}
        vars(graph).update(hooks)
        put_module(network, region.path, graph)


def _build_graph(
    region: ModuleRegion, call: ModuleCall, proof: Proof, module: nn.Module,
    originals: Originals | None,
) -> Demasked:  # fmt: skip
    """The network of a region, called like its module."""
    program = _region_program(region, call, proof.after, module)
    prefix = f"{region.path}."
    cuts = {name.removeprefix(prefix): replace(cut, source=cut.source.removeprefix(prefix))
            for name, cut in proof.cuts.items() if name.startswith(prefix)}  # fmt: skip
    used = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    record = Provenance(
        cuts={name: cut for name, cut in cuts.items() if name in program.constants},
        reasons=(),
        effects={},
        notes=(),
        inputs=tuple(spec for spec in input_specs(program) if spec.name in used),
        before=measure_module(module),
        after=measure_module(module),
        guards=(),
    )
    return build(program, record, originals=_originals_inside(originals, region.path))


def _originals_inside(originals: Originals | None, path: str) -> Originals | None:
    """The originals of a module, without its own hooks, which are copied to its graph."""
    if originals is None:
        return None
    prefix = f"{path}."
    module = copy.copy(originals.model.get_submodule(path))
    for name in HOOKS:
        vars(module)[name] = {}
    layers = {name.removeprefix(prefix): layer for name, layer in originals.modules.items()
            if name.startswith(prefix)}  # fmt: skip
    return Originals(module, layers)


def _region_program(
    region: ModuleRegion, call: ModuleCall, whole: Program, module: nn.Module
) -> Program:
    """The program of a region, its inputs and outputs those of its module."""
    assert call.inputs is not None
    graph, mapping = fx.Graph(), dict[fx.Node, fx.Node]()
    leaves, in_spec = pytree.tree_flatten((call.args, dict(call.kwargs or {})))
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            # The code around may pass a tensor in other calls: masks are often omitted.
            raise ProgramMismatch(
                f"{region.path} takes {leaf!r:.40}, which is not a tensor", region.path
            )
        input_, node = graph.placeholder(f"input_{k}"), call.inputs.get(k)
        input_.meta["val"] = node.meta["val"] if node is not None else leaf
        if node is not None:
            mapping[node] = input_
    constants = _Constants(region.path, whole)
    for node in region.inputs:
        _compute(node, graph, mapping, constants, region.path)
    for node in region.nodes:
        _copy(node, graph, mapping, constants, region.path)
    values = [mapping[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in call.outputs]
    graph.output(tuple(values))
    names = _argument_names(module, call)
    return Program(graph, constants.own, in_spec, call.out_spec, names, training=whole.training)


class _Constants:
    """The constants that a region reads, by their names in its module."""

    def __init__(self, path: str, program: Program) -> None:
        self.path, self.all = path, program.constants
        self.own: dict[str, Constant] = {}

    def take(self, target: str) -> str:
        """The name in the module of a constant of the program. Raises ProgramMismatch for a
        parameter that other modules share."""
        constant, prefix = self.all[target], f"{self.path}."
        names = constant.aliases or (constant.name,)
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if constant.parameter and len(inside) < len(names):
            raise ProgramMismatch(f"{self.path} shares {target} with other modules", self.path)
        name = target.removeprefix(prefix)
        if not target.startswith(prefix):
            name = "constant_" + target.replace(".", "_")
        aliases = tuple(inside) if constant.aliases else ()
        self.own[name] = replace(constant, name=name, aliases=aliases)
        return name


def _compute(
    node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, fx.Node], constants: _Constants,
    path: str,
) -> None:  # fmt: skip
    """Compute in a region a value from elsewhere that is none of its module's arguments: a size, or
    a value computed from sizes and constants. Raises ProgramMismatch."""
    if node in mapping:
        return
    if node.op == "get_attr":
        _copy(node, graph, mapping, constants, path)
        return
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        for source, input_ in list(mapping.items()):
            tensor = source.meta.get("val")
            if input_.op != "placeholder" or not isinstance(tensor, Tensor):
                continue
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == value.node.expr:
                    size_of = torch.ops.aten.sym_size.int
                    mapping[node] = graph.call_function(size_of, (input_, axis))
                    mapping[node].meta["val"] = value
                    return
    if node.op != "call_function":
        raise ProgramMismatch(f"{path} reads a value that is none of its arguments ({node})", path)
    for source in node.all_input_nodes:
        _compute(source, graph, mapping, constants, path)
    _copy(node, graph, mapping, constants, path)


def _copy(
    node: fx.Node, graph: fx.Graph, mapping: dict[fx.Node, fx.Node], constants: _Constants,
    path: str,
) -> None:  # fmt: skip
    """Copy a call into the graph of a region; paths of modules begin at the region's module."""
    for source in node.all_input_nodes:
        if source not in mapping:  # a constant
            _copy(source, graph, mapping, constants, path)
    if node.op == "get_attr":
        new = graph.create_node("get_attr", constants.take(str(node.target)))
    else:
        new = graph.node_copy(node, lambda n: mapping[n])
    new.meta = dict(node.meta)
    stack = {key: (name.removeprefix(f"{path}."), kind)
             for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items()
             if name.startswith(f"{path}.")}  # fmt: skip
    new.meta["nn_module_stack"] = stack
    mapping[node] = new


def _argument_names(module: nn.Module, call: ModuleCall) -> tuple[str, ...]:
    """The names of forward's arguments, in the order of the call."""
    named = inspect.signature(module.forward).parameters.values()
    plain = [p.name for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [f"args_{k}" for k in range(len(call.args) - len(plain))]
    return (*plain[: len(call.args)], *more, *(call.kwargs or {}))
