"""The figures that other pages quote from the ledger, and the writer of all pages.

A page holds a block between `<!-- name -->` and `<!-- end -->`. In a template,
`{page|setting|setting|column}` is a figure: the cell of that column in the first row of that page
whose leading cells are these settings (`*` is any).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks import ROOT
from benchmarks.common.catalog import scripts
from benchmarks.common.ledger import RESULTS, Ledger, markdown, quote

Row = tuple[str, str, str]


def optimized(label: str, network: str) -> Row:
    """A row of executors on one thread."""
    figures = (f"executors|{network}|1|{column}" for column in ("original, ms", "optimize(), ms", "ratio", "fastest"))
    original, ours, ratio, rival = (f"{{{figure}}}" for figure in figures)
    return (
        f"{label}, 1 thread, `optimize`",
        f"{original} → {ours} ms",
        f"{ratio} × as fast as the fastest runtime ({rival})",
    )


def sparse(label: str, *setting: str, peers: Sequence[str]) -> Row:
    """A row of cpu_sparse on two threads."""
    figure = f"{{cpu_sparse|{'|'.join(setting)}|2|"
    speeds = (f"{figure}/ {peer}}} × as fast as {peer}" for peer in peers)
    times = f"{figure}torch, eager, ms}} → {figure}demask, ms}} ms"
    return f"{label}, 2 threads, `optimize`", times, ", ".join(speeds)


def by_hand(label: str, setting: str) -> Row:
    """A row of a page that has a network written by hand."""
    return (
        f"{label}, 1 thread, `demask`",
        f"{{{setting}|masked, ms}} → {{{setting}|demasked, ms}} ms",
        f"written by hand for these widths: {{{setting}|by hand, ms}} ms",
    )


WON: list[Row] = [
    sparse(
        "ResNet-50, 95 % zeros in no pattern, batch 1",
        "ResNet-50, pruned",
        "95%",
        "1",
        peers=("ONNX Runtime", "DeepSparse"),
    ),
    optimized("MobileNetV2, half of its channels, batch 16", "MobileNetV2, batch 16"),
    optimized("ResNet-56, half of its channels, batch 1", "ResNet-56"),
    optimized("ResNet-50, half of its channels, batch 1", "ResNet-50"),
    optimized("MiniLM-sized encoder, half of its heads and units, 128 tokens", "encoder, 128 tokens"),
    optimized("ResNet-18, nothing masked, batch 1", "ResNet-18, unmasked"),
    sparse(
        "BERT-base feed-forward, 90 % zeros, 128 tokens",
        "BERT-base feed-forward",
        "90%",
        "128",
        peers=("ONNX Runtime", "DeepSparse"),
    ),
    by_hand("ResNet-20, 4 x wide, half of its channels, batch 64", "residual|ResNet-20, 4 x wide|zero|64|1"),
    by_hand("MiniLM-sized encoder, half of its heads and units, 8 × 128 tokens", "encoder|sdpa|8 x 128|1"),
    (
        "ResNet-50, an ONNX file, half of its channels, batch 1, 1 thread, `demask slim`",
        "{runtime|ResNet-50|1|original, ms} → {runtime|ResNet-50|1|slim, ms} ms",
        "ONNX Runtime runs both",
    ),
]
LOST: list[Row] = [
    sparse("Linear 768 to 3072, 70 % zeros, 1 token", "Linear 768 to 3072", "70%", "1", peers=("ONNX Runtime",)),
    sparse("Linear 768 to 3072, 70 % zeros, 128 tokens", "Linear 768 to 3072", "70%", "128", peers=("DeepSparse",)),
]
NOT_FASTER: list[Row] = [
    (
        "ResNet-20, batch 1, 2 threads, `demask`",
        "{residual|ResNet-20|*|1|2|masked, ms} → {residual|ResNet-20|*|1|2|demasked, ms} "
        "ms ([residual](../benchmarks/results/residual.md))",
        "a pass is mostly calls; `optimize` makes them one",
    ),
    (
        "ResNet-56 in ONNX Runtime, batch 1",
        "{runtime|ResNet-56 (CIFAR)|1|original, ms} → {runtime|ResNet-56 (CIFAR)|1|slim, ms} ms "
        "([runtime](../benchmarks/results/runtime.md))",
        "the runtime computes blocks of 16 channels",
    ),
    (
        "UltraFace in ONNX Runtime, every width as small as it can be",
        "{runtime|the same, weights no inputs|1|original, ms} → "
        "{runtime|the same, weights no inputs|1|minimal, ms} ms "
        "([runtime](../benchmarks/results/runtime.md))",
        "the same blocks; `demask slim` measures widths, and writes one of "
        "{runtime|the same, weights no inputs|1|slim, ms} ms",
    ),
]


def measured(ledger: Ledger) -> str:
    """The table of README.md, with the day of its oldest figure."""
    losses = [("**losses**", "", "")]
    lines = [[quote(ledger, cell) for cell in row] for row in [*WON, *losses, *LOST]]
    pages = set(re.findall(r"\{(\w+)\|", repr([*WON, *LOST])))
    oldest = min(run.date for page in pages for run in ledger.runs(page))
    return f"Measured {oldest} or later.\n\n" + markdown(["what", "original → demask", "other tools"], lines)


def list_pages(ledger: Ledger, names: Iterable[str]) -> str:
    """These pages of results, with what each says in a sentence."""
    lines = []
    for name in names:
        page, dates = ledger.pages[name], sorted(run.date for run in ledger.runs(name))
        lines.append([f"[{page.title}](../benchmarks/results/{name}.md)", page.summary, dates[0]])
    return markdown(["page", "in a sentence", "measured"], lines)


def list_engine(ledger: Ledger, engine: str) -> str:
    """The pages of results of an engine."""
    return list_pages(ledger, (name for name, (of, _) in scripts().items() if of == engine and name in ledger.pages))


def list_every_page(ledger: Ledger) -> str:
    """All pages of results, by engine."""
    engines = dict.fromkeys(engine for engine, _ in scripts().values())
    return "\n\n".join(f"## {engine.capitalize()}\n\n{list_engine(ledger, engine)}" for engine in engines)


LOSSES = (  # pages that docs/losses.md speaks of
    "peers",
    "batch",
    "pilot_explain",
    "pilot_skip",
    "gpu_sparse",
    "cost",
    "planning",
    "slim_checkpoint",
)
ENGINES = ("pilot", "sparse", "stride", "traverse")  # each with a page of documentation
BLOCKS: dict[str, dict[str, Callable[[Ledger], str]]] = {
    "README.md": {"measured": measured},
    "docs/results.md": {"pages": list_every_page},
    **{f"docs/{engine}.md": {"measured": partial(list_engine, engine=engine)} for engine in ENGINES},
    "docs/losses.md": {
        "not faster": lambda ledger: _table(ledger, ["what", "measured", "why"], NOT_FASTER),
        "lost": lambda ledger: _table(ledger, ["what", "demask", "the other"], LOST),
        "other pages": partial(list_pages, names=LOSSES),
    },
}


def _table(ledger: Ledger, head: list[str], rows: list[Row]) -> str:
    return markdown(head, [[quote(ledger, cell) for cell in row] for row in rows])


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that is written from the ledger, and its text."""
    ledger = Ledger.read()
    for name in ledger.pages:
        yield RESULTS / f"{name}.md", ledger.render(name)
    for file, blocks in BLOCKS.items():
        text = (ROOT / file).read_text()
        for name, block in blocks.items():
            pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
            new = f"\n{block(ledger)}\n\n"
            text, count = re.subn(pattern, lambda m, new=new: m[1] + new + m[2], text, flags=re.S)
            if count != 1:
                raise LookupError(f"{file}: expected <!-- {name} --> and <!-- end --> once")
        yield ROOT / file, text


def write_pages() -> Iterator[Path]:
    """Writes them; returns the paths of those that changed."""
    for path, text in pages():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            yield path.relative_to(ROOT)
