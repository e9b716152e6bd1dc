"""Every activation in every lowering (LLVM at each vector width, Triton, torch) against float64."""

from __future__ import annotations

import ast
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from demask import kernels
from demask.kernels.cpu.csr import narrowed
from demask.kernels.llvm.activations import LOWERINGS, activated
from demask.kernels.llvm.emitter import I64, Emitter
from demask.kernels.llvm.isa import host
from demask.kernels.llvm.jit import CODE
from demask.ops.activations import (
    ACTIVATIONS,
    Act,
    Activation,
    act_of,
    activation_module,
    apply_activation,
    find_onednn_activation,
)
from interpreted import DEVICES, rows_of, run_on

ULPS = 4
#: times |x|: what torch's formulas round 1 + erf and 1 + tanh to
ROUNDED = {"gelu": 2**-25, "gelu_tanh": 2**-25}
DENORMAL = 2**-148  # what a denormal e**x is rounded to, in formulas that multiply it by x
NUMBERS = {"leaky_relu": [(0.01,), (-0.5,)], "elu": [(1.0,), (0.3,)], "clamp": [(0.0, 6.0), (-0.5, 0.25)]}
ACTS: list[Act] = [(name, numbers) for name in LOWERINGS for numbers in NUMBERS.get(name, [()])]
#: of float32: NaN with payloads and signs, among them one that signals
PAYLOADS = [0x7FC00000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7FFFFFFF]
SPECIAL = [0.0, 1e-40, 1e-30, 1e-6, 1e-3, 0.5, 1.0, 3.0, 20.0, 87.5, 88.0, 89.0, 104.0, 3e38, math.inf]


def points() -> Tensor:
    """Numbers near every border, of either sign, and NaN; 64 at a time."""
    size = np.geomspace(1e-9, 105, 1500)
    numbers = np.concatenate([SPECIAL, size, np.linspace(0, 6, 1000)]).astype(np.float32)
    nan = np.array(PAYLOADS, np.uint32).view(np.float32)
    values = np.concatenate([nan, numbers, -numbers])
    return torch.from_numpy(np.resize(values, -(-len(values) // 64) * 64))


def exact(x: Tensor, act: Act) -> Tensor:
    """act(x) in float64, by formulas in which nothing cancels."""
    name, x = act[0], x.double()
    if name == "gelu":
        return x * torch.special.erfc(-x * math.sqrt(0.5)) / 2
    if name == "gelu_tanh":
        return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return apply_activation(x, act)


def check(found: Tensor, x: Tensor, act: Act) -> None:
    """Within `ULPS` units in the last place of the exact value, or what torch's formula rounds.
    What is not finite is as in torch; zeros keep their signs."""
    wanted, finite = exact(x, act), x.isfinite()
    unit = torch.from_numpy(np.spacing(wanted.abs().float().nan_to_num(0, 1, 1).numpy())).double()
    rounded = ROUNDED.get(act[0], DENORMAL if ACTIVATIONS[act[0]].exponential else 0.0)
    allowed = ULPS * unit + rounded * x.double().abs()
    far = finite & ((found.double() - wanted).abs() > allowed).logical_or(found.isnan())
    assert not far.any(), torch.stack([x, found])[:, far][:, :9]
    # one number at a time: torch's vectors give gelu(inf) = NaN, and gelu(-0) = 0 on some machines
    zero = x == 0
    torchs = torch.stack([apply_activation(v, act) for v in x[~finite | zero]])
    mine = found[~finite | zero]
    torch.testing.assert_close(mine, torchs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine[torchs == 0].signbit(), torchs[torchs == 0].signbit())


@dataclass(frozen=True, slots=True)
class Applied:
    """out[i] = act(x[i]) for i < end, in vectors of so many lanes."""

    act: Act
    lanes: int

    arguments = 3

    def emit(self, e: Emitter) -> None:
        e = narrowed(e, self.lanes)
        x, out = e.pointer(e.args[0]), e.pointer(e.args[1])
        with e.loop(I64(0), e.args[2]) as k:
            e.write(activated(e, e.read(e.line(x, k)), self.act), e.line(out, k))


def computed(acts: Sequence[Act], lanes: int, x: Tensor) -> Iterator[tuple[Act, Tensor]]:
    """Each activation with what its machine code makes of x."""
    memory = torch.empty(2, len(x) + 16)
    source, out = (row[-(row.data_ptr() // 4) % 16 :][: len(x)] for row in memory)  # aligned
    source.copy_(x)
    for kernel, address in CODE.addresses([Applied(act, lanes) for act in acts]).items():
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(address)
        function(source.data_ptr(), out.data_ptr(), len(x) // lanes)
        yield kernel.act, out


@pytest.mark.parametrize("lanes", [n for n in (1, 2, 4, 8, 16) if n <= host().lanes])
def test_machine_code(lanes: int) -> None:
    x = points()
    for act, out in computed(ACTS, lanes, x):
        check(out, x, act)


def check_on_gpu(device: str) -> None:
    """All points, each times 1 and plus 0, which turns -0 into 0."""
    from demask.sparse.products import gpu_products as products
    from demask.sparse.products.gpu_products import KernelChoice

    x, one = points() + 0.0, rows_of(torch.ones(1, 1), device)
    choice = KernelChoice("rows", 1, 2048, 1)
    for act in ACTS:
        check(products.spmm(one, x[None].to(device), None, act, choice).cpu()[0], x, act)


@pytest.mark.parametrize("device", DEVICES)
def test_triton(device: str) -> None:
    run_on(device, check_on_gpu)


def test_every_activation_has_every_lowering() -> None:
    """Triton's, which only some have, by its text: it is read where Triton is not installed too."""
    assert set(LOWERINGS) == set(ACTIVATIONS)
    tree = ast.parse((Path(kernels.__file__).parent / "gpu.py").read_text())
    nodes = {getattr(node, "name", ""): node for node in tree.body}
    compared = [
        node.comparators[0]
        for node in ast.walk(nodes["activated"])
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "ACT"
    ]
    branches = {node.value for node in compared if isinstance(node, ast.Constant)} - {""}
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert branches == set(ast.literal_eval(assigned["ACTIVATIONS"])) <= set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=lambda a: a.name)
def test_ops_and_modules_compute_the_reference(activation: Activation) -> None:
    x = torch.linspace(-8, 8, 999)
    numbers = (-0.5, 0.25)[: activation.count]
    wanted = apply_activation(x, (activation.name, numbers))
    assert wanted.shape == x.shape and activation.nonnegative(*numbers) <= bool((wanted >= 0).all())
    for op in activation.ops:
        if all(isinstance(number, str) for number in op.numbers):
            assert torch.equal(op.target(x, *numbers, **op.where), wanted)
    made = activation_module((activation.name, numbers))
    assert act_of(made) == (activation.name, numbers) and torch.equal(made(x), wanted)
    if activation.onednn:
        assert find_onednn_activation(activation.onednn, activation.algorithm) is activation
