"""Shared by all tests."""

import gc
import sys
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from demask.failures import set_strict

TESTS = Path(__file__).parent


def folders() -> list[str]:
    """Where tests import each other and what they share from: each folder that is no package, of
    `tests` and below it."""
    packages = {path.parent for path in TESTS.rglob("__init__.py")}
    below = {path.parent for path in TESTS.rglob("*.py")} - packages
    return [str(path) for path in sorted(below) if not packages & set(path.parents)]


sys.path[:0] = folders()  # also in the processes that xdist starts: each loads this file first

from captured_once import captured_once  # noqa: E402
from cpu_times import CpuTimes  # noqa: E402
from recorded_results import Results, shard_of  # noqa: E402
from rotation import Rotation  # noqa: E402


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="K/N", default="1/1", help="run the K-th of N parts of the selected tests")
    parser.addoption(
        "--results",
        metavar="FILE",
        help="write what tests measured to a JSON file; results of tests not run stay in it",
    )
    parser.addoption(
        "--rotation",
        metavar="K",
        help="which of the tests that take turns run (default: by the count of commits), or all",
    )
    parser.addoption(
        "--cpu-times",
        metavar="FILE",
        nargs="?",
        const="",
        help="print the processor time of tests by folder; write that of each to a JSON file",
    )


def pytest_configure(config):
    set_strict(True)  # what fails inside is seen here, where users get a network and a reason
    gc.set_threshold(100_000, 20, 20)  # exports make so many objects: a tenth of the time went here
    config.addinivalue_line("markers", "sampled(n): each n-th case runs, others for other commits")
    config.pluginmanager.register(Rotation.of(config))
    if (times := config.getoption("--cpu-times")) is not None:
        config.pluginmanager.register(CpuTimes(config, times))
    if not torch.accelerator.is_available():  # each seed would format the stack for each kind
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            kind.manual_seed_all = lambda seed: None
    # Hypothesis parses all modules for constants to draw, 4 s in each process; the laws draw seeds.
    with suppress(ImportError, AttributeError):
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants
    with suppress(ImportError):  # llvmlite is optional
        from demask.kernels.llvm.jit import CODE

        CODE.files = None  # kernels with planted faults must not reach other processes
    path, on_worker = config.getoption("--results"), hasattr(config, "workerinput")
    if path and not on_worker:
        config.pluginmanager.register(Results(Path(path)))


def pytest_unconfigure():
    gc.unfreeze()


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    first, count = shard_of(config.getoption("--shard"))
    shard = {item: zlib.crc32(item.nodeid.encode()) % count for item in items}
    config.hook.pytest_deselected(items=[item for item in items if shard[item] != first])
    items[:] = [item for item in items if shard[item] == first]


@pytest.fixture
def result(record_property):
    """What a test measured, for `--results`: call it with suite, network and mask first, and then
    with more (error, before, after, note), before anything is asserted."""
    given = {}
    record_property("result", given)
    return given.update


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """The entries of an honest .pt2, by name below its root folder."""
    from pt2_files import AUTO, CALL, Small, export

    path = tmp_path_factory.mktemp("honest") / "model.pt2"
    shapes = {"x": {0: AUTO}, "spare": None, "scale": None}
    torch.export.save(export(Small().eval(), *CALL, shapes), path)
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What earlier modules left in caches is no longer looked at by the garbage collector, which
    timing calls before each round: export leaves millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nominal(monkeypatch):
    """Conditions are decided by the same numbers on every machine, whatever it measured before."""
    chain = sys.modules.get("demask.pilot.chains.exact_conditions")
    if chain is not None:
        cost = sys.modules["demask.pilot.chains.chain_cost"]
        monkeypatch.setattr(chain, "here", lambda threads=None: cost.NOMINAL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    torch.manual_seed(0)  # numbers drawn do not depend on the tests before
    with captured_once(item):
        return (yield)
