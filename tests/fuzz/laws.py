"""What must hold of every network and its demasked form; each law yields what it finds broken."""

from __future__ import annotations

import copy
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from demask.graph.result.module_calls import graph_of_calls
from demask.ops.laws import missed
from fuzz.program import Program, smaller
from graphs import to_graph

LIMIT = 1e-10  # max |a - b| / max |a| per output leaf, float64: a re-ordered sum is about 1e-15


@dataclass(slots=True)
class Outcome:
    """broken: laws that do not hold. missed, slices: what the minimality oracle found, per op."""

    broken: list[str] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    slices: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)


def shrunken(program: Program, net: nn.Module) -> fx.GraphModule:
    shapes = None
    if program.dynamic:
        shapes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    return to_graph(net, program.example(program.batch), dynamic_shapes=shapes)


def check(program: Program, *, oracle: bool = True, slow: bool = False) -> Outcome:
    """Every law, on one network. slow: also compile it and train a step."""
    found = Outcome()
    net = program.build()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train(program.seed % 2 == 0)
    flags = [m.training for m in net.modules()]
    try:
        slim = shrunken(program, net)
    except Exception as error:
        found.broken.append(f"demask raises {_short(error)}")
        return found
    if [m.training for m in net.modules()] != flags or slim.training != net.training:
        found.broken.append("training flags changed")
    net.eval(), slim.eval()
    found.declined.update(r.text for r in slim.demasked.reasons if r.text.startswith("no rule"))
    laws: list[Callable[[], Iterator[str]]] = [
        lambda: exact(program, net, slim),
        lambda: unchanged(program, net, before),
        lambda: smaller_or_equal(net, slim),
        lambda: idempotent(program, slim),
        lambda: copies(program, slim),
    ]
    if slow:
        laws += [lambda: compiles(program, slim), lambda: trains(program, net, slim)]
    for law in laws:
        try:
            found.broken += law()
        except Exception as error:
            if "captured for sizes with" in str(error) and program.dynamic:
                continue  # Export fixed a size that this law varies: refused, with the reason.
            found.broken.append(f"raises {_short(error)}")
    if oracle and not found.broken:
        count_missed(program, slim, found)
    return found


def _short(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "demask" in f.filename]
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}{where}"


def difference(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |a|; infinite where shapes, dtypes or non-finite places differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)) or not torch.equal(
        torch.nan_to_num(a[~finite]), torch.nan_to_num(b[~finite])
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    gap = float((a[finite] - b[finite]).abs().max())
    return gap / float(a[finite].abs().max()) if gap else 0.0


def run(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[list[Tensor], object]:
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(module(*(a.clone() for a in args)))
    return leaves, spec


def exact(program: Program, net: nn.Module, slim: nn.Module) -> Iterator[str]:
    """Equal at the example's batch, at 1 and at 3; dynamic networks at another image size too."""
    calls = [(batch, 0) for batch in dict.fromkeys((program.batch, 1, 3))]
    calls += [(2, 3)] if program.dynamic else []
    for batch, grow in calls:
        args = program.example(batch, 5, grow=grow)
        (a, a_spec), (b, b_spec) = run(net, args), run(slim, args)
        if a_spec != b_spec:
            yield f"outputs are {b_spec}, not {a_spec}"
        for k, (x, y) in enumerate(zip(a, b, strict=False)):
            if not difference(x, y) <= LIMIT:
                yield f"output {k} differs by {difference(x, y):.1e} at batch {batch}, size +{grow}"


def unchanged(program: Program, net: nn.Module, before: dict[str, Tensor]) -> Iterator[str]:
    after = net.state_dict()
    for name in before.keys() | after.keys():
        if name not in after or name not in before:
            yield f"{name} of the original came or went"
        elif not torch.equal(before[name], after[name]):
            yield f"{name} of the original changed"
    args = program.example(2, 6)
    (a, _), (b, _) = run(program.build(), args), run(net, args)
    if any(difference(x, y) != 0 for x, y in zip(a, b, strict=True)):
        yield "the original computes something else"


def floats(module: nn.Module) -> int:
    """Floating elements, buffers too, each memory once."""
    found = {t.data_ptr(): t.numel() for t in _tensors(module) if t.is_floating_point() and t.numel()}
    return sum(found.values())


def _tensors(module: nn.Module) -> list[Tensor]:
    plain = [v for m in module.modules() for v in vars(m).values() if isinstance(v, Tensor)]
    return [*module.parameters(), *module.buffers(), *plain]


def smaller_or_equal(net: nn.Module, slim: fx.GraphModule) -> Iterator[str]:
    sizes = slim.demasked
    if sizes.after.parameters > sizes.before.parameters:
        yield f"parameters grow: {sizes.before.parameters} -> {sizes.after.parameters}"
    # Numbers written in forward (y[:, 0] = 0.25) are tensors of the captured network too.
    had = max(floats(net), sizes.before.parameters)
    if floats(slim) > had:
        yield f"floating elements grow: {had} -> {floats(slim)}"


def calls_of(module: fx.GraphModule) -> int:
    return sum(node.op.startswith("call") for node in module.graph.nodes)


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def idempotent(program: Program, slim: fx.GraphModule) -> Iterator[str]:
    again = shrunken(program, slim)
    first, second = shapes_of(slim), shapes_of(again)
    if first != second:
        odd = {k: (first.get(k), second.get(k)) for k in first.keys() | second.keys() if first.get(k) != second.get(k)}
        yield f"a second demask changes shapes: {odd}"
    elif calls_of(slim) != calls_of(again):
        yield f"a second demask changes the number of calls: {calls_of(slim)} -> {calls_of(again)}"


def copies(program: Program, slim: fx.GraphModule) -> Iterator[str]:
    args = program.example(2, 7)
    (a, _), (b, _) = run(slim, args), run(copy.deepcopy(slim), args)
    if any(difference(x, y) != 0 for x, y in zip(a, b, strict=True)):
        yield "a deepcopy computes something else"


def compiles(program: Program, slim: fx.GraphModule) -> Iterator[str]:
    args = program.example(program.batch, 8)
    torch.compiler.reset()
    a, _ = run(slim, args)
    with torch._dynamo.config.patch(allow_rnn=True):  # torch traces its recurrent modules if asked
        b, _ = run(torch.compile(slim, fullgraph=True, backend="eager"), args)  # type: ignore[arg-type]
    if any(not difference(x, y) <= LIMIT for x, y in zip(a, b, strict=True)):
        yield "compiled, it computes something else"


def trains(program: Program, net: nn.Module, slim: fx.GraphModule) -> Iterator[str]:
    """Gradients of what is kept are the original's; a step in train mode runs."""
    args = program.example(3, 9)
    try:
        wanted = _gradients(net, args)
    except RuntimeError as error:  # the original itself cannot be trained
        assert "modified inplace" in str(error) or "inplace operation" in str(error), error
        return
    if wanted is None:
        return
    got = _gradients(slim, args)
    if got is None:
        yield "the original has gradients and the demasked network has none"
        return
    if not {"reused", "tied"} & {step.op for step in program.steps}:
        yield from _same_gradients(program, net, slim, wanted, got)
    fresh = copy.deepcopy(slim).train()
    optimizer = torch.optim.SGD([*fresh.parameters(), nn.Parameter(torch.zeros(1))], lr=0.01)
    try:
        _loss(net.train(), args)
    except ValueError:  # batch norm over one value per channel
        return
    finally:
        net.eval()
    loss = _loss(fresh, args)
    if loss.requires_grad:
        loss.backward()
        optimizer.step()


def _loss(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    leaves = pytree.tree_leaves(module(*(a.clone() for a in args)))
    total = torch.zeros((), dtype=torch.float64)
    for leaf in leaves:
        total = total + (leaf * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)).sum()
    return total


def _gradients(module: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor] | None:
    """By name; None where autograd refuses (a value it needs was written over)."""
    module.zero_grad()
    try:
        loss = _loss(module, args)
        if not loss.requires_grad:
            return {}
        loss.backward()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            return None
        raise
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def _same_gradients(program, net, slim, wanted, got) -> Iterator[str]:
    """Where a weight is 0 its gradient may be gone: what it multiplies was not computed. A weight
    that also went into a constant (the bias at masked tokens) has lost the constant's share."""
    values = dict(net.named_parameters())
    sources = Counter(cut.source for cut in slim.demasked.cuts.values())
    for name, cut in slim.demasked.cuts.items():
        if name not in got or cut.source not in wanted or sources[cut.source] > 1:
            continue
        want, value = wanted[cut.source], values[cut.source].detach()
        for axis, kept in enumerate(cut.kept):
            if kept is not None:
                index = torch.tensor(kept, dtype=torch.long)
                want, value = want.index_select(axis, index), value.index_select(axis, index)
        if want.numel() == got[name].numel():  # a norm's scale may be shaped to broadcast
            want, value = want.reshape(got[name].shape), value.reshape(got[name].shape)
        if want.shape != got[name].shape:
            yield f"cut of {name} says shape {tuple(want.shape)}, it is {tuple(got[name].shape)}"
            continue
        # A zero that a mask holds in the original is an ordinary weight in the result.
        value = slim.get_parameter(name).detach()
        gap = (want - got[name])[value != 0].abs()
        scale = max(1e-3, *(float(g.abs().max()) for g in wanted.values() if g.numel()))
        wrong = gap.numel() and float(gap.max()) > 1e-9 * scale
        if wrong and not in_constants(program, slim, cut.source):
            yield f"gradient of {name} differs by {float(gap.max()):.1e}"


def in_constants(program: Program, slim: fx.GraphModule, source: str) -> bool:
    """Do other tensors of the result change with this parameter of the original?"""
    other = program.build()
    with torch.no_grad():
        other.get_parameter(source).mul_(1.01)
    twin, cuts = shrunken(program, other), slim.demasked.cuts
    after = twin.state_dict()
    return twin.code != slim.code or any(
        name not in after or not torch.equal(value, after[name])
        for name, value in slim.state_dict().items()
        if name not in cuts or cuts[name].source != source
    )


def count_missed(program: Program, slim: fx.GraphModule, found: Outcome) -> None:
    """Slices kept that no output depends on, by the op that reads them."""
    readers = _readers(slim)
    for name, value in [*slim.named_parameters(), *slim.named_buffers()]:
        if value.is_floating_point():
            found.slices[readers.get(name, "?")] += sum(value.shape)
    for line in missed(slim, program.example(48, 20)):  # every index of an embedding is drawn
        found.missed[readers.get(line.partition(",")[0], "?")] += 1


def _readers(slim: fx.GraphModule) -> dict[str, str]:
    """Per weight, the op that reads it."""
    found = {}
    for node in graph_of_calls(slim).nodes:
        if node.op == "get_attr" and node.users:
            found[str(node.target)] = str(next(iter(node.users)).target)
    return found


def shrink(program: Program, fails: Callable[[Program], bool], *, seconds: float = 300) -> Program:
    """The smallest program found in the time given that still fails."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        simpler = (p for p in smaller(program) if p != program and p.steps)
        better = next((p for p in simpler if time.monotonic() > end or _holds(fails, p)), None)
        if better is None or time.monotonic() > end:
            return program
        program = better
    return program


def kind_of(line: str) -> str:
    """A broken law's line without its numbers and names."""
    return re.sub(r"[\d.]+e[-+]\d+|\d+|\{.*\}|'[^']*'|\binf\b", "#", line)


def explained(program: Program, outcome: Outcome, *, slow: bool = False, seconds: float = 20) -> str:
    """What is broken, the seed, and the smallest network found that breaks it too."""
    kind = kind_of(outcome.broken[0])

    def fails(other: Program) -> bool:
        return any(kind_of(b) == kind for b in check(other, oracle=False, slow=slow).broken)

    least = shrink(program, fails, seconds=20)
    return f"seed {program.seed}: {'; '.join(outcome.broken)}\n\n{least.snippet()}\n"


def _holds(fails: Callable[[Program], bool], program: Program) -> bool:
    """Does it still fail, as a network that runs?"""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            net = program.build()
            net(*program.example(program.batch)), net(*program.example(1)), net(*program.example(3))
    except Exception:
        return False
    return fails(program)
