"""States of a parameter, cut as the parameter was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from demask import BadInput
from demask.graph.result.origin import Piece
from demask.shrink.training.carry import cut_states

ROWS, COLUMNS = (4, 0, 3), (1, 2)
PIECE = Piece("fc.weight", (5, 3), (ROWS, COLUMNS), ("fc.weight_orig",), True, True)
OWN = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))


def grid(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 1


def test_states_of_the_parameters_shape_have_its_positions() -> None:
    before = {
        "exp_avg": grid(5, 3),
        "exp_avg_sq": grid(5, 3).double(),
        "step": torch.tensor(3.0),
        "betas": (0.9, 0.99),
        "ready": True,
    }
    after = cut_states("fc.weight_orig", before, PIECE, OWN)
    expected = grid(5, 3)[list(ROWS)][:, list(COLUMNS)]
    assert torch.equal(after["exp_avg"], expected)
    assert torch.equal(after["exp_avg_sq"], expected.double())
    assert after["step"] == 3
    assert after["step"] is not before["step"]
    assert (after["betas"], after["ready"]) == ((0.9, 0.99), True)
    assert not after["exp_avg"].requires_grad


@pytest.mark.parametrize("names", [("row_var", "col_var"), ("exp_avg_sq_row", "exp_avg_sq_col")])
def test_averages_over_an_axis_are_those_of_the_smaller_one(names: tuple[str, str]) -> None:
    """Means of squares of a tensor that is zero where it was removed, and of the smaller tensor."""
    squares = torch.zeros(5, 3)
    squares[torch.tensor(ROWS)[:, None], torch.tensor(COLUMNS)] = grid(3, 2)
    keepdim = names[0] == "row_var"

    def means(x: Tensor) -> dict[str, Tensor]:
        return {names[0]: x.mean(-1, keepdim), names[1]: x.mean(-2, keepdim)}

    after = cut_states("fc.weight_orig", means(squares), PIECE, OWN)
    for name, expected in means(grid(3, 2)).items():
        torch.testing.assert_close(after[name], expected)


def test_axes_of_size_one_stay_and_norms_have_more_axes() -> None:
    after = cut_states("w", {"scale": grid(5, 1)}, PIECE, OWN)
    assert torch.equal(after["scale"], grid(5, 1)[list(ROWS)])
    vector = Piece("norm.weight", (5,), (ROWS,), ("norm.weight",), True, True)
    after = cut_states("w", {"exp_avg": grid(5)}, vector, torch.zeros(3, 1, 1))
    assert torch.equal(after["exp_avg"], grid(5)[list(ROWS)].view(3, 1, 1))


def test_memory_formats_are_those_of_the_parameter() -> None:
    own = torch.zeros(3, 2, 4, 4).to(memory_format=torch.channels_last)
    piece = Piece("c.weight", (5, 2, 4, 4), (ROWS, None, None, None), ("c.weight",), True, True)
    after = cut_states("w", {"exp_avg": grid(5, 2, 4, 4)}, piece, own)["exp_avg"]
    assert after.stride() == own.stride()
    assert torch.equal(after, grid(5, 2, 4, 4)[list(ROWS)])


@pytest.mark.parametrize("value", [grid(5, 5), grid(3), grid(5, 3, 2), [grid(2)], {"a": grid(2)}])
def test_other_states_are_refused(value: object) -> None:
    with pytest.raises(BadInput, match=r"'gram' of fc\.weight_orig"):
        cut_states("fc.weight_orig", {"gram": value}, PIECE, OWN)
