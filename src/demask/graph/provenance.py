"""Provenance: the record of how a demasked network was derived from the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Any

from demask.errors import BadInput
from demask.graph.input_domains import Domain
from demask.records import OMITTED, Limit, Stored, decode, encode

Positions = tuple[int, ...] | None
Scale = Annotated[float, Limit("finite scales above 0", lambda scale: 0 < scale < inf)]
ZeroPoint = Annotated[int, Limit("zero points of 32 bits", lambda point: abs(point) < 2**31)]
Number = Annotated[int, Limit("integers of 31 bits", lambda number: 0 <= number < 2**31)]
Attribute = Annotated[str, Limit("an attribute's name", str.isidentifier)]
RANGE = Limit("low <= high", lambda domain: domain.is_range)
# JSON has no infinity.
Seconds = Annotated[float, Stored(lambda s: s if s < inf else None, lambda s: inf if s is None else float(s))]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor of the result was sliced from a tensor of the original.

    source: its fully qualified name in the original. shape: its original shape. kept: per axis, the
    original positions in their new order; None for a full axis. The scale and shift of a sliced
    norm have additional axes of size one after their own, to broadcast.
    """

    source: str
    shape: tuple[int, ...]
    kept: tuple[Positions, ...]

    def along(self, shape: Sequence[int]) -> tuple[Positions, ...] | None:
        """The positions that remain of a tensor of this shape that the network computes the cut one
        from: rows of a table, a vector that broadcasts; None if its axes are others.

        Its axes are the last ones of the cut tensor, which may have more of size one.
        """
        axes = list(zip(self.shape, self.kept, strict=True))
        remaining: list[Positions] = []
        for size in reversed(shape):
            while axes and axes[-1][0] == 1 != size:
                axes.pop()
            other, positions = axes.pop() if axes else (1, None)
            if positions is not None and size not in (1, other):
                return None
            remaining.append(positions if size == other else None)
        return tuple(reversed(remaining))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why `count` slices along axis `axis` of the output of `node` remain, or were changed.

    module: the name of the module that contains the call. op: the op ("aten.foo.default"), if the
    reason applies to every call of it, else "".
    """

    node: str
    module: str
    axis: int
    count: int
    text: str
    op: str = ""

    def __str__(self) -> str:
        place = self.module or self.node
        return f"{self.text}: {self.count} slices of axis {self.axis} of {place}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a network: the elements of its parameters, as sum(p.numel() for p in
    network.parameters()) counts them, and of its buffers (without masks of
    torch.nn.utils.prune); MACs of one call on the example inputs; bytes of all these tensors."""

    parameters: int
    macs: int
    bytes: int
    buffers: int = 0


@dataclass(frozen=True, slots=True)
class ModuleSizes:
    """The size of a module without its submodules, before and after: elements of its parameters,
    and MACs of one call on the example inputs."""

    parameters: tuple[int, int]
    macs: tuple[int, int]

    def since(self, earlier: ModuleSizes | None) -> ModuleSizes:
        """The sizes from before `earlier`, which ended where these begin, to those after these."""
        if earlier is None:
            return self
        return ModuleSizes((earlier.parameters[0], self.parameters[1]), (earlier.macs[0], self.macs[1]))

    @classmethod
    def paired(
        cls, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]
    ) -> dict[str, ModuleSizes]:
        """By module, sizes from its parameters and MACs before and after, in the order of
        `before`."""
        names, none = dict.fromkeys([*before, *after]), (0, 0)
        pairs = {name: (before.get(name, none), after.get(name, none)) for name in names}
        return {name: cls((a[0], b[0]), (a[1], b[1])) for name, (a, b) in pairs.items()}


def _module_sizes(data: Any) -> ModuleSizes:
    parameters_before, parameters_after, macs_before, macs_after = decode(tuple[int, ...], data, "sizes")
    return ModuleSizes((parameters_before, parameters_after), (macs_before, macs_after))


FourSizes = Annotated[ModuleSizes, Stored(lambda row: [*row.parameters, *row.macs], _module_sizes)]


def removed_parameters(modules: Mapping[str, ModuleSizes]) -> dict[str, int]:
    """Parameters removed by module, without modules of which none is."""
    counts = {path: sizes.parameters[0] - sizes.parameters[1] for path, sizes in modules.items()}
    return {path: count for path, count in counts.items() if count > 0}


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor input: sizes (an int, or the name of a dynamic dimension), dtype ("float32"), the
    shape of the example, and the values that the input may have; None: any numbers."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: str
    example: tuple[int, ...]
    domain: Annotated[Annotated[Domain, RANGE] | None, OMITTED] = None


NAMELESS = ("", "?", "-1", "None")  # what exporters write for unnamed dynamic sizes


@dataclass(frozen=True, slots=True)
class OnnxPort:
    """One input or output of an ONNX file: its name, its dtype ("float32", or the type of other
    values), and its sizes: an int, the name of a dynamic size or ""; None if the file has none."""

    name: str
    dtype: str
    sizes: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class QuantizationGrid:
    """The quantization of a constant of an ONNX file: the integer dtype ("int8"), and one scale and
    zero point for the tensor, or one of each per position of an axis."""

    dtype: str
    axis: int
    scales: tuple[Scale, ...]
    zero_points: tuple[ZeroPoint, ...]


@dataclass(frozen=True, slots=True)
class Interface:
    """The inputs, outputs and descriptions of an ONNX file. metadata: its `metadata_props`. grids:
    of quantized constants, by their names in the module."""

    inputs: tuple[OnnxPort, ...]
    outputs: tuple[OnnxPort, ...]
    name: str = ""
    doc: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    grids: Mapping[str, QuantizationGrid] = field(default_factory=dict)


WHOLE = "the network, whole"
GRAPH_WOULD = "a graph would have"  # first words of the note on what a graph would save
ALIKE_WOULD = "masked alike, it would have about"  # of the note on what a graph of other masks would
GIVEN = "given"  # the unchanged network, in files


@dataclass(frozen=True, slots=True)
class TuneDecision:
    """A decision of optimize() for a part of a network. place: the part, or WHOLE. chosen: the
    candidate in the result, or GIVEN. seconds: of each candidate; infinite if it does not run."""

    place: str
    chosen: str
    seconds: Mapping[str, Seconds]


@dataclass(frozen=True, slots=True)
class Speed:
    """Alternating timings of a result of optimize() and of the original network.

    given, result: seconds of a call of the original and of the result: median, 10 % and 90 %
    quantiles. ratio: of the medians; least: its lower 95 % bound (bootstrap over `pairs` rounds).
    """

    given: tuple[float, float, float]
    result: tuple[float, float, float]
    ratio: float
    least: float
    pairs: int
    threads: int
    machine: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The record of what was done to a network: `slim.demasked`.

    cuts: per tensor of the result, how it was sliced. reasons: why slices remain. effects: the
    number of layout conversions in the result, by kind ("scatter", "scatter-add", "gather",
    "slice", "pad", "border map"). notes: other remarks for the user (dynamic dimensions,
    assumptions). inputs: the tensor inputs of a call, flattened. before, after: sizes. removed:
    removed parameters by module. guards: conditions on dynamic sizes. values: the inputs of the
    example that are no tensors (None, numbers, flags, text), as Python literals; the result is
    valid for these values only. decisions, speed: of optimize(). interface: of the ONNX file that
    the network was read from. densities: by layer with sparse weights, the stored share of weights.
    form, graph_reasons: "class" or "graph", and why a class was not possible. numbers: by module,
    integer attributes with new values. modules: sizes by module, in order of execution; {} where
    they were not measured. batch: examples in the call whose MACs the sizes have; 0 if unknown.
    """

    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...]
    effects: Mapping[str, int]
    notes: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    before: Sizes
    after: Sizes
    removed: Mapping[str, int] = field(default_factory=dict)  # module -> parameters
    guards: tuple[str, ...] = ()  # conditions on dynamic sizes (see `guards`)
    values: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[TuneDecision, ...] = ()
    speed: Speed | None = None
    interface: Interface | None = None
    densities: Mapping[str, float] = field(default_factory=dict)
    form: str = "graph"
    graph_reasons: tuple[str, ...] = ()
    numbers: Mapping[str, Mapping[Attribute, Number | tuple[Number, ...]]] = field(default_factory=dict)
    modules: Mapping[str, FourSizes] = field(default_factory=dict)
    batch: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dictionary that JSON can represent; `from_dict` is the inverse."""
        return encode(Provenance, self)

    @classmethod
    def from_dict(cls, data: Any) -> Provenance:
        """The inverse of `to_dict`. Raises BadInput for other data."""
        return decode(Provenance, data, "provenance")


def provenance_of(network: Any) -> Provenance:
    """The provenance of a demasked network. Raises BadInput for other objects."""
    provenance = getattr(network, "demasked", None)
    if not isinstance(provenance, Provenance):
        raise BadInput(
            f"expected a network that demask returned, got a {type(network).__name__} without the "
            "attribute `demasked`; call demask.demask(model, args) and pass its result"
        )
    return provenance
