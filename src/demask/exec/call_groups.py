"""A program in groups of calls: all inputs run through a group before the weights of the next group are read.

    peak bytes of weights == the largest sum of the constants of one group

A group knows the constants that it reads, the values that it reads from earlier groups and writes for later ones,
and after which of its calls a value has no reader left. `run_calls` runs one group on the values of one or of several
inputs. `walk` runs groups of consecutive calls whose constants fit a budget of bytes, on any number of inputs. Values
between such groups are stored for each input, in memory or, beyond the budget, on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.files.atomic_write import temporary_folder
from demask.files.weight_file import StoredTensor, WeightFile
from demask.graph.program import Program
from demask.ops import schema

Stored = TypeVar("Stored")
Watch = Callable[[int, fx.Node, Any], None]  # number of the input, call, output


@dataclass(frozen=True, slots=True)
class CallGroup:
    """Calls that run for all inputs before those of the next group.

    constants: names of the constants that they read. reads: values that earlier groups wrote, and inputs of the
    network. writes: values that later groups read or the network returns. frees: by call, the values that nothing
    reads after it.
    """

    calls: tuple[fx.Node, ...]
    constants: tuple[str, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    frees: Mapping[fx.Node, tuple[fx.Node, ...]]

    @property
    def last_reads(self) -> set[fx.Node]:
        """Of the values that the group reads, those that no later group reads."""
        return {value for freed in self.frees.values() for value in freed}.intersection(self.reads)


def group_calls(
    program: Program, groups: Sequence[Sequence[fx.Node]], repeated: Collection[fx.Node] = ()
) -> tuple[CallGroup, ...]:
    """The groups with these calls, in order.

    repeated: calls that run again in each group that reads their results, such as calls on constants.
    """
    position = {node: k for k, node in enumerate(program.graph.nodes)}
    read_later = set(program.graph.output_node().all_input_nodes)
    result = []
    for members in reversed(groups):
        calls, pending = set(members), list(members)
        while pending:
            needed = {source for source in pending.pop().all_input_nodes if source in repeated} - calls
            calls |= needed
            pending += needed
        order = sorted(calls, key=position.__getitem__)
        sources = dict.fromkeys(source for node in order for source in node.all_input_nodes)
        constants = dict.fromkeys(str(source.target) for source in sources if source.op == "get_attr")
        reads = tuple(source for source in sources if source.op != "get_attr" and source not in calls)
        writes = tuple(node for node in order if node in read_later)
        frees = {}
        for node in reversed(order):
            values = (value for value in (*node.all_input_nodes, node) if value.op != "get_attr")
            frees[node] = tuple(value for value in values if value not in read_later)
            read_later.update(frees[node])
        read_later -= calls
        result.append(CallGroup(tuple(order), tuple(constants), reads, writes, frees))
    return tuple(reversed(result))


def run_calls(
    group: CallGroup,
    values: dict[fx.Node, Any],
    constant: Callable[[str], Tensor],
    watch: Callable[[fx.Node, Any], None] | None = None,
    compute: Callable[[fx.Node, Callable[[fx.Node], Any]], Any] = schema.call_on,
) -> None:
    """Run the calls of a group: add their results to `values`, and delete what nothing reads any more.

    constant: returns a constant by its name. watch: gets each call and its result. compute: returns the result of a
    call, from the call and a function that returns the value of an operand.
    """

    def value(node: fx.Node) -> Any:
        return constant(str(node.target)) if node.op == "get_attr" else values[node]

    for node in group.calls:
        values[node] = compute(node, value)
        if watch is not None:
            watch(node, values[node])
        for freed in group.frees[node]:
            del values[freed]


def returned(program: Program, values: Mapping[fx.Node, Any], constant: Callable[[str], Tensor]) -> Any:
    """What the network returns, from the values of its results. constant: returns a constant by its name."""
    results: Any = program.graph.output_node().args[0]
    read = {v: constant(str(v.target)) if v.op == "get_attr" else values[v] for v in results if isinstance(v, fx.Node)}
    return pytree.tree_unflatten([read[v] if isinstance(v, fx.Node) else v for v in results], program.out_spec)


# ------------------------------------------------------------------------------- weights and inputs


def stored_constants(program: Program, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """By constant of a program, what is stored under its name or another name of the same tensor."""
    places = {}
    for key, constant in program.constants.items():
        name = next((n for n in (key, constant.name, *constant.aliases) if n in stored), None)
        if name is not None:
            places[key] = stored[name]
    return places


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a program, in memory or in a file until they are read.

    places: by name of those in the file, the tensor there and the order of its axes.
    """

    program: Program
    file: WeightFile | None = None
    places: Mapping[str, tuple[StoredTensor, tuple[int, ...]]] = field(default_factory=dict)

    def nbytes(self, name: str) -> int:
        """Bytes of a constant."""
        return (self.places[name][0] if name in self.places else self.program.constants[name].tensor).nbytes

    def read(self, name: str) -> Tensor:
        """A constant, in memory."""
        if self.file is None or name not in self.places:
            return self.program.constants[name].tensor
        stored, order = self.places[name]
        return self.file.tensor(stored).permute([order.index(axis) for axis in range(len(order))])


def bind_inputs(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[fx.Node, Any]:
    """The values of the inputs in a call; raises BadInput where it is not a call of the program."""
    if not isinstance(args, tuple):
        raise BadInput(
            f"expected each input to be a tuple of arguments, got {type(args).__name__}: write (x,) for one tensor"
        )
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    nodes = program.graph.find_nodes(op="placeholder")
    if len(leaves) != len(nodes) or spec != program.in_spec:
        raise BadInput(f"expected a call like the first one, with {len(nodes)} inputs, got {len(leaves)}")
    bound = dict(zip(nodes, leaves, strict=True))
    for node, leaf in bound.items():
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            _check_input(node.name, value, leaf)
    return bound


def _check_input(name: str, value: Tensor, leaf: Any) -> None:
    sizes = [n if isinstance(n, int) else "any" for n in value.shape]
    fits = isinstance(leaf, Tensor) and leaf.ndim == value.ndim and leaf.dtype == value.dtype
    if not fits or any(n != "any" and n != m for n, m in zip(sizes, leaf.shape, strict=True)):
        got = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:40]
        raise BadInput(f"input {name!r}: expected {value.dtype} {sizes}, got {got}")


# ------------------------------------------------------------------------- groups that fit a budget


def consecutive_groups(constants: Constants, budget: int | None = None) -> tuple[CallGroup, ...]:
    """All calls, in as few groups of consecutive ones as fit `budget` bytes of constants each; None: one group.

    Raises BadInput where one call alone reads more, with the smallest budget that is enough.
    """
    groups: list[list[fx.Node]] = [[]]
    reads, size, least = set[str](), 0, 0
    for node in constants.program.graph.nodes:
        if node.op != "call_function":
            continue
        own = {str(source.target) for source in node.all_input_nodes if source.op == "get_attr"}
        if budget is not None and groups[-1] and size + sum(map(constants.nbytes, own - reads)) > budget:
            groups.append([])
            reads, size = set(), 0
        groups[-1].append(node)
        size += sum(map(constants.nbytes, own - reads))
        reads |= own
        least = max(least, size)
    if budget is not None and least > budget:
        raise BadInput(
            f"expected a budget of {least:,} bytes or more, the weights of the largest "
            f"layer, got {budget:,}; pass memory={least}"
        )
    return group_calls(constants.program, groups)


@dataclass(slots=True)
class Walk:
    """What a run in groups did.

    peak_weight_bytes, boundary_bytes: the most bytes in memory of constants, and of values between groups. spilled:
    the most inputs with values on disk. outputs: what the network returned for each input, where that is stored.
    """

    groups: int
    peak_weight_bytes: int = 0
    boundary_bytes: int = 0
    spilled: int = 0
    outputs: list[Any] = field(default_factory=list)


@torch.no_grad()
def walk(
    constants: Constants,
    inputs: Sequence[Mapping[fx.Node, Any]],
    watch: Watch,
    *,
    budget: int | None = None,
    outputs: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Walk:
    """Run every input through the program, group by group; `watch` gets the output of each call.

    inputs: the values of the inputs in each call (`bind_inputs`). budget: bytes of constants at a time. outputs: also
    store what the network returns.

    Raises BadInput where the budget is less than the constants of one call.
    """
    program, groups = constants.program, consecutive_groups(constants, budget)
    run = Walk(len(groups))
    with ExitStack() as stack:
        between = _ValuesBetween(run, budget, stack)
        for number, group in enumerate(groups, 1):
            weights = {name: constants.read(name) for name in group.constants}
            run.peak_weight_bytes = max(run.peak_weight_bytes, sum(t.nbytes for t in weights.values()))
            for k, bound in enumerate(inputs):
                values = dict(bound) if number == 1 else between.take(k)
                run_calls(group, values, weights.__getitem__, lambda node, value, k=k: watch(k, node, value))
                if number < len(groups):
                    between.put(k, values)
                elif outputs:
                    run.outputs.append(returned(program, values, constants.read))
                if progress is not None:
                    progress(f"slice {number} of {len(groups)}, input {k + 1}")
            del weights  # before the next ones are read
    return run


@dataclass(slots=True)
class _ValuesBetween:
    """Values between two groups by input: in memory, or on disk beyond the budget."""

    run: Walk
    budget: int | None
    stack: ExitStack
    values: dict[int, dict[fx.Node, Any]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)  # bytes in memory
    files: dict[int, Path] = field(default_factory=dict)  # with the tensors of inputs that are on disk
    folder: Path | None = None

    def take(self, k: int) -> dict[fx.Node, Any]:
        values, path = self.values.pop(k), self.files.pop(k, None)
        del self.sizes[k]
        if path is not None:
            tensors = load_file(path)
            values = {node: tensors.get(str(i), value) for i, (node, value) in enumerate(values.items())}
            path.unlink()
        return values

    def put(self, k: int, values: dict[fx.Node, Any]) -> None:
        tensors = {str(i): value for i, value in enumerate(values.values()) if isinstance(value, Tensor)}
        size = sum(tensor.nbytes for tensor in tensors.values())
        if tensors and self.budget is not None and sum(self.sizes.values()) + size > self.budget:
            self.folder = self.folder or self.stack.enter_context(temporary_folder())
            path = self.folder / f"{k}.safetensors"
            try:
                save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, path)
            except (SafetensorError, OSError) as error:
                raise BadInput(
                    f"cannot write {size:,} bytes of values between slices to "
                    f"{path.parent}: {error}; free some room there, or name another "
                    "folder in TMPDIR"
                ) from error
            self.files[k] = path
            self.run.spilled = max(self.run.spilled, len(self.files))
            values = {node: None if isinstance(value, Tensor) else value for node, value in values.items()}
            size = 0
        self.values[k], self.sizes[k] = values, size
        self.run.boundary_bytes = max(self.run.boundary_bytes, sum(self.sizes.values()))
