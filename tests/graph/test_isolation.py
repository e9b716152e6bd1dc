"""Results do not depend on what is in effect around a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import demask


class Doubling(TorchFunctionMode):
    """Doubles what `torch.zeros_like`, `clone` and convolutions return."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        named = getattr(func, "__name__", "") in ("clone", "conv2d", "mul")
        return value * 2 if named and isinstance(value, Tensor) else value


class Halving(TorchDispatchMode):
    """Halves the outputs of products."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        value = func(*args, **(kwargs or {}))
        return value / 2 if "mul" in str(func) and isinstance(value, Tensor) else value


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


AMBIENT: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "function mode": Doubling,
    "dispatch mode": Halving,
    "flop counter": lambda: FlopCounterMode(display=False),
    "anomalies": torch.autograd.detect_anomaly,
    "cached parametrizations": parametrize.cached,
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t),
}


def network(seed: int = 0, width: int = 8) -> tuple[nn.Module, Tensor]:
    """Masked channels with shifts, a parametrized layer, and constants to fold."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Conv2d(width, 4, 3)),
        nn.Flatten(),
        nn.Linear(4 * 36, 5),
    ).eval()
    prune.ln_structured(net[0], "weight", amount=0.5, n=2, dim=0)
    with torch.no_grad():
        net[1].bias.normal_()
    return net, torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("name", AMBIENT)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_results_are_equal_under_each_state_of_torch(name: str) -> None:
    net, x = network()
    expected = demask.demask(net, (x,), result="graph")
    with AMBIENT[name]():
        slim = demask.demask(net, (x,), result="graph")
        same = demask.verify(net, slim, (x,))
    assert same.ok
    ours, theirs = slim.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not any(tensor.is_inference() for tensor in ours.values())
    assert all(p.requires_grad for p in slim.parameters())
    with torch.no_grad():
        assert torch.equal(slim(x), expected(x))
        torch.testing.assert_close(slim(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["autocast", "float64", "device", "function mode"])
def test_the_state_before_is_restored(name: str) -> None:
    net, _ = network()
    with AMBIENT[name]():
        before = torch.ones(2) * 1, torch.is_autocast_enabled("cpu"), torch.get_default_device()
        with pytest.raises(demask.BadInput):
            demask.demask(net, (torch.ones(2, 5, 8, 8, device="cpu"),))
        after = torch.ones(2) * 1, torch.is_autocast_enabled("cpu"), torch.get_default_device()
    assert before[1:] == after[1:] and before[0].dtype == after[0].dtype
    assert before[0].device == after[0].device


class Positions(nn.Module):
    """Adds numbers that it creates in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.linspace(0, 1, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_reads_the_default_dtype_has_that_of_the_caller(dtype: torch.dtype) -> None:
    net, x = Positions().eval(), torch.randn(2, 6).double()
    with default_dtype(dtype), torch.no_grad():
        slim = demask.demask(net, (x,), result="graph")
        assert torch.equal(slim(x), net(x))


def test_threads_demask_networks_at_the_same_time() -> None:
    """Four threads, twenty networks, while a fifth runs one."""
    networks = [network(seed, 2 + seed % 5 * 2) for seed in range(20)]
    failures: list[str] = []
    done = threading.Event()

    def work(k: int) -> None:
        for net, x in networks[k::4]:
            try:
                slim = demask.demask(net, (x,))
                torch.testing.assert_close(slim(x), net(x), rtol=1e-5, atol=1e-5)
            except BaseException as error:  # assertions too: a thread's are lost
                failures.append(f"{type(error).__name__}: {error}")

    def run() -> None:
        net, x = network(30)
        expected = net(x)
        while not done.is_set():
            try:
                torch.testing.assert_close(net(x), expected)
            except BaseException as error:
                failures.append(f"runner: {type(error).__name__}: {error}")
                return

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    runner = threading.Thread(target=run)
    for thread in (*threads, runner):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    runner.join()
    assert not failures, failures[:3]


def test_a_compiled_function_may_call_it() -> None:
    net, x = network()

    def call(x: Tensor) -> Tensor:
        return demask.demask(net, (x,), result="graph")(x) * 1

    compiled = torch.compile(call, backend="eager")
    torch.testing.assert_close(compiled(x), net(x), rtol=1e-5, atol=1e-5)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] < 10  # the package itself is not traced: that takes minutes
