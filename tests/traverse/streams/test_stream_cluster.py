"""Tasks on the workers of a dask cluster: the same bytes as on one machine, whoever dies."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import own_process
from demask.errors import BadInput
from demask.traverse import stream

distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of tornado and of processes that are killed
MEMORY = "14MiB"


def network():
    """A network with statistics over the image, of torch's own modules: workers need no test."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Upsample(scale_factor=2.0),
        nn.Conv2d(8, 3, 3, padding=1),
    )
    return nn.Sequential(*layers).eval()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).random((2, 3, 400, 200), dtype=np.float32)
    np.save("image.npy", image)
    stream(network(), tmp_path / "image.npy", tmp_path / "whole.npy", memory=MEMORY, stripe=40)
    return tmp_path


def cluster(workers, processes=True):
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=processes,
        dashboard_address=None,
        memory_limit=0,
        silence_logs=50,
    )


class Killer(threading.Thread):
    """Kills random workers of a cluster; their nannies start new ones."""

    def __init__(self, cluster, kills, pause):
        super().__init__(daemon=True)
        self.cluster, self.kills, self.pause, self.done = cluster, kills, pause, 0

    def run(self):
        while self.done < self.kills:
            time.sleep(random.uniform(*self.pause))
            running = [
                n.process.process
                for n in self.cluster.workers.values()
                if n.process is not None and n.process.process is not None
            ]
            if running and (process := random.choice(running)).pid:
                os.kill(process.pid, signal.SIGKILL)
                self.done += 1


def test_workers_write_the_same_bytes(folder):
    with cluster(2, processes=False) as local, distributed.Client(local) as client:
        stream(network(), folder / "image.npy", folder / "result.npy", memory=MEMORY, stripe=40, client=client)
    assert (folder / "result.npy").read_bytes() == (folder / "whole.npy").read_bytes()
    assert not (folder / ".result.npy.partial").exists()


@pytest.mark.nightly  # by day threads, above, and one killed process, in test_stream_resume
@pytest.mark.parametrize(("workers", "kills"), [(2, 1), (4, 20)])
def test_workers_write_the_same_bytes_and_may_die(folder, workers, kills):
    random.seed(0)
    with own_process.workers(), cluster(workers) as local, distributed.Client(local) as client:
        killer = Killer(local, kills, (0.5, 2.0))
        killer.start()
        done = stream(network(), folder / "image.npy", folder / "result.npy", memory=MEMORY, stripe=40, client=client)
    assert (folder / "result.npy").read_bytes() == (folder / "whole.npy").read_bytes()
    assert done.shape == (2, 3, 800, 400)
    assert killer.done
    assert not (folder / ".result.npy.partial").exists()


def test_what_a_cluster_cannot_do_is_refused(folder):
    class NoClient:
        def submit(self): ...

        def scatter(self): ...

    with pytest.raises(BadInput, match="expected a dask"):
        stream(network(), "image.npy", "result.npy", memory=MEMORY, client=object())
    with pytest.raises(BadInput, match="must be a file"):
        stream(network(), "image.npy", np.zeros((2, 3, 800, 400), np.float32), memory=MEMORY, client=NoClient())
