"""ONNX files that packages ship, every second channel masked: edited, and exported again.

`python -m benchmarks run edited_files -- --packages FOLDER` takes the files of all packages in a
folder (`site-packages` of another environment) and those of the packages of `real_models`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor

import demask
from benchmarks.common.catalog import Benchmark
from benchmarks.common.ledger import Cell, Page, Run, Table, save, text_of
from benchmarks.shrink.real_models import FIXED, PIXELS, RATE, error, graphs_of, sources
from demask.files.onnx.edit.edit_file import edit_file, save_edited
from demask.machine.clock import Timing, race
from demask.machine.describe import load_average
from demask.ops import TABLE

BENCHMARK = Benchmark(
    "ONNX files of packages with every second channel masked: edited, and exported again",
    "about 30 s a file",
    needs=("`make .venv/real.stamp`", "a folder of more packages (`--packages`)"),
    quick="--only cls_infer",
    measures=("files/onnx", "shrink", "facts", "ops"),
)

LEAST = 4096  # bytes of a file that is no test
SIZES = (64, 96, 160, 32, 512, 576, 1600, 16_000, 48_000, 1)  # tried for the open sizes of an input
SECONDS = 2.0  # of calls in alternation, at most
KINDS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "random": lambda x: x,
    "zeros": torch.zeros_like,
    "constant": torch.ones_like,
    "tiny": lambda x: x * 1e-9,
    "large": lambda x: x * (16 if x.dtype == torch.float16 else 1e4),
}
DTYPES = {
    "float": torch.float32,
    "float16": torch.float16,
    "double": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "bool": torch.bool,
}
Feeds = Mapping[str, np.ndarray]


@dataclass(slots=True)
class Row:
    """One file. sizes, calls, errors, seconds: of "original", "edit" and "export"; errors are
    relative to the largest value of an output, the largest of all kinds of input. failures: why
    there is no edit or no export."""

    name: str
    opset: int = 0
    exported_opset: int = 0
    nodes: tuple[int, int] = (0, 0)
    sizes: dict[str, int] = field(default_factory=dict)
    calls: Mapping[str, Timing] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def files(packages: Path | None) -> dict[str, Path]:
    """ONNX files by package and name, without those of equal bytes."""
    paths = [source.path for source in sources().values() if source.is_onnx]
    folders = {path: source.package for source in sources().values() for path in [source.path]}
    for path in sorted(packages.rglob("*.onnx")) if packages else ():
        paths.append(path)
        folders[path] = path.relative_to(packages).parts[0] if packages else ""
    by_name, seen = {}, set()
    for path in paths:
        data = path.read_bytes()
        if len(data) >= LEAST and data not in seen:
            seen.add(data)
            by_name[f"{folders[path]}/{path.stem}"] = path
    return by_name


def masked(path: Path, folder: Path) -> Path:
    """A copy of the file whose layers have every second output channel at zero, also where their
    weights are stored as integers."""
    model = onnx.load(path)
    for graph in graphs_of(model.graph):
        tensors = {t.name: t for t in graph.initializer}
        tensors |= {
            n.output[0]: a.t for n in graph.node if n.op_type == "Constant" for a in n.attribute if a.name == "value"
        }
        stored = {n.output[0]: n for n in graph.node if n.op_type == "DequantizeLinear"}
        done: set[str] = set()
        for node in graph.node:
            for k, axis in _channels(node):
                name, zero = node.input[k], 0
                if name in stored:
                    inputs = stored[name].input
                    point = tensors.get(inputs[2]) if len(inputs) > 2 else None
                    zero = 0 if point is None else numpy_helper.to_array(point).reshape(-1)[0]
                    name = inputs[0]
                if name in tensors and name not in done and len(tensors[name].dims) > max(axis, 0):
                    done.add(name)
                    values = numpy_helper.to_array(tensors[name]).copy()
                    np.moveaxis(values, axis, 0)[1::2] = zero
                    tensors[name].CopyFrom(numpy_helper.from_array(values, tensors[name].name))
    masked_path = folder / path.name
    onnx.save(model, masked_path)
    return masked_path


def _channels(node: Any) -> list[tuple[int, int]]:
    """The operands of a layer that have output channels, and the axis of these."""
    transposed = any(a.name == "transB" and a.i for a in node.attribute)
    match node.op_type:
        case "Conv" | "ConvInteger":
            return [(1, 0), *([(2, 0)] if len(node.input) > 2 and node.op_type == "Conv" else [])]
        case "ConvTranspose":
            return [(1, 1), *([(2, 0)] if len(node.input) > 2 else [])]
        case "Gemm":
            return [(1, 0 if transposed else 1), *([(2, -1)] if len(node.input) > 2 else [])]
        case "MatMul" | "MatMulInteger":
            return [(1, -1)]
    return []


def session(path: Path | str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])


def example(path: Path, runner: Any) -> tuple[Tensor, ...]:
    """Seeded inputs for the sizes that a file leaves open, on which it runs."""
    draw = torch.Generator().manual_seed(0)
    shapes = [port.shape for port in runner.get_inputs()]
    batches = {None, *(shape[0] for shape in shapes if shape)}  # names of the first axes
    for size, batch in itertools.product(SIZES, (1, 2)):
        inputs = []
        for port in runner.get_inputs():
            is_state = port.name in ("state", "h", "c")
            dims = [
                n if isinstance(n, int) and n > 0 else batch if k == 0 or is_state or (n and n in batches) else size
                for k, n in enumerate(port.shape)
            ]
            if len(dims) == 4 and path.stem in PIXELS:
                dims[2:] = PIXELS[path.stem]
            dtype = DTYPES[port.type.removeprefix("tensor(").removesuffix(")")]
            if port.name == "sr":
                inputs.append(torch.tensor(RATE))
            elif dtype.is_floating_point:
                inputs.append(torch.randn(dims, generator=draw).to(dtype))
            else:
                inputs.append(torch.randint(0, 2, dims, generator=draw).to(dtype))
        try:
            runner.run(None, feeds(runner, inputs))
            return tuple(inputs)
        except Exception:  # its exceptions share no base class
            continue
    raise ValueError("no example of the sizes tried runs")


def feeds(runner: Any, inputs: Sequence[Tensor]) -> dict[str, np.ndarray]:
    """Arrays by name. A file with fixed inputs has fewer."""
    ports = runner.get_inputs()
    return {port.name: x.numpy() for port, x in zip(ports, inputs, strict=True)}


def measured(name: str, path: Path, folder: Path) -> Row:
    """One file: its edit and its export, their outputs and times."""
    row, original = Row(name), masked(path, folder)
    row.opset = _opset(original)
    row.sizes["original"] = original.stat().st_size
    runner = session(original)
    inputs = example(path, runner)
    fixed = FIXED.get(path.stem, {})
    free = [x for port, x in zip(runner.get_inputs(), inputs, strict=True) if port.name not in fixed]

    def edited(target: Path) -> None:
        result = edit_file(original, inputs, TABLE)
        if result is None:
            raise ValueError("nothing to remove")
        row.nodes = (result.unchanged, result.nodes)
        save_edited(result, target)

    def exported(target: Path) -> None:
        network = demask.from_onnx(original, inputs=fixed)
        demask.to_onnx(demask.demask(network, tuple(free)), target, tuple(free))
        row.exported_opset = _opset(target)

    calls: dict[str, Callable[[], Any]] = {"original": lambda: runner.run(None, feeds(runner, inputs))}
    for kind, write, arguments in (("edit", edited, inputs), ("export", exported, free)):
        target, start = folder / f"{kind}.onnx", time.process_time()
        try:
            write(target)
            row.seconds[kind] = time.process_time() - start
            other = session(target)
            row.sizes[kind] = target.stat().st_size
            row.errors[kind] = difference(runner, inputs, other, arguments)
            calls[kind] = lambda other=other, xs=arguments: other.run(None, feeds(other, xs))
        except Exception as failed:
            reason = " ".join(str(failed).replace(f"{folder}/", "").split())
            row.failures[kind] = f"{type(failed).__name__}: {reason}"
    row.calls = Timing.of_each(race(calls, seconds=SECONDS))
    return row


def difference(runner: Any, inputs: Sequence[Tensor], other: Any, same: Sequence[Tensor]) -> float:
    """The largest difference of two files on all kinds of input on which the first one runs and
    gives finite numbers."""
    worst = 0.0
    for change in KINDS.values():
        changed = [[change(x) if x.is_floating_point() else x for x in xs] for xs in (inputs, same)]
        try:
            expected = runner.run(None, feeds(runner, changed[0]))
        except Exception:  # its exceptions share no base class
            continue
        outputs = other.run(None, feeds(other, changed[1]))
        pairs = [
            (a.astype(np.float64), b.astype(np.float64))
            for a, b in zip(expected, outputs, strict=True)
            if isinstance(a, np.ndarray) and a.dtype.kind in "fiub" and a.size
        ]
        if all(np.isfinite(a).all() for a, _ in pairs) and pairs:
            worst = max(worst, error(*zip(*pairs, strict=True)))
    return worst


def _opset(path: Path) -> int:
    model = onnx.load(path, load_external_data=False)
    return next((e.version for e in model.opset_import if e.domain in ("", "ai.onnx")), 0)


WAYS = ("edit", "export")
HEAD = [
    "file",
    "KB",
    *(f"{way}, KB" for way in WAYS),
    "original, ms",
    *(f"{way}, ms" for way in WAYS),
    "unchanged",
    "nodes",
    "op set",
    "op set of the export",
    *(f"{way} differs by" for way in WAYS),
    *(f"{way}, s" for way in WAYS),
    "failed",
]


def cells(row: Row) -> list[Cell]:
    """A line of the table."""
    kilobytes = {kind: size / 1e3 for kind, size in row.sizes.items()}
    failures = (f"{way}: {reason[:300]}".replace("|", "/") for way, reason in row.failures.items())
    every = ("original", *WAYS)
    return [
        row.name,
        *map(kilobytes.get, every),
        *map(row.calls.get, every),
        *(n or None for n in (*row.nodes, row.opset, row.exported_opset)),
        *map(row.errors.get, WAYS),
        *map(row.seconds.get, WAYS),
        "; ".join(failures),
    ]


def count_worse(rows: Sequence[Mapping[str, Any]], unit: str, other: str, least: float = 1.0) -> int:
    """Files whose edit takes at least so many times the size or the time of another file."""
    pairs = [(row[f"edit, {unit}"], row[other]) for row in rows]
    pairs = [[x.low if isinstance(x, Timing) else x for x in pair] for pair in pairs]
    return sum(a >= least * b for a, b in pairs if a and b)


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    edited, exported = (sum(row[f"{way}, KB"] is not None for row in rows) for way in WAYS)
    return (
        f"{edited} of {len(rows)} files are edited, {exported} exported again; edits larger than "
        f"the original: {count_worse(rows, 'KB', 'KB')}, slower by 5 %: "
        f"{count_worse(rows, 'ms', 'original, ms', 1.05)}; larger than the export by 2 %: "
        f"{count_worse(rows, 'KB', 'export, KB', 1.02)}, slower by 5 %: "
        f"{count_worse(rows, 'ms', 'export, ms', 1.05)}"
    )


def page(rows: Sequence[Row]) -> Page:
    text = f"""
Every second output channel of each convolution and of each product with stored weights is zero.
*edit*: the file without them (`demask.files.onnx.edit`), all else of it byte for byte. *export*:
`demask.to_onnx` of the demasked network. Milliseconds of one call in ONNX Runtime
{onnxruntime.__version__}: median (10 %–90 % quantile) of alternated calls; where files are
compared, the 10 % quantile. Differences are the largest on {", ".join(KINDS)} inputs, relative to
the largest value of the output, where the original's outputs are finite. *unchanged*: nodes of the
edit, byte for byte. Seconds of the processor, once."""
    title = "ONNX files of packages: edited, and exported again"
    return Page(title, [text, summarize, Table(HEAD, [*map(cells, rows)], merge=True)], summarize)


def main() -> None:
    """Run what is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", type=Path, help="a folder of more packages")
    parser.add_argument("--only", nargs="+", help="parts of names of files")
    parser.add_argument("--output", type=Path, help="a page of its own, in place of the ledger")
    options, rows = parser.parse_args(), list[Row]()
    torch.set_num_threads(1)
    before = load_average()
    for name, path in files(options.packages).items():
        if options.only and not any(part in name for part in options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(measured(name, path, Path(folder)))
            except Exception as failed:
                rows.append(Row(name, failures={"original": f"{type(failed).__name__}: {failed}"}))
        print(*map(text_of, cells(rows[-1])), sep=" | ", flush=True)
        run = Run.now("1 thread", before=before)
        save("edited_files", page(rows), run, options.output)


if __name__ == "__main__":
    main()
