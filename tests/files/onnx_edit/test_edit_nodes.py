"""The ONNX package's node tests through the edit: masks on their constants, inputs and outputs.

Of each case, operands after the first become constants and floats are multiplied by masks of zeros,
so that the node's operands have known positions and its readers want some of them. One walk of
the editor, whose result is taken even where it is larger. Inputs after the first may stay inputs.
`python tests/files/onnx_edit/test_edit_nodes.py LSTM GRU` prints what becomes of some ops' cases.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import helper, numpy_helper  # noqa: E402

from conformance import Case, cases, to_torch  # noqa: E402
from demask.errors import BadInput, DemaskError  # noqa: E402
from demask.files.onnx.check import Judge  # noqa: E402
from demask.files.onnx.edit.edit_file import edit_once  # noqa: E402
from demask.ops import TABLE  # noqa: E402

PARTS, SHARE, WHERE = 8, 0.98, 9  # WHERE: op set since which there is Where
MASKED = (np.float16, np.float32, np.float64)  # types that the runtime multiplies
RUNTIME_IR = 13  # the newest version that the runtime reads
SEEDS = (0, 1, 2)  # 0: constants but for the first input; others: a random choice


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: cut, unchanged, refused, lacking (nothing here runs it),
    wrong or crashed."""

    case: str
    seed: int
    kind: str
    words: str = ""

    def __str__(self) -> str:
        return f"{self.case} [{self.seed}]: {self.kind}: {' '.join(self.words.split())[:400]}"


def mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """True, but for some positions of one axis."""
    ones = np.ones(shape, bool)
    axes = [k for k, n in enumerate(shape) if n > 1]
    if axes:
        axis = int(rng.choice(axes))
        lost = rng.permutation(shape[axis])[: int(rng.integers(1, shape[axis]))]
        ones[(slice(None),) * axis + (lost,)] = False
    return ones


def masked(case: Case, seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """A file of the case, and its inputs."""
    rng = np.random.default_rng([seed, len(case.name)])
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = min(model.ir_version, RUNTIME_IR)
    graph, feeds, before = model.graph, {}, []
    arrays = [numpy_helper.to_array(v) if isinstance(v, onnx.TensorProto) else v for v in case.data[0][0]]
    opset = next((i.version for i in model.opset_import if not i.domain), 1)
    for k, (port, array) in enumerate(zip(list(graph.input), arrays, strict=True)):
        if not isinstance(array, np.ndarray):
            feeds[port.name] = array
            continue
        is_masked = array.dtype in MASKED and array.ndim and array.size and opset >= WHERE
        cover = mask(rng, array.shape) if is_masked else None
        if k and (seed == 0 or rng.random() < 0.5):
            graph.input.remove(port)
            constant = array if cover is None else np.where(cover, array, array.dtype.type(0))
            graph.initializer.append(numpy_helper.from_array(constant, port.name))
            continue
        feeds[port.name] = array
        if cover is not None:
            inner = f"{port.name}.masked"
            for node in graph.node:
                node.input[:] = [inner if name == port.name else name for name in node.input]
            before.append(_masking(graph, cover, array, port.name, inner))
    nodes = [*before, *graph.node]
    del graph.node[:]
    for port, array in zip(graph.output, case.data[0][1], strict=True):
        array = numpy_helper.to_array(array) if isinstance(array, onnx.TensorProto) else array
        if not isinstance(array, np.ndarray) or array.dtype not in MASKED or opset < WHERE:
            continue
        inner = f"{port.name}.uncut"
        for node in nodes:
            node.output[:] = [inner if name == port.name else name for name in node.output]
        nodes.append(_masking(graph, mask(rng, array.shape), array, inner, port.name))
    graph.node.extend(nodes)
    return model, feeds


def _masking(graph: Any, cover: np.ndarray, array: np.ndarray, source: str, result: str) -> Any:
    """A node that replaces masked elements by zero: a product, where they are finite (0 times
    infinity is no zero; of Where, the analysis knows nothing)."""
    if np.isfinite(array).all():
        graph.initializer.append(numpy_helper.from_array(cover.astype(array.dtype), f"{result}.m"))
        return helper.make_node("Mul", [source, f"{result}.m"], [result])
    zero = np.zeros((), array.dtype)
    graph.initializer.append(numpy_helper.from_array(cover, f"{result}.mask"))
    graph.initializer.append(numpy_helper.from_array(zero, f"{result}.zero"))
    return helper.make_node("Where", [f"{result}.mask", source, f"{result}.zero"], [result])


def outcome(case: Case, seed: int, folder: Path) -> Outcome:
    """What becomes of a case."""

    def ends(kind: str, words: object = "") -> Outcome:
        return Outcome(case.name, seed, kind, str(words))

    model, feeds = masked(case, seed)
    path = folder / "case.onnx"
    path.write_bytes(model.SerializeToString())
    inputs = tuple(map(to_torch, feeds.values()))
    if not all(isinstance(x, torch.Tensor) for x in inputs):
        return ends("refused", "inputs that are no tensors")
    try:
        edited, barriers, _ = edit_once(model, folder, inputs, TABLE)
    except DemaskError as error:
        return ends("refused", error)
    except Exception as error:
        return ends("crashed", f"{type(error).__name__}: {error}")
    kept = {node.SerializeToString() for node in edited.graph.node}
    is_cut = {t.SerializeToString() for t in edited.graph.initializer} != {
        t.SerializeToString() for t in model.graph.initializer
    } or any(node.SerializeToString() not in kept for node in model.graph.node)
    try:
        Judge.of_file(str(path), inputs).compare(edited.SerializeToString())
    except BadInput as error:  # nothing runs the original
        return ends("lacking", error)
    except DemaskError as error:
        # The license that 0 * x is 0 removes the NaN of a 0 * inf, as large numbers overflow.
        is_licensed = "expected nan" in str(error) and "(on large numbers" in str(error)
        is_void = "all outputs are NaN" in str(error)  # a mean over no weight
        return ends("refused" if is_licensed or is_void else "wrong", error)
    except Exception as error:
        return ends("crashed", f"{type(error).__name__}: {error}")
    return ends("cut" if is_cut else "unchanged", "; ".join(" ".join(b) for b in barriers))


def outcomes(chosen: Iterable[Case], folder: Path) -> Iterator[Outcome]:
    for case in chosen:
        if case.expected is None:
            yield from (outcome(case, seed, folder) for seed in SEEDS)


#: once wrong or crashed: infinite constants, numbers of sizes, one number as an input, one output
EVERYDAY = (
    "test_attention_4d_attn_mask_3d_causal_expanded",
    "test_affine_grid_2d_expanded",
    "test_gemm_default_scalar_bias",
    "test_conv_with_strides_padding",
    "test_adam",
    "test_convtranspose",
    "test_castlike_BFLOAT16_to_FLOAT",
    "test_split_equal_parts_2d",
    "test_onehot_with_axis",
    "test_reduce_log_sum_asc_axes",
    "test_cast_FLOAT_to_UINT2",
)


def test_node_tests_that_once_failed(tmp_path):
    chosen = [case for case in cases() if case.name in EVERYDAY]
    assert len(chosen) > len(EVERYDAY) - 2
    results = list(outcomes(chosen, tmp_path))
    assert not [str(r) for r in results if r.kind in ("wrong", "crashed")]
    assert any(r.kind == "cut" for r in results)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_nearly_all_node_tests_are_edited_or_stay_as_they_are(part, tmp_path):
    results = list(outcomes(cases()[part::PARTS], tmp_path))
    bad = [str(r) for r in results if r.kind in ("wrong", "crashed")]
    count = sum(r.kind not in ("lacking", "refused") for r in results)
    assert not [r for r in results if r.kind == "wrong"], "\n".join(bad)
    assert len(bad) <= (1 - SHARE) * count, "\n".join(bad)


def main(names: list[str]) -> None:
    """Print and count what becomes of some ops' cases."""
    chosen = [c for c in cases() if not names or c.op in names or c.name in names]
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for result in outcomes(chosen, Path(folder)):
            kinds[result.kind] += 1
            if result.kind not in ("cut", "unchanged") or names:
                print(result, flush=True)
    print(dict(kinds))


if __name__ == "__main__":
    main(sys.argv[1:])
