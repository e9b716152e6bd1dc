"""A program run call by call, in slices: consecutive calls whose weights fit a budget.

All inputs run through a slice before the next slice's weights are read; then its own are freed.
Values that later slices read are stored for each input, in memory or, beyond the budget, on disk.
Values are freed after their last reader.

Weights stay in their file (an archive of demask, safetensors) until they are needed: the network is
captured with hollow tensors, which have the right shapes and zeros that take no memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.files.archive import Outline, outline
from demask.files.atomic_write import temporary_folder
from demask.files.weight_file import StoredTensor, WeightFile, with_weights
from demask.graph.program import Program


class ConstantSource(Protocol):
    """Reads the constants of a program from memory or a file."""

    def nbytes(self, name: str) -> int:
        """Bytes of a constant."""
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These constants, in memory."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedConstants:
    """Constants that are in memory anyway."""

    program: Program

    def nbytes(self, name: str) -> int:
        return self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.program.constants[name].tensor for name in names}


@dataclass(frozen=True, slots=True)
class Filed:
    """Constants in a file; those that the capture added are in memory.

    places: by name, the tensor in the file and the order of its axes there.
    """

    program: Program
    file: WeightFile
    places: Mapping[str, tuple[StoredTensor, tuple[int, ...]]]

    def nbytes(self, name: str) -> int:
        stored = self.places.get(name)
        return stored[0].nbytes if stored else self.program.constants[name].tensor.nbytes

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> Tensor:
        if name not in self.places:
            return self.program.constants[name].tensor
        stored, order = self.places[name]
        back = [order.index(axis) for axis in range(len(order))]
        return self.file.tensor(stored).permute(back)


def stored_source(network: Outline, program: Program) -> Filed:
    """Where the constants of a program are stored that was captured from an outlined network."""
    places = {}
    for key, constant in program.constants.items():
        names = (key, constant.name, *constant.aliases)
        name = next((n for n in names if n in network.places), None)
        if name is not None:
            places[key] = network.places[name]
    return Filed(program, network.file, places)


def outlined(model: nn.Module | str | os.PathLike[str], weights: Any) -> Outline:
    """A network and its file: a .demask archive, or a module and a .safetensors file of its names.

    Raises BadInput where the file does not fit, RefusedFile for an unsafe one.
    """
    if isinstance(model, nn.Module):
        file = WeightFile.read(weights)
        copy, places = with_weights(model, file, StoredTensor.hollow)
        orders = {name: (t, tuple(range(len(t.shape)))) for name, t in places.items()}
        return Outline(copy, file, orders)
    path = Path(model)
    if path.suffix == ".pt2":
        raise BadInput(
            f"{path}: a .pt2 is read in full; to run it slice by slice, write it "
            "as .demask once: demask.save(demask.demask(program), path)"
        )
    return outline(path)


Watch = Callable[[int, fx.Node, Any], None]  # number of the input, call, output


@dataclass(frozen=True, slots=True)
class CallSlice:
    """Consecutive calls, the constants that they read, and the bytes of those."""

    calls: tuple[fx.Node, ...]
    reads: tuple[str, ...]
    nbytes: int


def slices_of(program: Program, source: ConstantSource, budget: int | None) -> tuple[CallSlice, ...]:
    """As few slices as consecutive calls allow. budget: bytes of weights at a time; None: one
    slice.

    Raises BadInput where one call alone reads more, with the smallest budget that is enough.
    """
    slices: list[CallSlice] = []
    calls: list[fx.Node] = []
    reads: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        mine = {str(n.target): None for n in node.all_input_nodes if n.op == "get_attr"}
        if budget is not None and calls and _bytes(source, reads | mine) > budget:
            slices.append(CallSlice(tuple(calls), tuple(reads), _bytes(source, reads)))
            calls, reads = [], {}
        calls.append(node)
        reads |= mine
    slices.append(CallSlice(tuple(calls), tuple(reads), _bytes(source, reads)))
    least = max(part.nbytes for part in slices)
    if budget is not None and least > budget:
        raise BadInput(
            f"expected a budget of {least:,} bytes or more, the weights of the largest "
            f"layer, got {budget:,}; pass memory={least}"
        )
    return tuple(slices)


def _bytes(source: ConstantSource, names: Mapping[str, None]) -> int:
    return sum(source.nbytes(name) for name in names)


def flat(program: Program, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call; raises BadInput where it is not a call of the program."""
    if not isinstance(args, tuple):
        raise BadInput(
            f"expected each input to be a tuple of arguments, got {type(args).__name__}: write (x,) for one tensor"
        )
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    nodes = program.graph.find_nodes(op="placeholder")
    if len(leaves) != len(nodes) or spec != program.in_spec:
        raise BadInput(f"expected a call like the first one, with {len(nodes)} inputs, got {len(leaves)}")
    for node, leaf in zip(nodes, leaves, strict=True):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            _check_input(node.name, value, leaf)
    return leaves


def _check_input(name: str, value: Tensor, leaf: Any) -> None:
    sizes = [n if isinstance(n, int) else "any" for n in value.shape]
    fits = isinstance(leaf, Tensor) and leaf.ndim == value.ndim and leaf.dtype == value.dtype
    if not fits or any(n != "any" and n != m for n, m in zip(sizes, leaf.shape, strict=True)):
        got = f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:40]
        raise BadInput(f"input {name!r}: expected {value.dtype} {sizes}, got {got}")


@dataclass(slots=True)
class SlicedRun:
    """What a run did.

    peak_weight_bytes, boundary_bytes: the most bytes in memory of weights, and of values between
    slices. spilled: the most inputs with values on disk.
    """

    slices: int
    peak_weight_bytes: int = 0
    boundary_bytes: int = 0
    spilled: int = 0
    outputs: list[Any] = field(default_factory=list)


@torch.no_grad()
def walk(
    program: Program,
    source: ConstantSource,
    inputs: Sequence[list[Any]],
    watch: Watch,
    *,
    budget: int | None = None,
    outputs: bool = False,
    progress: Callable[[str], None] | None = None,
) -> SlicedRun:
    """Run every input through the program, slice by slice; `watch` gets the output of each call.

    inputs: the leaves of each call (`flat`). outputs: also store what the network returns.
    """
    parts = slices_of(program, source, budget)
    run, last = SlicedRun(len(parts)), last_reads(program)
    names = [node for node in program.graph.nodes if node.op == "placeholder"]
    final: Any = program.graph.output_node().args[0]
    with ExitStack() as stack:
        boundary = _BoundaryValues(len(inputs), budget, stack, run)
        for number, part in enumerate(parts):
            weights = source.read(part.reads)
            run.peak_weight_bytes = max(run.peak_weight_bytes, sum(t.nbytes for t in weights.values()))
            for k, leaves in enumerate(inputs):
                values = boundary.take(k) if number else dict(zip(names, leaves, strict=True))
                _calls(part, weights, values, last, lambda n, v, k=k: watch(k, n, v))
                if number + 1 < len(parts):
                    boundary.put(k, values)
                elif outputs:
                    run.outputs.append(_returned(program, source, final, values))
                if progress is not None:
                    progress(f"slice {number + 1} of {len(parts)}, input {k + 1}")
            del weights
    return run


def _calls(
    part: CallSlice,
    weights: Mapping[str, Tensor],
    values: dict[fx.Node, Any],
    last: Mapping[fx.Node, list[fx.Node]],
    watch: Callable[[fx.Node, Any], None],
) -> None:
    """Run the calls of a slice; free values after their last reader."""

    def value(node: fx.Node) -> Any:
        return weights[str(node.target)] if node.op == "get_attr" else values[node]

    for node in part.calls:
        target: Any = node.target
        output = target(*map_arg(node.args, value), **map_arg(node.kwargs, value))
        watch(node, output)
        values[node] = output
        for gone in last.get(node, ()):
            values.pop(gone, None)


def last_reads(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """Per call, the values that no later call reads."""
    seen: dict[fx.Node, fx.Node] = {}
    for node in reversed(program.graph.nodes):
        for source in node.all_input_nodes:
            seen.setdefault(source, node)
        if node.op == "call_function" and node not in seen:
            seen[node] = node
    last: dict[fx.Node, list[fx.Node]] = {}
    for source, reader in seen.items():
        last.setdefault(reader, []).append(source)
    return last


def _returned(program: Program, source: ConstantSource, final: Any, values: Mapping[fx.Node, Any]) -> Any:
    """What the network returns for one input."""

    def value(node: fx.Node) -> Any:
        if node.op == "get_attr":
            return source.read([str(node.target)])[str(node.target)]
        return values[node]

    leaves = [value(v) if isinstance(v, fx.Node) else v for v in final]
    return pytree.tree_unflatten(leaves, program.out_spec)


class _BoundaryValues:
    """Values between two slices, for each input: in memory, or on disk beyond the budget."""

    def __init__(self, count: int, budget: int | None, stack: ExitStack, run: SlicedRun):
        self.values: list[dict[fx.Node, Any]] = [{} for _ in range(count)]
        self.files: list[tuple[Path, list[fx.Node]] | None] = [None] * count
        self.sizes, self.budget, self.stack, self.run = [0] * count, budget, stack, run
        self.folder: Path | None = None

    def take(self, k: int) -> dict[fx.Node, Any]:
        values, self.values[k], self.sizes[k] = self.values[k], {}, 0
        spilled = self.files[k]
        if spilled is not None:
            path, nodes = spilled
            tensors = load_file(path)
            values |= {node: tensors[str(i)] for i, node in enumerate(nodes)}
            path.unlink()
            self.files[k] = None
        return values

    def put(self, k: int, values: dict[fx.Node, Any]) -> None:
        plain = [n for n, v in values.items() if isinstance(v, Tensor)]
        size = sum(values[n].nbytes for n in plain)
        if self.budget is not None and sum(self.sizes) + size > self.budget and plain:
            path = self._folder() / f"{k}.safetensors"
            tensors = {str(i): values[n].contiguous().clone() for i, n in enumerate(plain)}
            try:
                save_file(tensors, path)
            except (SafetensorError, OSError) as error:
                raise BadInput(
                    f"cannot write {size:,} bytes of values between slices to "
                    f"{path.parent}: {error}; free some room there, or name another "
                    "folder in TMPDIR"
                ) from error
            self.files[k] = (path, plain)
            self.run.spilled = max(self.run.spilled, sum(p is not None for p in self.files))
            values = {n: v for n, v in values.items() if not isinstance(v, Tensor)}
            size = 0
        self.values[k], self.sizes[k] = values, size
        self.run.boundary_bytes = max(self.run.boundary_bytes, sum(self.sizes))

    def _folder(self) -> Path:
        if self.folder is None:
            self.folder = self.stack.enter_context(temporary_folder())
        return self.folder


def each(items: Any) -> Iterator[tuple[Any, ...]]:
    """Inputs as tuples of arguments: of one call, or of several."""
    yield from ([items] if isinstance(items, tuple) else items)
