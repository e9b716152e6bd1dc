"""demask() checks itself: it compares the result and the model on the example and on two similar
draws.

Each network is called three times, in its own dtype, and shares the model's tensors. A difference
of more than 64 units in the last place (of more than 1e-10 in float64) is computed again in
float64: an ill-conditioned network rounds as badly before demasking as after it, and only a larger
difference is a defect.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from demask.errors import BadInput, CaptureDiffers, Mismatch
from demask.failures import described, is_strict, warn_caller
from demask.graph.capture.errors import check_call, part_of
from demask.graph.example_inputs import batch_axes, draw_examples, resize_batch
from demask.graph.example_runs import Inputs, copy_in_eval, run_seeded
from demask.graph.input_domains import NOTHING, Domain, Domains, domains_of
from demask.graph.program import Program, copy_tensors
from demask.graph.provenance import Cut, Provenance
from demask.graph.result.demasked_module import Demasked, build, build_plain
from demask.numerics import (
    RELATIVE,
    ULPS,
    WORSE,
    compare,
    find_narrow_casts,
    max_size_and_gap,
    named_leaves,
    to_computable,
    to_double,
    to_wide,
)
from demask.ops import schema
from demask.pytree_paths import leaves_with_paths
from demask.shrink.bug_report import write_bug_report

Draws = list[tuple[str, Inputs, Any]]  # a description, the inputs, and the outputs of the model
# Relative to the largest output: two steps of an 8-bit value, in networks that round.
FLIPS = 2 / 255


def check_result(
    slim: Demasked,
    program: Program,
    model: nn.Module | ExportedProgram,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    stated: Domains = NOTHING,
) -> Demasked:
    """`slim`, if it computes what the model does. Else the network as it was captured, with a
    warning and a report that say so, and a file for a bug report.

    program: what `slim` was computed from. Raises CaptureDiffers where that differs from the model,
    BadInput where the model fails on the example.
    """
    example = draw_examples((model,), args, dict(kwargs or {}))
    reference = copy_in_eval(model)
    try:
        draws = [(name, inputs, run_seeded(reference, inputs)) for name, inputs in draw_inputs(example, stated)]
    except Exception as error:  # the user's code: on a draw that it refuses, say
        draws = _example_draw(model, example)
        if not draws:
            _refuse(error)
            return _add_note(slim, f"this result was not checked: the model fails ({described(error)})")
    if not (wrong := _difference(slim, draws)):
        return slim
    if _difference(build(program, slim.demasked), draws):
        if _is_random(program) or _difference(reference, draws):
            return _add_note(slim, _NOT_REPEATABLE)
        if not _is_same_in_double(program, model, draws):
            raise _capture_differs(wrong, model)
    flips = FLIPS if _has_rounding(program) else 0.0
    if _is_rounding(partial(build_plain, program), slim, draws, flips):
        return slim
    return _return_captured(slim, program, wrong)


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
    try:
        reference = copy_in_eval(model, caches=caches)
        draws = [(name, inputs, run_seeded(reference, inputs)) for name, inputs in draw_inputs(example, stated)]
    except Exception:
        draws = _example_draw(model, example, caches=caches)
    leaves, spec = pytree.tree_flatten(example)
    axes = batch_axes(record, leaves)
    for batch in (1, 3) if any(axes) else ():
        sized = [resize_batch(leaf, where, batch) for leaf, where in zip(leaves, axes, strict=True)]
        inputs = pytree.tree_unflatten(sized, spec)
        with contextlib.suppress(Exception):  # the model rejects this batch size
            draws.append((f"batch {batch}", inputs, run_seeded(copy_in_eval(model), inputs)))
    if branching is not None:
        for name, inputs in _other_sizes(branching, example):
            with contextlib.suppress(Exception):  # the model rejects these sizes
                expected = run_seeded(copy_in_eval(model, caches=caches), inputs)
                draws.append((name, inputs, expected))
    wrong = _difference(slim, draws, caches=caches)
    exact = wrong and not isinstance(model, ExportedProgram)
    new_reference = partial(copy_in_eval, model, share=False)
    return "" if exact and _is_rounding(new_reference, slim, draws) else wrong


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


def _example_draw(model: nn.Module | ExportedProgram, example: Inputs, *, caches: bool = False) -> Draws:
    """The example alone, for a model that rejects draws; [] where it fails there, too."""
    try:
        return [("the example inputs", example, run_seeded(copy_in_eval(model, caches=caches), example))]
    except Exception:
        return []


def _is_same_in_double(program: Program, model: nn.Module | ExportedProgram, draws: Draws) -> bool:
    """Whether a capture and its model agree in float64: then they differ by rounding only."""
    if isinstance(model, ExportedProgram):
        return False
    try:
        both = [
            _run_in_double(partial(copy_in_eval, model, share=False), draws),
            _run_in_double(partial(build_plain, program), draws),
        ]
        rows = [row for outputs in zip(*both, strict=True) for row in _pairs(*outputs)]
        return not any(_describe_leaf(a, b, torch.finfo(torch.float32).eps) for _, a, b in rows)
    except Exception:
        return False


def _run_in_double(new_network: Callable[[], nn.Module], draws: Draws) -> list[Any]:
    """The outputs of a network on each draw in float64, where it is twice as large or more: its
    memory is freed at once. new_network: builds it, with tensors of its own."""
    wide = to_wide(new_network())
    outputs = [run_seeded(wide, pytree.tree_map(to_double, inputs)) for _, inputs, _ in draws]
    wide.to("meta")  # graphs, and networks with `save_pretrained`, refer to themselves
    return outputs


def _capture_differs(wrong: str, model: nn.Module | ExportedProgram) -> CaptureDiffers:
    return CaptureDiffers(
        f"the graph that torch.export captured does not compute what the model does ({wrong})",
        "unknown",
        "look for code that depends on something else than its inputs; demask only a part, such "
        f"as {part_of(model)}; or pass check=False to have the network as it was captured",
    )


def _return_captured(slim: Demasked, program: Program, wrong: str) -> Demasked:
    """The network as it was captured, with a report that says why."""
    if is_strict():
        raise Mismatch(f"the result of demask() computes something else: {wrong}")
    path = write_bug_report(program, slim, wrong)
    text = (
        f"demask() changed what this network computes ({wrong}), so the network is returned as it "
        f"was captured, nothing removed. This is a defect of demask: please report it with {path} "
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


def draw_inputs(example: Inputs, stated: Domains = NOTHING) -> Iterator[tuple[str, Inputs]]:
    """The inputs to compare on: the example; numbers drawn from its domains; the example's values
    in another order. stated: domains that the caller states."""
    yield "the example inputs", example
    leaves, spec = pytree.tree_flatten(example)
    domains, draw = domains_of(leaves, stated), torch.Generator().manual_seed(0)
    for name, change in (("drawn numbers (seed 0)", Domain.draw), ("values reordered (seed 0)", Domain.reorder)):
        values = [
            change(domain, leaf, draw) if isinstance(leaf, Tensor) else leaf
            for leaf, domain in zip(leaves, domains, strict=True)
        ]
        yield name, pytree.tree_unflatten(values, spec)


def _difference(network: nn.Module | ExportedProgram, draws: Draws, *, caches: bool = False) -> str:
    """The first output that differs from the expected one, and by how much; "" if none does."""
    runner = copy_in_eval(network, caches=caches)
    eps = max((torch.finfo(kind).eps for _, kind in find_narrow_casts(runner)), default=0.0)
    for name, inputs, expected in draws:
        try:
            outputs = run_seeded(runner, inputs)
        except Exception as error:
            return f"{described(error)}, on {name}"
        skipped = _cache_paths(expected) if caches else ()
        for where, a, b in _pairs(expected, outputs):
            if where.startswith(skipped):
                continue
            if text := _describe_leaf(a, b, eps):
                return f"output {where} {text}, on {name}"
    return ""


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


def _pairs(expected: Any, actual: Any) -> Iterator[tuple[str, Any, Any]]:
    named, leaves = named_leaves(expected), named_leaves(actual)
    if len(named) != len(leaves):
        yield "count", len(named), len(leaves)
        return
    for (place, a), (_, b) in zip(named, leaves, strict=True):
        yield place or "0", a, b


def _describe_leaf(expected: Any, actual: Any, eps: float) -> str:
    """How two outputs differ, in words; "" if not, or where the expected one is not finite."""
    difference = compare(expected, actual)
    if difference.text:
        return difference.text
    if not math.isfinite(difference.gap):
        return "is not finite where the model's is"
    if difference.is_rounding(eps):
        return ""
    kind = expected.dtype if isinstance(expected, Tensor) else ""
    return f"differs by {difference.ulps(eps):.3g} units in the last place of {kind}"


def _is_rounding(new_reference: Callable[[], nn.Module], slim: nn.Module, draws: Draws, flips: float = 0.0) -> bool:
    """Whether differences come from rounding alone: in float64 there are none but those of rounded
    constants, or the network itself rounds as badly before demasking. new_reference: builds the
    network before demasking, with tensors of its own.

    A network that computes in float64 throughout has no wider type to be compared in: how badly it
    rounds is read off its error in float32, which is that many times as large.
    """
    try:
        both = [_run_in_double(new_reference, draws), _run_in_double(partial(copy_in_eval, slim, share=False), draws)]
        runner = copy_in_eval(slim)
        for (_, inputs, expected), exact, other in zip(draws, *both, strict=True):
            with _CoarsestType() as types:
                after = run_seeded(runner, inputs)
            eps, narrow = min(types.eps, _SINGLE), exact
            if eps < _SINGLE:
                small = new_reference().float()
                narrow = run_seeded(small, pytree.tree_map(_to_single, inputs))
            outputs = map(pytree.tree_leaves, (expected, after, exact, other, narrow))
            rows = zip(*outputs, strict=True)
            if not all(_is_rounded(*row, eps=eps, flips=flips) for row in rows):
                return False
    except Exception:
        return False
    return True


_SINGLE, _DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


class _CoarsestType(TorchFunctionMode):
    """Watches the calls of a network. eps: the largest machine epsilon of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = _DOUBLE

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return outputs


def _to_single(leaf: Any) -> Any:
    """A floating-point tensor in float32; anything else as it is."""
    return leaf.float() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _is_rounded(before: Any, after: Any, exact: Any, other: Any, narrow: Any, eps: float, flips: float) -> bool:
    """Whether one output is as exact after demasking as before. exact, other: both in float64;
    narrow: before in float32, where all is computed in float64, else `exact` again. eps: of the
    coarsest type that the network computes in, float32's at most."""
    if not isinstance(before, Tensor):
        return before == after
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if not before.is_floating_point():
        return torch.equal(before, after) or torch.equal(exact, other)
    before, after, exact, other, narrow = map(to_computable, (before, after, exact, other, narrow))
    finite = torch.isfinite(before) & torch.isfinite(exact)
    values = [value[finite].double() for value in (before, after, exact, other, narrow)]
    if not values[0].numel():
        return True
    before, after, exact, other, narrow = values
    size, error = max_size_and_gap(exact, before)
    in_single = max_size_and_gap(exact, narrow)[1] * _DOUBLE / _SINGLE
    if math.isfinite(in_single):  # float32 may overflow
        error = max(error, in_single)
    allowed = max(WORSE * error, ULPS * eps * size, RELATIVE * size, flips * size)
    graph, own = max_size_and_gap(exact, other)[1], max_size_and_gap(exact, after)[1]
    return math.isfinite(own) and (own <= allowed or graph <= ULPS * eps * size)


_ROUNDS = ("round", "quantize", "floor", "ceil", "trunc", "sign", "argmax", "topk", "sort")


def _has_rounding(program: Program) -> bool:
    """Whether a network has calls that may turn a rounding error into a step."""
    return any(word in str(node.target) for node in program.graph.nodes for word in _ROUNDS)


def _is_random(program: Program) -> bool:
    """Whether a graph draws random numbers."""
    return any(map(schema.draws_random_numbers, program.graph.nodes))
