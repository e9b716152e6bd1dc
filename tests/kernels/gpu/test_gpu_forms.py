"""What kernels on a GPU are given: every nonzero once, in the order that was promised."""

from __future__ import annotations

import copy
import doctest
import gc

import numpy as np
import pytest
import torch

from demask.errors import BadInput
from demask.failures import strict
from demask.machine.cost import Costs
from demask.sparse import csr_matrix as matrix
from demask.sparse.csr_matrix import CsrMatrix
from demask.sparse.products import gpu_formats as gpu_forms
from demask.sparse.products import gpu_products
from demask.sparse.products.gpu_formats import bitmap_of, deal_tasks, formats_of, full, snake, transpose_of
from demask.sparse.products.gpu_products import KernelChoice, candidates, fastest, kind_of
from demask.sparse.products.keep import keep
from sparse_cases import csr
from sparse_cases import matrix as random


def rows_of(w: torch.Tensor) -> CsrMatrix:
    values, crow, col = csr(w)
    return CsrMatrix(crow, col, values, None, (w.shape[0], w.shape[1]))


@pytest.mark.parametrize("module", [gpu_forms, gpu_products, matrix], ids=lambda m: m.__name__)
def test_examples_run(module):
    assert doctest.testmod(module).failed == 0


def test_a_dense_matrix_is_kept_while_values_stay() -> None:
    m = rows_of(random(6, 40, 0.4, dtype=torch.float32))
    formats, made = formats_of(m), []

    def decompress() -> torch.Tensor:
        made.append(csr_dense(m))
        return made[-1]

    first, second = formats.dense(m, decompress), formats.dense(m, decompress)
    assert len(made) == 2 and formats.dense(m, decompress) is second is not first
    m.values.mul_(2)  # in place: seen, and kept again from the second call on
    for count in (3, 4, 4):
        assert torch.equal(formats.dense(m, decompress), csr_dense(m)) and len(made) == count
    assert copy.deepcopy(formats)._dense is None
    for _ in range(20):  # other values, perhaps at the address of those that were freed
        m = m._replace(values=torch.randn_like(m.values))
        assert torch.equal(formats.dense(m, decompress), csr_dense(m))


def csr_dense(m: CsrMatrix) -> torch.Tensor:
    return torch.sparse_csr_tensor(m.crow, m.col, m.values, m.size).to_dense()


@pytest.mark.parametrize(
    ("n", "what", "kind"), [(128, "speed", "cached"), (127, "speed", "dense"), (512, "memory", "dense")]
)
def test_what_is_kept(n: int, what: str, kind: str) -> None:
    m = rows_of(random(6, 40, 0.4, dtype=torch.float32))
    with keep(what):
        for task in ("spmm", "transposed"):
            assert {c.kind for c in candidates(task, m, n, True, 4)} == {"rows", "bitmap", kind}
        assert "cached" not in {c.kind for c in candidates("sddmm", m, n, True, 4)}
    assert keep.now() == "speed"
    with pytest.raises(BadInput, match="speed"):
        keep("all")
    cached = KernelChoice("cached")
    assert gpu_products._in_graph(cached) == KernelChoice("dense")
    assert gpu_products._in_graph(cached._replace(kind="rows")).kind == "rows"


def uneven(count: int, most: int, seed: int = 0) -> np.ndarray:
    g = np.random.default_rng(seed)
    counts = (g.pareto(1.1, count) * 6).astype(np.int64).clip(0, most)
    return np.concatenate([[0], counts.cumsum()])


@pytest.mark.parametrize("together", [1, 4, 7])
@pytest.mark.parametrize("longest", [4, 64, None])
@pytest.mark.parametrize("processors", [1, 3, 132])
def test_every_nonzero_is_in_one_task(together, longest, processors):
    crow = uneven(301, 900)
    found = deal_tasks(crow, None, processors, together, longest)
    seen = np.zeros(crow[-1], int)
    slots = {}
    for begin, end, target in zip(*(found[k] for k in ("begins", "ends", "targets")), strict=True):
        seen[begin:end] += 1
        slots[-1 - target] = begin
        if target >= 0:
            assert (begin, end) == (crow[target], crow[target + 1])
    assert (seen == 1).all()
    whole = found["targets"][found["targets"] >= 0].tolist()
    assert sorted([*whole, *found["rows"].tolist()]) == list(range(301))
    parts = [range(f, f + c) for f, c in zip(found["firsts"], found["counts"], strict=True)]
    for row, part in zip(found["rows"], parts, strict=True):
        begins = [slots[slot] for slot in part]
        assert begins == sorted(begins)
        assert begins[0] == crow[row]
    assert sum(map(len, parts)) == int(found["counts"].sum())
    if longest is not None:
        assert (found["ends"] - found["begins"]).max() <= longest


def test_processors_get_equal_shares():
    """Groups in the order in which processors take them, one wave after the other."""
    crow = uneven(132 * 8 * 4, 2000, 3)
    for processors in (4, 132):
        found = deal_tasks(crow, None, processors, 4, 10**9)
        lengths = (found["ends"] - found["begins"]).reshape(-1, 4)
        work = lengths.max(1)
        shares = np.array([work[k::processors].sum() for k in range(processors)])
        straight = np.sort(work)[::-1]
        plain = np.array([straight[k::processors].sum() for k in range(processors)])
        assert np.ptp(shares) <= np.ptp(plain)
        assert shares.max() - shares.min() <= work.max()


def test_rows_of_a_group_are_similar():
    crow = uneven(400, 500)
    found = deal_tasks(crow, None, 5, 8, 10**9)
    lengths = np.sort((found["ends"] - found["begins"]).reshape(-1, 8), 1)
    order = lengths[np.lexsort((-lengths[:, 0], -lengths[:, -1]))]
    assert (order[1:, -1] <= order[:-1, 0]).all()


def test_snake_is_a_permutation():
    for groups in (0, 1, 5, 131, 132, 133, 1000):
        assert sorted(snake(groups, 132).tolist()) == list(range(groups))


def spread(m: CsrMatrix) -> torch.Tensor:
    """The matrix that a bitmap and values stand for."""
    bits = bitmap_of(m)
    assert bits is not None
    made = torch.zeros(bits.high, bits.tiles * 64, dtype=m.values.dtype)
    for tile in range(bits.tiles):
        for row in range(bits.high):
            place = int(bits.starts[tile, row])
            for bit in range(64):
                if int(bits.masks[tile, row]) >> bit & 1:
                    made[row, tile * 64 + bit] = m.values[place]
                    place += 1
    return made


@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (130, 65), (3, 200)])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_a_bitmap_is_the_matrix(shape, density):
    w = random(*shape, density)
    made = spread(rows_of(w))
    assert torch.equal(made[: shape[0], : shape[1]], w)
    assert made.count_nonzero() == w.count_nonzero()


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_the_transpose(density):
    w = random(7, 12, density)
    m = rows_of(w)
    made = transpose_of(m)
    parts = made.crow, made.col, m.values[made.order]
    found = torch.sparse_csr_tensor(*parts, (12, 7), check_invariants=True)
    assert torch.equal(found.to_dense(), w.t())


def test_rows_with_names():
    w = random(9, 12, 0.4)
    w[::3] = 0
    m = rows_of(w)
    names = torch.tensor([1, 2, 4, 5, 7, 8], dtype=torch.int32)
    short = m._replace(crow=m.crow[[0, *(names + 1).tolist()]], names=names)
    assert torch.equal(full(short).crow, m.crow)
    assert torch.equal(spread(short), spread(m))
    crow = transpose_of(short)
    assert all(map(torch.equal, crow, transpose_of(m)))


def test_forms_live_as_long_as_the_matrix():
    m = rows_of(random(7, 12, 0.4))
    first = formats_of(m)
    first.bitmap(m)
    first.tasks(m, 4)
    assert formats_of(m._replace(values=m.values * 2)) is first
    m.col.add_(0)
    assert formats_of(m) is not first
    several = [rows_of(random(3, 4, 0.5)) for _ in range(200)]  # a network's layers
    first, others = formats_of(m), [formats_of(one) for one in several]
    assert formats_of(m) is first
    assert all(formats_of(one) is form for one, form in zip(several, others, strict=True))
    count = len(gpu_forms.FORMATS.entries)
    del m
    gc.collect()
    assert len(gpu_forms.FORMATS.entries) < count


@pytest.mark.parametrize("part", ["a column", "a start", "a name"])
def test_hostile_indices_are_refused(part):
    m = rows_of(random(4, 6, 1.0))
    names = torch.arange(4, dtype=torch.int32)
    if part == "a column":
        m.col[3] = 6
    if part == "a start":
        m.crow[2] = 100
    if part == "a name":
        names[3] = 4
    with pytest.raises(BadInput):
        formats_of(m._replace(names=names))


@strict(False)
def test_the_fastest_is_taken_and_remembered(tmp_path):
    """By a clock on which each call takes what it says; one cannot run here."""
    now, made = [0.0], []
    takes = {KernelChoice("rows", 4, 64): 3.0, KernelChoice("bitmap", 64, 16): 2.0, KernelChoice("dense"): 5.0}

    def make(choice):
        made.append(choice)
        if choice.kind == "bitmap" and choice.height == 128:
            raise RuntimeError("no room")
        return lambda: now.__setitem__(0, now[0] + takes[choice])

    options = [KernelChoice("bitmap", 128, 16), *takes]
    for _ in range(2):
        known = Costs.open(tmp_path / "costs.json", threads=1, clock=lambda: now[0])
        found = fastest("a GPU, a product", options, make, known)
        assert found == KernelChoice("bitmap", 64, 16)
    assert made == [*options, options[0]]  # measured once; what failed is tried again
    assert fastest("another GPU", options[2:], make, known) == options[2]


def test_calls_of_one_kind_share_a_choice():
    m = rows_of(random(50, 30, 0.1))
    same = {kind_of("spmm", m, torch.ones(30, n)) for n in (33, 50, 64)}
    assert len(same) == 1
    others = {
        kind_of("transposed", m, torch.ones(50, 64)),
        kind_of("spmm", m, torch.ones(30, 65)),
        kind_of("spmm", m, torch.ones(64, 30).t()),
        *same,
    }
    assert len(others) == 4


def test_forms_are_copied_whole():
    m = rows_of(random(50, 30, 0.4))
    form = formats_of(m)
    form.tasks(m, 4), form.bitmap(m), form.transposed(m)
    other = copy.deepcopy(form)
    assert torch.equal(other.bitmap(m).masks, form.bitmap(m).masks)
    assert other.bitmap(m).masks.data_ptr() != form.bitmap(m).masks.data_ptr()
    assert other.tasks(m, 4).begins.data_ptr() != form.tasks(m, 4).begins.data_ptr()


@pytest.mark.parametrize("task", ["spmm", "transposed", "sddmm"])
@pytest.mark.parametrize("n", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dense_product_is_always_a_candidate(task, n, dtype):
    m = rows_of(random(500, 300, 0.1))
    m = m._replace(values=m.values.to(dtype))
    found = candidates(task, m, n, True, 132)
    dense = KernelChoice("cached" if n >= 128 and task != "sddmm" else "dense")
    assert found.count(dense) == 1
    assert len(set(found)) == len(found)
    assert {c.kind for c in found} == {"rows", "bitmap", dense.kind}
    for c in found:
        if c != dense:
            assert c.height & (c.height - 1) == 0 < c.height
            assert c.width & (c.width - 1) == 0 < c.width
