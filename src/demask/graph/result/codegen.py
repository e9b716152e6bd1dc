"""The Python a result runs: the graph's calls, spelled the way that costs least to call.

A call of an overload (`torch.ops.aten.relu.default`) takes a few microseconds more than torch's own
binding of the same op (`torch.relu`), and every dot behind `self` is a search through a module: a
module inside another is looked up in `_modules`, the dictionary that holds it, which costs less. A
network that had its work removed feels both, so neither is left in the code. The graph itself keeps
its overloads.
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
    checker,
    checks,
    refuse,
    refuse_value,
    value_checks,
)
from demask.graph.provenance import Provenance

TRACED = "_demask_traced"  # in the code: whether torch.compile or torch.export traces the call
_CALL = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)\(")
_ASSIGNED = re.compile(r"(\w+)(?: : [^=]+)? = ")


class Codegen(PyTreeCodeGen):
    """Checks the sizes and values that come in, then calls.

    Pytree specs are values: copies share them (copying them warns in torch 2.13).
    """

    def __init__(self, specs: Any, provenance: Provenance):
        super().__init__(specs)
        self.provenance = provenance
        self.checks: tuple[Callable[..., None], ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Codegen:
        return type(self)(self.pytree_info, self.provenance)

    def __reduce__(self) -> tuple[Any, ...]:
        names, *specs = self.pytree_info
        return _unpickled, (type(self), names, [_plain(spec) for spec in specs], self.provenance)

    def gen_var_bindings(self, fn_args: list[str], free_vars: list[str], expanded_def: bool) -> str:
        """Lines that read the flat inputs off the arguments: none where they are the arguments."""
        spec = self.pytree_info.in_spec
        groups = [spec.child(k) for k in range(spec.num_children)]
        leaves = all(g.child(k).is_leaf() for g in groups for k in range(g.num_children))
        plain = [re.split("[:#]", name)[0].strip() for name in free_vars]
        own = [name for name in self.pytree_info.orig_args if name != "self"]
        if not leaves or any(group.is_leaf() for group in groups) or len(plain) != len(own):
            return super().gen_var_bindings(fn_args, free_vars, expanded_def)
        bound = "" if plain == own else f"\n    {', '.join(plain)} = {', '.join(own)}"
        return self._format_annotations(free_vars, expanded_def) + bound

    def process_inputs(self, *args: Any) -> Any:
        """The flat inputs, checked: what torch.export calls, which runs the graph, not its code."""
        flat = super().process_inputs(*args)
        for check in self.checks if args else ():  # none where the values are already in place
            check(*flat)
        return flat

    def _gen_python_code(self, nodes: Any, root_module: str, *args: Any, **kwargs: Any) -> Any:
        given = list(nodes)
        names = {n.name: str(n.target) for n in given if n.op == "placeholder"}
        values = list(value_checks(names, self.provenance.values))
        sizes = list(checks(names, self.provenance.inputs, self.provenance.guards))

        def transformed(body: list[str]) -> list[str]:
            found = _lookups((_CALL.sub(_bound, line) for line in body), given, root_module)
            return [*values, *sizes, *found]

        variables = list(names.values())
        self.checks = (checker(variables, values), checker(variables, sizes, **SYMBOLIC))
        self._body_transformer = transformed
        code = super()._gen_python_code(nodes, root_module, *args, **kwargs)
        code.globals |= {REFUSE: refuse, REFUSE_VALUE: refuse_value}
        code.globals[TRACED] = torch.compiler.is_compiling
        return code


def _unpickled(
    kind: type[Codegen], names: list[str], specs: Sequence[Any], provenance: Provenance
) -> Codegen:
    return kind(PyTreeInfo(names, *map(_spec, specs)), provenance)


def _plain(spec: Any) -> Any:
    """A pytree spec as tuples, None for its leaves: pickled as it is, torch 2.13 warns of them."""
    if spec.is_leaf():
        return None
    return spec.type, spec.context, [_plain(spec.child(k)) for k in range(spec.num_children)]


def _spec(plain: Any) -> Any:
    """The inverse of `_plain`."""
    if plain is None:
        return pytree.tree_structure(0)
    kind, context, children = plain
    return pytree.TreeSpec(kind, context, [_spec(child) for child in children])


def binding(name: str, overload: str = "default") -> str | None:
    """How Python spells an ATen op through torch's own binding; None where it has none, or one that
    does not take all that the op takes (a list with gaps) or has another default (of a reduction:
    torch 2.13 sums nothing up where it is left out).

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
    found = binding(match.group(1), match.group(2))
    return match.group(0) if found is None else f"{found}("


def _lookups(lines: Iterable[str], nodes: Sequence[fx.Node], root: str) -> Iterator[str]:
    """Lines of code in which modules are found in dictionaries, which are looked up once each."""
    targets = {n.name: str(n.target) for n in nodes if n.op in ("get_attr", "call_module")}
    called = {node.name for node in nodes if node.op == "call_module"}
    taken, held = {node.name for node in nodes}, {}
    for line in lines:
        name = found[1] if (found := _ASSIGNED.match(line)) else ""
        *path, leaf = targets.get(name, "").split(".")
        if name in called or path:
            inside = path if name in called else path[:-1]
            for k in range(len(inside) + 1):
                if tuple(inside[:k]) not in held:
                    short = held[tuple(inside[:k])] = _short(inside[:k], taken)
                    taken.add(short)
                    last = f"{held[tuple(inside[: k - 1])]}[{inside[k - 1]!r}]" if k else root
                    yield f"{short} = {last}._modules\n"
            read = f"{held[tuple(inside)]}[{(leaf if name in called else path[-1])!r}]"
            if name not in called:
                read = _read(read, leaf)
            line = line.replace(_read(root, targets[name]), read, 1)
        yield line


def _short(path: Sequence[str], taken: Container[str]) -> str:
    """A local name for the modules inside the one of a path."""
    name = "_".join(["at", *(re.sub(r"\W", "_", step) for step in path)])
    while name in taken:
        name += "_"
    return name


def _read(root: str, path: str) -> str:
    """`self.a.0` as torch.fx spells it: `getattr(self.a, "0")`."""
    text = root
    for step in path.split("."):
        text = f"{text}.{step}" if step.isidentifier() else f'getattr({text}, "{step}")'
    return text
