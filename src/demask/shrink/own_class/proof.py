"""Proves that a network computes a program: captures the network and compares programs.

Equality of programs up to names, order, and the ops that move values.

Equal values get equal numbers (value numbering: Cocke and Schwartz, Programming Languages and Their
Compilers, 1970): two calls have the same value if op and operands are the same. Calls that only
move elements (views, slices, permutations, splits) are compared by the source of each element of
the output, for two assignments of the dynamic sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.compat.dispatch import has_schema
from demask.errors import DemaskError
from demask.failures import described, is_strict
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.program import Program, path_of
from demask.graph.provenance import Cut
from demask.graph.result.uncalled_modules import is_holder
from demask.ops import op_name, schema
from demask.ops.schema import fake
from demask.ops.traits import IDENTITIES, MOVES

MOST = 2**24  # the most elements of a value whose moves are traced
_SAME = IDENTITIES | {torch.ops.aten.detach_.default}


def find_difference(a: Program, b: Program) -> fx.Node | None:
    """The first call of `a` that `b` lacks, or the output of `a` if only that differs; None if the
    programs are equal. Random calls are equal if their order is."""
    values = ValueNumbers()
    numbers_a, numbers_b = values.of(a), values.of(b)
    (first,), (second,) = (program.graph.find_nodes(op="output") for program in (a, b))
    if numbers_a[first] == numbers_b[second]:
        return None
    values_b = set(numbers_b.values())
    return next((node for node in a.graph.nodes if numbers_a[node] not in values_b), first)


@dataclass(frozen=True, slots=True)
class _MovedElements:
    """Moved elements of the value of `root`: their positions in it, per assignment of sizes."""

    root: fx.Node
    positions: tuple[Tensor, ...]


@dataclass(slots=True)
class _ProgramWalk:
    """The state of numbering the values of one program."""

    program: Program
    names: dict[Any, str]
    sizes: tuple[dict[Any, int], ...]
    numbers: dict[fx.Node, int] = field(default_factory=dict)
    moved: dict[fx.Node, Any] = field(default_factory=dict)
    inputs: int = 0
    drawn: int = 0


class ValueNumbers:
    """Numbers of the values of several programs; equal values have equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.tensors: dict[Hashable, list[Tensor]] = {}

    def of(self, program: Program) -> dict[fx.Node, int]:
        """The number of each node's value."""
        symbols = list(_symbols(program.graph))
        names = {symbol: f"n{k}" for k, (symbol, _) in enumerate(symbols)}
        sizes = tuple({symbol: hint + more for symbol, hint in symbols} for more in (0, 1))
        walk = _ProgramWalk(program, names, sizes)
        for node in program.graph.nodes:
            walk.numbers[node] = self._number(node, walk)
        return walk.numbers

    def _number(self, node: fx.Node, walk: _ProgramWalk) -> int:
        """The number of a node's value, from those of its operands."""
        key: Hashable
        if node.op == "placeholder":
            key, walk.inputs = ("input", walk.inputs), walk.inputs + 1
        elif node.op == "get_attr":
            key = ("tensor", *self._tensor(walk.program.constants[str(node.target)].tensor))
        elif node.op == "output":
            key = ("output", self._plain(node.args, walk))
        elif isinstance(node.meta.get("val"), torch.SymInt):
            key = ("size", _size_expression(fake(node), walk))
        elif (source := _same(node)) is not None:
            walk.moved[node] = walk.moved.get(source)
            return walk.numbers[source]
        elif (moved := _moved(node, walk)) is not None:
            walk.moved[node] = moved
            if not isinstance(moved, _MovedElements):  # several, named by getitem
                key = ("parts", len(self.numbers))
            elif _is_whole(moved, node, walk):
                return walk.numbers[moved.root]
            else:
                key = ("moved", walk.numbers[moved.root], _shape(node, walk), *map(_digest, moved.positions))
        else:
            key = (node.op, str(node.target), self._plain(_arguments(node), walk))
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                key, walk.drawn = (*key, walk.drawn), walk.drawn + 1
        return self.numbers.setdefault(key, len(self.numbers))

    def _tensor(self, tensor: Tensor) -> tuple[Hashable, ...]:
        """A key that equal tensors share, and no others."""
        kind = (tensor.dtype, tuple(tensor.shape))
        alike = self.tensors.setdefault(kind, [])
        for k, other in enumerate(alike):
            if other is tensor or torch.equal(other, tensor):
                return (*kind, k)
        alike.append(tensor)
        return (*kind, len(alike) - 1)

    def _plain(self, value: Any, walk: _ProgramWalk) -> Hashable:
        """An argument as a key: nodes by the numbers of their values."""
        if isinstance(value, fx.Node):
            return ("value", walk.numbers[value])
        if isinstance(value, torch.SymInt):
            return ("size", _size_expression(value, walk))
        if isinstance(value, (list, tuple)):
            return tuple(self._plain(item, walk) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._plain(item, walk)) for name, item in sorted(value.items()))
        return (type(value).__name__, str(value))


def _same(node: fx.Node) -> fx.Node | None:
    """The operand that a call returns unchanged, or None."""
    if node.op != "call_function":
        return None
    source = node.args[0] if node.args else None
    if node.target is torch.ops.aten.cat.default and isinstance(source, (list, tuple)):
        source = source[0] if len(source) == 1 else None
    elif node.target not in _SAME:
        return None
    return source if isinstance(source, fx.Node) else None


def _arguments(node: fx.Node) -> Any:
    """All arguments of a call, defaults included; the axis of a concatenation from the front."""
    if node.target is torch.ops.aten.cat.default:
        call_arguments = schema.arguments(node)
        return call_arguments | {"dim": call_arguments["dim"] % fake(node).ndim}
    if has_schema(node.target):
        return schema.arguments(node)
    return (node.args, node.kwargs)


def _symbols(graph: fx.Graph) -> Iterator[tuple[Any, int]]:
    """The symbols of the inputs' sizes, in order, and their values in the example."""
    seen: set[Any] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, int):
                continue
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                if symbol not in seen:
                    seen.add(symbol)
                    env = size.node.shape_env
                    hints = getattr(env, "backed_var_to_val", None) or env.var_to_val
                    yield symbol, int(hints.get(symbol, 2))


def _size_expression(size: Any, walk: _ProgramWalk) -> str:
    if isinstance(size, int):
        return str(size)
    return str(size.node.expr.subs({s: _named(name) for s, name in walk.names.items()}))


def _named(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


def _size_value(size: Any, sizes: dict[Any, int]) -> int:
    """The value of a size for an assignment. Raises TypeError if it depends on other symbols."""
    return size if isinstance(size, int) else int(size.node.expr.subs(sizes))


def _shape(node: fx.Node, walk: _ProgramWalk) -> tuple[str, ...]:
    return tuple(_size_expression(size, walk) for size in fake(node).shape)


def _digest(positions: Tensor) -> bytes:
    return hashlib.blake2b(positions.contiguous().numpy().tobytes(), digest_size=16).digest()


def _is_whole(moved: _MovedElements, node: fx.Node, walk: _ProgramWalk) -> bool:
    """Whether a moved value equals its root, element by element, with the same shape."""
    root = fake(moved.root)
    if not isinstance(root, Tensor) or root.ndim != fake(node).ndim:
        return False
    return all(
        positions.shape == tuple(_size_value(n, sizes) for n in root.shape)
        and torch.equal(positions.reshape(-1), torch.arange(positions.numel()))
        for positions, sizes in zip(moved.positions, walk.sizes, strict=True)
    )


def _moved(node: fx.Node, walk: _ProgramWalk) -> Any:
    """_MovedElements, or a list of them per output, if a call only moves the elements of one value;
    else None."""
    if node.target is operator.getitem:
        several = walk.moved.get(schema.source_of(node))
        return several[schema.output_of(node)] if isinstance(several, (list, tuple)) else None
    if op_name(node.target) not in MOVES:
        return None
    source, *others = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if any(n.op != "get_attr" for n in others) or node.args[0] is not source:
        return None
    before = walk.moved.get(source)
    root, positions = (before.root, before.positions) if isinstance(before, _MovedElements) else (source, None)
    results = []
    try:
        for k, sizes in enumerate(walk.sizes):
            if positions is None:
                shape = [_size_value(n, sizes) for n in fake(source).shape]
                count = torch.Size(shape).numel()
                if count > MOST:
                    return None
                start = torch.arange(count).reshape(shape)
            else:
                start = positions[k]

            def put(n: fx.Node, start: Tensor = start, sizes: dict[Any, int] = sizes) -> Any:
                if n is source:
                    return start
                if n.op == "get_attr":
                    return walk.program.constants[str(n.target)].tensor
                return _size_value(fake(n), sizes)

            results.append(schema.call_on(node, put))
    except (TypeError, RuntimeError, ValueError):
        return None  # a data-dependent size, or a call that fails for these sizes
    if isinstance(results[0], Tensor):
        return _MovedElements(root, tuple(results))
    return [_MovedElements(root, parts) for parts in zip(*results, strict=True)]


NormalForm = Callable[[Program], Program]


class ProgramMismatch(DemaskError):
    """How a network differs from a program. place: the path of the module."""

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


@dataclass(slots=True)
class Proof:
    """The program that a network has to compute, and how to test whether it does.

    before, after: the captured program, and the smaller one it became. cuts: of the constants of
    `after`. inputs: the example's args and kwargs. capture: the programs of a network that is
    called like the model. forms: normal forms in which programs are compared, the cheapest first.
    own: the program of the last network that was proved to compute `after`, as its code calls it:
    it may compute what `after` skips since nothing reads it.
    """

    before: Program
    after: Program
    cuts: Mapping[str, Cut]
    inputs: Inputs
    capture: Callable[[nn.Module], Iterator[Program]]
    forms: Sequence[NormalForm]
    own: Program | None = None
    _normal: dict[int, Program] = field(default_factory=dict)

    def target(self, k: int) -> Program:
        """`after` in normal form k, computed at first use."""
        if k not in self._normal:
            self._normal[k] = self.forms[k](self.after)
        return self._normal[k]

    def run(self, network: nn.Module) -> Any:
        """The outputs of a network on the example, in eval mode. Raises ProgramMismatch."""
        with _locate_errors(network):
            # With gradients enabled: some modules use a fused kernel without.
            return run_seeded(copy_in_eval(network), self.inputs, grad=True)

    def find_difference(self, network: nn.Module) -> ProgramMismatch | None:
        """How a network fails to compute `after`, in every form; None if it computes it."""
        try:
            self.run(network)
            with _locate_errors(network):
                for program in self.capture(network):
                    if _dynamic_sizes(program) != _dynamic_sizes(self.before):
                        continue
                    node = None
                    for k, form in enumerate(self.forms):
                        node = find_difference(self.target(k), form(program))
                        if node is None:
                            self.own = program
                            return None
                    assert node is not None
                    place = path_of(node) if node.op == "call_function" else ""
                    text = f"{place or 'the network'} differs in a call by more than shapes"
                    return ProgramMismatch(f"{text} ({node.target})", place)
        except ProgramMismatch as error:
            return error
        return ProgramMismatch("the network is captured for other sizes than the model")


def _dynamic_sizes(program: Program) -> list[list[bool]]:
    """Which sizes of a program's inputs are dynamic."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    return [[not isinstance(size, int) for size in v.shape] for v in values if isinstance(v, Tensor)]


# Errors that a network's own code raises for sizes or modules that it does not expect.
_NETWORK_ERRORS = (DemaskError, RuntimeError, ValueError, AttributeError, IndexError)


@contextlib.contextmanager
def _locate_errors(network: nn.Module) -> Iterator[None]:
    """Convert errors of a network to ProgramMismatch, with the path of the module that raised."""
    stack: list[str] = []
    handles = [
        handle
        for path, module in network.named_modules()
        if not is_holder(module)
        for handle in _track_calls(module, path, stack)
    ]
    try:
        yield
    except (MemoryError, ProgramMismatch):
        raise
    except Exception as error:
        if is_strict() and not isinstance(error, _NETWORK_ERRORS):
            raise
        place = stack[-1] if stack else ""
        text = f"{place or 'the network'} does not run: {described(error)}"
        raise ProgramMismatch(text, place) from error
    finally:
        for handle in handles:
            handle.remove()


def _track_calls(module: nn.Module, path: str, stack: list[str]) -> list[Any]:
    """Push the paths of running modules on a stack; the one that raises stays on top."""

    def enter(*_: Any) -> None:
        if not path:
            stack.clear()
        stack.append(path)

    def leave(*_: Any) -> None:
        del stack[-1:]

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
