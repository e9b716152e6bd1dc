"""Entries of recurrent ops, which read their own output of the step before: LSTM, GRU, RNN.

    "!t n i, 1 n h, 1 n h, (!k h) i, (!k h) ^h, (!k h), (!k h) -> !t n h, 1 n h, 1 n h"     LSTM

t: time, n: batch, i: input feature, h: hidden unit, k: gate. A projected LSTM computes p features
from its cells c and reads these in the next step. Calls with several layers or directions are split
before (`demask.graph.split_recurrent`). Gates in order: LSTM i, f, g, o; GRU r, z, n.
Source: torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from demask.ops import schema
from demask.ops.entry import Case, Declined, Entry, SizedLine
from demask.ops.entry import Shape as S
from demask.ops.schema import fake

LSTM = "aten.lstm.input"
GATES = {LSTM: 4, "aten.gru.input": 3, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}


def count_parameters(node: fx.Node) -> int:
    """The number of parameters per layer and direction of a recurrent call: w_ih, w_hh, with biases
    b_ih and b_hh, and w_hr if an LSTM projects its output."""
    call_arguments = schema.arguments(node)
    layers = call_arguments["num_layers"] * (2 if call_arguments["bidirectional"] else 1)
    return len(call_arguments["params"]) // layers


def _line(gates: int) -> Callable[[fx.Node], SizedLine | Declined]:
    """The line of a call of an op with this number of gates."""

    def line(node: fx.Node) -> SizedLine | Declined:
        call_arguments = schema.arguments(node)
        if call_arguments["num_layers"] != 1 or call_arguments["bidirectional"]:
            return Declined("several recurrent layers in one call, with dropout between them")
        biases = 2 if call_arguments["has_biases"] else 0
        projected = count_parameters(node) - biases == 3
        if projected and fake(call_arguments["hx"][0]).shape[2] >= fake(call_arguments["hx"][1]).shape[2]:
            return Declined("an LSTM projected to as many outputs as it has cells")
        c, p = ("c", "p") if projected else ("h", "h")
        t = "n !t" if call_arguments["batch_first"] else "!t n"
        states = [f"1 n {p}", f"1 n {c}"][: len(schema.outputs(node)) - 1]
        params = [f"(!k {c}) i", f"(!k {c}) ^{p}"] + [f"(!k {c})"] * biases + ["p c"] * projected
        text = f"{', '.join([f'{t} i', *states, *params])} -> {', '.join([f'{t} {p}', *states])}"
        return SizedLine(text, {"k": gates})

    return line


def _cases(gates: int, name: str) -> tuple[Case, ...]:
    """Initial states zero and not zero, without biases, batch first; projected LSTMs."""
    t, n, i, h, p = 3, 2, 4, 6, 5 if name == LSTM else 6

    def case(*, biases=True, first=False, zero=True, p=h) -> Case:
        states = [S((1, n, p), zero, "zero" if zero else "normal")]
        states += [S((1, n, h), zero, "zero" if zero else "normal")] * (name == LSTM)
        params = [S((gates * h, i), True), S((gates * h, p), True)]
        params += [S((gates * h,), True)] * (2 * biases) + [S((p, h), True)] * (p != h)
        x, flags = S((n, t, i) if first else (t, n, i)), (1, 0.0, False, False, first)
        return Case((x, states if name == LSTM else states[0], params, biases, *flags), {})

    plain = (case(), case(biases=False), case(zero=False), case(first=True))
    return (*plain, case(p=p), case(p=p, biases=False, zero=False)) if p != h else plain


def _entry(name: str, main: int, stays: Callable) -> tuple[str, Entry]:
    gates = GATES[name]
    columns = {"fill": "recur", "main": main, "stays": stays, "cases": _cases(gates, name)}
    return name, Entry(_line(gates), **columns)


ENTRIES = [
    # c = f c + i g: a cell at 0 stays there while g = tanh(b_ih + b_hh) = 0.
    _entry(LSTM, 2, lambda b, c: b + c == 0),
    # h = (1 - z) n + z h, where n = tanh(b_ih + r b_hh) for some r in (0, 1).
    _entry("aten.gru.input", 2, lambda b, c: (b == 0) & (c == 0)),
    _entry("aten.rnn_tanh.input", 0, lambda b, c: b + c == 0),
    _entry("aten.rnn_relu.input", 0, lambda b, c: b + c <= 0),
]

__all__ = ["ENTRIES", "GATES", "LSTM", "count_parameters"]
