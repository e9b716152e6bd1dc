"""Writes what the package computes for many networks as text, so that a change which should change
nothing can be seen to: `diff -r` of two dumps is empty, and `hash` of a dump is that of `HASH`.

    python tests/golden/dump.py FOLDER [--only "micro/*"] [--jobs 2]
    python tests/golden/dump.py --hash FOLDER

Networks are seeded and costs are not measured. A part that raises is dumped as what it raised.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import hashlib
import json
import multiprocessing
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("tests", "tests/networks", "tests/networks/zoo")]

import torch  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

HASH = Path(__file__).with_name("HASH")
ZOO = ("alexnet", "densenet121", "efficientnet_b0", "googlenet", "mnasnet0_5", "mobilenet_v2",
       "mobilenet_v3_small", "regnet_x_400mf", "resnet18", "resnet50", "shufflenet_v2_x0_5",
       "squeezenet1_1")  # fmt: skip
SEEDS = 100


@dataclass(frozen=True, slots=True)
class Example:
    """A network and a call of it."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    shapes: Any = None

    @property
    def call(self) -> tuple[Any, ...]:
        return self.model, self.args, self.kwargs


# ------------------------------------------------------------------------------------ networks


def networks() -> Iterator[tuple[str, Callable[[], Example]]]:
    """Names, and what builds the network of each."""
    import micro_recurrent  # noqa: F401  (their networks join MICROS)
    import micro_sequences  # noqa: F401
    from anatomy import MASKS
    from architectures import ARCHITECTURES
    from micro import MICROS

    for case in MICROS:
        yield f"micro/{case.name}", lambda case=case: _micro(case)
    for seed in range(SEEDS):
        yield f"fuzz/{seed:03}", lambda seed=seed: _fuzz(seed)
    for name in ZOO:
        yield f"zoo/{name}", lambda name=name: _zoo(name)
    for k, name in enumerate(sorted(ARCHITECTURES)):
        kind = sorted(MASKS)[k % len(MASKS)]
        yield f"transformers/{name}-{kind}", lambda name=name, kind=kind: _transformer(name, kind)


def _micro(case: Any) -> Example:
    torch.manual_seed(7)
    model, args = case.make()
    return Example(model.float().eval(), tuple(a.float() for a in args))


def _fuzz(seed: int) -> Example:
    from fuzz.generate import generate

    program = generate(seed)
    return Example(program.build().eval(), tuple(program.example(program.batch)))


def _zoo(name: str) -> Example:
    import networks as zoo

    draw = torch.Generator().manual_seed(0)
    model = zoo.mask(zoo.built(name, draw), draw).eval()
    return Example(model, (torch.randn(2, 3, 64, 64, generator=draw),))


def _transformer(name: str, kind: str) -> Example:
    from architectures import ARCHITECTURES, masked

    chosen, draw = ARCHITECTURES[name], torch.Generator().manual_seed(0)
    model = masked(name, kind, draw).eval()
    inputs = chosen.inputs(2, chosen.lengths[0], draw)
    return Example(model, (), inputs, chosen.shapes)


# ------------------------------------------------------------------------------------ as text


def tensor_text(tensor: Tensor) -> str:
    """Type, shape and the hash of the numbers."""
    held = tensor.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    kind = str(held.dtype).removeprefix("torch.")
    return f"{kind} {tuple(held.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def value_text(value: Any) -> str:
    """A value of a graph: dtype and sizes of tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(value_text, value)) + ")"
    return str(value)


def graph_text(graph: fx.Graph) -> str:
    """One line per node: name, call, operands, value, module, effect."""
    lines = []
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        place = list(stack.values())[-1][0] if stack else ""
        lines.append(
            " | ".join(
                [
                    node.op,
                    node.name,
                    str(node.target),
                    f"{node.args} {dict(node.kwargs)}",
                    value_text(node.meta.get("val", node.meta.get("value"))),
                    place,
                    str(node.meta.get("effect", "")),
                ]
            )
        )
    return "\n".join(lines)


def module_text(module: nn.Module) -> str:
    """Class, modules and tensors."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    tensors = [f"{name} {type(t).__name__} {t.requires_grad} {tensor_text(t)}" for name, t in named]
    kind = type(module).__name__ if not isinstance(module, fx.GraphModule) else "GraphModule"
    return "\n".join([kind, repr(module), *tensors])


def program_text(program: Any) -> str:
    """A captured program: graph and constants."""
    rows = [
        f"{name} {c.parameter} {c.requires_grad} {c.aliases} {tensor_text(c.tensor)}"
        for name, c in program.constants.items()
    ]
    return "\n".join([graph_text(program.graph), *rows, *program.guards])


def json_text(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str)


def file_text(write: Callable[[Path], object]) -> str:
    """The hash of a file that a function writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return "\n".join(f"{p.name} {hashlib.sha256(p.read_bytes()).hexdigest()}" for p in files)


# ------------------------------------------------------------------------------------ parts


def graphs(example: Example) -> Iterator[tuple[str, str]]:
    """The demasked network as a graph, with all that is said and written of it."""
    import demask

    slim: Any = demask.demask(*example.call, dynamic_shapes=example.shapes, result="graph")
    yield "graph", graph_text(slim.graph)
    yield "code", slim.code
    yield "tensors", module_text(slim)
    yield "record", json_text(slim.demasked.to_dict())
    yield "report", str(demask.report(slim))
    yield "archive", file_text(lambda path: demask.save(slim, path))
    yield "onnx", attempted(lambda: file_text(lambda path: demask.to_onnx(slim, path)))


def own(example: Example) -> Iterator[tuple[str, str]]:
    """The demasked network in its own class, or what comes back in its place."""
    import demask

    slim: Any = demask.demask(*example.call, dynamic_shapes=example.shapes)
    yield "own", module_text(slim)
    yield "own_record", json_text(slim.demasked.to_dict())
    yield "own_report", str(demask.report(slim))


def strides(example: Example) -> Iterator[tuple[str, str]]:
    """Strided convolutions lowered for each target, given back, and as instructions."""
    from demask import stride

    for target in sorted(stride.TARGETS):
        yield (
            f"lowered_{target}",
            attempted(
                lambda target=target: _demasked_text(stride.lower(*example.call, target=target, dynamic_shapes={}))
            ),
        )
    yield "raised", attempted(lambda: _demasked_text(stride.raise_strides(*example.call, dynamic_shapes={})))
    yield "instructions", attempted(lambda: _hashed(json_text(stride.instructions(*example.call).to_dict())))


def tiles(example: Example) -> Iterator[tuple[str, str]]:
    """Tiled execution: halos, and plans for two budgets."""
    from demask import traverse

    yield "halo", attempted(lambda: str(traverse.halo(*example.call)))
    for memory in ("1MiB", "64MiB"):
        yield (f"plan_{memory}", attempted(lambda memory=memory: str(traverse.plan(*example.call, memory=memory))))


def sparse(example: Example) -> Iterator[tuple[str, str]]:
    """All layers as segments: programs, tapes, and the LLVM text of their kernels."""
    from demask.exec.tape.segment_plan import SegmentPlan
    from demask.kernels.llvm.isa import AVX2
    from demask.kernels.llvm.jit import source
    from demask.ops import TABLE
    from demask.shrink.pipeline import capture_program, shrink_program
    from demask.sparse.segment.build_segments import segmented, segments_of
    from demask.sparse.segment.candidates import _base_programs

    program = shrink_program(capture_program(*example.call, None), TABLE)[0]
    base = next(iter(_base_programs(program, None, TABLE)))[1]
    whole = segmented(base, lambda *_: True, lambda *_: True)
    yield "segments", program_text(whole)
    texts: set[str] = set()
    for k, (node, segment) in enumerate(segments_of(whole.graph)):
        inputs = [_zeros(n) for n in node.args[0]]
        weights = [whole.constants[str(n.target)].tensor for n in node.args[1]]
        with _recorded() as (calls, kernels):
            text = attempted(lambda s=segment, w=weights, i=inputs: str(SegmentPlan.of(s, w, i, 2, AVX2).shapes))
        yield f"tape_{k}", "\n".join([text, *calls])
        texts |= {source([kernel], AVX2) for kernel in kernels}
    yield "llvm", "\n".join(sorted(map(_hashed, texts)))


def candidates(example: Example) -> Iterator[tuple[str, str]]:
    """The programs that `optimize` would try, with costs that are not measured."""
    from demask.graph.queries import ExampleSizes as Sizes
    from demask.ops import TABLE
    from demask.shrink.pipeline import capture_program, shrink_program
    from demask.tune.candidates import generate_candidates
    from demask.tune.layer_costs import LayerCosts

    program = shrink_program(capture_program(*example.call, None), TABLE)[0]
    leaves = pytree.tree_leaves((example.args, example.kwargs or {}))
    asker = LayerCosts(FixedCosts(), Sizes.of(program.graph, leaves))  # type: ignore[arg-type]
    for k, form in enumerate(generate_candidates(program, asker, TABLE, lambda words: None)):
        rows = [form.name, *map(str, form.decisions), program_text(form.program)]
        yield f"candidate_{k}", "\n".join(rows)


def pilots(example: Example) -> Iterator[tuple[str, str]]:
    """Networks that a cheap run first would be: simplified, or conditioned; and weights as packets
    in the order of what was collected."""
    from demask import pilot

    for by in ("bits:4", "exponents", "rank:0.25", "channels:0.5", "downsample:2"):
        yield (
            f"simplified_{by.partition(':')[0]}",
            attempted(lambda by=by: _demasked_text(pilot.simplify(*example.call, by=by))),
        )
    for how, by in (("columns", None), ("skip:0.5", "bits:4"), ("constant:0.5", "bits:4")):
        yield (
            f"conditioned_{how.partition(':')[0]}",
            attempted(
                lambda how=how, by=by: module_text(pilot.condition(*example.call, pilot=by, condition=how, check=False))
            ),
        )
    if example.args:
        yield "collected", attempted(lambda: str(pilot.collect(example.model, example.args)))
    yield "packets", file_text(lambda path: pilot.write_packets(path, example.model, block=256))


PARTS = (graphs, own, strides, tiles, sparse, candidates, pilots)


class FixedCosts:
    """Seconds that follow from the question, and not from the machine."""

    def seconds(self, question: Any) -> float:
        spread = int(hashlib.sha256(question.name.encode()).hexdigest()[:4], 16) / 0xFFFF
        return (1e-6 + 1e-11 * question.flops + 1e-10 * question.bytes) * (1 + spread / 2)


@contextlib.contextmanager
def _recorded() -> Iterator[tuple[list[str], dict[Any, None]]]:
    """Collects the calls of tapes in words, and their kernels, while it lasts."""
    from demask.exec.tape.tape import Tape

    calls, kernels, original = list[str](), dict[Any, None](), Tape.done

    def done(tape: Any, isa: Any) -> Any:
        ready = original(tape, isa)
        for number, phase in enumerate(tape.phases):
            for thread, listed in enumerate(phase):
                calls.extend(f"{number} {thread} {_call_text(call)}" for call in listed)
                kernels.update((call.kernel, None) for call in listed)
        calls.append(f"arena {ready.size}")
        return ready

    Tape.done = done
    try:
        yield calls, kernels
    finally:
        Tape.done = original


def _call_text(call: Any) -> str:
    fields = {key: _field(value) for key, value in sorted(call.fields.items())}
    places = {
        key: (place if isinstance(place, int) else str(place.layout), more)
        for key, (place, more) in sorted(call.buffers.items())
    }
    return f"{call.kernel} {fields} {places}"


def _field(value: Any) -> Any:
    data = getattr(value, "tobytes", None)
    return hashlib.sha256(data()).hexdigest()[:16] if data else value


def _zeros(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    sizes = [n if isinstance(n, int) else int(n.node.hint) for n in value.shape]
    return torch.zeros(sizes, dtype=value.dtype)


def _demasked_text(module: Any) -> str:
    return "\n".join([graph_text(module.graph), module_text(module), *module.demasked.notes])


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|<eval_with_key>\.\d+")


def attempted(make: Callable[[], str]) -> str:
    """A text, or what was raised in its place."""
    try:
        return make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def written(job: tuple[str, Path]) -> str:
    """Write the dump of one network; its name."""
    name, folder = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    make = dict(networks())[name]
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        found: list[tuple[str, str]] = []

        def run(part: Any = part, found: list[tuple[str, str]] = found) -> str:
            found.extend(part(make()))
            return ""

        if raised := attempted(run):
            found.append((f"{part.__name__}_raised", raised))
        for title, text in found:
            (place / f"{title}.txt").write_text(_ADDRESS.sub("0x", text) + "\n")
    return name


def helps(folder: Path) -> None:
    """The help of every command."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from demask.cli.main import app

    place = folder / "help"
    place.mkdir(parents=True, exist_ok=True)
    group: Any = get_command(app)
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"})
    for name in sorted(group.commands):
        text = runner.invoke(app, [name, "--help"]).output
        (place / f"{name}.txt").write_text(text)


def hash_of(folder: Path) -> str:
    """One hash of all files of a dump."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*.txt")):
        total.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def main() -> None:
    from rich.progress import track

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*", help='names of networks, as in "micro/*"')
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--hash", action="store_true", help="print the hash of a dump alone")
    asked = parser.parse_args()
    if not asked.hash:
        names = [name for name, _ in networks() if fnmatch.fnmatch(name, asked.only)]
        helps(asked.folder)
        jobs = [(name, asked.folder) for name in names]
        context = multiprocessing.get_context("spawn")
        with context.Pool(asked.jobs, maxtasksperchild=40) as pool:
            for _ in track(pool.imap_unordered(written, jobs), "dumping", len(jobs)):
                pass
    print(hash_of(asked.folder))


if __name__ == "__main__":
    main()
