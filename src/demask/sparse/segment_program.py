"""A segment of a network as a value: steps over images and tokens, with weights as spans of
tensors.

A program defines what is computed, but not how: layouts, tiles and packed weights belong to a plan
(`sparse.plan`), which is for one machine and one size. It is text in graphs and files, so it is
untrusted until `SegmentProgram.parse` has checked it.

Value k is input k, or the output of step k - len(inputs). Kinds of values, by their tensors:

    image     [batch, channels, height, width]
    signal    [batch, channels, length]
    tokens    [..., channels]
    pixels    [batch, height, width, channels], an image with channels last
    matrices  [..., rows, columns], each with tokens of its own
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from demask.errors import BadInput
from demask.sparse.segment_checks import check_positive, check_step, is_count, kind_of, shape_of_step, weight_spans
from demask.sparse.segment_steps import INPUTS, NAMES, STEPS, SparseWeight, Step, has_rank, reads

MAX_TEXT = 4_000_000  # characters of a program: ResNet-152 has 60,000


@dataclass(frozen=True, slots=True)
class SegmentProgram:
    """Steps from inputs to outputs. inputs: kind of each input; outputs: numbers of values.

    static: numbers of inputs that are the same tensors in many calls, such as border maps: a plan
    converts them to its layout once, and again only when they change.
    """

    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    static: tuple[int, ...] = ()
    kinds: tuple[str, ...] = field(init=False, compare=False)  # of every value

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _kinds(self))

    def text(self) -> str:
        """The program as one line of JSON, read by `SegmentProgram.parse`."""
        steps = [{"op": NAMES[type(s)], **_plain(s)} for s in self.steps]
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
            kind = self.kinds[reads(step)[0]]
            try:
                shapes.append(check_positive(shape_of_step(step, shapes, kind), kind))
            except BadInput as error:
                raise BadInput(f"step {number} ({NAMES[type(step)]}): {error}") from None
        return shapes


def _plain(step: Step) -> dict[str, Any]:
    """The fields of a step that differ from their defaults."""
    changed = {}
    for f in fields(step):
        value = getattr(step, f.name)
        if value != f.default:
            changed[f.name] = weight_spans(value) if isinstance(value, SparseWeight) else value
    return changed


def _step(entry: dict[str, Any]) -> Step:
    kind = STEPS[entry.pop("op")]
    known = {f.name for f in fields(kind)}
    if set(entry) - known:
        raise BadInput(f"expected the fields {sorted(known)}, got {sorted(entry)}")
    values = {key: _tupled(value) for key, value in entry.items()}
    if "weight" in values:
        values["weight"] = SparseWeight(*values["weight"])
    return kind(**values)


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
            kinds.append(kind_of(step, [kinds[v] for v in reads(step)]))
        except BadInput as error:
            raise BadInput(f"step {number} ({NAMES[type(step)]}): {error}") from None
    if not program.outputs or not all(is_count(v) and v < len(kinds) for v in program.outputs):
        raise BadInput(f"expected outputs among {len(kinds)} values, got {program.outputs!r:.80}")
    input_count = len(program.inputs)
    if not all(is_count(v) and v < input_count for v in program.static):
        raise BadInput(f"expected static inputs below {input_count}, got {program.static!r:.80}")
    return tuple(kinds)
