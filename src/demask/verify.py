"""Do two networks compute the same? Measured, with the error, never assumed."""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.failures import described, public
from demask.graph.capture.capture import capture, interface_of
from demask.graph.capture.fold_constants import folded
from demask.graph.capture.functionalize import functionalized
from demask.graph.capture.shared_captures import sharing
from demask.graph.example_inputs import batch_axes, batched, examples, like
from demask.graph.module_copy import structural_copy, without_caches
from demask.graph.provenance import Cut, Provenance
from demask.graph.result.class_result import as_graph
from demask.graph.result.demasked_module import Demasked, build_plain
from demask.graph.result.uncalled_modules import is_holder
from demask.numerics import (
    RELATIVE,
    ULPS,
    compare,
    is_as_exact,
    named_leaves,
    names_narrow,
    narrowed,
    readable,
    to_double,
    widen,
)
from demask.ops import TABLE, Table
from demask.shrink import demask
from demask.shrink.emit.constant_store import cut
from demask.shrink.pipeline import given as captured
from demask.shrink.submodules import first_calls, repeated_blocks

TOKENS = 4  # that language models generate, to be compared
SHARE = 4  # of the memory of this machine, one such part may be taken by copies in float64
LAYERS = 8  # drawn from those of a network whose copies take more, beside three others


@dataclass(frozen=True, slots=True)
class Verification:
    """What a comparison found.

    max_abs, max_rel: the largest difference over all runs in float64, absolute and relative to the
    largest output of its leaf. dtype: the model's own. ok: equal within 1e-10 in float64 and within
    64 units in the last place of the largest output in the model's own dtype. ulps: those units.
    runs: how many calls were compared. vacuous: outputs that did not depend on the input, for which
    equality proves nothing. narrowed: calls that cast to a narrower float, whose type then counts.
    failure: the first difference that was too large, in words. layers: where copies of the whole in
    float64 would take too much memory, the layers that were compared in float64 instead, each on
    the inputs that it has in the model; max_abs and max_rel are theirs. coverage: in words, what
    was compared in float64 then, and what was not.
    """

    max_abs: float
    max_rel: float
    dtype: str
    ok: bool
    ulps: float = 0.0
    runs: int = 0
    vacuous: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    failure: str = ""
    layers: tuple[str, ...] = ()
    coverage: str = ""

    def __str__(self) -> str:
        word = "equal" if self.ok else f"DIFFERENT ({self.failure})"
        text = (f"{word}: {self.max_rel:.1e} relative in float64, {self.ulps:.3g} ulps in "
                f"{self.dtype}, {self.runs} runs")  # fmt: skip
        still = f"; do not depend on the input: {', '.join(self.vacuous)}" if self.vacuous else ""
        return text + still + (f"; {self.coverage}" if self.coverage else "")


@public
def verify(
    model: nn.Module | ExportedProgram,
    slim: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
    table: Table = TABLE,
) -> Verification:
    """Compare `slim` with `model` in eval mode, on the given inputs and three seeded draws like
    them, at batch 1 and 3 too where the batch is dynamic; in float64 and in the model's own dtype.
    Of networks that `generate`, a few tokens are compared, too. Where copies in float64 would take
    more than a quarter of this machine's memory, the whole is compared in its own dtype alone, and
    a sample of its repeated layers in float64, one by one: the result says which.

    table: the op table that `slim` was made with. Neither module is changed. Raises Mismatch when
    they differ and `check`; BadInput when there are no example inputs to run. Integer and boolean
    outputs must be equal. In the model's own dtype, 64 ulps of an output's largest value are
    allowed, or 8 times what the model itself is off from float64.

    >>> import torch, demask
    >>> net = torch.nn.Linear(4, 3)
    >>> demask.verify(net, demask.demask(net, (torch.randn(2, 4),)), (torch.randn(2, 4),)).ok
    True
    """
    args, kwargs = examples((slim, model), args, dict(kwargs or {}))
    networks = model, slim
    if isinstance(getattr(slim, "demasked", None), Provenance):  # its cache holds fewer heads
        model, slim = _without_cache(model), _without_cache(slim)
    layers = _layers(model, slim) if _copies(model, slim) > memory() / SHARE else []
    if layers:
        found, narrow = _Differences(RELATIVE, tracked=False), narrowed(slim)
        pairs = {False: _own(model, slim)}
    else:
        graph = _graph(slim)
        left, right, allowed = _doubles(model, graph, args, kwargs, table)
        found, narrow = _Differences(allowed, tracked=True), narrowed(graph)
        pairs = {True: (left, right), False: _own(model, slim)}
    for seed, batch, inputs in _draws(model, slim, args, kwargs):
        for wide, (a, b) in pairs.items():
            given = pytree.tree_map(to_double, inputs) if wide else inputs
            found.compare(a, b, given, wide, narrow, f"draw {seed}, batch {batch}")
    compared = _compare_layers(found, model, slim, layers, (args, kwargs), table) if layers else ()
    found.compare_tokens(networks, kwargs.get("input_ids", args[0] if args else None))
    dtype = str(_dtype(model, slim)).removeprefix("torch.")
    result = found.result(dtype, tuple(name for name, _ in narrow))
    if layers:
        words = _coverage(compared, layers, _copies(model, slim), dtype)
        result = replace(result, layers=compared, coverage=words)
    if check and not result.ok:
        raise Mismatch(
            f"the networks differ: {result.failure}. Expected at most {found.allowed:.1e} relative "
            f"in float64 and {ULPS:g} ulps in {result.dtype}; got {result.max_rel:.1e} and "
            f"{result.ulps:.3g}. "
            "If `slim` came from demask(), please report it with the model."
        )
    return result


def _without_cache(network: Any) -> Any:
    """A copy of a network of a class, which returns no cache."""
    if not isinstance(network, nn.Module) or isinstance(network, fx.GraphModule):
        return network
    return without_caches(_eval(network))


def _graph(slim: nn.Module) -> nn.Module:
    """What of a network can be widened whatever its own code casts to: its graph."""
    try:
        return as_graph(slim)
    except NotExportable:
        return slim


def memory() -> float:
    """Bytes of memory of this machine; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _copies(model: Any, slim: nn.Module) -> int:
    """Bytes that copies of both in float64 would take."""
    own = model.state_dict.values() if isinstance(model, ExportedProgram) else _held(model)
    return 8 * sum(t.numel() for t in (*own, *_held(slim)) if t.is_floating_point())


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _layers(model: Any, slim: nn.Module) -> list[str]:
    """The repeated layers of two networks that can be compared one by one."""
    if not isinstance(model, nn.Module) or isinstance(model, fx.GraphModule):
        return []
    there = {name for name, module in slim.named_modules() if not is_holder(module)}
    return [name for name in repeated_blocks(model) if name in there]


def _sample(names: Sequence[str]) -> list[str]:
    """The first, middle and last, and some more, drawn."""
    ends = {0, len(names) // 2, len(names) - 1}
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = ends | set([k for k in order if k not in ends][:LAYERS])
    return [names[k] for k in sorted(chosen)]


def _compare_layers(
    found: _Differences, model: Any, slim: nn.Module, names: list[str], inputs: Any, table: Table
) -> tuple[str, ...]:
    """Compare a sample of the layers in float64, each on the inputs of its first call in `model`;
    those compared, up to one that differs. One pair of copies exists at a time."""
    calls = first_calls(model, inputs[0], inputs[1], _sample(names))
    own = _dtype(model, slim)
    with sharing():
        for k, (name, given) in enumerate(calls.items()):
            left = _wide(model.get_submodule(name), given)
            right = _wide(slim.get_submodule(name), given)
            call = left, right, pytree.tree_map(to_double, given), True, [], f"layer {name}"
            trial = _Differences(RELATIVE, tracked=False)
            trial.compare(*call)
            with sharing():  # a capture of these copies would keep them
                exact = not trial.failure or _refined(left, right, own, *given, table)
            found.allowed = RELATIVE if exact else ULPS * torch.finfo(own).eps
            found.compare(*call)
            if found.failure:
                return tuple(calls)[: k + 1]
            del left, right, call
            gc.collect()  # graphs are cycles: their tensors would stay until it is due
    return tuple(calls)


def _wide(layer: nn.Module, inputs: Any) -> nn.Module:
    """A copy of a layer in float64, whatever its own code casts to where that can be captured."""
    try:
        copy: nn.Module = build_plain(captured(layer, inputs[0], inputs[1], None))
    except NotExportable:
        copy = _eval(layer, share=False)
    copy = copy.double()
    widen(copy)
    return copy


def _coverage(compared: Sequence[str], layers: Sequence[str], size: int, dtype: str) -> str:
    """What was compared in float64 and what was not, in words."""
    return (
        f"float64 is of {len(compared)} of {len(layers)} layers alone ({', '.join(compared)}), "
        "each on the inputs of one run of the model: copies of the whole take "
        f"{size / 2**30:.1f} GiB. The other layers, and what is around them, were compared in "
        f"{dtype} alone, in the whole"
    )


class _Differences:
    """Collects differences over runs. tracked: of runs in float64 (True), or in the networks' own
    dtype, it is seen which outputs do not depend on the inputs."""

    def __init__(self, allowed: float, *, tracked: bool) -> None:
        self.allowed, self.tracked = allowed, tracked
        self.max_abs = self.max_rel = self.ulps = 0.0
        self.runs, self.failure = 0, ""
        self.seen: dict[str, list[Tensor]] = {}
        self.exact: dict[str, Tensor] = {}  # in float64, of the inputs compared last

    def compare(self, a, b, inputs, wide: bool, narrow, where: str) -> None:
        with torch.no_grad():
            left = _outputs("the first network", a, inputs, where)
            right = _outputs("the second network", b, inputs, where)
        named, other = named_leaves(left), named_leaves(right)
        self.runs += 1
        if len(named) != len(other):
            self._fail(f"{len(named)} outputs against {len(other)} ({where})")
            return
        for (place, x), (_, y) in zip(named, other, strict=True):
            self._leaf(place or "output", x, y, wide, narrow, where)

    def _leaf(self, name: str, x: Any, y: Any, wide: bool, narrow, where: str) -> None:
        difference = compare(x, y)
        if difference.text:
            self._fail(f"output {name} {difference.text} ({where})")
            return
        if not isinstance(x, Tensor):
            return
        if wide is self.tracked and "batch 1" not in where and "batch 3" not in where:
            self.seen.setdefault(name, []).append(x)
        if not difference.is_finite:
            self._fail(f"output {name} is not finite ({where})")
        elif x.is_complex() and difference.gap:
            self._fail(f"output {name} ({x.dtype}) is not equal ({where})")
        elif x.is_floating_point() and wide:
            self.exact[name] = readable(x)
            self.max_abs = max(self.max_abs, difference.gap)
            self.max_rel = max(self.max_rel, difference.relative)
            if difference.relative > self.allowed:
                self._fail(
                    f"output {name} by {difference.relative:.1e} relative in float64 ({where})"
                )
        elif x.is_floating_point():
            ulps = difference.ulps(max((torch.finfo(kind).eps for _, kind in narrow), default=0.0))
            self.ulps = max(self.ulps, ulps)
            if ulps > ULPS and not self._is_rounding(name, readable(x), readable(y)):
                self._fail(f"output {name} by {ulps:.3g} ulps in {x.dtype} ({where})")

    def _is_rounding(self, name: str, x: Tensor, y: Tensor) -> bool:
        """Whether the second network is as exact as the first: of an ill-conditioned one, rounding
        moves the output far before demasking, too."""
        exact = self.exact.get(name)
        if exact is None or exact.shape != x.shape:
            return False
        return is_as_exact(exact, x, y)

    def compare_tokens(self, networks: tuple[Any, Any], ids: Any) -> None:
        """Where both networks generate text, compare a few tokens, made with their caches."""
        a, b = networks
        is_text = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
        if not is_text or not all(callable(getattr(m, "generate", None)) for m in (a, b)):
            return
        options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = _eval(a).generate(ids, **options)  # type: ignore[operator]
            except Exception:  # it cannot be called like that
                return
            try:
                tokens = _eval(b).generate(ids, **options)  # type: ignore[operator]
            except BadInput:  # a part of it is a graph, which refuses calls unlike the example
                return
        self.runs += 1
        if not torch.equal(expected, tokens):
            self._fail(f"the first {TOKENS} tokens that they generate differ")

    def _fail(self, text: str) -> None:
        self.failure = self.failure or text

    def result(self, dtype: str, narrowed: tuple[str, ...]) -> Verification:
        still = tuple(
            name for name, values in self.seen.items()
            if len(values) > 1 and all(torch.equal(values[0], v) for v in values[1:])
        )  # fmt: skip
        return Verification(
            self.max_abs, self.max_rel, dtype, not self.failure, self.ulps, self.runs,
            still, narrowed, self.failure,
        )  # fmt: skip


def _outputs(name: str, network: nn.Module, inputs: Any, where: str) -> Any:
    try:
        return network(*inputs[0], **inputs[1])
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        shapes = [tuple(t.shape) for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        raise BadInput(
            f"{name} fails on inputs of shapes {shapes} ({where}): {described(error)}. Both must "
            "take the same inputs: give args, kwargs that they do"
        ) from error


def _own(model, slim) -> tuple[nn.Module, nn.Module]:
    if isinstance(model, ExportedProgram):
        return model.module(check_guards=False), _eval(slim)
    return _eval(model), _eval(slim)


def _eval(module: nn.Module, share: bool = True) -> nn.Module:
    copied = structural_copy(module, share=share)
    for part in copied.modules():
        part.training = False
    return copied


def _doubles(model, slim, args, kwargs, table: Table) -> tuple[nn.Module, nn.Module, float]:
    """Both in float64, and the relative difference that is then allowed.

    The constants that demasking computed stand in `slim` rounded to its own dtype. Where demasking
    the model in float64 gives the same tensors up to that rounding, they are put in its place, and
    the difference left is that of the graph alone. Else (a network trained since, or from somewhere
    else) the rounding counts.
    """
    own = _dtype(model, slim)
    right = _eval(slim, share=False).double()
    widen(right)
    if isinstance(model, ExportedProgram):
        left: nn.Module = build_plain(folded(functionalized(capture(model))))
    elif names_narrow(slim) or (interface_of(model) and not isinstance(model, Demasked)):
        # What the model's own code casts to float32 can be widened in its graph alone; an ONNX
        # file may cast what is of that type already, which no graph shows.
        left = build_plain(folded(functionalized(capture(model, args, kwargs))))
    else:
        left = _eval(model, share=False)
    left = left.double()
    widen(left)
    if own is torch.float64 or (
        not narrowed(right) and _refined(left, right, own, args, kwargs, table)
    ):
        return left, right, RELATIVE
    return left, right, ULPS * torch.finfo(own).eps


def _refined(
    left: nn.Module, right: nn.Module, own: torch.dtype, args, kwargs, table: Table
) -> bool:
    """Put float64 constants in place of rounded ones, if they are those rounded."""
    try:
        given = pytree.tree_map(to_double, (args, kwargs))
        twin: Any = demask(left, *given, table=table, check=False, result="graph")
    except DemaskError:
        return False
    exact, rounded, eps = twin.state_dict(), right.state_dict(), ULPS * torch.finfo(own).eps
    cuts, whole = twin.demasked.cuts, left.state_dict()
    if exact.keys() != rounded.keys():
        return False
    for name, value in exact.items():
        if value.shape != rounded[name].shape:
            return False
        if _is_cut(value, cuts.get(name), whole):  # which rounds nothing
            exact[name] = rounded[name]
        elif value.is_floating_point() and value.numel():
            allowed = eps * float(value.abs().max())
            if not bool(((value - rounded[name]).abs() <= allowed).all()):
                return False
    if not isinstance(twin, fx.GraphModule) or not isinstance(right, fx.GraphModule):
        return False
    if not _literals(right.graph, twin.graph, eps):
        return False
    right.recompile()
    right.load_state_dict(exact)
    return True


def _is_cut(value: Tensor, how: Cut | None, whole: Mapping[str, Tensor]) -> bool:
    """Whether a tensor holds numbers of the whole network's, and none that were computed."""
    source = None if how is None else whole.get(how.source)
    if how is None or source is None or tuple(source.shape) != how.shape:
        return False
    return torch.equal(cut(source, how.kept), value)


def _literals(rounded: fx.Graph, exact: fx.Graph, eps: float) -> bool:
    """Numbers written in a graph (a pad's value) from its float64 twin, if the two agree."""
    pairs = list(zip(rounded.nodes, exact.nodes, strict=False))
    if len(rounded.nodes) != len(exact.nodes) or any(a.target != b.target for a, b in pairs):
        return False
    for node, twin in pairs:
        mine, theirs = list(node.args), list(twin.args)
        for k, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if isinstance(a, float) and isinstance(b, float) and abs(a - b) <= eps * abs(b):
                mine[k] = b
        node.args = tuple(mine)
    return True


def _draws(model: Any, slim: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[int, Any, Any]]:
    """(seed, batch, inputs): the inputs as given, and draws like them, at batches 1 and 3 too."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    axes = batch_axes(getattr(slim, "demasked", None), leaves)
    if isinstance(
        getattr(model, "demasked", None), Provenance
    ):  # which may be for one size where the other is for any
        axes = [a & b for a, b in zip(axes, batch_axes(model.demasked, leaves), strict=True)]
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        drawn = [like(leaf, draw) if seed and isinstance(leaf, Tensor) else leaf for leaf in leaves]
        yield seed, "given", pytree.tree_unflatten(drawn, spec)
        if seed == 1 and any(axes):
            for batch in (1, 3):
                sized = [batched(x, where, batch) for x, where in zip(drawn, axes, strict=True)]
                yield seed, batch, pytree.tree_unflatten(sized, spec)


def _dtype(model, slim) -> torch.dtype:
    source = model.state_dict.values() if isinstance(model, ExportedProgram) else model.parameters()
    pools = [*source, *slim.parameters()]
    return next((p.dtype for p in pools if p.is_floating_point()), torch.float32)
