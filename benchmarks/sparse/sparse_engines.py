"""Who takes part in benchmarks/sparse/cpu_sparse.py: how each is prepared, called and timed."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, cast

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import demask
from benchmarks.common import inductor, turns
from benchmarks.shrink.peers_called import openvino_module
from benchmarks.sparse import deepsparse_server as server
from demask.cli.bench import reason, timed
from demask.graph.result.demasked_module import Demasked

OURS, RUNTIME, SPINNING = "demask", "ONNX Runtime", "ONNX Runtime, spinning"
FROZEN, EAGER, OPENVINO, DEEPSPARSE = "torch, frozen", "torch, eager", "OpenVINO", "DeepSparse"
COMPILED = inductor.NAME
WHO = (OURS, RUNTIME, SPINNING, FROZEN, EAGER, COMPILED, OPENVINO, DEEPSPARSE)
OPSET = 13  # the newest that DeepSparse 1.8 reads well
LEAST = 0.004  # seconds that a turn times, and calls untimed before
NOT_RUN = "not run"

CALLED = {
    OURS: "`demask.optimize(model, (x,), threads=threads)`, called on torch tensors.",
    RUNTIME: "the exported file, all optimizations (its default), threads of the setting, "
    "`session.intra_op.allow_spinning=0`, on the CPU.",
    SPINNING: "the same with spinning allowed, its default.",
    FROZEN: "`torch.jit.trace`, `freeze`, `optimize_for_inference`: oneDNN with norms folded in.",
    EAGER: "the original network, under `torch.no_grad()`.",
    COMPILED: "`torch.compile` with inductor, constants frozen, sizes fixed.",
    OPENVINO: "the exported file; latency hint, threads of the setting, float32.",
    DEEPSPARSE: "the exported file, in a process of its own that times its own calls; as many "
    "cores as threads, default scheduler, checks of inputs off.",
}

Outputs = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Engine:
    """A contender with its input. run: its outputs. turn: the seconds of a call, by one turn.

    seconds: that its preparation took. notes: what it reports of itself.
    """

    run: Callable[[], Outputs]
    turn: Callable[[], float]
    seconds: float
    notes: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def local(cls, call: Callable[[], Any], seconds: float, read: Callable[[Any], Outputs]) -> Engine:
        """One in this process. read: what a call returns as arrays."""
        return cls(lambda: read(call()), lambda: turns.turn(call, LEAST), seconds)


@dataclass(frozen=True, slots=True)
class Setting:
    """A network with its input, the file it was exported to, and what may be used."""

    model: nn.Module
    x: Tensor
    file: Path
    threads: int
    deepsparse: str | None


def tensors(outputs: Tensor | tuple[Tensor, ...]) -> Outputs:
    """Torch's outputs as arrays."""
    parts = (outputs,) if isinstance(outputs, Tensor) else outputs
    return [part.numpy() for part in parts]


def export(model: nn.Module, x: Tensor, path: Path) -> None:
    """Writes the network as an ONNX file of the opset that all can read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that exporter is the old one, which DeepSparse needs
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=OPSET)


def exact(model: nn.Module, x: Tensor) -> Outputs:
    """The outputs in float64."""
    with torch.no_grad():
        return tensors(deepcopy(model).double()(x.double()))


# -- contenders ----------------------------------------------------------------------------------


def ours(setting: Setting, _: ExitStack) -> Engine:
    """The network by demask.optimize; notes: the seconds of a second time, with the costs that the
    first one measured, and what it chose."""
    cache = setting.file.with_suffix(".json")

    def make() -> Demasked:
        return demask.optimize(setting.model, (setting.x,), threads=setting.threads, cache=cache)

    (_, cold), (network, warm) = timed(make), timed(make)
    call = Engine.local(lambda: network(setting.x), cold, tensors)
    chosen = network.demasked.decisions[0].chosen
    return Engine(call.run, call.turn, cold, {"again": warm, "chosen": chosen})


def runtime(setting: Setting, _: ExitStack, *, spinning: bool = False) -> Engine:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = setting.threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))

    def make() -> onnxruntime.InferenceSession:
        return onnxruntime.InferenceSession(str(setting.file), options, providers=["CPUExecutionProvider"])

    session, seconds = timed(make)
    feed = {session.get_inputs()[0].name: setting.x.numpy()}
    return Engine.local(lambda: session.run(None, feed), seconds, list)


def spinning(setting: Setting, stack: ExitStack) -> Engine:
    return runtime(setting, stack, spinning=True)


def frozen(setting: Setting, _: ExitStack) -> Engine:
    """Torch's own way to be fast without a compiler: oneDNN, with what can be folded folded."""

    def make() -> nn.Module:
        traced = torch.jit.trace(setting.model, setting.x)
        network = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
        for _ in range(3):  # it specializes to the sizes in its first calls
            network(setting.x)
        return network

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.jit will be removed
        network, seconds = timed(make)
    return Engine.local(lambda: network(setting.x), seconds, tensors)


def eager(setting: Setting, _: ExitStack) -> Engine:
    return Engine.local(lambda: setting.model(setting.x), 0.0, tensors)


def compiled(setting: Setting, _: ExitStack) -> Engine:
    call, seconds = timed(lambda: inductor.inductor(setting.model, setting.x))
    return Engine.local(call, seconds, tensors)


def openvino(setting: Setting, _: ExitStack) -> Engine:
    core = openvino_module().Core()
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": setting.threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    start = perf_counter()
    request = core.compile_model(str(setting.file), "CPU", options).create_infer_request()
    seconds, x = perf_counter() - start, [setting.x.numpy()]

    def call() -> Any:
        return request.infer(x, share_inputs=True, share_outputs=True)

    return Engine.local(call, seconds, lambda got: [part.copy() for part in got.to_tuple()])


def deepsparse(setting: Setting, stack: ExitStack) -> Engine:
    """DeepSparse in its own process, which ends with the stack. RuntimeError where it fails."""
    command = [setting.deepsparse or "", server.__file__, str(setting.file), str(len(setting.x)), str(setting.threads)]
    requests, answers = stack.enter_context(running(command))
    try:
        server.send(requests, setting.x.numpy())
        hello = server.receive(answers)
    except (EOFError, BrokenPipeError):
        raise RuntimeError("its process ended before it was ready") from None

    def run() -> Outputs:
        server.send(requests, {"ask": "run"})
        return [server.receive(answers) for _ in range(server.receive(answers))]

    def turn() -> float:
        turns.settle()
        server.send(requests, {"ask": "turn", "least": LEAST})
        return server.receive(answers)

    return Engine(run, turn, hello["seconds"], hello)


@contextmanager
def running(command: list[str]) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The pipes to and from a process, which ends when they close."""
    # Its own packages, not these; and it would report its use over the network.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["NM_DISABLE_ANALYTICS"] = "1"
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout)
    try:
        yield requests, answers
    finally:
        with suppress(BrokenPipeError):  # of a process that has failed
            requests.close()
        process.wait()
        answers.close()


MAKES: Mapping[str, Callable[[Setting, ExitStack], Engine]] = {
    OURS: ours,
    RUNTIME: runtime,
    SPINNING: spinning,
    FROZEN: frozen,
    EAGER: eager,
    COMPILED: compiled,
    OPENVINO: openvino,
    DEEPSPARSE: deepsparse,
}


def error(expected: Outputs, actual: Outputs) -> float:
    """The largest difference, relative to the largest expected value.

    ValueError where shapes differ; NaN where an output has one.
    """
    shapes = [[part.shape for part in outputs] for outputs in (expected, actual)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"outputs of {shapes[1]}, expected {shapes[0]}")
    most = max(float(np.abs(part).max()) for part in expected)
    pairs = zip(expected, actual, strict=True)
    return float(np.max([np.abs(want - got).max() for want, got in pairs])) / most


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender that is ready, or why it is not. error: of its outputs, see `error`."""

    engine: Engine | None
    error: float = float("nan")
    failure: str = ""


def entered(who: str, setting: Setting, expected: Outputs, stack: ExitStack, allowed: float) -> Entry:
    """A contender prepared and checked: one whose outputs are wrong is not timed."""
    if who == DEEPSPARSE and setting.deepsparse is None:
        return Entry(None, failure=NOT_RUN)
    try:
        engine = MAKES[who](setting, stack)
        gap = error(expected, engine.run())
    except Exception as caught:  # it may raise anything, and then that is its result
        return Entry(None, failure=reason(caught))
    if not gap <= allowed:  # not `>`: NaN is wrong
        return Entry(None, gap, f"wrong by {gap:.0e}")
    return Entry(engine, gap)
