"""A segment of a network as a value: steps over images and tokens, with weights as spans of
tensors.

A program defines what is computed, but not how: layouts, tiles and packed weights belong to a plan
(`exec.tape`), which is for one machine and one size. It is text in graphs and files, so it is
untrusted until `SegmentProgram.parse` has checked it. Kinds of values: `segment_steps`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demask.errors import BadInput
from demask.exec.steps.segment_calls import CALLED
from demask.exec.steps.segment_rows import ROWS, check_step, is_count, kind_of, name_of, row_of, shape_of, weight_spans
from demask.exec.steps.segment_steps import CHANNELS_LAST, INPUTS, MAX_SIZE, AnyStep, SparseWeight, Step, has_rank


def check_positive(shape: tuple[Any, ...], kind: str) -> tuple[Any, ...]:
    """The shape. Raises BadInput if an image is empty or too large (symbolic sizes pass)."""
    sizes = () if kind in CHANNELS_LAST else shape[2:]
    if any(isinstance(size, int) and not 1 <= size <= MAX_SIZE for size in sizes):
        raise BadInput(f"expected windows that fit into the input, got an output of {shape}")
    return shape


MAX_TEXT = 4_000_000  # characters of a program: ResNet-152 has 60,000


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Steps from inputs to outputs. inputs: kind of each input; outputs: numbers of values.

    static: numbers of inputs that are the same tensors in many calls, such as border maps: a plan
    converts them to its layout once, and again only when they change.
    """

    inputs: tuple[str, ...]
    steps: tuple[AnyStep, ...]
    outputs: tuple[int, ...]
    static: tuple[int, ...] = ()
    kinds: tuple[str, ...] = field(init=False, compare=False)  # of every value

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _kinds(self))

    def text(self) -> str:
        """The program as one line of JSON, read by `SegmentProgram.parse`."""
        steps = [_entry(step) for step in self.steps]
        document: dict[str, Any] = {"inputs": self.inputs, "steps": steps, "outputs": self.outputs}
        if self.static:
            document["static"] = self.static
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> SegmentProgram:
        """The program of a text. Raises BadInput if the text is not a valid program."""
        if len(text) > MAX_TEXT:
            raise BadInput(f"expected a program of at most {MAX_TEXT} characters, got {len(text)}")
        try:
            document = json.loads(text)
            steps = tuple(_step(dict(entry)) for entry in document["steps"])
            numbers = (tuple(document.get(key, ())) for key in ("outputs", "static"))
            return cls(tuple(document["inputs"]), steps, *numbers)
        except BadInput:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadInput(f"expected a program as written by SegmentProgram.text: {error!r:.200}") from None

    def shapes(self, inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
        """The shape of every value; sizes may be symbolic.

        Raises BadInput if the inputs or steps do not match.
        """
        if len(inputs) != len(self.inputs):
            raise BadInput(f"expected {len(self.inputs)} inputs, got {len(inputs)}")
        shapes: list[tuple[Any, ...]] = []
        for kind, shape in zip(self.inputs, inputs, strict=True):
            if not has_rank(kind, len(shape)):
                raise BadInput(f"expected {kind}, got a tensor of shape {tuple(shape)}")
            shapes.append(tuple(shape))
        for number, step in enumerate(self.steps):
            kind = self.kinds[step.x]
            try:
                shapes.append(check_positive(shape_of(step, [shapes[v] for v in step.reads], kind), kind))
            except BadInput as error:
                raise BadInput(f"step {number} ({name_of(step)}): {error}") from None
        return shapes


# Keys of the texts of steps that are always written; others where they differ from their defaults.
ALWAYS = ("x", "z", "xs", "weight", "bias", "call", "kind")


def _entry(step: AnyStep) -> dict[str, Any]:
    """A step as an object of JSON."""
    row, entry = row_of(step), {"op": name_of(step)}
    values: dict[str, Any] = {
        "x": step.x,
        "z": step.reads[-1],
        "xs": step.reads,
        "weight": weight_spans(step.weight),
        "call": step.op,
        **step.fields._asdict(),
    }
    defaults = {"act": None, "add": None, "index": None, "name": "", **row.fields._field_defaults}
    for key in row.keys:
        value = values[key] if key in values else getattr(step, key)
        if key in ALWAYS or key not in defaults or value != defaults[key]:
            entry[key] = value
    return entry


def _step(entry: dict[str, Any]) -> AnyStep:
    """The step of an object of JSON. Raises BadInput, KeyError or TypeError for an invalid one."""
    op = entry.pop("op")
    if op == "call":
        op = entry["call"]
        if op not in CALLED:
            raise BadInput(f"expected a call of {sorted(CALLED)}, got {op!r:.40}")
    elif op in CALLED:
        raise BadInput(f"expected a call of {op}, got a step")
    row = ROWS[op]
    if set(entry) - set(row.keys):
        raise BadInput(f"expected the fields {sorted(row.keys)}, got {sorted(entry)}")
    values = {key: _tupled(value) for key, value in entry.items()}
    reads = values["xs"] if "xs" in row.keys else tuple(values[key] for key in ("x", "z") if key in row.keys)
    added = () if values.get("add") is None else (values["add"],)
    fields = row.fields(**{key: values[key] for key in row.fields._fields if key in values})
    weight = {"weight": SparseWeight(*values["weight"]), "bias": values["bias"]} if "weight" in row.keys else {}
    rest = {key: values[key] for key in ("index", "act", "kind", "name") if key in values}
    return Step(op, (*reads, *added), fields, **weight, **rest, adds=bool(added) or row.adds)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _kinds(program: SegmentProgram) -> tuple[str, ...]:
    """The kind of each value. Raises BadInput for steps with invalid fields."""
    kinds: list[str] = []
    for kind in program.inputs:
        if kind not in INPUTS:
            raise BadInput(f"expected inputs of the kinds {INPUTS}, got {kind!r:.40}")
        kinds.append(kind)
    for number, step in enumerate(program.steps):
        try:
            check_step(step, len(kinds))
            kinds.append(kind_of(step, [kinds[v] for v in step.reads]))
        except BadInput as error:
            raise BadInput(f"step {number} ({name_of(step)}): {error}") from None
    if not program.outputs or not all(is_count(v) and v < len(kinds) for v in program.outputs):
        raise BadInput(f"expected outputs among {len(kinds)} values, got {program.outputs!r:.80}")
    input_count = len(program.inputs)
    if not all(is_count(v) and v < input_count for v in program.static):
        raise BadInput(f"expected static inputs below {input_count}, got {program.static!r:.80}")
    return tuple(kinds)
