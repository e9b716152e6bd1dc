"""explain(): what each pilot and condition would gain and lose on this machine, before it is used.

For exact conditions the seconds follow from bytes: the zeros of the inputs say which columns and
rows a chain reads, and `pilot.chains.chain_cost` predicts the time. Other conditions are timed
alternately with the network, since they have to run on the inputs anyway, for the answers that they
change. Operations are counted, too: a pilot that is the network with other weights costs as much as
the network itself, whatever it saves. The verdict says what is not faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from demask.errors import BadInput, DemaskError
from demask.exec.tape.tape import NoPlan
from demask.facts.analysis import Analysis
from demask.failures import described, public
from demask.graph.editor import GraphEditor
from demask.graph.isolation import in_isolation
from demask.machine.clock import checked_threads, race, set_threads
from demask.machine.cost import Costs
from demask.machine.describe import describe_machine
from demask.numerics import is_number
from demask.ops import TABLE, Table
from demask.pages import Lines, Page, PageSource, TextTable
from demask.pilot.chains.chain_cost import NOMINAL, ChainRates, Reads, Uses, cached_shares, measured
from demask.pilot.chains.chain_op import ROWS
from demask.pilot.chains.chain_plan import ChainLayer
from demask.pilot.chains.exact_conditions import (
    GAIN,
    LinearChain,
    Picked,
    choose,
    find_chains,
    inputs_of_chains,
    layers_of,
    remove_dropout,
    values_of,
)
from demask.pilot.condition import condition_of
from demask.pilot.conditions.base import Args, text
from demask.pilot.router import call_copy
from demask.shrink.build_uncut import build_uncut
from demask.shrink.pipeline import capture_program


def check_arguments(model: Any, loss: Any, candidates: Any) -> None:
    """Raise BadInput for arguments of `explain` that cannot be used."""
    if not isinstance(model, nn.Module):
        raise BadInput(
            f"expected an nn.Module as model, got {type(model).__name__}; of an ExportedProgram pass its module()"
        )
    if not is_number(loss) or not 0 <= loss <= 1:
        raise BadInput(f"expected a loss of 0 to 1, as a share of inputs, got {loss!r}")
    pairs = candidates if isinstance(candidates, Sequence) else [candidates]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise BadInput(
                "expected pairs of texts (pilot, condition) as candidates, such as "
                f"('bits:8', 'skip:0.5'), got {pair!r:.60}"
            )


def check_inputs(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> None:
    """Raise BadInput unless each input fits the model and its first output has answers."""
    for k, args in enumerate(inputs):
        try:
            leaves = pytree.tree_leaves(model(*args))
        except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            raise BadInput(
                f"input {k} does not fit the model: {described(error)}; inputs are "
                "one tensor or tuple of arguments for each call"
            ) from error
        if not leaves or not isinstance(leaves[0], Tensor) or leaves[0].ndim == 0:
            raise BadInput(
                "expected a tensor with an axis of answers as the first output, got "
                f"{leaves[0] if leaves else 'none'!r:.40}"
            )


Pair = tuple[str, str]  # a pilot's text, "" for none; a condition's text
CANDIDATES: tuple[Pair, ...] = (
    ("", "columns"),
    ("bits:8", "certified"),
    ("bits:8", "certified:levels=2"),
    ("bits:8", "skip:0.5"),
    ("bits:4", "skip:0.25"),
    ("channels:0.5", "skip:0.5"),
)
EXACT = {
    "columns": ("dense", "columns"),
    "certified": ("dense", "columns", "certified"),
    "certified:levels=2": ("dense", "columns", "two"),
}
BETTER = 1.05  # times that a pilot must be faster than columns alone
MOST = 64  # inputs that are used
LOSS = 0.01  # share of answers that may differ, of conditions that are not exact
CALLS, WARMUP = 24, 4


@dataclass(frozen=True, slots=True)
class ExplainedPair:
    """One line of an `Explanation`: a pilot and a condition, with a predicted time and a verdict.

    Attributes:
        pilot: text of the pilot, "" for none.
        condition: text of the condition.
        seconds: predicted seconds of a call; None where the pair cannot be applied.
        gain: the network's seconds divided by `seconds`; None likewise.
        loss: share of inputs whose answer (index of the largest output) differs, 0 for exact
            conditions; None likewise.
        exact: whether the condition changes no output.
        use: whether to use the pair.
        why: the reason of the verdict, in words.
    """

    pilot: str
    condition: str
    seconds: float | None
    gain: float | None
    loss: float | None
    exact: bool
    use: bool
    why: str


@dataclass(frozen=True, slots=True)
class Explanation(PageSource):
    """The result of `explain`: for each pilot and condition a predicted time and a verdict.

    A pilot is a cheap first run that selects the work; a condition is the policy by which the full
    run does only that work. `print` shows an explanation as a table.

    Attributes:
        lines: one per pair, in the order of the call: `pilot` and `condition` (texts), `seconds` of
            a call, `gain` (the network's seconds divided by the pair's), `loss` (share of inputs
            whose answer, the index of the largest output, differs; 0 for exact conditions), `exact`
            (whether the condition changes no output), `use` (whether to use the pair) and `why`
            (the reason, a text). `seconds`, `gain` and `loss` are None where the pair cannot be
            applied.
        seconds: seconds of a call of the unchanged network, the median over the inputs.
        inputs: number of inputs that were used.
        threads: number of torch's threads.
        machine: description of the machine.
        summary: which pair to use, in one line.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import explain
        >>> from demask.pilot.chains.chain_cost import NOMINAL  # built-in rates
        >>> net = Sequential(Linear(8, 8), ReLU(), Linear(8, 4)).eval()
        >>> pairs = [("", "columns"), ("bits:4", "columns")]
        >>> result = explain(net, [torch.randn(1, 8)], candidates=pairs, machine=NOMINAL)
        >>> [(line.pilot, line.condition, line.use) for line in result.lines]
        [('', 'columns', False), ('bits:4', 'columns', False)]
    """

    lines: tuple[ExplainedPair, ...]
    seconds: float
    inputs: int
    threads: int
    machine: str
    summary: str

    def to_dict(self) -> dict[str, Any]:
        """The numbers as nested dictionaries, ready for JSON; times in seconds."""
        return asdict(self)

    def page(self) -> Page:
        """What `print`, `to_html` and notebooks show, as sections."""
        rows = [
            (
                line.pilot or "none",
                line.condition,
                "" if line.seconds is None else f"{line.seconds * 1e3:.3f}",
                "" if line.gain is None else f"{line.gain:.2f}",
                "" if line.loss is None else f"{line.loss:.1%}",
                f"{'use' if line.use else 'do not use'}: {line.why}",
            )
            for line in self.lines
        ]
        columns = ("pilot", "condition", "ms", "gain", "loss", "verdict")
        head = (
            f"{self.summary}. As it is: {self.seconds * 1e3:.3f} ms, {self.inputs} inputs, "
            f"{self.threads} threads, {self.machine}"
        )
        table = TextTable(columns, rows, "Conditions", left=(0, 1, 5), is_close=True, width=140)
        return Page("demask pilot explain", (Lines([head]), table), self.summary)


@in_isolation
@public
def explain(
    model: nn.Module,
    inputs: Iterable[Any],
    *,
    threads: int | None = None,
    loss: float = LOSS,
    candidates: Sequence[Pair] = CANDIDATES,
    costs: Costs | None = None,
    machine: ChainRates | None = None,
    clock: Callable[[], float] = perf_counter,
    table: Table = TABLE,
) -> Explanation:
    """An `Explanation`: for each pilot and condition a predicted time and a verdict.

    Times are those of this machine. A pilot is a cheap first run that selects the work; a condition
    is the policy by which the full run does only that work. For conditions that change no output,
    the time is computed from the bytes of weights that a call reads. Other conditions are applied
    and timed on the inputs, and their changed answers are counted. The answer to an input is the
    index of the largest entry in each row of the first output.

    Args:
        model: the network, an nn.Module, which runs in eval mode and is not changed.
        inputs: an iterable with one tensor or tuple of arguments per call, like those of later
            calls; the first 64 are used.
        threads: number of torch's threads, 1 or more; default None: torch's setting.
        loss: greatest share of inputs whose answers may differ, 0 to 1; default 0.01. Pairs that
            exceed it get the verdict not to use them.
        candidates: pairs of texts (pilot, condition), "" for no pilot, as in ("bits:8",
            "skip:0.5"); `simplify` and `condition` list the texts. Default: six common pairs.
        costs: measured bandwidths of this machine, a `demask.machine.cost.Costs`; default None:
            those in the user's cache folder, which the first call measures and stores.
        machine: rates that replace `costs`, a `demask.pilot.chains.chain_cost.ChainRates`; default
            None.
        clock: function that returns seconds; default time.perf_counter.
        table: facts about each ATen op; default: the library's table.

    Raises:
        BadInput: there are no inputs, one does not fit the model, the first output has no axes,
            `threads` or `loss` is out of range, `model` is no nn.Module, or an entry of
            `candidates` is no pair of texts. (A pair that cannot be applied has a line with the
            reason.)
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.pilot import explain
        >>> from demask.pilot.chains.chain_cost import NOMINAL  # built-in rates
        >>> net = Sequential(Linear(8, 8), ReLU(), Linear(8, 4)).eval()
        >>> pairs = [("", "columns")]  # no pilot
        >>> result = explain(net, [torch.randn(1, 8)], candidates=pairs, machine=NOMINAL)
        >>> result.summary  # the layers are too small
        'use none: nothing pays here'
    """
    check_arguments(model, loss, candidates)
    model = call_copy(model)
    several = [one if isinstance(one, tuple) else (one,) for one in islice(inputs, MOST)]
    if not several:
        raise BadInput("expected inputs, one tensor or tuple of arguments for each call, got none")
    count = checked_threads(threads)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(set_threads(count))
        if machine is None:
            measurements = costs or Costs.open(threads=count)
            machine = measured(measurements)
            measurements.save()
        network = _ExplainedNetwork.of(model, several, clock, table)
        lines = [_line(network, pilot, condition, machine, loss) for pilot, condition in candidates]
    lines = _compared(lines)
    where = describe_machine() + ("; bandwidths are nominal" if machine is NOMINAL else "")
    return Explanation(tuple(lines), network.seconds, len(several), count, where, _summary(lines))


def _summary(lines: Sequence[ExplainedPair]) -> str:
    used = [line for line in lines if line.use]
    if not used:
        return "use none: nothing pays here"
    best = min(used, key=lambda line: line.seconds or 0.0)
    if best.condition == "columns":
        return "columns only, no pilot"
    return f"use {best.condition} by {best.pilot}"


def _compared(lines: Sequence[ExplainedPair]) -> list[ExplainedPair]:
    """Pilots of exact conditions must be faster than columns alone, which need none."""
    columns = next((line for line in lines if line.condition == "columns"), None)
    revised = []
    for line in lines:
        if line.exact and line.use and line is not columns and columns is not None:
            ratio = (columns.seconds or 0.0) / (line.seconds or 1.0)
            if ratio < BETTER and columns.use:
                why = f"columns only, no pilot: {ratio:.2f} times as fast as those"
                line = replace(line, use=False, why=why)
        revised.append(line)
    return revised


@dataclass(frozen=True, slots=True)
class _ExplainedChain:
    """A chain of the network, the rows that come in, those of each input, why it cannot be
    conditioned ("": it can), and torch's seconds of one call."""

    layers: tuple[ChainLayer, ...]
    rows: Tensor
    came: list[Tensor]
    why: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _ExplainedNetwork:
    """The network, its inputs, its chains, its seconds, those outside of chains, its operations."""

    model: nn.Module
    inputs: list[tuple[Any, ...]]
    chains: tuple[_ExplainedChain, ...]
    seconds: float
    rest: float
    flops: float
    clock: Callable[[], float]
    table: Table
    why: str = ""  # why layers are in no chain

    @classmethod
    def of(cls, model: nn.Module, inputs: list[tuple[Any, ...]], clock: Any, table: Table) -> _ExplainedNetwork:
        editor = GraphEditor(capture_program(model, inputs[0], None, None))
        check_inputs(model, inputs)
        remove_dropout(editor)
        where, left = find_chains(editor)
        came: list[list[Tensor]] = [[] for _ in where]
        for args in inputs:
            for k, x in enumerate(inputs_of_chains(editor, where, args, None)):
                if x is not None:
                    came[k].append(x.reshape(-1, x.shape[-1]))
        chains = []
        for chain, rows in zip(where, came, strict=True):
            layers = tuple(layers_of(editor, chain))
            many = bool(rows) and len(rows[0]) > ROWS
            why = f"{len(rows[0])} rows in a call: chains are for {ROWS} at most" if many else ""
            all_rows = torch.cat(rows) if rows else torch.empty(0, layers[0].weight.shape[1])
            chains.append(_ExplainedChain(layers, all_rows[:MOST].contiguous(), rows, why))
        other = _rest(editor, where, inputs[0], table)
        seconds, each, rest = _timed(model, other, inputs, chains, clock)
        chains = [replace(chain, seconds=one) for chain, one in zip(chains, each, strict=True)]
        why = "; ".join(dict.fromkeys(one.why for one in left))
        flops = _flops(model, inputs)
        return cls(model, inputs, tuple(chains), seconds, rest, flops, clock, table, why)


def _plain(layers: Sequence[ChainLayer], x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.nn.functional.linear(x, layer.weight, layer.bias)
        x = torch.relu(x) if layer.relu else x
    return x


def _rest(editor: GraphEditor, where: Sequence[LinearChain], args: Args, table: Table) -> nn.Module | None:
    """The network with a constant instead of each chain, None where nothing else is left of it.
    The editor is used up."""
    before = editor.program
    for chain, value in zip(where, values_of(editor, [c.last for c in where], args, None), strict=True):
        if value is not None:
            editor.replace(chain.last, editor.add_constant("chain", value, chain.last))
    network = build_uncut(Analysis(before, table), editor.finish(), ["chains as constants"])
    calls = [node for node in network.graph.nodes if node.op not in ("placeholder", "get_attr")]
    return network if len(calls) > 1 else None


def _timed(
    model: nn.Module,
    rest: nn.Module | None,
    inputs: Sequence[tuple[Any, ...]],
    chains: Sequence[_ExplainedChain],
    clock: Callable[[], float],
) -> tuple[float, list[float], float]:
    """Median seconds of the network, of each chain in torch, and of what is in no chain."""
    calls = {"network": _cycled(model, inputs)}
    if rest is not None:
        calls["rest"] = _cycled(rest, inputs)
    for k, chain in enumerate(chains):
        if chain.came:
            calls[f"{k}"] = _cycled(partial(_plain, chain.layers), [(x,) for x in chain.came])
    samples = race(calls, CALLS, WARMUP, clock=clock)
    taken = {name: median(one) for name, one in samples.items()}
    each = [taken.get(f"{k}", 0.0) for k in range(len(chains))]
    return taken["network"], each, taken.get("rest", 0.0)


def _cycled(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    turns = cycle(inputs)
    return lambda: call(*next(turns))


def _flops(model: nn.Module, inputs: Sequence[tuple[Any, ...]]) -> float:
    some = inputs[:8]
    with FlopCounterMode(display=False) as counter:
        for args in some:
            model(*args)
    return counter.get_total_flops() / len(some)


def _line(network: _ExplainedNetwork, pilot: str, condition: str, machine: ChainRates, loss: float) -> ExplainedPair:
    try:
        kind = condition_of(condition)
        if text(kind) in EXACT:
            exact = _exact(network, pilot, text(kind), machine)
            return replace(exact, condition=condition)
        return _tried(network, pilot, condition, loss)
    except (DemaskError, NotImplementedError) as error:
        return ExplainedPair(pilot, condition, None, None, None, False, False, f"refused: {error}"[:200])


def _exact(network: _ExplainedNetwork, pilot: str, condition: str, machine: ChainRates) -> ExplainedPair:
    """The pair of an exact condition, predicted from bytes. Chains that gain nothing stay with
    torch."""
    seconds, said, unchanged = network.rest, [], 0
    for chain in network.chains:
        reason, picked = chain.why, None
        if not reason and len(chain.rows):
            try:
                picked = picked_here(chain.layers, chain.rows, EXACT[condition], machine)
            except NoPlan as error:
                reason = str(error)
        gains = picked is not None and picked.dense >= GAIN * picked.seconds
        seconds += picked.seconds if picked is not None and gains else chain.seconds
        unchanged += not gains
        if picked is None:
            said.append(reason or "a chain of which no input was seen")
        elif not gains:
            gain = picked.dense / picked.seconds
            said.append(f"no zeros to speak of: {gain:.2f} times over the same kernel, dense")
        else:
            said.append(", ".join(picked.modes))
    if not network.chains:
        said.append(network.why or "it has no linear layers")
    if unchanged == len(network.chains):
        seconds = network.seconds
    gain = network.seconds / seconds
    use = gain >= GAIN
    why = "; ".join(dict.fromkeys(said))
    return ExplainedPair(pilot, condition, seconds, gain, 0.0, True, use, why)


def picked_here(layers: Sequence[ChainLayer], rows: Tensor, allowed: Sequence[str], machine: ChainRates) -> Picked:
    """Modes by these rows, with predicted seconds for the cached share of their weights."""
    picked = choose(layers, rows, allowed, machine)
    used, x = [], rows
    for layer, mode, moved in zip(layers, picked.modes, picked.reads, strict=True):
        y = _plain([layer], x)
        used.append(_uses(layer, mode, moved, x, y))
        x = y
    seconds = machine.seconds(picked.reads, cached_shares(used, machine.cache))
    extra = machine.layer * sum(mode in ("certified", "two") for mode in picked.modes)
    return replace(picked, seconds=seconds + extra)


def _uses(layer: ChainLayer, mode: str, moved: Reads, x: Tensor, y: Tensor) -> list[Uses]:
    """What calls on the rows of x, which gave y, read of a layer: columns, or all of its full
    numbers and rows, those the most often that are the most often above zero."""
    count, columns = layer.weight.shape
    if mode == "dense":
        return [Uses(torch.tensor([4.0 * count * columns]), torch.ones(1))]
    if mode == "columns":
        return [Uses(torch.full((columns,), 4.0 * count), (x != 0).float().mean(0))]
    live = (y > 0).float().mean(0) + 1e-6
    each = moved.rows / count
    share = (live * count / live.sum() * each / (4.0 * columns)).clamp(max=1.0)
    rows = Uses(torch.full((count,), 4.0 * columns), share)
    return [Uses(torch.tensor([moved.whole]), torch.ones(1)), rows]


def _tried(network: _ExplainedNetwork, pilot: str, condition: str, allowed: float) -> ExplainedPair:
    """Timed and compared on the inputs, pilot included; `allowed`: share of answers that may
    differ."""
    kind = condition_of(condition)
    conditioned: Any = kind.applied(network.model, network.inputs[0], None, pilot or None, network.table)
    share = _flops(conditioned, network.inputs) / max(network.flops, 1.0)
    ratio, changed = _run_alternately(conditioned, network)
    seconds, loss = network.seconds * ratio, changed / len(network.inputs)
    gain = 1 / ratio
    why = f"{share:.0%} of the operations, the pilot's included"
    if gain < GAIN:
        why += "; it saves less than it costs"
    elif loss > allowed:
        why += f"; {loss:.1%} of the answers differ, {allowed:.1%} may"
    use = gain >= GAIN and loss <= allowed
    return ExplainedPair(pilot, condition, seconds, gain, loss, False, use, why)


def _run_alternately(conditioned: nn.Module, network: _ExplainedNetwork) -> tuple[float, int]:
    """The median seconds of a call over the network's, alternately on the inputs (twice, if they
    are few), and how many answers differ."""
    mine, network_seconds, changed, clock = [], [], 0, network.clock
    for _ in range(1 if len(network.inputs) > CALLS else 2):
        changed = 0
        for args in network.inputs:
            looks = [clock()]
            got = conditioned(*args)
            looks.append(clock())
            expected = network.model(*args)
            looks.append(clock())
            mine.append(looks[1] - looks[0])
            network_seconds.append(looks[2] - looks[1])
            changed += _answer(got) != _answer(expected)
    skipped = WARMUP if len(mine) > WARMUP else 0
    return median(mine[skipped:]) / median(network_seconds[skipped:]), changed


def _answer(out: Any) -> list[int]:
    first = next(t for t in pytree.tree_leaves(out) if isinstance(t, Tensor))
    return first.reshape(first.shape[0], -1).argmax(1).tolist()
