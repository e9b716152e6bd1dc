"""Conditions that change no output: columns of zero inputs are skipped, rows proved zero are.

A chain linear, ReLU, linear, … is found in the graph and becomes one call (`pilot.chain_op`) in
which each layer has the mode that is predicted to be the fastest, given what the example inputs do
to it. A chain that nothing makes faster stays as it was, and the module says why. Skipping columns
needs no pilot: its own baseline, and most of the gain wherever hidden values are mostly zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import signature_of
from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.graph.editor import GraphEditor
from demask.graph.recorded_run import RecordedRun
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE, Table, schema
from demask.pilot.chains.chain_cost import ChainRates, Reads, here, reads
from demask.pilot.chains.chain_op import ROWS
from demask.pilot.chains.chain_plan import ChainLayer, ChainPlan, LayerCounts
from demask.pilot.chains.fast_call import called, only_chain
from demask.pilot.chains.find import LinearChain, behind, found, replaced, without_dropout
from demask.pilot.conditions.base import Condition, Conditioned, Decision
from demask.shrink.build_uncut import finished
from demask.shrink.pipeline import given
from demask.sparse.plan.tape import NoPlan

SAMPLES = 16  # rows of the example inputs that modes are chosen by
GAIN = 1.05  # times that a chain must be predicted to be faster
SMOOTH = ("gelu", "silu", "mish", "softplus", "sigmoid", "tanh", "elu", "selu", "celu")


class Chained(Demasked):
    """A network with chains in it. conditioned: what was decided, per layer."""

    trains = False
    conditioned: Conditioned

    def recompile(self) -> Any:
        """As torch.fx does; calls go to the plan directly where the graph is a chain alone."""
        code, kind = super().recompile(), type(self)
        if only_chain(self) is not None:
            kind.__call__ = called(kind.__call__)
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied.conditioned = self.conditioned
        return copied


@dataclass(frozen=True, slots=True)
class Columns:
    """Skip the columns of the weights whose input is zero, without a pilot; exact.

    >>> from demask.ops import TABLE
    >>> layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)]
    >>> x = torch.randn(1, 64).relu()
    >>> fast = Columns().applied(nn.Sequential(*layers).eval(), (x,), None, None, TABLE)
    >>> fast.conditioned.exact, torch.allclose(fast(x), nn.Sequential(*layers)(x), atol=1e-5)
    (True, True)
    """

    name: ClassVar[str] = "columns"

    def applied(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, pilot: Any,
        table: Table = TABLE,
    ) -> Chained:  # fmt: skip
        """The module with its chains. pilot: None; BadInput for one, which would not be used."""
        if pilot is not None:
            raise BadInput(
                "columns needs no pilot: zeros of the live input are seen as it runs; "
                f"leave it out, or take the condition 'certified'; got {pilot!r:.80}"
            )
        return chained(model, args, kwargs, self, ("dense", "columns"), table)


@dataclass(frozen=True, slots=True)
class Certified:
    """Skip the rows in front of ReLU that few bits prove to be zero; exact (`kernels.certify`).

    bits: of the weights that prove it: 8. levels: 2 to read 4 of them first, the others for what
    these leave open. Columns of zero inputs are skipped, too, where that is predicted to be faster.
    """

    name: ClassVar[str] = "certified"
    bits: int = 8
    levels: int = 1

    def __post_init__(self) -> None:
        if self.bits != 8 or self.levels not in (1, 2):
            raise BadInput(f"expected bits=8 and levels=1 or 2, got bits={self.bits}, "
                           f"levels={self.levels}; fewer bits alone prove too little")  # fmt: skip

    def applied(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, pilot: Any,
        table: Table = TABLE,
    ) -> Chained:  # fmt: skip
        """The module with its chains. pilot: None: the weights' own upper bits are the pilot."""
        if pilot is not None:
            raise BadInput("certified makes its pilot of the weights itself, with a bound; leave "
                           f"pilot out; got {pilot!r:.80}")  # fmt: skip
        proving = "certified" if self.levels == 1 else "two"
        return chained(model, args, kwargs, self, ("dense", "columns", proving), table)


def unconditioned(model: nn.Module, args: tuple[Any, ...],
                  kwargs: Mapping[str, Any] | None = None, *,
                  table: Table = TABLE) -> Chained:  # fmt: skip
    """The network with all chains dense: what conditioned ones equal bit for bit."""
    return chained(model, args, kwargs, Columns(), ("dense",), table, always=True)


def chained(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    condition: Condition,
    allowed: Sequence[str],
    table: Table,
    *,
    always: bool = False,
) -> Chained:
    """The network with its chains, each layer in the mode that is predicted to be the fastest of
    those allowed. always: chains that gain nothing, too. The model is not changed."""
    before = given(model, args, kwargs, None)
    editor = GraphEditor(before)
    without_dropout(editor)
    chains, decisions = found(editor)
    inputs = inputs_of_chains(editor, chains, args, kwargs)
    for chain, x in zip(chains, inputs, strict=True):
        decisions += decided(editor, chain, x, allowed, always=always)
    after = editor.finish()
    plain = finished(Analysis(before, table), after, [f"{len(chains)} chains of linear layers"])
    info: Any = signature_of(plain.graph)
    made = Chained.of(plain, plain.graph, info, plain.demasked).eval()
    by = "" if condition.name == "columns" else "bits:8"
    made.conditioned = Conditioned(condition, by, exact=True, decisions=tuple(decisions))
    return made


def decided(editor: GraphEditor, chain: LinearChain, x: Tensor | None, allowed: Sequence[str], *,
            always: bool) -> list[Decision]:  # fmt: skip
    """Choose the modes of a chain, put it in, and say why, a line for each layer."""
    if x is None or x.dtype is not torch.float32 or not x.numel():
        what = "empty" if x is not None and not x.numel() else "not seen"
        if x is not None and x.dtype is not torch.float32:
            what = str(x.dtype).removeprefix("torch.")
        why = f"its example input is {what}, expected float32 of one row or more"
        return [Decision(name, "as it was", why) for name in chain.names]
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > ROWS and not always and x.ndim > 2:
        why = f"its input has {len(rows)} rows in a call; chains are for {ROWS} at most"
        return [Decision(name, "as it was", why) for name in chain.names]
    try:
        picked = choose(layers_of(editor, chain), rows[:SAMPLES].contiguous(), allowed)
    except NoPlan as reason:
        return [Decision(name, "as it was", str(reason)) for name in chain.names]
    gain = picked.dense / picked.seconds
    if gain < GAIN and not always:
        why = f"predicted gain {gain:.2f} times, expected {GAIN} or more"
        return [Decision(name, "as it was", f"{why}; {said}{_smooth(chain, name)}")
                for name, said in zip(chain.names, picked.why, strict=True)]  # fmt: skip
    replaced(editor, chain, picked.modes)
    return [
        Decision(name, mode, f"{said}{_smooth(chain, name)}")
        for name, mode, said in zip(chain.names, picked.modes, picked.why, strict=True)
    ]


def _smooth(chain: LinearChain, name: str) -> str:
    """What is to be said of a last layer in front of an activation that makes no zeros."""
    if name != chain.names[-1] or chain.relus[-1]:
        return ""
    after = behind(chain)
    smooth = [word for word in SMOOTH if word in after]
    return f"; {smooth[0]} behind it makes no zeros to skip" if smooth else ""


@dataclass(frozen=True, slots=True)
class Picked:
    """Modes of a chain's layers and why; what they read; predicted seconds of a call, and of one
    that is dense."""

    modes: tuple[str, ...]
    why: tuple[str, ...]
    reads: tuple[Reads, ...]
    seconds: float
    dense: float


def choose(layers: Sequence[ChainLayer], rows: Tensor, allowed: Sequence[str],
           machine: ChainRates | None = None) -> Picked:  # fmt: skip
    """The fastest allowed mode of each layer, by what was seen on these rows [n, columns]. machine:
    None for this one (`cost.here`)."""
    machine = machine or here()
    options: list[list[tuple[float, str, str, Reads]]] = []
    looks = {mode: observed(layers, rows, mode) for mode in allowed}
    for k, layer in enumerate(layers):
        (count, columns), found = layer.weight.shape, []
        for mode in allowed:
            if mode in ("certified", "two") and not layer.relu:
                continue
            seen = looks[mode][k]
            moved = reads(count, columns, mode, seen)
            share = min(1.0, machine.cache / (4.0 * count * columns))
            seconds = machine.seconds([moved], [share]) - machine.call
            extra = machine.layer if mode in ("certified", "two") else 0.0
            # a dense layer looks at no zeros: there are as many as columns saw
            told = looks.get("columns", looks[mode])[k] if mode == "dense" else seen
            found.append((seconds + extra, mode, _words(layer, mode, told), moved))
        options.append(found)
    best = [min(some, key=lambda one: one[0]) for some in options]
    whole = [4.0 * layer.weight.numel() for layer in layers]
    share = min(1.0, machine.cache / sum(whole))
    dense = machine.seconds([Reads(dense=size) for size in whole], [share] * len(layers))
    moved = tuple(one[3] for one in best)
    seconds = machine.call + sum(one[0] for one in best)
    return Picked(tuple(one[1] for one in best), tuple(one[2] for one in best), moved, seconds,
                  dense)  # fmt: skip


def observed(layers: Sequence[ChainLayer], rows: Tensor, mode: str) -> list[LayerCounts]:
    """The mean of what a mode sees of each layer, over rows."""
    modes = [mode if layer.relu or mode in ("dense", "columns") else "columns" for layer in layers]
    looks: list[list[LayerCounts]] = []
    ChainPlan(layers, modes, 1)(rows, looks)
    return [LayerCounts(*(round(sum(values) / len(looks)) for values in zip(
                *((one[k].columns, one[k].first, one[k].rows) for one in looks), strict=True)))
            for k in range(len(layers))]  # fmt: skip


def _words(layer: ChainLayer, mode: str, seen: LayerCounts) -> str:
    rows, columns = layer.weight.shape
    live = f"{seen.columns / max(columns, 1):.1%} of its inputs are not zero"
    if mode not in ("certified", "two"):
        return live
    return f"{seen.rows / max(rows, 1):.1%} of its rows are not proved zero, {live}"


def layers_of(editor: GraphEditor, chain: LinearChain) -> list[ChainLayer]:
    """A chain's layers as plans take them."""
    found = []
    for call, relu in zip(chain.calls, chain.relus, strict=True):
        given_ = schema.arguments(call)
        weight, bias = (editor.tensor(given_[key]) for key in ("weight", "bias"))
        assert weight is not None
        kept = None if bias is None else bias.detach().contiguous()
        found.append(ChainLayer(weight.detach().contiguous(), kept, relu))
    return found


def inputs_of_chains(editor: GraphEditor, chains: Sequence[LinearChain], args: tuple[Any, ...],
                     kwargs: Mapping[str, Any] | None) -> list[Tensor | None]:  # fmt: skip
    """What the chains' inputs are on the example inputs."""
    firsts = [schema.arguments(chain.calls[0])["input"] for chain in chains]
    return values_of(editor, firsts, args, kwargs)


def values_of(editor: GraphEditor, nodes: Sequence[fx.Node], args: tuple[Any, ...],
              kwargs: Mapping[str, Any] | None) -> list[Tensor | None]:  # fmt: skip
    """The values of nodes on the example inputs, None of those that do not run."""
    program = replace(editor.program, graph=editor.graph, constants=editor.constants)
    flat = pytree.tree_leaves((args, dict(kwargs or {})))
    run = RecordedRun(program, set(nodes))
    holders = len(editor.graph.find_nodes(op="placeholder"))
    if holders != len(flat):
        raise BadInput(f"expected {holders} example inputs, got {len(flat)}")
    with torch.no_grad():
        run.run(*flat)
    return [value if value is None else value.detach() for value in map(run.values.get, nodes)]
