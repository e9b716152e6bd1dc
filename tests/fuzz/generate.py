"""Random masked networks from a seed."""

from __future__ import annotations

import random

import torch
from torch.utils import _pytree as pytree

from fuzz.draft import Draft
from fuzz.program import Input, Program
from fuzz.steps.fills import FILLS
from fuzz.steps.layers import (
    LAYERS,
    batch_norm,
    block,
    conv,
    conv_transpose,
    group_norm,
    instance_norm,
    prelu,
    squeeze_excite,
)
from fuzz.steps.plain import PLAIN, act, cat, in_place, join, pad, pool, split, upsample
from fuzz.steps.sequences import SEQUENCES

SHAPES = (
    (5, 7, 9),
    (3, 9, 11),
    (6, 5, 8),
    (4, 8, 6),
    (5, 13),
    (7, 6),
    (3, 5, 6, 7),
    (9,),
    (12,),
    (7, 9),
    (6, 8),
    (5, 12),
    (4, 6),
)
# Ops that say nothing of the image's size.
SIZELESS = {conv: 14, block: 4, batch_norm: 6, act: 8, join: 6, cat: 4, split: 2, pad: 2, pool: 3,
            upsample: 2, conv_transpose: 2, squeeze_excite: 2, in_place: 1, prelu: 1,
            group_norm: 1, instance_norm: 1}  # fmt: skip


def generate(seed: int, *, dynamic: bool = False, fills: bool = False) -> Program:
    """A network whose outputs are finite and (one of them at least) depend on the input.

    dynamic: one that is fine with any image size. fills: with masks over positions, and calls that
    are no finite number wherever they are called.
    """
    for attempt in range(50):
        key = f"{seed}.{attempt}.{dynamic}" + ".fills" * fills
        program = _drawn(random.Random(key), seed, dynamic, fills)
        if program is not None and is_sound(program):
            return program
    raise RuntimeError(f"no sound network found from seed {seed} in 50 draws")


def _drawn(rng: random.Random, seed: int, dynamic: bool, fills: bool) -> Program | None:
    inputs = [Input("v0", (rng.choice((3, 5, 6)), 9, 12))] if dynamic else _inputs(rng)
    sequence = not dynamic and len(inputs[0].shape) == (1 if inputs[0].high else 2)
    draft = Draft(rng, inputs, seed)
    if inputs[0].high:
        wide = rng.choice((5, 6, 8))
        lines = [f"self.m1 = nn.Embedding({inputs[0].high}, {wide})"]
        if rng.random() < 0.6:
            lines += [f"self.m1.weight.data[:, {sorted(rng.sample(range(wide), 2))}] = 0.0"]
        draft.count = max(draft.count, 10)
        draft.add("embedding", ["v0"], "v10 = self.m1(v0)", lines, outs=("v10",))
        draft.count = 11
    ops = SIZELESS if dynamic else {**LAYERS, **SEQUENCES, **PLAIN}
    if sequence and rng.random() < 0.7:
        ops = {op: weight * (4 if op in SEQUENCES else 1) for op, weight in ops.items()}
    ops = FILLS if fills else ops
    wanted = rng.randint(3, 8 if fills else 15)
    for _ in range(6 * wanted):
        if len(draft.steps) >= wanted:
            break
        names = draft.floats()
        # Mostly the newest value, so that networks are deep; at times an older one: branches.
        name = names[-1] if rng.random() < 0.7 else rng.choice(names)
        op = rng.choices(list(ops), list(ops.values()))[0]
        op(draft, name)
    return _finished(rng, draft, inputs, seed, dynamic)


def _inputs(rng: random.Random) -> list[Input]:
    if rng.random() < 0.08:
        return [Input("v0", (rng.choice((4, 7)),), high=11)]
    first = rng.choice(SHAPES)
    count = rng.choice((1, 1, 1, 2, 2, 3))
    return [Input(f"v{k}", first if k == 0 or rng.random() < 0.6 else rng.choice(SHAPES)) for k in range(count)]


def _finished(rng, draft: Draft, inputs, seed: int, dynamic: bool) -> Program | None:
    made = [o for s in draft.steps for o in s.outs]
    loose = [o for o in made if o not in draft.used]
    if not loose:
        return None
    # The values with most behind them first, or most steps would be dead code.
    loose.sort(key=lambda name: -len(_behind(name, draft)))
    outputs = loose[: rng.randint(1, 3)]
    if rng.random() < 0.2:
        outputs.append(rng.choice(made))
    outputs = list(dict.fromkeys(outputs))
    form = rng.choice(("one", "one", "tuple", "dict", "nested")) if len(outputs) > 1 else "one"
    form = "tuple" if len(outputs) > 1 and form == "one" else form
    batch = 2 if dynamic or rng.random() < 0.8 else rng.choice((1, 4))
    return Program(seed, tuple(inputs), tuple(draft.steps), tuple(outputs), form, batch, dynamic)


def _behind(name: str, draft: Draft) -> set[str]:
    found, todo = set(), [name]
    reads = {o: s.reads for s in draft.steps for o in s.outs}
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += reads.get(each, ())
    return found


def is_sound(program: Program) -> bool:
    """Finite outputs, one of which at least depends on the input."""
    net = program.build()
    try:
        with torch.no_grad():
            runs = [pytree.tree_leaves(net(*program.example(2, seed))) for seed in (1, 2)]
            net(*program.example(1)), net(*program.example(3))
    except (RuntimeError, ValueError, IndexError):
        return False
    finite = all(bool(torch.isfinite(leaf).all()) for run in runs for leaf in run)
    return finite and any(not torch.equal(a, b) for a, b in zip(*runs, strict=True))
