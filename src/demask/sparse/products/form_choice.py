"""Which form of a packed matrix takes the least time on this machine: measured for the first matrix of its kind, and
stored in the file of `machine.cost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from demask.machine.cost import Costs, Question, costs_of_machine
from demask.sparse.products.packed import FORMS, PackedMatrix, empty_matrix, pack, quantize
from demask.sparse.products.packed_product import has_bitmap, linear

CACHES = 2**26  # bytes of copies that are read in turns: more than caches hold, as in a large network
COPIES = 16  # at most
ELEMENTS = 2**22  # of the matrix that is measured, which has fewer rows than a larger one
STEPS = 20  # all densities in a step of so many share their measurements
MANY = 256  # vectors; more of them have the form of as many


def chosen_form(
    size: tuple[int, int],
    density: float,
    dtype: torch.dtype,
    vectors: int = 1,
    group: int = 0,
    costs: Costs | None = None,
) -> str:
    """The form that takes the least time for products with so many vectors on the CPU, with torch's threads.

    density: of nonzeros, from 0 to 1. group: of columns with a scale, which nonzeros with columns have none of.
    costs: in place of those of torch's threads.
    """
    rows, columns = size
    step = round(STEPS * density)
    if step == STEPS or not rows * columns:
        return "dense"
    size = max(min(rows, ELEMENTS // columns), 1), columns
    vectors = min(1 << (vectors - 1).bit_length(), MANY)
    density = max(step / STEPS, 0.2 / STEPS)
    forms = [
        form for form in FORMS if not (form == "bitmap" and not has_bitmap(dtype)) and not (form == "columns" and group)
    ]
    costs = costs or costs_of_machine(torch.get_num_threads())
    questions = {form: _question(form, size, density, dtype, vectors, group) for form in forms}
    is_known = all(costs.measured(question.name) for question in questions.values())
    seconds = {form: costs.seconds(question) for form, question in questions.items()}
    if not is_known:
        costs.save()
    return min(forms, key=seconds.__getitem__)


def _question(
    form: str, size: tuple[int, int], density: float, dtype: torch.dtype, vectors: int, group: int
) -> Question:
    count = size[0] * size[1] if form == "dense" else int(density * size[0] * size[1])

    def make() -> Callable[[], Tensor]:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(size, generator=generator) * (torch.rand(size, generator=generator) < density)
        matrix, scale = quantize(weight, group) if dtype == torch.int8 else (weight.to(dtype), None)
        packed = pack(matrix, form, scale)
        x = torch.randn(vectors, size[1], generator=generator).to(dtype if dtype.is_floating_point else torch.float32)
        matrices = cycle(copies(packed))
        return lambda: linear(next(matrices), x)

    grouped = f" in groups of {group}" if group else ""
    name = f"packed {form} {size[0]}x{size[1]} {dtype}{grouped}, {density:.0%}, {vectors} vectors"
    nbytes = empty_matrix(form, size, count, dtype, "meta", group).nbytes
    return Question(name, 2 * count * vectors, nbytes, make)


def copies(packed: PackedMatrix) -> list[PackedMatrix]:
    """The matrix and copies of it, which together are read from memory."""
    count = min(COPIES, CACHES // max(packed.nbytes, 1))
    return [packed, *(replace(packed, tensors=tuple(t.clone() for t in packed.tensors)) for _ in range(count))]
