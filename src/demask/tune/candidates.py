"""The forms of a program that are worth measuring whole, each made of the pieces that are fastest.

What a piece costs is asked of the cost model; what the pieces cost together is measured, since
caches and calls are shared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx

from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.provenance import TuneDecision
from demask.graph.queries import ExampleSizes, input_dependent
from demask.ops import Table, schema
from demask.ops.traits import CONV_OF_AXES
from demask.tune.epilogue import Epilogue
from demask.tune.layer_costs import FUSED, PLAIN, Asker, Layer
from demask.tune.passes.channels_last import CONVOLUTIONS as IMAGES
from demask.tune.passes.channels_last import convolves, laid_out, movable
from demask.tune.passes.conv_into_arena import prefilled
from demask.tune.passes.fold_affine import absorbed, contraction
from demask.tune.passes.fuse_epilogues import chain, fused
from demask.tune.passes.join_as_sum import Sum, summed
from demask.tune.passes.merge_activations import named
from demask.tune.passes.one_pixel_as_linear import flattened
from demask.tune.passes.pack_pixels import paired
from demask.tune.passes.pad_channels import Widening, rounded, widened

aten = torch.ops.aten
GAIN = 0.97  # a piece in another form must take less than this share of what it took
MULTIPLES = (8, 16)  # channels: halves and wholes of a vector register


@dataclass(slots=True)
class Candidate:
    """A program in one form: its name, what was decided for its pieces. exact: the program that it
    comes near to, where its weights are stored with fewer bits."""

    name: str
    program: Program
    decisions: list[TuneDecision] = field(default_factory=list)
    exact: Program | None = None


def forms(
    program: Program, asker: Asker, table: Table, tell: Callable[[str], object]
) -> Iterator[Candidate]:
    """The program with norms in the weights, then with layers in their fastest forms: images as
    they come, channels last, or the one or other by their size."""
    base = flattened(absorbed(named(program)), table)
    yield Candidate("norms in the weights", base)
    tell("asking what layers cost")
    groups = by_size(base, asker)
    yield from _both(Maker(asker, lambda _: False, table), "layers with their epilogues", base)
    if not groups or not movable(base):
        return
    yield from _both(Maker(asker, lambda _: True, table), "channels last", base)
    choice = {size: costs[True] < GAIN * costs[False] for size, costs in groups.items()}
    if len(set(choice.values())) > 1:
        last = partial(_chosen, asker, choice)
        yield from _both(Maker(asker, last, table), "channels last for some sizes", base)


def _both(maker: Maker, name: str, base: Program) -> Iterator[Candidate]:
    form = maker.made(name, base)
    yield form
    yield from maker.in_arena(form)


def _chosen(asker: Asker, choice: dict[tuple[int, ...], bool], node: fx.Node) -> bool:
    return choice.get(asker.shape(node)[2:], False)


def by_size(program: Program, asker: Asker) -> dict[tuple[int, ...], dict[bool, float]]:
    """Seconds of the convolutions that make images of one size, with channels last and without."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    found: dict[tuple[int, ...], dict[bool, float]] = defaultdict(lambda: {True: 0.0, False: 0.0})
    for node in editor.calls(*IMAGES):
        if node in live and contraction(editor, node) is not None and convolves(node):
            after = chain(node, live)
            for last in (True, False):
                _, taken = asker.layer(
                    asker.of(node), last, after.after, other=after.other is not None
                )
                found[asker.shape(node)[2:]][last] += taken
    return found


@dataclass(slots=True)
class Maker:
    """Makes one form: `last` says which convolutions have their channels last."""

    asker: Asker
    last: Callable[[fx.Node], bool]
    table: Table
    decisions: list[TuneDecision] = field(default_factory=list)

    def made(self, name: str, base: Program) -> Candidate:
        """The form of a program whose norms are in the weights."""
        program = summed(base, self.join)
        program = widened(program, self.worth, self.table)
        for multiple in MULTIPLES:
            width = lambda n, m=multiple: -(-n // m) * m  # noqa: E731
            program = rounded(program, width, self.worth, self.table)
        program = fused(program, self.fuse)
        return Candidate(name, self.arranged(program), self.decisions)

    def arranged(self, program: Program) -> Program:
        """A fused program in its memory layout."""
        return paired(laid_out(program, self.last, self.table), self.pair)

    def in_arena(self, form: Candidate) -> Iterator[Candidate]:
        """The form once more with its convolutions in the arena, if any is large."""
        program = prefilled(form.program, self.asker.example)
        if program is not None:
            again = laid_out(program, self.last, self.table)
            yield Candidate(f"{form.name}, in one arena", again, form.decisions)

    def join(self, editor: GraphEditor, found: Sum, branch: fx.Node, join: fx.Node) -> str | None:
        """How a layer should write at its places of a join: its rows there, or a 1 x 1 convolution
        behind it; None to leave scatter-adds and pads as they are."""
        layer, last = self.asker.of(branch), self.last(branch)
        after = _after(join)
        shape, count = self.asker.shape(join), self.asker.shape(branch)[found.axis]
        rows = shape[found.axis] - count
        grown = self.asker.layer(layer.wider(rows), last, after, other=True)[1]
        alone = self.asker.layer(layer, last)[1]
        into = [shape, self.asker.shape(branch)]
        added = self.asker.call(aten.index_add_.default, last, into, layer.dtype, found.axis,
                                index=count)  # fmt: skip
        more = self.asker.call(aten.relu_.default, last, [shape], layer.dtype)
        seconds = {"grow": grown, "scatter-add": alone + added + more}
        if found.axis == 1 and layer.convolves and "transpose" not in layer.target:
            seconds["place"] = alone + self._place(branch, layer, shape, last, after)
        best = min(seconds, key=seconds.__getitem__)
        self.decisions.append(TuneDecision(f"the join behind {_named(branch)}", best, seconds))
        return None if best == "scatter-add" else best

    def _place(self, branch: fx.Node, layer: Layer, shape: tuple[int, ...], last: bool,
               after: Epilogue) -> float:  # fmt: skip
        axes, count = len(shape) - 2, self.asker.shape(branch)[1]
        geometry = ((1,) * axes, (0,) * axes, (1,) * axes, 1)
        weight = (shape[1], count, *[1] * axes)
        one = Layer(str(CONV_OF_AXES[axes]), self.asker.shape(branch), weight, geometry, False,
                    layer.dtype, layer.device)  # fmt: skip
        return self.asker.layer(one, last, after, other=True)[1]

    def worth(self, editor: GraphEditor, plan: Widening, pad: fx.Node | None) -> bool:
        """Do wider layers take less than they do now, the pad that goes included?"""
        live = input_dependent(editor.graph)
        before = after = 0.0
        for node in {**plan.rows, **plan.columns}:
            layer, found = self.asker.of(node), chain(node, live)
            wider = layer.wider(plan.more if node in plan.rows else 0,
                                plan.more if node in plan.columns else 0)  # fmt: skip
            last, other = self.last(node), found.other is not None
            before += self.asker.layer(layer, last, found.after, other=other)[1]
            after += self.asker.layer(wider, last, found.after, other=other)[1]
        name = "the width of"
        if pad is not None:
            name, dtype = "the pad behind", pad.meta["val"].dtype
            source: fx.Node = schema.arguments(pad)["self"]
            pads = schema.arguments(pad)["pad"]
            target, shapes = aten.constant_pad_nd.default, [self.asker.shape(source)]
            before += self.asker.call(target, self.last(source), shapes, dtype, list(pads), 0.0)
        better = after < GAIN * before
        if better:
            first = next(iter(plan.rows), None)
            place = name if first is None else f"{name} {_named(first)}"
            self.decisions.append(
                TuneDecision(place, "wider", {"as it is": before, "wider": after})
            )
        return better

    def fuse(self, node: fx.Node, after: Epilogue, other: bool) -> bool:
        """Is a layer faster as a call of oneDNN's with its epilogue?"""
        layer, last = self.asker.of(node), self.last(node)
        forms = self.asker.forms(layer, last)
        seconds = {f: self.asker.seconds(layer, f, last, after, other) for f in forms}
        best = min(seconds, key=seconds.__getitem__)
        self.decisions.append(TuneDecision(_named(node), best, seconds))
        return best != PLAIN

    def pair(self, editor: GraphEditor, node: fx.Node) -> int:
        """How many neighbouring pixels a narrow convolution should compute at once."""
        layer, after, other = fused_layer(node, self.asker.example)
        seconds = {f: self.asker.seconds(layer, f, True, after, other)
                   for f in self.asker.forms(layer, True) if f != PLAIN}  # fmt: skip
        best = min(seconds, key=seconds.__getitem__)
        return 1 if best == FUSED or not self.last(node) else int(best.split()[0])


def fused_layer(node: fx.Node, example: ExampleSizes) -> tuple[Layer, Epilogue, bool]:
    """The layer that a fused convolution is, its epilogue, whether something is added."""
    found = schema.arguments(node)
    axes = len(found["padding"])
    geometry = tuple(tuple(found[key]) for key in ("stride", "padding", "dilation"))
    value = node.meta["val"]
    layer = Layer(str(CONV_OF_AXES[axes]), example.shape(found["X"]), example.shape(found["W"]),
                  (*geometry, found["groups"]), found["B"] is not None, value.dtype,
                  value.device)  # fmt: skip
    if "other" in found:
        return layer, Epilogue(found["unary_attr"] or "none"), True
    return layer, Epilogue(found["attr"], tuple(found["scalars"]), found["algorithm"]), False


def _named(node: fx.Node) -> str:
    """A layer by the module that holds its weight."""
    name = str(schema.arguments(node)["weight"].target)
    return name.rpartition(".")[0] or name


def _after(join: fx.Node) -> Epilogue:
    readers = list(join.users)
    relu = len(readers) == 1 and readers[0].target is aten.relu.default
    return Epilogue("relu") if relu else Epilogue()
