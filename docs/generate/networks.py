"""docs/networks.md, from benchmarks/results/networks.json, which the nightly tests measure:

    python -m pytest -m "nightly or not nightly" --results benchmarks/results/networks.json \\
        tests/whole/test_transformers.py tests/whole/test_zoo.py tests/graph/test_recurrent.py
    python -m docs networks
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from docs.generate import DOCS, ROOT

PATH = DOCS / "networks.md"
RESULTS = ROOT / "benchmarks" / "results" / "networks.json"
HEAD = """# Networks and masks

What is left of each network's parameters after `demask`, in %, for each kind of mask. Networks and
weights are random, small for transformers (two layers, width 32); what is removed depends on where
they have their parameters, so rows are for reading, not for comparing. One demask per cell, with
the batch dynamic, and the length of texts or the size of images where the network has one of its
own choice; the result is compared with the original at other batches and sizes. *Error*: the
largest difference in any cell relative to the largest output, in float64 (at most 1e-10; † where
the network's own code casts to float32: at most 64 units in its last place). *What came back*:
the network's own *class*; that with graphs for some *parts*; or a *graph*. *The class costs*: in
how many of its cells it has over 5 % more parameters than one graph, and the most. Both are empty
for networks that were last measured before results had the caller's class.

Made by `python -m docs networks` from what the nightly tests wrote; a test keeps it so.
"""
# Per suite of tests: title, the words for its masks in the order of the columns.
SUITES = {
    "transformers": (
        "Transformers",
        {
            "head": "half of the heads have values of zero",
            "head_constant": "the same, and their biases stay: those heads are constants",
            "head_output": "half of the heads are not read by the output projection",
            "partial": "1 or 2 of 8 positions of each head are zero, others in every head",
            "unit": "half of the units of feed-forward networks have weights of zero, with biases",
            "channel": "a quarter of the residual stream is zero in all that writes into it",
            "stream": "the same, but norms keep scale and shift",
            "embedding": "a quarter of the embeddings' channels is zero",
            "layer": "one of two layers (of each kind) adds nothing",
        },
    ),
    "torchvision": (
        "torchvision's classifiers",
        {
            "channels": "half of each convolution's output channels are zero, others in each; norms keep their shifts",
            "inside": "half of the channels inside of each block are zero, with their norms'",
        },
    ),
    "recurrent": (
        "Recurrent networks",
        {
            "nothing": "nothing is zero",
            "units": "4 of 10 units of every layer are zero, 2 of 4 that a projection makes",
            "channels": "half of the channels that come in are zero, or not read",
            "layer": "the first layer is zero",
            "direction": "the backward direction is zero, where there is one",
        },
    ),
}

Line = dict[str, Any]


def cell(line: Line | None) -> str:
    """What is left, in %; in words where nothing was measured."""
    if line is None:
        return ""
    if line.get("failed"):
        return "fails"
    if "after" not in line:
        return "–"
    return f"{100 * line['after'] / line['before']:.0f}"


def worst(lines: Iterable[Line]) -> str:
    """The largest error; with a dagger where a narrower type is allowed for."""
    tested = [line for line in lines if "error" in line]
    if not tested:
        return ""
    dagger = " †" if any(line["allowed"] > 1e-10 for line in tested) else ""
    return f"{max(line['error'] for line in tested):.0e}{dagger}"


def forms(lines: dict[str, Line], masks: Sequence[str]) -> str:
    """What came back for which masks; the masks are left out where it is one for all."""
    by: dict[str, list[str]] = {}
    for mask in masks:
        if "form" in lines.get(mask, {}):
            by.setdefault(lines[mask]["form"], []).append(mask.replace("_", " "))
    if len(by) < 2:
        return "".join(by)
    return "; ".join(f"{form}: {', '.join(by[form])}" for form in ("class", "parts", "graph") if form in by)


def cost(lines: Iterable[Line]) -> str:
    """How many results have over 5 % more parameters than a graph, and the most, in %."""
    more = [line["after"] / line["graph"] - 1 for line in lines if line.get("graph")]
    over = sum(share > 0.05 for share in more)
    return f"{over} of {len(more)}, {max(more):.0%}" if more else ""


def columns(lines: Sequence[Line], known: dict[str, str]) -> list[str]:
    """The masks that lines have, those with words first."""
    masks = {line["mask"] for line in lines}
    return [m for m in known if m in masks] + sorted(masks - known.keys())


def table(lines: Sequence[Line], masks: Sequence[str]) -> str:
    """Networks x masks."""
    named: dict[str, dict[str, Line]] = {}
    for line in lines:
        named.setdefault(line["network"], {})[line["mask"]] = line
    formed = any("form" in line for line in lines)
    last = ["error", "what came back", "the class costs"] if formed else ["error"]
    rows = [["network", *(mask.replace("_", " ") for mask in masks), *last]]
    rows += [["---"] + ["--:"] * (len(masks) + 1) + ["---"] * 2 * formed]
    for name in sorted(named):
        by_mask = named[name]
        row = [name, *(cell(by_mask.get(mask)) for mask in masks), worst(by_mask.values())]
        rows.append([*row, forms(by_mask, masks), cost(by_mask.values())] if formed else row)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def notes(lines: Sequence[Line]) -> list[str]:
    """Why cells are as they are: networks with one note share a line."""
    said: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        if "note" in line:
            said.setdefault((line["note"], line["network"]), []).append(line["mask"])
    return [
        f"- {network}, {', '.join(masks).replace('_', ' ')}: {note}."
        for (note, network), masks in sorted(said.items(), key=lambda item: item[0][::-1])
    ]


def section(suite: str, lines: Sequence[Line]) -> str:
    title, words = SUITES.get(suite, (suite, {}))
    masks = columns(lines, words)
    legend = [f"- *{mask.replace('_', ' ')}*: {words[mask]}." for mask in masks if mask in words]
    parts = [f"## {title}", "\n".join(legend), table(lines, masks), "\n".join(notes(lines))]
    return "\n\n".join(part for part in parts if part)


def page(lines: Sequence[Line] | None = None) -> str:
    """The page, from the results of tests; default: the committed ones."""
    lines = json.loads(RESULTS.read_text()) if lines is None else lines
    names = {line["suite"] for line in lines}
    suites = [s for s in SUITES if s in names] + sorted(names - SUITES.keys())
    sections = [section(s, [line for line in lines if line["suite"] == s]) for s in suites]
    return "\n".join([HEAD, *(f"{text}\n" for text in sections)])
