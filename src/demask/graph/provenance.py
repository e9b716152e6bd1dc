"""What a demasked network remembers of the one it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

Positions = tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor of the result was cut from one of the original.

    source: its fully qualified name in the original. shape: its shape there. kept: per axis the
    old positions in their new order, or None where the whole axis was kept. The scale and shift of
    a norm that was cut carry axes of size one behind theirs, to broadcast.
    """

    source: str
    shape: tuple[int, ...]
    kept: tuple[Positions, ...]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something was kept or done: `count` slices of axis `axis` of the value made by `node`.

    op: where nothing is known of the very call of `node`, the op it calls ("aten.foo.default").
    """

    node: str
    module: str
    axis: int
    count: int
    text: str
    op: str = ""

    def __str__(self) -> str:
        place = self.module or self.node
        return f"{self.text}: {self.count} kept on axis {self.axis} of {place}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Counts of one network: parameters (elements; floating buffers included), MACs of one call on
    the example inputs, bytes of all its tensors."""

    parameters: int
    macs: int
    bytes: int


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor input: sizes (an int, or the name of a dynamic dimension), dtype ("float32"), and
    the example size of every dimension."""

    name: str
    sizes: tuple[int | str, ...]
    dtype: str
    example: tuple[int, ...]


NAMELESS = ("", "?", "-1", "None")  # what exporters write for a dynamic size without a name


@dataclass(frozen=True, slots=True)
class OnnxPort:
    """One input or output of an ONNX file: its name, its dtype ("float32"; else what kind of value
    it is), its sizes (names of dynamic ones, "" for one with no name), None if it has none."""

    name: str
    dtype: str
    sizes: tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class QuantizationGrid:
    """The whole numbers that a constant of an ONNX file is stored as: their dtype ("int8"), and one
    scale and zero point for all of it, or one of each for every place on an axis."""

    dtype: str
    axis: int
    scales: tuple[float, ...]
    zero_points: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interface:
    """How an ONNX file is called, and what it says of itself. metadata: its `metadata_props`.
    grids: of quantized constants, by the name that they get in the module."""

    inputs: tuple[OnnxPort, ...]
    outputs: tuple[OnnxPort, ...]
    name: str = ""
    doc: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    grids: Mapping[str, QuantizationGrid] = field(default_factory=dict)


WHOLE = "the network, whole"
GIVEN = "given"  # the form in which nothing was changed


@dataclass(frozen=True, slots=True)
class TuneDecision:
    """What optimize() chose for one piece of a network: the seconds of each form it could take
    (infinite where it cannot), and which is returned (or GIVEN). place: where, or WHOLE."""

    place: str
    chosen: str
    seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; None stands for infinity, which JSON has not."""
        seconds = {form: taken if taken < inf else None for form, taken in self.seconds.items()}
        return {"place": self.place, "chosen": self.chosen, "seconds": seconds}


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a result of optimize() was beside the network as given, called in turns.

    given, result: seconds of a call: median, 10 % and 90 % quantiles. ratio: of the medians; least:
    its lower 95 % bound (bootstrap over `pairs` rounds).
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
    """What was done to a network: `slim.demasked`.

    cuts: per tensor of the result, how it was cut. reasons: every slice kept and why. effects: how
    many ops of each kind the result holds to keep shapes ("scatter", "scatter-add", "gather",
    "slice", "pad", "border map"). notes: what else the user should know (dynamic dimensions,
    licences used). inputs: the tensors a call takes, flattened. before, after: sizes. values: what
    other inputs (None, numbers, flags, text) were in the example, as Python spells it; the result
    is the network for these alone. decisions, speed: of optimize() alone: what was chosen for each
    piece, and how fast the result was beside the network as given. interface: of a network that
    came from an ONNX file, how it was called there. densities: of the layers that are computed by
    their nonzeros alone, the share of weights that are stored.
    """

    cuts: Mapping[str, Cut]
    reasons: tuple[Reason, ...]
    effects: Mapping[str, int]
    notes: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    before: Sizes
    after: Sizes
    removed: Mapping[str, int] = field(default_factory=dict)  # module -> parameters gone
    guards: tuple[str, ...] = ()  # conditions on dynamic sizes (see `guards`)
    values: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[TuneDecision, ...] = ()
    speed: Speed | None = None
    interface: Interface | None = None
    densities: Mapping[str, float] = field(default_factory=dict)
    form: str = "graph"
    graph_reasons: tuple[str, ...] = ()
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` takes it back."""
        return {
            "cuts": {name: asdict(cut) for name, cut in self.cuts.items()},
            "reasons": [asdict(reason) for reason in self.reasons],
            "effects": dict(self.effects),
            "notes": list(self.notes),
            "inputs": [asdict(spec) for spec in self.inputs],
            "before": asdict(self.before),
            "after": asdict(self.after),
            "removed": dict(self.removed),
            "guards": list(self.guards),
            "values": dict(self.values),
            "decisions": [decision.to_dict() for decision in self.decisions],
            "speed": None if self.speed is None else asdict(self.speed),
            "interface": None if self.interface is None else asdict(self.interface),
            "densities": dict(self.densities),
            "form": self.form,
            "graph_reasons": list(self.graph_reasons),
            "numbers": {path: dict(values) for path, values in self.numbers.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        """The inverse of `to_dict`; raises KeyError or TypeError on anything else."""
        return cls(
            cuts={name: _cut(cut) for name, cut in data["cuts"].items()},
            reasons=tuple(Reason(**reason) for reason in data["reasons"]),
            effects=dict(data["effects"]),
            notes=tuple(data["notes"]),
            inputs=tuple(_input(spec) for spec in data["inputs"]),
            before=Sizes(**data["before"]),
            after=Sizes(**data["after"]),
            removed=dict(data["removed"]),
            guards=tuple(str(guard) for guard in data.get("guards", ())),
            values={str(k): str(v) for k, v in data.get("values", {}).items()},
            decisions=tuple(_decision(row) for row in data.get("decisions", ())),
            speed=None if data.get("speed") is None else _speed(data["speed"]),
            interface=None if data.get("interface") is None else _interface(data["interface"]),
            densities={str(k): float(v) for k, v in data.get("densities", {}).items()},
            form=str(data.get("form", "graph")),
            graph_reasons=tuple(map(str, data.get("graph_reasons", ()))),
            numbers={str(k): _numbers(v) for k, v in data.get("numbers", {}).items()},
        )


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers, or rows of them, by name."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        row = value if isinstance(value, (list, tuple)) else [value]
        if not all(type(n) is int and 0 <= n < 2**31 for n in row) or not name.isidentifier():
            raise ValueError(f"expected whole numbers, got {name} = {value!r:.40}")
        found[str(name)] = tuple(row) if isinstance(value, (list, tuple)) else value
    return found


def _decision(data: Mapping[str, Any]) -> TuneDecision:
    seconds = {str(form): inf if taken is None else float(taken)
               for form, taken in data["seconds"].items()}  # fmt: skip
    return TuneDecision(str(data["place"]), str(data["chosen"]), seconds)


def _speed(data: Mapping[str, Any]) -> Speed:
    given, result = (tuple(map(float, data[key])) for key in ("given", "result"))
    return Speed(**{**data, "given": given, "result": result})


def _interface(data: Mapping[str, Any]) -> Interface:
    inputs, outputs = (tuple(map(_port, data[key])) for key in ("inputs", "outputs"))
    metadata = {str(k): str(v) for k, v in data["metadata"].items()}
    grids = {str(k): _grid(v) for k, v in data.get("grids", {}).items()}
    return Interface(inputs, outputs, str(data["name"]), str(data["doc"]), metadata, grids)


def _grid(data: Mapping[str, Any]) -> QuantizationGrid:
    scales, points = tuple(map(float, data["scales"])), tuple(map(int, data["zero_points"]))
    if not all(0 < scale < inf for scale in scales) or any(abs(p) >= 2**31 for p in points):
        raise ValueError("expected finite scales above 0, and zero points of 32 bits")
    return QuantizationGrid(str(data["dtype"]), int(data["axis"]), scales, points)


def _port(data: Mapping[str, Any]) -> OnnxPort:
    sizes = data["sizes"]
    return OnnxPort(str(data["name"]), str(data["dtype"]), None if sizes is None else tuple(sizes))


def _cut(data: Mapping[str, Any]) -> Cut:
    kept = tuple(None if axis is None else tuple(map(int, axis)) for axis in data["kept"])
    return Cut(str(data["source"]), tuple(map(int, data["shape"])), kept)


def _input(data: Mapping[str, Any]) -> InputSpec:
    return InputSpec(data["name"], tuple(data["sizes"]), data["dtype"], tuple(data["example"]))
