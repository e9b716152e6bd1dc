"""One judge: verify, demask's own check, the race of candidates and the comparison of ONNX files say the
same of a pair of networks.

A verdict is "+" where all accept the pair, "-" where none does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import demask
from demask.errors import DemaskError, Mismatch
from demask.files.onnx.check import Judge
from demask.shrink.check import describe_difference
from demask.tune.race import CandidateRace

INF, NAN = float("inf"), float("nan")
Change = Callable[[Tensor], object]


class Network(nn.Module):
    """A function of its input times a weight of one."""

    def __init__(self, change: Change):
        super().__init__()
        self.change, self.weight = change, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> object:
        return self.change(x * self.weight)


def same(x: Tensor) -> Tensor:
    return x


def first(value: float) -> Change:
    """The input with another first number."""

    def change(x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x[:, :1], value), x[:, 1:]], 1)

    return change


def units(count: float) -> Callable[[torch.dtype], Change]:
    """The input, off by units in the last place of a dtype."""
    return lambda dtype: lambda x: x * (1 + count * torch.finfo(dtype).eps)


def eighths(x: Tensor) -> Tensor:
    return (x.sum(1) * 8).round()


def cancelled(x: Tensor) -> Tensor:
    """Two large numbers, subtracted."""
    return (x + 1e4) - 1e4


def sine(x: Tensor) -> Tensor:
    """A function that makes rounding errors a million times as large."""
    return (1e6 * (x[:, :1] + x[:, 1:2] + x[:, 2:3] + x[:, 3:])).sin()


# By name: the two functions (the second of the dtype where it is `units`), and the verdicts in
# float64, float32 and bfloat16; "." where that is left to chance.
CASES: dict[str, tuple[Change, object, str]] = {
    "equal": (same, same, "+++"),
    "0.5 units": (same, units(0.5), "+++"),
    "30 units": (same, units(30), "++-"),
    "70 units": (same, units(70), "+--"),
    "1000 units": (same, units(1000), "+--"),
    "NaN for a number": (same, first(NAN), "---"),
    "a number for NaN": (first(NAN), same, "---"),
    "zero for NaN": (first(NAN), first(0.0), "---"),
    "NaN in both": (first(NAN), first(NAN), "+++"),
    "NaN everywhere": (lambda x: x * NAN, lambda x: x * NAN, "---"),
    "infinity in both": (first(INF), first(INF), "+++"),
    "infinity of another sign": (first(INF), first(-INF), "---"),
    "a number for infinity": (first(INF), same, "---"),
    "another shape": (same, lambda x: x[:, :2], "---"),
    "another dtype": (same, lambda x: x.half(), "---"),
    "one more output": (same, lambda x: (x, x), "---"),
    "equal integers": (lambda x: (x > 0).long(), lambda x: (x > 0).long(), "+++"),
    "integers off by one": (lambda x: (4 * x).round().long(), lambda x: (4 * x).round().long() + 1, "---"),
    "other truth values": (lambda x: x > 0, lambda x: x <= 0, "---"),
    "sums in another order, rounded": (eighths, lambda x: eighths(x.flip(1)), "+++"),
    "a cancelled sum, and none": (cancelled, same, "+++"),
    "two cancelled sums": (cancelled, lambda x: (1e4 + x) - 1e4, "+++"),
    "large sines of a sum": (sine, lambda x: sine(x.flip(1)), "++."),
    "constants": (lambda x: x * 0 + 1, lambda x: x * 0 + 1, "+++"),
    "zeros": (lambda x: x * 0, lambda x: x * 0, "+++"),
    "tiny numbers for zeros": (lambda x: x * 0, lambda x: x * 0 + 1e-12, "---"),
    "an error": (same, lambda x: x.reshape(7, 7), "---"),
}
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def verdicts(a: nn.Module, b: nn.Module, x: Tensor, folder: Path) -> str:
    """What verify, check, race and files say of the second network for the first."""

    def by_verify() -> bool:
        return demask.verify(a, b, (x,), check=False).ok

    def by_check() -> bool:
        return not describe_difference(b, a, (x,), {})

    def by_race() -> bool:
        return bool(CandidateRace(a, None, (x,), {}, torch.device("cpu"), 1).admit("b", b) == [])

    def by_onnx() -> bool:
        files = [folder / "a.onnx", folder / "b.onnx"]
        for network, file in zip((a, b), files, strict=True):
            torch.onnx.export(network, (x,), str(file), dynamo=False, opset_version=17)
        Judge.of_file(str(files[0]), [x]).compare(files[1].read_bytes())
        return True

    verdicts = ""
    for judge in (by_verify, by_check, by_race, by_onnx):
        accepts = False
        with contextlib.suppress(Mismatch, DemaskError, RuntimeError, ValueError):
            accepts = judge()
        verdicts += "+" if accepts else "-"
    return verdicts


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, d) for name, case in CASES.items() for d, v in zip(DTYPES, case[2], strict=True) if v != "."],
)
def test_all_judges_agree(name, dtype, tmp_path):
    pytest.importorskip("onnxruntime")
    before, after, expected = CASES[name]
    after = after(dtype) if " unit" in name else after
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    networks = [Network(change).to(dtype).eval() for change in (before, after)]
    assert verdicts(*networks, x, tmp_path) == 4 * expected[DTYPES.index(dtype)]
