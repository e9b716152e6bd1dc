"""demask() checks itself: the result and the model are compared on the example and on two similar
draws, by the rule of `demask.judge`.

Each network is called three times, in its own dtype, and shares the model's tensors. Larger differences are
computed again in float64: an ill-conditioned network rounds as badly before demasking as after it, and only
a larger difference is a defect.

A defect is reported with a file: the graph of a network, without its weights.
"""

from __future__ import annotations

import contextlib
import io
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, CaptureDiffers, Mismatch
from demask.failures import described, is_strict, warn_caller
from demask.graph.capture.errors import check_call, part_of
from demask.graph.example_inputs import batch_axes, draw_examples, resize_batch
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.input_domains import NOTHING, Domains, domains_of
from demask.graph.program import Constant, Program, copy_tensors
from demask.graph.provenance import Cut, Provenance
from demask.graph.result.demasked_module import Demasked, build, build_plain
from demask.installation import VERSION
from demask.judge import Draw, Expected, InFloat64, Verdict, draw_inputs, expected_outputs, judge
from demask.numerics import find_narrow_casts, to_double, to_wide
from demask.ops import schema
from demask.ops.entry import Table, op_name
from demask.pytree_paths import leaves_with_paths

SMALL = 4096  # most elements of an integer tensor (indices, sizes) whose values are written


def write_bug_report(program: Program, slim: fx.GraphModule, failure: str) -> Path:
    """The path of a new .zip in the temporary folder: both graphs as text, sizes, versions, the
    failure, and per tensor where it is zero. It has no weights."""
    folder = Path(tempfile.mkdtemp(prefix="demask-report-"))
    path = folder / "report.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.json", json.dumps(_summary(program, failure), indent=1))
        archive.writestr("captured.txt", _text(program.graph))
        archive.writestr("result.txt", f"{_text(slim.graph)}\n{slim.code}")
        for k, constant in enumerate(program.constants.values()):
            archive.writestr(f"zeros/{k}.npy", _zeros(constant.tensor))
    return path


def _summary(program: Program, failure: str) -> dict[str, Any]:
    return {
        "failure": failure,
        "seeds": [0],
        "versions": {
            "demask": VERSION,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
        },
        "notes": list(program.notes),
        "guards": list(program.guards),
        "constants": [_constant(constant) for constant in program.constants.values()],
    }


def _constant(constant: Constant) -> dict[str, Any]:
    tensor = constant.tensor
    plain = not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= SMALL
    return {
        "name": constant.name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "parameter": constant.parameter,
        "aliases": list(constant.aliases),
        "zeros": int((tensor == 0).sum()),
        "one value": bool(tensor.numel() and (tensor == tensor.reshape(-1)[0]).all()),
        "values": tensor.tolist() if plain else None,
    }


def _text(graph: fx.Graph) -> str:
    """Every call of a graph, with the shape and dtype of its output."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        lines.append(f"{node.format_node()}    # {shape}")
    return "\n".join(lines)


def _zeros(tensor: Tensor) -> bytes:
    """Where a tensor is 0, one bit per element, as a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.packbits((tensor == 0).cpu().numpy().reshape(-1)))
    return buffer.getvalue()


def check_result(
    slim: Demasked,
    program: Program,
    model: nn.Module | ExportedProgram,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stated: Domains,
    table: Table,
) -> Demasked:
    """`slim`, if it computes what the model does. Else the network as it was captured, with a
    warning and a report that say so, and a file for a bug report.

    program: what `slim` was computed from. Raises CaptureDiffers where that differs from the model,
    BadInput where the model fails on the example.
    """
    example = draw_examples((model,), args, dict(kwargs or {}))
    try:
        draws = _expected(model, example, stated)
    except Exception as error:  # the user's code
        _refuse(error)
        return _add_note(slim, f"this result was not checked: the model fails ({described(error)})")
    verdict = _verdict(slim, draws)
    if not verdict.difference:
        note = f"this result was not checked: it {verdict.failure}" if verdict.failure else verdict.remark
        return _add_note(slim, note) if note else slim
    if _verdict(build(program, slim.demasked), draws).difference:
        if _is_random(program) or _verdict(model, draws).difference:
            return _add_note(slim, _NOT_REPEATABLE)
        if isinstance(model, ExportedProgram) or not _is_same_in_double(program, model, draws):
            raise _capture_differs(verdict.difference, model)
    explain = _by_float64(partial(build_plain, program), slim, draws, program.graph)
    if not _verdict(slim, draws, explain).difference:
        return slim
    return _return_captured(slim, program, verdict.difference, table)


def refuse_failing(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None) -> None:
    """Raise BadInput where the model fails on the example, before anything is captured."""
    check_call(model, args, kwargs, None)
    try:
        run_seeded(copy_in_eval(model), draw_examples((model,), args, dict(kwargs or {})))
    except MemoryError:
        raise
    except Exception as error:
        _refuse(error)


def _refuse(error: Exception) -> None:
    """Raise BadInput for an error of the model itself, but for an op that the CPU does not have."""
    if "not implemented" not in str(error):
        raise BadInput(f"the model itself fails on the example: {described(error)}") from error


def describe_difference(
    slim: nn.Module,
    model: nn.Module | ExportedProgram,
    args: Any,
    kwargs: Any,
    *,
    record: Provenance | None = None,
    stated: Domains = NOTHING,
    branching: Program | None = None,
    caches: bool = True,
) -> str:
    """How a network of the model's class differs from it on the example and two similar draws; ""
    if it does not. Draws that the model rejects are not compared.

    record: of a network with graphs for some modules. It returns no caches of keys and values,
    where another one does (with fewer heads), and is called at batches 1 and 3, too: the code
    around a graph may call it differently there. branching: a program of more sizes than the
    network was proved for, since its code may branch by them: it is called at some of these, too.
    caches: whether caches of keys and values are compared.
    """
    example = draw_examples((model,), args, dict(kwargs or {}))
    caches = caches and record is None
    draws: list[tuple[Draw, Any]] = []
    with contextlib.suppress(Exception):  # the model fails on the example
        draws += _expected(model, example, stated, caches=caches)
    leaves, spec = pytree.tree_flatten(example)
    axes = batch_axes(record, leaves)
    for batch in (1, 3) if any(axes) else ():
        sized = [resize_batch(leaf, where, batch) for leaf, where in zip(leaves, axes, strict=True)]
        inputs = pytree.tree_unflatten(sized, spec)
        with contextlib.suppress(Exception):  # the model rejects this batch size
            draws.append((Draw(f"batch {batch}", inputs), run_seeded(copy_in_eval(model), inputs)))
    if branching is not None:
        for name, inputs in _other_sizes(branching, example):
            with contextlib.suppress(Exception):  # the model rejects these sizes
                expected = run_seeded(copy_in_eval(model, caches=caches), inputs)
                draws.append((Draw(name, inputs), expected))
    explain = None
    if not isinstance(model, ExportedProgram):
        explain = _by_float64(partial(copy_in_eval, model, share=False), slim, draws)
    return _verdict(slim, draws, explain, caches=caches).failure


def _other_sizes(program: Program, example: Inputs) -> Iterator[tuple[str, Inputs]]:
    """The example with each dynamic size changed: one more and less, half, twice, and 1 to 3."""
    leaves, spec = pytree.tree_flatten(example)
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    axes: dict[str, list[tuple[int, int]]] = {}
    for k, value in enumerate(values if len(values) == len(leaves) else ()):
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not isinstance(size, int) and size.node.expr.is_Symbol:
                axes.setdefault(str(size), []).append((k, axis))
    for name, places in axes.items():
        n = leaves[places[0][0]].shape[places[0][1]]
        for size in sorted({1, 2, 3, n - 1, n + 1, n // 2, 2 * n} - {0, -1, n}):
            sized = list(leaves)
            for j, where in places:
                sized[j] = resize_batch(sized[j], {where}, size)
            yield f"{name} = {size}", pytree.tree_unflatten(sized, spec)


_NOT_REPEATABLE = (
    "this result was not checked: the network's outputs differ from call to call (random numbers, or a state)"
)


def _expected(
    model: nn.Module | ExportedProgram, example: Inputs, stated: Domains, *, caches: bool = False
) -> list[tuple[Draw, Any]]:
    """The example and two similar draws, with the model's outputs."""
    draws = draw_inputs(example, domains_of(pytree.tree_leaves(example), stated))
    return expected_outputs(partial(run_seeded, copy_in_eval(model, caches=caches)), draws)


def _is_same_in_double(program: Program, model: nn.Module, draws: Expected) -> bool:
    """Whether a capture and its model agree in float64: then they differ by rounding only."""
    try:
        wide = to_wide(copy_in_eval(model, share=False))
        doubled = [Draw(draw.kind, pytree.tree_map(to_double, draw.inputs)) for draw, _ in draws]
        expected = [(draw, run_seeded(wide, draw.inputs)) for draw in doubled]
        capture = partial(run_seeded, to_wide(build_plain(program)))
        return not judge(capture, expected, eps=torch.finfo(torch.float32).eps).difference
    except Exception:
        return False


def _capture_differs(wrong: str, model: nn.Module | ExportedProgram) -> CaptureDiffers:
    return CaptureDiffers(
        f"the graph that torch.export captured does not compute what the model does ({wrong})",
        "unknown",
        "look for code that depends on something else than its inputs; demask only a part, such "
        f"as {part_of(model)}; or pass check=False to have the network as it was captured",
    )


def _return_captured(slim: Demasked, program: Program, wrong: str, table: Table) -> Demasked:
    """The network as it was captured, with a report that says why."""
    if is_strict():
        raise Mismatch(f"the result of demask() computes something else: {wrong}")
    path = write_bug_report(program, slim, wrong)
    own = sorted(table.added.intersection(op_name(node.target) for node in program.graph.nodes))
    cause = "This is a defect of demask"
    if own:
        cause = (
            f"An entry that was added to the table may be wrong ({', '.join(own)}): test each by "
            "demask.ops.laws.check(name, table, demask.demask). If they hold, this is a defect of demask"
        )
    text = (
        f"demask() changed what this network computes ({wrong}), so the network is returned as it "
        f"was captured, nothing removed. {cause}: please report it with {path} "
        "(the graph, sizes, versions and where weights are zero; no weights)"
    )
    warn_caller(text)
    whole = copy_tensors(program)
    cuts = {name: Cut(c.name, tuple(c.tensor.shape), (None,) * c.tensor.ndim) for name, c in whole.constants.items()}
    record = replace(
        slim.demasked,
        cuts=cuts,
        reasons=(),
        effects={},
        removed={},
        after=slim.demasked.before,
        notes=(text, *slim.demasked.notes),
    )
    return build(whole, record)


def _add_note(slim: Demasked, note: str) -> Demasked:
    slim.demasked = replace(slim.demasked, notes=(note, *slim.demasked.notes))
    return slim


def _by_float64(new_reference: Any, slim: nn.Module, draws: Expected, graph: Any = None) -> InFloat64:
    return InFloat64(new_reference, draws, partial(copy_in_eval, slim, share=False), graph)


def _verdict(
    network: nn.Module | ExportedProgram, draws: Expected, explain: InFloat64 | None = None, *, caches: bool = False
) -> Verdict:
    """The verdict of a network on draws, for which the model's outputs are known."""
    runner = copy_in_eval(network, caches=caches)
    eps = max((torch.finfo(kind).eps for _, kind in find_narrow_casts(runner)), default=0.0)
    return judge(partial(run_seeded, runner), draws, explain, without=_cache_paths if caches else None, eps=eps)


def _cache_paths(output: Any) -> tuple[str, ...]:
    """Where an output holds a cache of keys and values, which a smaller network has fewer of: an
    object of transformers' `Cache` under any name, or what older versions return as tuples."""
    named = leaves_with_paths(output, is_leaf=_is_cache)
    return tuple(
        path
        for path, leaf in ((pytree.keystr(keys), leaf) for keys, leaf in named if keys)
        if _is_cache(leaf) or path.startswith("['past_key_values']")
    )


def _is_cache(value: Any) -> bool:
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers.") for c in type(value).__mro__)


def _is_random(program: Program) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(schema.draws_random_numbers, program.graph.nodes))
