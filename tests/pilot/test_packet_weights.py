"""Networks that are conditioned and read from packets: the rows that are computed, and no others, are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import own_process
from demask.errors import BadInput
from demask.pilot import ExecutionData, PacketReader, collect, condition, write_packets


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Sigmoid(), nn.Linear(512, 8)).eval()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.bn, self.b = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 32, 3, bias=False)
        self.head = nn.Linear(32, 5)
        self.bn.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.b(torch.relu(self.bn(self.a(x))))).mean((2, 3)))


NETWORKS = {"perceptron": (perceptron, (5, 64)), "convolutions": (lambda: Convolutions().eval(), (2, 3, 12, 12))}


@pytest.fixture(params=NETWORKS)
def written(request, tmp_path):
    build, shape = NETWORKS[request.param]
    model, x = build(), torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    data = collect(model, (x,), measure="contribution")
    path = tmp_path / "weights.packets"
    write_packets(path, model, data)
    with torch.device("meta"):
        outline = build()
    return model, outline, x, data, path


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_what_is_computed_is_what_is_read(written, keep: float) -> None:
    """Bit for bit the network in memory; and rows of the most important packets alone are read."""
    model, outline, x, data, path = written
    expected = condition(model, (x,), pilot=data, condition=f"skip:{keep}", check=False)
    small = condition(outline, (x,), pilot=data, condition=f"skip:{keep}", weights=path)
    assert torch.equal(small(x), expected(x))
    assert all(map(torch.equal, small.last, expected.last))
    if keep == 1.0:
        torch.testing.assert_close(small(x), model(x))
    assert small.conditioned.pilot == data.source
    small.close()
    with pytest.raises(BadInput, match="the reader is closed"):
        small(x + 1) if small.update(data.mean()) else small.run([i[:1] for i in small.last], (x,))


def test_the_priorities_of_the_file_need_no_pilot(tmp_path) -> None:
    model, x = perceptron(), torch.randn(3, 64)
    data = collect(model, (x,))
    path = tmp_path / "weights.packets"
    write_packets(path, model, data)
    with torch.device("meta"):
        outline = perceptron()
    small = condition(outline, (x,), condition="skip:0.25", weights=path, memory="1MiB")
    y = small(x)
    read = small.bytes_read
    by_data = condition(model, (x,), pilot=data, condition="skip:0.25", check=False)
    by_data(x)
    reader = PacketReader(path)
    for mine, theirs, name in zip(small.last, by_data.last, ("0.weight", "2.weight"), strict=True):
        packets = reader.holders(name)
        assert set(packets[mine.numpy()]) <= set(packets[theirs.numpy()])
    torch.testing.assert_close(y, by_data.run(small.last, (x,)), rtol=0, atol=0)
    sizes, packets = reader.index.sizes(), set(reader.holders("4.weight"))
    for rows, name in zip(small.last, ("0.weight", "2.weight"), strict=True):
        packets |= set(reader.holders(name)[rows.numpy()])
    chosen = sorted(packets)
    assert sizes[chosen].sum() <= read <= 4096 * reader.index.pages()[chosen].sum()
    assert sizes[chosen].sum() < 0.3 * sum(p.nbytes for p in model.parameters())
    assert small.peak_weight_bytes <= 2**20
    assert torch.equal(small(x), y) and small.bytes_read == 0  # retained
    assert "the priorities of weights.packets" in str(small.conditioned)


def test_memory_is_a_limit(written) -> None:
    _, outline, x, data, path = written
    full = condition(outline, (x,), pilot=data, condition="skip:0.5", weights=path)
    y = full(x)
    least = max(tensor.nbytes for _, tensor in full.retained.values())
    small = condition(outline, (x,), pilot=data, condition="skip:0.5", weights=path, memory=least)
    for _ in range(2):
        assert torch.equal(small(x), y) and small.peak_weight_bytes <= least and small.bytes_read > 0
    none = condition(outline, (x,), pilot=data, condition="skip:0.5", weights=path, memory=least - 1)
    with pytest.raises(BadInput, match=f"pass memory={least} or more"):
        none(x)


def test_frames_and_pilots_of_their_own(written) -> None:
    model, outline, x, data, path = written
    small = condition(outline, (x,), pilot=data, condition="skip:0.2", weights=path)
    first = small(x)
    other = ExecutionData("channel", {n: m.mean(0).flip(0) for n, m in data.magnitudes.items()}, "the other way round")
    small.update(other)
    expected = condition(model, (x,), pilot=other, condition="skip:0.2", check=False)
    assert torch.equal(small(x), expected(x)) and not torch.equal(small(x), first)
    live = condition(outline, (x,), pilot=model, condition="skip:0.2", weights=path)
    assert torch.equal(live(x), condition(model, (x,), pilot=model, condition="skip:0.2", check=False)(x))


def test_what_cannot_be_read_in_parts_is_refused(written, tmp_path) -> None:
    model, outline, x, data, path = written
    for options in (
        {"condition": "constant:0.5:value=0", "pilot": data},
        {"condition": "skip:0.5", "pilot": "bits:8"},
        {"condition": "columns"},
        {"condition": "skip", "calibration": [x]},
    ):
        with pytest.raises(BadInput):
            condition(outline, (x,), weights=path, **options)
    with pytest.raises(BadInput, match="pass weights"):
        condition(model, (x,), pilot=data, condition="skip:0.5", memory="1MiB")
    with pytest.raises(BadInput, match="meta device only"):
        condition(nn.Sequential(outline, nn.Linear(5, 5, device="meta")), (x,), condition="skip:0.5", weights=path)


def test_a_network_larger_than_the_memory(tmp_path) -> None:
    """96 MiB of weights; the process grows by a fraction of them when it conditions and runs the network."""
    program = f"""
import resource, torch
from torch import nn
from demask.pilot import condition
def build():
    return nn.Sequential(nn.Linear(512, 16384), nn.ReLU(), nn.Linear(16384, 1024), nn.ReLU(), nn.Linear(1024, 8)).eval()
x = torch.randn(2, 512)
with torch.device("meta"):
    outline = build()
condition(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), (torch.ones(2, 8),), pilot="bits:8",
          condition="skip:0.5", check=False)
torch.mm(torch.randn(512, 512), torch.randn(512, 512))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = condition(outline, (x,), condition="skip:0.05", weights={str(tmp_path / "net.packets")!r}, memory="16MiB")
y = small(x)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) // 1024, small.bytes_read // 2**20, y.isfinite().all())
"""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 16384), nn.ReLU(), nn.Linear(16384, 1024), nn.ReLU(), nn.Linear(1024, 8))
    write_packets(tmp_path / "net.packets", model)
    code, out, error = own_process.run(program)
    assert code == 0, error
    grown, read, finite = out.split()
    assert finite == "tensor(True)"
    assert int(read) < 8
    assert int(grown) < 48
