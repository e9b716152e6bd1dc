"""CPU kernels as an aarch64 processor runs them, in tests on another processor.

LLVM compiles for aarch64 and links in this process's memory, as it does on such a processor; a call of machine code
becomes a call in qemu's user mode, by `driver.c`, which reads and writes this process's memory at the same
addresses. All else, Python and torch, runs as it is. Calls have one thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"
CPU = "neoverse-n1"
CALLED = ("memset", "memcpy", "memmove")  # by machine code; in this order, addresses of the driver's own
ANY_PROCESS = 2**64 - 1
ALLOW_READING = 0x59616D61  # prctl(PR_SET_PTRACER): where the system is strict, for a child as well
PROGRAM_AT = 1 << 40  # address of the driver: far from where Linux puts any
MARGIN = 1 << 31  # bytes between addresses of qemu and of this process, which grows
TAKEN = 3  # exit status of the driver where it cannot have an address
TRIES = 50


def missing_tool() -> str:
    """Why aarch64 code cannot run here; empty if it can. Raises RuntimeError instead where CI_ARM=1."""
    missing = [tool for tool in (QEMU, COMPILER) if shutil.which(tool) is None]
    reason = f"needs {' and '.join(missing)}: apt-get install qemu-user-static gcc-aarch64-linux-gnu" if missing else ""
    if reason and os.environ.get("CI_ARM") == "1":
        raise RuntimeError(reason)
    return reason


def ranges(process: int) -> list[tuple[int, int]]:
    """The addresses that a process uses: [begin, end) in ascending order."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    both = [line.split(maxsplit=1)[0].split("-") for line in lines]
    return [(int(begin, 16), int(end, 16)) for begin, end in both if len(begin) < 16]  # not those of the kernel


def are_apart(process: int, other: int) -> bool:
    """Whether no address that a process uses is near one of another. Of addresses that qemu itself uses, code in it
    reads what qemu has there."""
    both = sorted([(*r, 0) for r in ranges(process)] + [(*r, 1) for r in ranges(other)])
    return all(
        owner == next_owner or end + MARGIN <= begin for (_, end, owner), (begin, _, next_owner) in pairwise(both)
    )


class Driver:
    """A process of qemu that makes calls in the memory of this one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self.calls = self.of = 0  # of: the process in whose memory it makes them

    @functools.cached_property
    def program(self) -> Path:
        """The compiled driver."""
        self.folder = tempfile.TemporaryDirectory()
        program = Path(self.folder.name) / "driver"
        source = Path(__file__).with_name("driver.c")
        options = "-O2", "-w", "-static", f"-Wl,-Ttext-segment={PROGRAM_AT:#x}"
        subprocess.run([COMPILER, *options, "-o", program, source], check=True)
        return program

    def start(self) -> tuple[int, ...]:
        """Start a process; returns the addresses of the functions in `CALLED`."""
        ctypes.CDLL(None).prctl(ALLOW_READING, ctypes.c_ulong(ANY_PROCESS), 0, 0, 0)
        self.of = os.getpid()
        command = [QEMU, "-cpu", CPU, self.program, str(self.of)]
        for _ in range(TRIES):
            self.messages.truncate(0)
            self.process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages
            )
            assert self.process.stdout is not None
            functions = struct.unpack("=3Q", self.process.stdout.read(24))
            if are_apart(self.process.pid, self.of):
                return functions
            self.stop()
        raise RuntimeError(f"qemu has addresses of this process in each of {TRIES} tries")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def call(self, code: int, *arguments: int | None) -> None:
        """Call machine code with up to 7 integers. Raises RuntimeError for an access that is not allowed here."""
        words = struct.pack("=8Q", *[(w or 0) % 2**64 for w in (code, *arguments, *[0] * (7 - len(arguments)))])
        with self.lock:
            self.calls += 1
            for _ in range(TRIES):
                if self.process is None or self.of != os.getpid():  # a forked process starts its own
                    self.start()
                assert self.process is not None and self.process.stdin and self.process.stdout
                self.process.stdin.write(words)
                if self.process.stdout.read(1):
                    return
                status = self.process.wait()
                self.stop()
                self.messages.seek(0)
                message = self.messages.read()
                if status != TAKEN:
                    break
            raise RuntimeError(f"aarch64 code ended with {status}: {message}")


class Aarch64:
    """The plugin of `pytest -p tests.arm.emulated`, which tells how many calls there were. Where a tool is missing,
    tests are skipped."""

    def __init__(self, runs_tests: bool) -> None:
        self.reason, self.calls = missing_tool(), 0
        self.driver = emulate() if runs_tests and not self.reason else None

    def pytest_runtest_setup(self) -> None:
        if self.reason:
            pytest.skip(self.reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        if self.driver is not None:
            report.calls, self.driver.calls = self.driver.calls, 0
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.calls += getattr(report, "calls", 0)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self.reason or f"aarch64: {self.calls} calls of kernels in {QEMU}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any file of tests asks what processor this is."""
    of_workers = getattr(early_config.known_args_namespace, "numprocesses", None)
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not of_workers
    early_config.pluginmanager.register(Aarch64(runs_tests))


def emulate() -> Driver:
    """From now on this process's kernels are those of an aarch64 processor. Before any of them is compiled."""
    import llvmlite.binding as llvm

    from demask.kernels import thread_team
    from demask.kernels.llvm import isa, jit

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: "aarch64-unknown-linux-gnu"
    llvm.get_host_cpu_name = lambda: CPU
    llvm.get_host_cpu_features = lambda: llvm.FeatureMap({"neon": True, "fullfp16": True})
    isa.host.cache_clear()
    jit.CODE.files = None

    driver, codes = Driver(), set()
    for name, address in zip(CALLED, driver.start(), strict=True):
        llvm.add_symbol(name, address)
    load, function_type = jit.Code._load, ctypes.CFUNCTYPE

    def load_for_driver(self: jit.Code, kernels: list[Any], target: isa.Isa) -> list[int]:
        assert target.triple.startswith("aarch64"), f"{target.name} cannot run here"
        addresses = load(self, kernels, target)
        codes.update(addresses)
        driver.stop()  # it may have read other code at the same addresses
        return addresses

    @functools.cache
    def function_type_for_driver(*kinds: Any, **options: Any) -> Any:
        kind = function_type(*kinds, **options)

        class Function(kind):
            _argtypes_, _restype_, _flags_ = kind._argtypes_, kind._restype_, kind._flags_

            def __new__(cls, *of: Any) -> Any:
                return functools.partial(driver.call, *of) if of and of[0] in codes else super().__new__(cls, *of)

        return Function

    jit.Code._load = load_for_driver
    ctypes.CFUNCTYPE = function_type_for_driver  # type: ignore[assignment]
    thread_team.Job.run = lambda self, threads: self.start(self.address, 1)
    return driver
