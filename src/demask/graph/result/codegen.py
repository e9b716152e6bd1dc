"""Code generation: the Python code of a result, with the least overhead per call.

A call of an overload (`torch.ops.aten.relu.default`) takes a few microseconds more than torch's
binding of the same op (`torch.relu`), and every attribute after `self` is a search through a
module: submodules are looked up in the dictionary `_modules` instead, which is faster. Both matter
for small networks. The graph itself retains its overloads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from demask.compat.dispatch import schema_of
from demask.compat.fx_internals import FUNCTIONS, NN_FUNCTIONS, NN_PATH, PyTreeCodeGen, PyTreeInfo
from demask.graph.guards import (
    REFUSE,
    REFUSE_VALUE,
    SYMBOLIC,
    compile_checks,
    refuse_sizes,
    refuse_value,
    size_checks,
    value_checks,
)
from demask.graph.provenance import Provenance

TRACED = "_demask_traced"  # in the code: whether torch.compile or torch.export is tracing
_CALL = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)\(")
_ASSIGNED = re.compile(r"(\w+)(?: : [^=]+)? = ")


class Codegen(PyTreeCodeGen):
    """Generates code that checks the sizes and values of the inputs, then runs the calls.

    Copies share pytree specs, which are immutable (torch 2.13 warns when they are copied).
    """

    def __init__(self, specs: Any, provenance: Provenance):
        super().__init__(specs)
        self.provenance = provenance
        self.checks: tuple[Callable[..., None], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Codegen:
        return type(self)(self.pytree_info, self.provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        names, *specs = self.pytree_info
        return _unpickled, (type(self), names, [_spec_as_tuples(spec) for spec in specs], self.provenance)

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Lines that assign the flat inputs from the arguments: none if they are the arguments."""
        spec = self.pytree_info.in_spec
        groups = [spec.child(k) for k in range(spec.num_children)]
        leaves = all(g.child(k).is_leaf() for g in groups for k in range(g.num_children))
        input_names = [re.split("[:#]", name)[0].strip() for name in free_vars]
        argument_names = [name for name in self.pytree_info.orig_args if name != "self"]
        if not leaves or any(group.is_leaf() for group in groups) or len(input_names) != len(argument_names):
            return super().gen_var_bindings(fn_args, free_vars, expanded_def)
        bound = "" if input_names == argument_names else f"\n    {', '.join(input_names)} = {', '.join(argument_names)}"
        return self._format_annotations(free_vars, expanded_def) + bound

    def process_inputs(self, *args: Any) -> Any:
        """The flat inputs after checks, for torch.export, which runs the graph, not the code."""
        flat = super().process_inputs(*args)
        for check in self.checks if args else ():  # no arguments: the values are assigned already
            check(*flat)
        return flat

    def _gen_python_code(self, nodes: Any, root_module: str, *args: Any, **kwargs: Any) -> Any:
        node_list = list(nodes)
        names = {n.name: str(n.target) for n in node_list if n.op == "placeholder"}
        values = list(value_checks(names, self.provenance.values))
        sizes = list(size_checks(names, self.provenance.inputs, self.provenance.guards))

        def transformed(body: list[str]) -> list[str]:
            lookups = _lookups((_CALL.sub(_bound, line) for line in body), node_list, root_module)
            return [*values, *sizes, *lookups]

        variables = list(names.values())
        self.checks = (compile_checks(variables, values), compile_checks(variables, sizes, **SYMBOLIC))
        self._body_transformer = transformed
        code = super()._gen_python_code(nodes, root_module, *args, **kwargs)
        code.globals |= {REFUSE: refuse_sizes, REFUSE_VALUE: refuse_value}
        code.globals[TRACED] = torch.compiler.is_compiling
        return code


def _unpickled(kind: type[Codegen], names: list[str], specs: Sequence[Any], provenance: Provenance) -> Codegen:
    return kind(PyTreeInfo(names, *map(_spec_from_tuples, specs)), provenance)


def _spec_as_tuples(spec: Any) -> Any:
    """A pytree spec as nested tuples, None for leaves: torch 2.13 warns if specs are pickled."""
    if spec.is_leaf():
        return None
    return spec.type, spec.context, [_spec_as_tuples(spec.child(k)) for k in range(spec.num_children)]


def _spec_from_tuples(plain: Any) -> Any:
    if plain is None:
        return pytree.tree_structure(0)
    kind, context, children = plain
    return pytree.TreeSpec(kind, context, [_spec_from_tuples(child) for child in children])


def binding(name: str, overload: str = "default") -> str | None:
    """The Python name of torch's binding of an ATen op; None if there is none, or if the binding
    does not accept all arguments of the op (a list with None entries) or has other defaults
    (`reduction` in torch 2.13).

    >>> binding("relu"), binding("linear"), binding("slice", "Tensor")
    ('torch.relu', 'torch.nn.functional.linear', None)
    """
    op = getattr(getattr(torch.ops.aten, name), overload)
    arguments = schema_of(op).arguments
    if any("List[Optional" in str(a.type) or a.name == "reduction" for a in arguments):
        return None
    function = getattr(FUNCTIONS, name, None)
    if function is not None and getattr(torch, name, None) is function:
        return f"torch.{name}"
    function = getattr(NN_FUNCTIONS, name, None)
    if function is None:
        return None
    public = getattr(torch.nn.functional, name, None) is function
    return f"torch.nn.functional.{name}" if public else f"{NN_PATH}.{name}"


def _bound(match: re.Match[str]) -> str:
    """The text of a call of an overload, by torch's binding if there is one."""
    name = binding(match.group(1), match.group(2))
    return match.group(0) if name is None else f"{name}("


def _lookups(lines: Iterable[str], nodes: Sequence[fx.Node], root: str) -> Iterator[str]:
    """Lines of code that read submodules from `_modules` dictionaries, each assigned once."""
    targets = {n.name: str(n.target) for n in nodes if n.op in ("get_attr", "call_module")}
    called = {node.name for node in nodes if node.op == "call_module"}
    taken, dictionaries = {node.name for node in nodes}, {}
    for line in lines:
        name = assigned[1] if (assigned := _ASSIGNED.match(line)) else ""
        *path, leaf = targets.get(name, "").split(".")
        if name in called or path:
            parents = path if name in called else path[:-1]
            for k in range(len(parents) + 1):
                if tuple(parents[:k]) not in dictionaries:
                    short = dictionaries[tuple(parents[:k])] = _local_module_name(parents[:k], taken)
                    taken.add(short)
                    last = f"{dictionaries[tuple(parents[: k - 1])]}[{parents[k - 1]!r}]" if k else root
                    yield f"{short} = {last}._modules\n"
            read = f"{dictionaries[tuple(parents)]}[{(leaf if name in called else path[-1])!r}]"
            if name not in called:
                read = _read(read, leaf)
            line = line.replace(_read(root, targets[name]), read, 1)
        yield line


def _local_module_name(path: Sequence[str], taken: Container[str]) -> str:
    """A local name for the `_modules` of the module at a path."""
    name = "_".join(["at", *(re.sub(r"\W", "_", step) for step in path)])
    while name in taken:
        name += "_"
    return name


def _read(root: str, path: str) -> str:
    """`self.a.0` in the notation of torch.fx: `getattr(self.a, "0")`."""
    text = root
    for step in path.split("."):
        text = f"{text}.{step}" if step.isidentifier() else f'getattr({text}, "{step}")'
    return text
