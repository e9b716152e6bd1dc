"""Whether two networks compute the same: on which inputs they are compared, by which rule, and which
differences are rounding alone.

Rule. Two outputs are the same if they have one type, shape and dtype; are NaN at the same elements, and
infinite with the same sign; have equal integers, truth values and text; and if the rest differs by at most
`tolerance`. A larger difference is the same only where an explanation shows that rounding alone causes it:
in float64 the second network is about as exact as the first (`InFloat64`), or noise of one rounding error
moves the outputs of the first half as far (`Pair.move`). `demask.verify` has a third one: rounded constants, by
demasking in float64. Outputs that are NaN throughout prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from demask.failures import described
from demask.graph.example_runs import run_seeded
from demask.graph.input_domains import Domain
from demask.numerics import PACKED, to_computable, to_double, to_wide
from demask.pytree_paths import leaves_with_paths

RELATIVE = 1e-10  # max |a - b| / max |a| in float64
ULPS = 64.0  # of max |a|, in the network's own dtype
LARGEST = 1e-2  # max |a - b| / max |a| in half precisions, of which 64 ulps are half of the value
POWERS = torch.float8_e8m0fnu  # powers of two
WORSE = 8.0  # times the rounding error of the first network
FLIPS = 2 / 255  # max |a - b| / max |a| in networks that round: two steps of an 8-bit value
_TYPES = [torch.finfo(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)]
SUBNORMAL = {info.eps: info.smallest_normal * info.eps for info in _TYPES}  # the smallest number, by machine epsilon
_SINGLE, _DOUBLE = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
_ROUNDS = ("round", "quantize", "floor", "ceil", "trunc", "sign", "argmax", "topk", "sort")
_EQUAL_AS_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


# --------------------------------------------------------------------------------------- inputs

Fill = Callable[[Domain, Tensor, torch.Generator], Tensor]


class Draw(NamedTuple):
    """One call. kind: what its inputs are, for messages. inputs: (args, kwargs), or a sequence."""

    kind: str
    inputs: Any


def _numbers(scale: float, change: Callable[[Tensor], Tensor] = lambda x: x) -> Fill:
    """Normally distributed floats times `scale`; where a domain has bounds, numbers of the domain.
    change: applied in float32, as some dtypes lack ops."""

    def fill(domain: Domain, x: Tensor, draw: torch.Generator) -> Tensor:
        if not x.is_floating_point() or domain != Domain():
            return domain.draw(x, draw) if x.is_floating_point() else x
        size = min(scale, 16.0) if x.dtype == torch.float16 else scale
        return change(torch.randn(x.shape, generator=draw) * size).to(x)

    return fill


DRAWN, REORDERED = "random numbers", "values reordered"
KINDS: Mapping[str, Fill] = {
    "zeros": _numbers(1, torch.zeros_like),
    "ones": _numbers(1, torch.ones_like),
    "tiny numbers": _numbers(1e-9),
    "large numbers": _numbers(1e4),
    "negative numbers": _numbers(1, lambda x: -x.abs()),
    DRAWN: Domain.draw,
    REORDERED: Domain.reorder,
}


SIMILAR = ((DRAWN, 0), (REORDERED, 0))


def draw_inputs(example: Any, domains: Sequence[Domain], kinds: Iterable[tuple[str, int]] = SIMILAR) -> Iterator[Draw]:
    """The example, a pytree, and inputs of its shapes within the domains of its leaves, one for each kind
    and seed. Integers, which may be indices, differ from the example's where the kind is DRAWN alone."""
    yield Draw("the example", example)
    leaves, spec = pytree.tree_flatten(example)
    for kind, seed in kinds:
        if KINDS[kind] is not Domain.draw and not any(_is_float(leaf) for leaf in leaves):
            continue
        draw = torch.Generator().manual_seed(seed)
        filled = [
            KINDS[kind](domain, leaf.detach(), draw) if isinstance(leaf, Tensor) else leaf
            for leaf, domain in zip(leaves, domains, strict=True)
        ]
        yield Draw(f"{kind} (seed {seed})", pytree.tree_unflatten(filled, spec))


# ------------------------------------------------------------------------------------- one output


def tolerance(size: float, eps: float) -> float:
    """The largest difference that sums in another order cause, for outputs of at most `size` in a float
    type with machine epsilon `eps`: 64 units in the last place of `size` (of a sum of thousands of terms),
    1 % of it in half precisions, or one unit; 1e-10 in float64, where nothing tells how badly a network rounds.

    >>> [tolerance(1.0, torch.finfo(t).eps) for t in (torch.float64, torch.float32, torch.bfloat16)]
    [1e-10, 7.62939453125e-06, 0.01]
    """
    ulp = ulp_size(size, eps)
    return max(RELATIVE * size, ulp, min(ULPS * ulp, LARGEST * size))


def ulp_size(largest: float, eps: float) -> float:
    """The size of one unit in the last place of `largest` >= 0, in the float type with machine epsilon `eps`: where
    its numbers are subnormal, their distance.

    >>> ulp_size(1.0, torch.finfo(torch.float16).eps), ulp_size(1e-6, torch.finfo(torch.float16).eps)
    (0.0009765625, 5.960464477539063e-08)
    """
    return max(eps * 2.0 ** math.floor(math.log2(largest)), SUBNORMAL.get(eps, 0.0)) if largest else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """How an output differs from the expected one.

    Attributes:
        text: a difference other than of the size of numbers (shape, dtype, unequal integers, NaN), or "".
        size: the largest finite expected magnitude, in float64. Of powers of two (float8_e8m0fnu), whose unit in the
            last place is the number: 1.
        gap: the largest difference, in float64; infinite where one of two values is not finite. Of powers of two, that
            of their exponents.
        eps: machine epsilon of their dtype.
        elements, not_finite: how many numbers there are, and how many are the same, but not finite.
        is_nan: whether all expected values are NaN.
    """

    text: str = ""
    size: float = 0.0
    gap: float = 0.0
    eps: float = 0.0
    elements: int = 0
    not_finite: int = 0
    is_nan: bool = False

    @property
    def relative(self) -> float:
        """gap / size; infinite if the values cannot be subtracted."""
        if self.text and not self.gap:
            return math.inf
        return self.gap / self.size if self.size else (math.inf if self.gap else 0.0)

    def ulps(self, eps: float = 0.0) -> float:
        """The gap in units in the last place of the size. eps: machine epsilon of the least precise
        type that the network computes in, if it is larger than that of the outputs."""
        ulp = ulp_size(self.size, max(eps, self.eps))
        return self.gap / ulp if ulp else (math.inf if self.gap else 0.0)


def compare(expected: Any, actual: Any) -> Difference:
    """How an output differs from the expected one; each is a tensor, number, string or None.

    >>> compare(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0])).relative
    0.25
    >>> compare(torch.ones(2), torch.ones(3)).text
    'is torch.float32 (3,), expected torch.float32 (2,)'
    """
    if not isinstance(expected, Tensor) or not isinstance(actual, Tensor):
        return Difference("" if _is_equal(expected, actual) else f"is {actual!r:.40}, expected {expected!r:.40}")
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        own, other = (f"{x.dtype} {tuple(x.shape)}" for x in (actual, expected))
        return Difference(f"is {own}, expected {other}")
    a, b, count = to_computable(expected), to_computable(actual).to(expected.device), expected.numel()
    if not is_inexact(expected):
        same = torch.equal(a, b)
        size, gap = (0.0, 0.0) if same else _size_and_gap(a, b)
        return Difference("" if same else f"({expected.dtype}) is not equal", size, gap, elements=count)
    are_powers = expected.dtype is POWERS
    if are_powers:
        a, b = a.log2(), b.log2()
    eps, finite = torch.finfo(expected.dtype).eps, a.isfinite()
    if bool((finite & b.isfinite()).all()):
        size, gap = _size_and_gap(a, b)
        return Difference("", 1.0 if are_powers else size, gap, eps, count)
    others = ~((a == b) | (a.isnan() & b.isnan()) | (finite & b.isfinite()))
    text, infinite = "", 0.0
    if bool(others.any()):
        at = tuple(others.nonzero()[0].tolist())
        text = f"has a number that is not finite: {b[at].item():.6g} at {at}, expected {a[at].item():.6g}"
        infinite = math.inf
    size, gap = _size_and_gap(a[finite & ~others], b[finite & ~others])
    unequal = int((~finite & ~others).sum())
    size = 1.0 if are_powers else size
    return Difference(text, size, max(gap, infinite), eps, count, unequal, bool(a.isnan().all()))


def _wide(x: Tensor) -> Tensor:
    """A tensor in float64, or complex numbers of such."""
    return to_computable(x).to(torch.complex128 if x.is_complex() else torch.float64)


def _size_and_gap(a: Tensor, b: Tensor) -> tuple[float, float]:
    """max |a| and max |a - b| of finite numbers, computed in float64."""
    if not a.numel():
        return 0.0, 0.0
    a, b = _wide(a), _wide(b)
    return float(a.abs().max()), float((a - b).abs().max())


def _is_equal(expected: Any, actual: Any) -> bool:
    """Whether numbers, strings, dtypes, devices or None are equal. Other objects count as equal."""
    if isinstance(expected, Tensor) or isinstance(actual, Tensor):
        return False
    return not isinstance(expected, _EQUAL_AS_VALUES) or expected == actual or expected != expected


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def named_leaves(value: Any) -> list[tuple[str, Any]]:
    """The leaves of an output, each with its path. Objects that are no pytrees (a cache, a
    dataclass) are replaced by the tensors and numbers in their attributes, at any depth.

    >>> [path for path, _ in named_leaves({"logits": torch.ones(2), "rest": (1, None)})]
    ["['logits']", "['rest'][0]", "['rest'][1]"]
    """
    return list(_leaves("", value, frozenset()))


def _leaves(prefix: str, value: Any, ancestors: frozenset[int]) -> Iterator[tuple[str, Any]]:
    for path, leaf in leaves_with_paths(value):
        full_path = prefix + pytree.keystr(path)
        attributes = _attributes(leaf)
        if attributes is None:
            yield full_path, leaf
        elif id(leaf) not in ancestors:  # an object that contains itself is visited once
            for name, attribute in attributes.items():
                if not isinstance(attribute, type) and not callable(attribute):
                    yield from _leaves(f"{full_path}.{name}", attribute, ancestors | {id(leaf)})


def _attributes(leaf: Any) -> Mapping[str, Any] | None:
    """The attributes of an object, by name; None for tensors and objects without attributes."""
    if isinstance(leaf, (Tensor, type)) or callable(leaf):
        return None
    slots = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    if not slots and not hasattr(leaf, "__dict__"):
        return None
    return {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)} | {**getattr(leaf, "__dict__", {})}


# ------------------------------------------------------------------------------------- all outputs


@dataclass(slots=True)
class Pair:
    """An output of two networks, and whether it is the same.

    name: of the output. kind: "output", or what else the networks change. eps: machine epsilon of the least
    precise type that they compute in. relative: difference / size that is always allowed; `only`: instead of
    the dtype's tolerance. allowed: the largest difference. moves: elements that rounding changes, of those that
    have no small changes: integers, and numbers that become infinite. is_unsteady: whether rounding changes
    the shape.
    """

    name: str
    expected: Any
    actual: Any
    eps: float = 0.0
    relative: float = 0.0
    only: bool = False
    difference: Difference = field(init=False)
    allowed: float = field(init=False)
    kind: str = "output"
    moves: Tensor | None = None
    is_same: bool = field(init=False)
    is_unsteady: bool = False

    def __post_init__(self) -> None:
        self.difference = compare(self.expected, self.actual)
        size = self.difference.size
        self.allowed = self.relative * size if size or self.relative < math.inf else math.inf
        self._decide() if self.only else self.widen(self.eps)

    def widen(self, eps: float) -> None:
        """Allow the tolerance of a less precise type."""
        if self.difference.eps:
            self.eps = max(self.eps, eps, self.difference.eps)
            self.allowed = max(self.allowed, tolerance(self.difference.size, self.eps))
        self._decide()

    def _decide(self) -> None:
        difference, x = self.difference, self.expected
        has_steps = self.relative > 0 and isinstance(x, Tensor) and not is_inexact(x) and x.dtype.itemsize < 4
        is_number = not difference.text or (has_steps and difference.gap > 0)
        self.is_same = is_number and difference.gap <= self.allowed

    def move(self, other: Any) -> None:
        """Allow twice what another rounding of the first network moves, as both networks round. other: its output."""
        a, b = self.expected, self.actual
        if self.is_same or not isinstance(a, Tensor) or not isinstance(other, Tensor) or a.dtype is POWERS:
            return  # of powers of two the next one is allowed, which is all that rounding moves
        if other.shape != a.shape:
            self.is_same = self.is_unsteady = True
            return
        other = other.to(a.dtype)
        wide, moved = _wide(a), _wide(other)
        flips = wide.isfinite() != moved.isfinite() if is_inexact(a) else wide != moved
        self.moves = flips if self.moves is None else self.moves | flips
        if is_inexact(a):
            self.allowed = max(self.allowed, 2 * compare(self._without_flips(a), self._without_flips(other)).gap)
        if isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype:
            self.difference = replace(compare(self._without_flips(a), self._without_flips(b)), eps=self.difference.eps)
            self._decide()

    def _without_flips(self, x: Tensor) -> Tensor:
        x = to_computable(x)
        return x if self.moves is None else x.masked_fill(self.moves, 0)

    def settle(self, exact: Any, other: Any, narrow: Any, narrow_eps: float, flips: float) -> None:
        """Allow what is about as exact as the first network, by its output in float64.

        other: the second network's in float64; None if that cannot run: it tells whether integers differ by
        rounding. narrow: the first network's in a type with epsilon `narrow_eps`: where it computes in float64
        throughout, its error is that of `narrow`, less by the ratio of the types. flips: largest difference /
        largest value that is allowed.
        """
        before, after = self.expected, self.actual
        tensors = [x for x in (before, after, exact) if isinstance(x, Tensor)]
        if self.is_same or len(tensors) < 3 or len({x.shape for x in tensors}) > 1 or before.dtype != after.dtype:
            return
        if before.dtype is POWERS:
            return
        if not is_inexact(before):
            self.is_same = torch.equal(after, exact) or (isinstance(other, Tensor) and torch.equal(exact, other))
            return
        if self.difference.text:
            return
        before, after, exact = (_wide(x).cpu() for x in tensors)
        finite = exact.isfinite() & before.isfinite()
        (size, error), own = (
            _size_and_gap(exact[finite], before[finite]),
            _size_and_gap(exact[finite], after[finite])[1],
        )
        if isinstance(narrow, Tensor) and narrow.shape == exact.shape:
            scaled = _size_and_gap(exact[finite], _wide(narrow).cpu()[finite])[1] * self.difference.eps / narrow_eps
            error = max(error, scaled) if math.isfinite(scaled) else error  # a narrow type may overflow
        self.is_same = own <= max(WORSE * error, self.allowed, flips * size)

    @property
    def label(self) -> str:
        """The name in messages: the number of an output alone."""
        return self.name.strip("[]") if self.name.strip("[]").isdigit() else self.name or "0"

    def describe(self) -> str:
        """How the outputs differ, and where."""
        difference, a, b = self.difference, self.expected, self.actual
        if not difference.size or (difference.text and difference.eps):
            return difference.text or f"differs by {difference.gap:.3g} where all is 0"
        gaps = (_wide(self._without_flips(a)) - _wide(self._without_flips(b))).abs().nan_to_num(0.0)
        at = tuple(int(k) for k in torch.unravel_index(gaps.argmax(), gaps.shape))
        element = f"{_wide(b)[at].item():.6g} at {at}, expected {_wide(a)[at].item():.6g}"
        if difference.text:
            return f"{difference.text}: {element}"
        if a.dtype is POWERS:
            return f"differs by {difference.gap:g} powers of two: {element}; allowed is one"
        kind = a.dtype if self.eps <= difference.eps else "the least precise type"
        ulps = f"{difference.ulps(self.eps):.3g} units in the last place of {kind}"
        allowed = f"allowed are {self.allowed / difference.size:.2g}"
        return f"differs by {ulps}, {difference.relative:.2g} of its largest value: {element}; {allowed}"


def is_inexact(x: Tensor) -> bool:
    """Whether a tensor has floats or complex numbers, which rounding changes by little."""
    return (x.is_floating_point() or x.is_complex()) and x.dtype not in PACKED


def by_name(outputs: Any) -> dict[str, Any]:
    """The leaves of outputs, by their names in pairs."""
    return dict(named_leaves(outputs))


def pair_up(expected: Any, actual: Any, **options: Any) -> list[Pair]:
    """The outputs of two networks, pytrees, in pairs; their number if that differs. options: of `Pair`."""
    named, leaves = named_leaves(expected), named_leaves(actual)
    if len(named) != len(leaves):
        return [Pair("count", len(named), len(leaves))]
    return [Pair(name, a, b, **options) for (name, a), (_, b) in zip(named, leaves, strict=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparing two networks shows; verdicts of several calls add up.

    Attributes:
        difference: the first difference that is no rounding, as text; "" for none.
        gap, relative, ulps: the largest difference of floats: absolute, relative to the largest value of
            the output, and in units in its last place.
        runs: number of calls whose outputs were compared.
        void: of these, those in which all outputs are NaN, which proves nothing.
        not_finite: number of elements of outputs that are NaN or infinite in both.
    """

    difference: str = ""
    gap: float = 0.0
    relative: float = 0.0
    ulps: float = 0.0
    runs: int = 0
    void: int = 0
    not_finite: int = 0

    @classmethod
    def of(cls, pairs: Sequence[Pair], where: str) -> Verdict:
        """The verdict of the outputs of one call. where: which call, for messages."""
        numbers = [pair for pair in pairs if pair.difference.elements]
        floats = [pair for pair in numbers if pair.difference.eps and not pair.is_unsteady]
        return cls(
            next((f"{pair.kind} {pair.label} {pair.describe()} ({where})" for pair in pairs if not pair.is_same), ""),
            max((pair.difference.gap for pair in floats), default=0.0),
            max((pair.difference.relative for pair in floats), default=0.0),
            max((pair.difference.ulps(pair.eps) for pair in floats), default=0.0),
            1,
            int(bool(numbers) and all(pair.difference.is_nan for pair in numbers)),
            sum(pair.difference.not_finite for pair in floats),
        )

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.difference or other.difference,
            max(self.gap, other.gap),
            max(self.relative, other.relative),
            max(self.ulps, other.ulps),
            self.runs + other.runs,
            self.void + other.void,
            self.not_finite + other.not_finite,
        )

    @property
    def failure(self) -> str:
        """Why the networks do not count as the same; "" if they do."""
        if not self.difference and self.runs and self.runs == self.void:
            return "proves nothing: all outputs are NaN"
        return self.difference

    @property
    def remark(self) -> str:
        """What of the outputs is no number, in words; "" if nothing is."""
        void = f", all of them in {self.void} of {self.runs} runs" if self.void else ""
        return (
            f"{self.not_finite:,} numbers of the outputs are NaN or infinite in both{void}" if self.not_finite else ""
        )


Expected = Sequence[tuple[Draw, Any]]  # calls, and the outputs of the first network
Explain = Callable[[int, list[Pair]], object]  # settles pairs of one of the calls, by its number


def expected_outputs(run: Callable[[Any], Any], draws: Iterable[Draw]) -> list[tuple[Draw, Any]]:
    """Draws with the outputs of a network, without those that it rejects. Raises what it raises on the first
    one, the example."""
    expected: list[tuple[Draw, Any]] = []
    for draw in draws:
        try:
            expected.append((draw, run(draw.inputs)))
        except Exception:
            if not expected:
                raise
    return expected


def judge(
    run: Callable[[Any], Any],
    expected: Expected,
    explain: Explain | None = None,
    *,
    without: Any = None,
    eps: float = 0.0,
) -> Verdict:
    """The verdict of a network on calls, up to the first one that differs.

    run: returns its outputs for inputs. explain: says which differences are rounding. without: returns the
    paths of expected outputs that are not compared. eps: as for `Pair`.
    """
    verdict = Verdict()
    for k, (draw, outputs) in enumerate(expected):
        try:
            pairs = pair_up(outputs, run(draw.inputs), eps=eps)
        except Exception as error:  # whatever a network raises
            return verdict + Verdict(f"{described(error)} ({draw.kind})", runs=1)
        skipped = without(outputs) if without is not None else ()
        pairs = [pair for pair in pairs if not pair.name.startswith(skipped)]
        if explain is not None and not all(pair.is_same for pair in pairs):
            explain(k, pairs)
        verdict += Verdict.of(pairs, f"on {draw.kind}")
        if verdict.difference:
            break
    return verdict


# ------------------------------------------------------------------------- rounding, by float64


class InFloat64:
    """Explains differences by float64: the second network is about as exact as the first.

    Args:
        reference: builds the first network, with tensors of its own.
        expected: the calls.
        other: builds the second network; None for one that cannot run in float64.
        graph: of the first network: whether it has calls that turn a rounding error into a step.
    """

    def __init__(
        self,
        reference: Callable[[], nn.Module],
        expected: Expected,
        other: Callable[[], nn.Module] | None = None,
        graph: fx.Graph | None = None,
    ):
        self.reference, self.expected, self.other, self.flips = reference, expected, other, flips_of(graph)
        self.eps = 0.0

    @cached_property
    def _runs(self) -> list[tuple[dict[str, Any], ...]]:
        """Outputs of each call, by name: the first network's in float64, the second's, and the first's in
        float32 if it computes in float64 throughout."""
        with _CoarsestType() as types:
            self._run_in_dtype(self.reference, lambda network: network, lambda leaf: leaf)
        self.eps = min(types.eps, _SINGLE)
        runs = [self._run_in_dtype(self.reference, to_wide, to_double)]
        runs.append([{}] * len(runs[0]) if self.other is None else self._run_in_dtype(self.other, to_wide, to_double))
        if self.eps < _SINGLE:
            runs.append(self._run_in_dtype(self.reference, nn.Module.float, to_single))
        return list(zip(*runs, strict=True))

    def _run_in_dtype(
        self, new: Callable[[], nn.Module], convert: Callable[[Any], Any], cast: Callable[[Any], Any]
    ) -> list[Any]:
        """The outputs of a network in another dtype; its memory is freed at once."""
        network = convert(new())
        outputs = [by_name(run_seeded(network, pytree.tree_map(cast, draw.inputs))) for draw, _ in self.expected]
        network.to("meta")  # graphs, and networks with `save_pretrained`, refer to themselves
        return outputs

    def __call__(self, k: int, pairs: Sequence[Pair]) -> None:
        try:
            exact, other, *narrow = self._runs[k]
        except MemoryError:
            raise
        except Exception:  # whatever a network raises in another dtype: its own decides
            return
        for pair in pairs:
            pair.widen(self.eps)
            narrowed = narrow[0].get(pair.name) if narrow else None
            pair.settle(exact.get(pair.name), other.get(pair.name), narrowed, _SINGLE, self.flips)


def flips_of(graph: fx.Graph | None) -> float:
    """The largest difference / largest value of a network whose calls may turn a rounding error into a step."""
    return FLIPS if graph is not None and any(w in str(n.target) for n in graph.nodes for w in _ROUNDS) else 0.0


class _CoarsestType(TorchFunctionMode):
    """Watches the calls of a network. eps: the largest machine epsilon of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = _DOUBLE

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(outputs):
            if _is_float(leaf):
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return outputs


def to_single(leaf: Any) -> Any:
    """A floating-point tensor in float32; anything else unchanged."""
    return leaf.float() if _is_float(leaf) else leaf
