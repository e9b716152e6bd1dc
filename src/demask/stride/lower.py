"""lower(): a network rewritten for a target without strided convolutions.

Each strided convolution is replaced by the cheapest sound form in the target's ops (`forms`): the
fewest multiply-adds, then no rounding, then the fewest written elements, then the fewest calls. If
no form is sound, the stride is pushed downstream (`dilate`), if the target allows. Otherwise the
network is refused, with all reasons.
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
from demask.facts.ranges import ANY, Ranges, compute_ranges
from demask.failures import Log, public
from demask.graph.editor import GraphEditor, reshape_views
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE, Table, op_name
from demask.ops.schema import fake
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING
from demask.rewrites.driver import call_lines, differences, rewrite
from demask.rewrites.normalize import CANONICAL
from demask.shrink.build_uncut import build_uncut
from demask.shrink.on_device import run_through_cpu
from demask.shrink.pipeline import capture_program
from demask.stride.average_pools import POOLS_AS_CONVOLUTIONS
from demask.stride.dilate import dilate
from demask.stride.forms import FORMS, LACKING, StrideForm, write_dense
from demask.stride.strided_conv import (
    Cost,
    CostCounter,
    FormInputs,
    GraphWriter,
    StridedConv,
    call_of,
    chain_of,
    has_stride,
    site_of,
)
from demask.stride.targets import KINDS, Target
from demask.stride.targets import target as target_of

STRIDE_1 = "stride 1"  # the form of a convolution whose stride drops no position
DILATION = "dilation"  # the form that also rewrites the calls after the convolution


class NoSoundForm(BadInput):
    """The error for a strided convolution that the ops of a target cannot compute exactly.

    It is a `demask.BadInput` and a ValueError, too. `lower` and `instructions` raise it.

    Attributes:
        reasons: dict from the name of each form (a way to write the convolution without its stride)
            to the reason why it cannot be used. {} where no form was tried, such as for dynamic
            sizes.

    Example:
        >>> import demask, torch
        >>> model = torch.nn.Conv2d(1, 1, 3, stride=2).eval()
        >>> bare = demask.stride.Target("bare", frozenset())
        >>> try:
        ...     demask.stride.lower(model, (torch.ones(1, 1, 8, 8),), target=bare)
        ... except demask.stride.NoSoundForm as error:
        ...     print(error.reasons["slice"])
        the target has no slice
    """

    def __init__(self, text: str, reasons: Mapping[str, str]):
        super().__init__(text)
        self.reasons = dict(reasons)


@dataclass(frozen=True, slots=True)
class Choice:
    """The replacement of a strided convolution.

    node: name of the convolution. module: name of the module that owns its weight, or "". form: the
    chosen one. why: the reason. cost: of the form; None for "dilation" and "stride 1". refused: by
    other form, why it could not be used.
    """

    node: str
    module: str
    form: str
    why: str
    cost: Cost | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lacking = [name for name, reason in self.refused.items() if reason.startswith(LACKING)]
        reasons = [f"{name}: {reason}" for name, reason in self.refused.items() if name not in lacking]
        reasons += [f"without the ops that they need: {', '.join(lacking)}"] if lacking else []
        text = f"{self.module or self.node}: {self.form}, {self.why}"
        return f"{text}. Refused: {'; '.join(reasons)}" if reasons else text


@in_isolation
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
    """A network with the outputs of `model` in eval mode, without strided convolutions.

    It is for accelerators that have convolutions of stride 1 only. Each strided convolution is
    replaced by a form (a way to write it in the target's ops): the first exact one in the target's
    `forms`, or if that is empty, the exact one with the fewest multiply-adds. Outputs are equal up
    to rounding. `model` is not changed.

    Args:
        model: an `nn.Module`, in any mode, or a `torch.export.ExportedProgram`.
        args: example inputs by position, a tuple such as (x,). Default: ().
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        target: name of a built-in target ("max_pool", "avg_pool", "slice", "no_pool",
            "space_to_depth", "fhe" or "matrix_unit"), path of a TOML file, or a `Target`. Default:
            "max_pool".
        dynamic_shapes: sizes that may vary between calls, as for `demask.demask`. Default: the
            batch, where torch.export proves that it can vary. Spatial sizes must be static.
        table: the table of ops. Default: `demask.ops.TABLE`.

    Returns:
        A graph module. Its `demasked.notes` are texts: the form of each convolution, the reason,
        and the forms that cannot be used.

    Raises:
        NoSoundForm: no form of a convolution is exact on the target, or its spatial sizes are
            dynamic. The message has the reason of every form.
        BadInput: the target is unknown or its file is not valid; the network contains an op that
            the target forbids; or the model does not run on the example inputs.
        NotExportable: the model cannot be captured.

    Example:
        >>> import torch
        >>> from demask.stride import lower
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.ReLU()).eval()
        >>> x = torch.randn(1, 3, 9, 9)
        >>> plain = lower(net, (x,), target="matrix_unit")
        >>> torch.allclose(plain(x), net(x), atol=1e-6)
        True
    """
    wanted = target_of(target)
    rest = {"target": wanted, "dynamic_shapes": dynamic_shapes, "table": table}
    if (elsewhere := run_through_cpu(lower, model, args, kwargs, **rest)) is not None:
        return elsewhere
    before = rewrite(capture_program(model, args, kwargs, dynamic_shapes), CANONICAL)
    log = Log()
    program, choices = lowered(before, wanted, table, log)
    return build_uncut(Analysis(before, table), program, (*map(str, choices), *log.notes))


@in_isolation
@public
def lowered(
    program: Program, target: str | Path | Target = "max_pool", table: Table = TABLE, log: Log | None = None
) -> tuple[Program, tuple[Choice, ...]]:
    """A program without strided convolutions, and the replacement of each. Raises as `lower`.

    log: notes rewrites that failed, and collects changes if it has a list for them."""
    log = Log() if log is None else log
    wanted = target_of(target)
    _check_forms(wanted)
    if "avg_pool" in wanted.forbidden:
        program = rewrite(program, POOLS_AS_CONVOLUTIONS, table, log)
    _check_ops(program.graph, wanted)
    editor = GraphEditor(program)
    reshape_views(editor.graph)
    known, constants, choices = _value_ranges(editor, table), {}, []
    while (node := _next_strided(editor, wanted)) is not None:
        before = None if log.changes is None else call_lines(editor.graph)
        choice = _lowered(editor, node, wanted, known, constants, table)
        choices.append(choice)
        if log.changes is not None and before is not None:
            log.changes += differences(before, call_lines(editor.graph), "strides", choice.form, choice.why)
        if choice.form == DILATION:
            known = _value_ranges(editor, table)
    return editor.finish(), tuple(choices)


def _check_forms(target: Target) -> None:
    names = [*FORMS, DILATION]
    unknown = [name for name in target.forms if name not in names]
    if unknown:
        raise BadInput(f"target {target.name!r}: form {unknown[0]!r} is unknown; expected some of {', '.join(names)}")


def _check_ops(graph: fx.Graph, target: Target) -> None:
    """Raise BadInput for calls of ops that the target forbids."""
    kinds = {start: kind for kind in target.forbidden for start in KINDS[kind]}
    for node in graph.nodes:
        name = op_name(node.target) if node.op == "call_function" else ""
        kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
        if kind is not None:
            raise BadInput(f"the target {target.name!r} has no {kind}, which {node.name} calls ({name})")


def _value_ranges(editor: GraphEditor, table: Table) -> Ranges:
    return compute_ranges(editor.graph.nodes, {name: c.tensor for name, c in editor.constants.items()}, table)


def _next_strided(editor: GraphEditor, target: Target) -> fx.Node | None:
    convolutions = editor.calls(*CONVOLUTIONS_ANY_PADDING)
    return next((node for node in convolutions if has_stride(node, target.conv_stride)), None)


def _lowered(
    editor: GraphEditor, node: fx.Node, target: Target, known: Ranges, constants: dict[Any, str], table: Table
) -> Choice:
    """Replace one strided convolution by a form. constants: written so far, by content."""
    chain = chain_of(node, table)
    site = site_of(editor, chain, known, target.largest)
    if isinstance(site, str):
        raise NoSoundForm(f"{_name_with_module(editor, node)}: {site}", {})
    call = call_of(editor, chain)
    if not site.drops:
        value = write_dense(_graph_writer(editor, node, node, constants), site, call, 0)
        editor.replace(node, value)
        return Choice(node.name, _owning_module(editor, node), STRIDE_1, "there is only one window")
    names = target.forms or tuple(FORMS)
    outcomes = {name: FORMS[name].first_sound(site, target) for name in names if name in FORMS}
    refused = {name: reason for name, reason in outcomes.items() if isinstance(reason, str)}
    sound = {name: functions for name, functions in outcomes.items() if isinstance(functions, int)}
    costs = {name: cost_of(FORMS[name], site, target, node, call, functions) for name, functions in sound.items()}
    order = names if target.forms else (*sorted(costs, key=lambda name: costs[name]), DILATION)
    module = _owning_module(editor, node)
    for name in order:
        if name == DILATION:
            text = _push_stride(editor, node, target, table)
            if text is None:
                return Choice(node.name, module, DILATION, "all calls after it are dilated", None, refused)
            refused[DILATION] = text
        elif name in sound:
            why = _describe_choice(site, sound[name], costs[name], len(sound))
            write = _graph_writer(editor, chain[0], chain[sound[name]], constants)
            value = FORMS[name].built(write, site, target, call, sound[name])
            _replace_chain(editor, chain[: sound[name] + 1], value)
            return Choice(node.name, module, name, why, costs[name], refused)
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refused.items())
    raise NoSoundForm(
        f"{_name_with_module(editor, node)} has no form that is sound on the target {target.name!r}:{reasons}", refused
    )


def _push_stride(editor: GraphEditor, node: fx.Node, target: Target, table: Table) -> str | None:
    """Push a stride downstream: None on success, else why it cannot be."""
    if DILATION not in target.ops:
        return "the target has no dilation"
    return dilate(editor, node, target, table)


def cost_of(
    form: StrideForm, site: StridedConv, target: Target, node: fx.Node, call: FormInputs, functions: int
) -> Cost:
    """Cost of the convolution in a form and of all functions after it, on the example's sizes: of
    one image where any number may come."""
    count = CostCounter(fake(call.x).shape[0])
    x, weight = count.read(call.x), count.read(call.weight)
    bias = None if call.bias is None else count.read(call.bias)
    numbers = None if call.numbers is None else call.numbers.to("meta")
    value = form.built(count, site, target, replace(call, x=x, weight=weight, bias=bias, numbers=numbers), functions)
    for step in call.steps[functions:]:
        value = step(count, value)
    return count.cost(rounds=form.rounds)


def _describe_choice(site: StridedConv, functions: int, cost: Cost, sound: int) -> str:
    known = site.ranges[functions]
    where = f" after {functions} function{'s' * (functions > 1)}" if functions else ""
    values = f"values from {known}{where}; " if known != ANY else ""
    cheapest = f"the cheapest of {sound} sound forms" if sound > 1 else "the only sound form"
    return f"{cheapest} ({values}{cost.macs} multiply-adds, {cost.elements} elements written)"


def _replace_chain(editor: GraphEditor, chain: Sequence[fx.Node], value: fx.Node) -> None:
    editor.replace(chain[-1], value)
    for node in reversed(chain[:-1]):
        editor.graph.erase_node(node)


def _graph_writer(editor: GraphEditor, node: fx.Node, reader: fx.Node, constants: dict[Any, str]) -> GraphWriter:
    meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
    return GraphWriter(editor, reader, _owning_module(editor, node), constants, meta)


def _owning_module(editor: GraphEditor, node: fx.Node) -> str:
    """Name of the module that owns a convolution's weight; "" if it is computed."""
    weight = node.args[1]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return ""
    return editor.constants[str(weight.target)].name.rpartition(".")[0]


def _name_with_module(editor: GraphEditor, node: fx.Node) -> str:
    module = _owning_module(editor, node)
    return f"the convolution {node.name}" + (f" ({module})" if module else "")
