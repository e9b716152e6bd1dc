"""lower(): a network for a target that has no strided convolution.

Each strided convolution takes the cheapest form that the target's ops allow and that is sound where
it stands (`forms`): least multiply-adds, then nothing rounded, then fewest elements written, then
fewest calls. Where no form of the convolution alone is sound, its stride is pushed downstream
(`dilate`), if the target can; and where that is refused too, the network is, with every reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.facts.ranges import ANY, Ranges, ranges
from demask.failures import public
from demask.graph.editor import GraphEditor, reshape_views
from demask.graph.normalize.canonical_calls import spelled
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE, Table, op_name
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING
from demask.shrink.build_uncut import finished
from demask.shrink.on_device import through_cpu
from demask.shrink.pipeline import given
from demask.stride.average_pools import pools_to_convs
from demask.stride.dilation.dilate import dilated
from demask.stride.lowering.form_writers import Cost, Counting, GraphWriter
from demask.stride.lowering.forms import FORMS, LACKING, StrideForm, wide
from demask.stride.lowering.strided_conv import (
    FormInputs,
    StridedConv,
    call_of,
    chain_of,
    site_of,
    strided,
)
from demask.stride.targets import KINDS, Target
from demask.stride.targets import target as target_of

STRIDE_1 = "stride 1"  # what a convolution becomes whose stride leaves nothing out
DILATION = "dilation"  # the form that rewrites what reads the convolution, not it alone


class NoSoundForm(BadInput):
    """A strided convolution has no form that is sound in the ops of a target. reasons: per form,
    why not."""

    def __init__(self, text: str, reasons: Mapping[str, str]):
        super().__init__(text)
        self.reasons = dict(reasons)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a strided convolution became.

    node: the convolution. module: where it stood. form: what was taken, `why` in words, at which
    cost (None for a stride that was pushed downstream). refused: the other forms, and why not.
    """

    node: str
    module: str
    form: str
    why: str
    cost: Cost | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lacking = [name for name, reason in self.refused.items() if reason.startswith(LACKING)]
        said = [f"{name}: {reason}" for name, reason in self.refused.items()
                if name not in lacking]  # fmt: skip
        said += [f"without the ops that they need: {', '.join(lacking)}"] if lacking else []
        text = f"{self.module or self.node}: {self.form}, {self.why}"
        return f"{text}. Refused: {'; '.join(said)}" if said else text


@public
def lower(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str | Path | Target = "max_pool",
    dynamic_shapes: Any = None,
    table: Table = TABLE,
) -> Demasked:
    """The model without strided convolutions, for a target that has none: same call, same outputs.

    args, kwargs, dynamic_shapes, table: as of `demask.demask`; spatial sizes must be static.
    target: the name of a built-in one (`demask.stride.TARGETS`), a TOML file, or a `Target`. What
    each convolution became, why, and which forms were refused is told by `result.demasked.notes`.
    Raises NoSoundForm, a BadInput, which names the convolution and every form's reason; BadInput
    for a target that cannot be read or an op that it forbids; NotExportable. Feature rows 002-a, b,
    c, e.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.ReLU()).eval()
    >>> x = torch.randn(1, 3, 9, 9)
    >>> plain = lower(net, (x,), target="matrix_unit")
    >>> torch.allclose(plain(x), net(x), atol=1e-6)
    True
    """
    wanted = target_of(target)
    rest = {"target": wanted, "dynamic_shapes": dynamic_shapes, "table": table}
    if (elsewhere := through_cpu(lower, model, args, kwargs, **rest)) is not None:
        return elsewhere
    before = spelled(given(model, args, kwargs, dynamic_shapes))
    program, choices = lowered(before, wanted, table)
    return finished(Analysis(before, table), program, map(str, choices))


@public
def lowered(
    program: Program, target: str | Path | Target = "max_pool", table: Table = TABLE
) -> tuple[Program, tuple[Choice, ...]]:
    """A program without strided convolutions, and what became of each; raises as `lower`."""
    wanted = target_of(target)
    _check_forms(wanted)
    if "avg_pool" in wanted.forbidden:
        program = pools_to_convs(program, whole=False)
    _check_ops(program.graph, wanted)
    editor = GraphEditor(program)
    reshape_views(editor.graph)
    known, kept, choices = _known(editor, table), {}, []
    while (node := _next(editor, wanted)) is not None:
        choice = _lowered(editor, node, wanted, known, kept, table)
        choices.append(choice)
        if choice.form == DILATION:
            known = _known(editor, table)
    return editor.finish(), tuple(choices)


def _check_forms(target: Target) -> None:
    names = [*FORMS, DILATION]
    unknown = [name for name in target.forms if name not in names]
    if unknown:
        raise BadInput(f"target {target.name!r}: form {unknown[0]!r} is unknown; "
                       f"expected some of {', '.join(names)}")  # fmt: skip


def _check_ops(graph: fx.Graph, target: Target) -> None:
    """Raise BadInput for calls of ops that the target forbids."""
    kinds = {start: kind for kind in target.forbidden for start in KINDS[kind]}
    for node in graph.nodes:
        name = op_name(node.target) if node.op == "call_function" else ""
        kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
        if kind is not None:
            raise BadInput(f"the target {target.name!r} has no {kind}, which {node.name} calls "
                           f"({name})")  # fmt: skip


def _known(editor: GraphEditor, table: Table) -> Ranges:
    return ranges(editor.graph, {name: c.tensor for name, c in editor.constants.items()}, table)


def _next(editor: GraphEditor, target: Target) -> fx.Node | None:
    found = editor.calls(*CONVOLUTIONS_ANY_PADDING)
    return next((node for node in found if strided(node, target.conv_stride)), None)


def _lowered(
    editor: GraphEditor,
    node: fx.Node,
    target: Target,
    known: Ranges,
    kept: dict[Any, str],
    table: Table,
) -> Choice:
    """Put a form in the place of one strided convolution."""
    chain = chain_of(node, table)
    site = site_of(editor, chain, known, target.largest)
    if isinstance(site, str):
        raise NoSoundForm(f"{_named(editor, node)}: {site}", {})
    call = call_of(editor, chain)
    if not site.drops:
        made = wide(_writing(editor, node, node, kept), site, call, 0)
        editor.replace(node, made)
        return Choice(node.name, _module(editor, node), STRIDE_1, "there is one window to make")
    names = target.forms or tuple(FORMS)
    places = {name: FORMS[name].place(site, target) for name in names if name in FORMS}
    refused = {name: reason for name, reason in places.items() if isinstance(reason, str)}
    sound = {name: place for name, place in places.items() if isinstance(place, int)}
    costs = {name: cost_of(FORMS[name], site, target, node, call, place)
             for name, place in sound.items()}  # fmt: skip
    order = names if target.forms else (*sorted(costs, key=lambda name: costs[name]), DILATION)
    module = _module(editor, node)
    for name in order:
        if name == DILATION:
            text = _dilated(editor, node, target, table)
            if text is None:
                return Choice(node.name, module, DILATION, "all that reads it is dilated", None,
                              refused)  # fmt: skip
            refused[DILATION] = text
        elif name in sound:
            why = _why(site, sound[name], costs[name], len(sound))
            _put(editor, chain, FORMS[name], site, target, call, sound[name], kept)
            return Choice(node.name, module, name, why, costs[name], refused)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
    raise NoSoundForm(
        f"{_named(editor, node)} has no form that is sound on the target {target.name!r}:{reasons}",
        refused,
    )


def _dilated(editor: GraphEditor, node: fx.Node, target: Target, table: Table) -> str | None:
    if DILATION not in target.ops:
        return "the target has no dilation"
    return dilated(editor, node, target, table)


def cost_of(
    form: StrideForm, site: StridedConv, target: Target, node: fx.Node, call: FormInputs, place: int
) -> Cost:
    """What the convolution and all functions behind it take, in a form, on the example's sizes."""
    count = Counting()
    x, weight = count.read(call.x), count.read(call.weight)
    bias = None if call.bias is None else count.read(call.bias)
    numbers = None if call.numbers is None else call.numbers.to("meta")
    value = form.built(count, site, target, replace(call, x=x, weight=weight, bias=bias,
                                                    numbers=numbers), place)  # fmt: skip
    for step in call.steps[place:]:
        value = step(count, value)
    return count.cost(rounds=form.rounds)


def _why(site: StridedConv, place: int, cost: Cost, sound: int) -> str:
    """How the form was chosen, what is known of the values there, and what it costs."""
    known = site.ranges[place]
    where = f" behind {place} function{'s' * (place > 1)}" if place else ""
    values = f"values from {known}{where}; " if known != ANY else ""
    cheapest = f"the cheapest of {sound} sound forms" if sound > 1 else "the one sound form"
    return f"{cheapest} ({values}{cost.macs} multiply-adds, {cost.elements} elements written)"


def _put(
    editor: GraphEditor, chain: Sequence[fx.Node], form: StrideForm, site: StridedConv, target: Target,
    call: FormInputs, place: int, kept: dict[Any, str],
) -> None:  # fmt: skip
    """Write the form before the last node that it stands for, and let it be read instead."""
    chain = chain[: place + 1]
    write = _writing(editor, chain[0], chain[-1], kept)
    made = form.built(write, site, target, call, place)
    editor.replace(chain[-1], made)
    for gone in reversed(chain[:-1]):
        editor.graph.erase_node(gone)


def _writing(
    editor: GraphEditor, node: fx.Node, reader: fx.Node, kept: dict[Any, str]
) -> GraphWriter:
    """What writes, before `reader`, calls that stand for `node`."""
    meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
    return GraphWriter(editor, reader, _module(editor, node), kept, meta)


def _module(editor: GraphEditor, node: fx.Node) -> str:
    """The module that a convolution's weight belongs to; else none."""
    weight = node.args[1]
    held = isinstance(weight, fx.Node) and weight.op == "get_attr"
    return editor.constants[str(weight.target)].name.rpartition(".")[0] if held else ""  # type: ignore[union-attr]


def _named(editor: GraphEditor, node: fx.Node) -> str:
    module = _module(editor, node)
    return f"the convolution {node.name}" + (f" ({module})" if module else "")
