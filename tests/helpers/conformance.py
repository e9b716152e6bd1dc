"""The ONNX package's own node tests (`onnx.backend.test`), run against `from_onnx`.

`python tests/conformance.py Softmax LSTM` runs the tests of some ops, without names all of them,
and prints what fails.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.backend.test.loader import load_model_tests

from demask.files.onnx.module import OnnxModule
from demask.files.onnx.read.reader import parse_model

_STEPS = (
    "NumPy rounds to 16 bits after every operation, and less than one step of the type is allowed; "
    "PyTorch rounds less often, and its outputs are nearer to those in float64."
)
_STREAM = "Expected are the random numbers of NumPy's generator for a seed; ours are PyTorch's."
_NOISE = "Expected is NumPy's rounding error, 2e-7, where the exact value is 0, and so is PyTorch's."
#: by name (with `*`), why a case may fail; on other processors some of them pass
EXPECTED: Mapping[str, str] = {
    "test_attention_*_bf16": _STEPS,
    "test_attention_*_bf16_expanded": _STEPS,
    "test_attention_4d_fp16": _STEPS,
    "test_attention_4d_causal_fp16": _STEPS,
    "test_attention_4d_causal_fp16_expanded": _STEPS,
    "test_bernoulli*": _STREAM,
    "test_training_dropout": _STREAM,
    "test_training_dropout_mask": _STREAM,
    "test_training_dropout_default*": _STREAM,
    "test_dft_inverse*": _NOISE,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One node test: a model, and inputs with the outputs that they should give."""

    name: str
    model: Any
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float

    @property
    def op(self) -> str:
        """The op that is tested: of an expanded function, the function's."""
        return self.key[1]

    @property
    def key(self) -> tuple[str, str]:
        """The op that is tested, with its domain before it."""
        whole = _by_name()[self.name.partition("_expanded")[0]]
        return whole.model.graph.node[0].domain, whole.model.graph.node[0].op_type

    @property
    def expected(self) -> str | None:
        """Why it may fail; None for those that must pass."""
        return next((why for names, why in EXPECTED.items() if fnmatchcase(self.name, names)), None)

    @property
    def float32(self) -> str:
        """ "all", "some" or "none": which inputs and outputs are float32 tensors (some: one input,
        or there is none, and one output)."""
        kinds = [
            [_element(v) == onnx.TensorProto.FLOAT for v in values]
            for values in (self.model.graph.input, self.model.graph.output)
        ]
        if all(map(all, kinds)):
            return "all"
        return "some" if (any(kinds[0]) or not kinds[0]) and any(kinds[1]) else "none"


def _element(value: Any) -> int:
    return value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else -1


@cache
def cases() -> tuple[Case, ...]:
    """All node tests of the installed onnx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return tuple(_case(t) for t in found)


@cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for case in cases()}


def _case(test: Any) -> Case:
    model = test.model or onnx.load(os.path.join(test.model_dir, "model.onnx"))
    data = test.data_sets or [_read(folder, model) for folder in Path(test.model_dir).glob("test*")]
    return Case(test.name, model, data, test.rtol, test.atol)


def _read(folder: Path, model: Any) -> tuple[list[Any], list[Any]]:
    def value(path: Path, port: Any) -> Any:
        kind = port.type.WhichOneof("value").removesuffix("_type")
        kinds = {"tensor": onnx.TensorProto, "sequence": onnx.SequenceProto, "optional": onnx.OptionalProto}
        read = {
            "tensor": onnx.numpy_helper.to_array,
            "sequence": onnx.numpy_helper.to_list,
            "optional": onnx.numpy_helper.to_optional,
        }
        return read[kind](kinds[kind].FromString(path.read_bytes()))

    ports = (("input", model.graph.input), ("output", model.graph.output))
    return tuple([value(folder / f"{word}_{k}.pb", p) for k, p in enumerate(ports)] for word, ports in ports)  # type: ignore[return-value]


def failure(case: Case) -> str | None:
    """Why a case fails, None if it passes."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            module = OnnxModule(parse_model(case.model, Path()))
            for given, expected in case.data:
                made = module(*map(to_torch, given))
                made = made if isinstance(made, tuple) else (made,)
                for k, (a, b) in enumerate(zip(made, expected, strict=True)):
                    compare(f"output {k}", a, b, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def to_torch(value: Any) -> Any:
    """An input of a case as `from_onnx` takes it; text stays numpy's."""
    if value is None or isinstance(value, list):
        return None if value is None else [to_torch(v) for v in value]
    array = _array(value)
    if array.dtype.kind in "OUST":
        return array
    name = array.dtype.name
    if name in ("int2", "int4", "uint2", "uint4"):  # held in a byte each, as `read` does
        return torch.from_numpy(array.astype(np.uint8 if name[0] == "u" else np.int8))
    if hasattr(torch, name) and array.dtype.isbuiltin == 1:
        return torch.from_numpy(array.copy())
    if hasattr(torch, name) and getattr(torch, name).itemsize == array.itemsize:
        whole = {1: np.uint8, 2: np.uint16}[array.itemsize]
        return torch.from_numpy(array.view(whole).copy()).view(getattr(torch, name))
    return torch.from_numpy(array.astype(np.float32 if "float" in name else np.int8))


def _array(value: Any) -> np.ndarray:
    """A value of a case as numpy's."""
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value).copy()
    return np.asarray(value)


def compare(where: str, made: Any, expected: Any, case: Case) -> None:
    """Raise AssertionError unless a value has the type, the sizes and the numbers expected."""
    if isinstance(expected, list):
        assert isinstance(made, list) and len(made) == len(expected), f"{where}: another length"
        for k, (a, b) in enumerate(zip(made, expected, strict=True)):
            compare(f"{where}[{k}]", a, b, case)
        return
    if expected is None:
        assert made is None, f"{where}: expected None"
        return
    expected = _array(expected)
    if expected.dtype.kind in "OUST":
        np.testing.assert_array_equal(np.asarray(made).astype(str), expected.astype(str), where)
        return
    assert isinstance(made, torch.Tensor), f"{where}: expected a tensor, got {type(made).__name__}"
    wanted = to_torch(expected)
    assert made.dtype == wanted.dtype, f"{where}: expected {wanted.dtype}, got {made.dtype}"
    assert made.shape == wanted.shape, f"{where}: expected {wanted.shape}, got {made.shape}"
    narrow = wanted.is_floating_point() and wanted.dtype != torch.float64
    numbers = [(t.float() if narrow else t).numpy() for t in (made, wanted)]
    if wanted.is_floating_point() or wanted.is_complex():
        np.testing.assert_allclose(*numbers, rtol=case.rtol, atol=case.atol, err_msg=where)
    else:
        np.testing.assert_array_equal(*numbers, err_msg=where)


def _chosen(names: list[str]) -> Iterator[Case]:
    for case in cases():
        if not names or case.op in names or case.name in names:
            yield case


def main(names: list[str]) -> None:
    """Run the cases of some ops (all, if none is named), and print what fails."""
    passed: dict[str, list[bool]] = {}
    for case in _chosen(names):
        why = failure(case)
        for key in {"whole", f"float32 {case.float32}"}:
            passed.setdefault(key, []).append(why is None)
        if why is not None:
            print(f"{case.name}: {' '.join(why.split())[:300]}")
    for key, found in sorted(passed.items()):
        print(f"{key}: {sum(found)} of {len(found)} pass")


if __name__ == "__main__":
    main(sys.argv[1:])
