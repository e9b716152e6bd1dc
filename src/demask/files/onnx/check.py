"""Whether an ONNX file computes what its original does, by running both, by the rule of `demask.judge`.

The original is another file or a network of torch. Inputs are the example, zeros, ones, and tiny,
large, negative and random numbers, at the example's sizes and, where the file leaves sizes open, at
larger ones. A runtime has no float64, so the explanation of a larger difference is noise: what rounding
alone moves the original's outputs. Where all scores of a detector are near 1e-5, a sigmoid that is accurate
to the last digit of 1 is 1 % off.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from demask.errors import BadInput, Mismatch
from demask.files.onnx.read.reader import installed
from demask.files.onnx.values import BITS, TORCH, numpy_of
from demask.graph.input_domains import NOTHING, Domain, domains_of
from demask.graph.rounding import Rounding
from demask.judge import DRAWN, FLIPS, Draw, Pair, Verdict, by_name, draw_inputs, pair_up
from demask.machine.allocator import release_free_memory
from demask.ops import Table

SEEDS = 3  # roundings of the inputs, weights and calls of a file
ATTRIBUTES = float(np.finfo(np.float32).eps)  # relative; attributes of ONNX ops are float32
FLOATS = {1: 2.0**-23, 10: 2.0**-10, 11: 2.0**-52, 16: 2.0**-7}  # epsilon by ONNX's number of the type
ROUNDS = ("Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Conv", "ConvTranspose")  # calls that get noise
KINDS = ("zeros", "ones", "tiny numbers", "large numbers", "negative numbers", DRAWN)
RUNTIME, REFERENCE = "ONNX Runtime", "the reference implementation of onnx"
AROUND = "ONNX Runtime, around the ops that nothing here runs"
VISIBLE = 1e-2  # of the example's outputs: a difference that a warning names, though rounding
# explains it; two steps of 8 bits are less
REFERENCE_SECONDS = 60.0  # of comparison in onnx's reference implementation, which is slow
NOT_IN_NUMPY = ("bfloat16", "float8", "float4", "int4", "int2")  # element types
QUANTIZED = (
    "ConvInteger",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "QLinearConv",
    "QLinearMatMul",
    "QuantizeLinear",
)
Outputs = list[Any]  # tensors; lists and dicts for sequences and maps
Inputs = Sequence[Tensor]
Filled = Callable[[Sequence[Tensor]], tuple[Any, Any]]


# ------------------------------------------------------------------------------------- runtimes


@dataclass(frozen=True, slots=True)
class Runner:
    """A file, ready to run. by: what runs it. names: of the inputs."""

    by: str
    names: tuple[str, ...]
    session: Any

    def __call__(self, inputs: Inputs) -> Outputs:
        arrays = map(numpy_of, inputs)
        outputs = self.session.run(None, dict(zip(self.names, arrays, strict=True)))
        return [np.asarray(y) if isinstance(y, np.generic | bool | int | float) else y for y in outputs]


def runner(model: str | bytes, *, optimized: bool = True, by: str | None = None) -> Runner:
    """A file in ONNX Runtime or, where that is missing or does not take it, in onnx's reference; if
    that has no such ops either, the parts around ops of other domains in ONNX Runtime.

    Args:
        model: path or bytes of the file.
        optimized: whether the runtime may fuse and fold.
        by: what has to run it. Default: what can.

    Raises:
        BadInput: nothing runs the file.
    """
    if by is not None:
        return _RUNNERS[by](model, optimized)
    failures = []
    for run_by in _RUNNERS.values():
        try:
            return run_by(model, optimized)
        except BadInput as error:
            failures.append(str(error))
    raise BadInput(f"nothing here runs the file: {'; '.join(dict.fromkeys(failures))}")


def _in_runtime(model: str | bytes, optimized: bool) -> Runner:
    if (runtime := session(model, optimized=optimized)) is None:
        raise BadInput("onnxruntime is not installed")
    return Runner(RUNTIME, tuple(port.name for port in runtime.get_inputs()), runtime)


def _in_reference(model: str | bytes, optimized: bool) -> Runner:
    from onnx.reference import ReferenceEvaluator

    proto = _load_model(model)
    try:
        reference: Any = ReferenceEvaluator(proto)
    except Exception as error:  # its exceptions share no base
        raise BadInput(f"nor does the reference of onnx: {first_line(error)}") from error
    stored = {tensor.name for tensor in proto.graph.initializer}
    names = tuple(name for name in reference.input_names if name not in stored)
    return Runner(REFERENCE, names, reference)


def _around_foreign(model: str | bytes, optimized: bool) -> Runner:
    """The file in ONNX Runtime without its ops of other domains: each passes its first operand on,
    and all its operands are further outputs."""
    proto = _load_model(model)
    known = {"", "ai.onnx", "ai.onnx.ml", *(f.domain for f in proto.functions)}
    make_node = installed().helper.make_node
    nodes, outputs = [], []
    for node in proto.graph.node:
        if node.domain in known:
            nodes.append(node)
            continue
        operands = [name for name in node.input if name]
        results = [name for name in node.output if name]
        nodes += [make_node("Identity", operands[:1], [name]) for name in results]
        reads = {f"operand {k} of {results[0]}": name for k, name in enumerate(operands)}
        nodes += [make_node("Identity", [name], [read]) for read, name in reads.items()]
        outputs += reads
    if not outputs:
        raise BadInput("all its ops are ONNX's")
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.output.extend(installed().ValueInfoProto(name=name) for name in sorted(outputs))
    return replace(_in_runtime(proto.SerializeToString(), optimized), by=AROUND)


_RUNNERS: Mapping[str, Callable[[str | bytes, bool], Runner]] = {
    RUNTIME: _in_runtime,
    REFERENCE: _in_reference,
    AROUND: _around_foreign,
}


def _load_model(model: str | bytes) -> Any:
    onnx = installed()
    return onnx.load(model) if isinstance(model, str) else onnx.ModelProto.FromString(model)


def session(model: str | bytes, threads: int = 1, *, optimized: bool = True) -> Any:
    """A session of ONNX Runtime, None where that is not installed.

    Args:
        model: path or bytes of the file.
        threads: of each op.
        optimized: whether the runtime may fuse and fold.

    Raises:
        BadInput: the runtime does not accept the file, or does not give numpy its outputs.
    """
    if (runtime := onnxruntime()) is None:
        return None
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    # Spinning threads of one session would occupy cores that the next session needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimized:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        result = runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exception classes share no base
        raise BadInput(f"ONNX Runtime does not take the network: {first_line(error)}") from error
    finally:
        release_free_memory()  # twice the file's size, of weights in other layouts
    for port in (*result.get_inputs(), *result.get_outputs()):
        if any(name in port.type for name in NOT_IN_NUMPY):
            raise BadInput(f"ONNX Runtime has no arrays for {port.name!r}, a {port.type}")
    return result


def onnxruntime() -> Any:
    """The package onnxruntime, None where it is missing."""
    try:
        import onnxruntime as runtime
    except ImportError:
        return None
    return runtime


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# --------------------------------------------------------------------------------------- inputs


def inputs_of(model: Any) -> list[Any]:
    """The ValueInfoProtos of the inputs of a ModelProto, without those that it stores."""
    stored = {tensor.name for tensor in model.graph.initializer}
    stored |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    return [type(value).FromString(value.SerializeToString()) for value in inputs]


def open_sizes(values: Sequence[Any], feeds: Mapping[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """The inputs and axes that have each size that the file leaves open, by its name.

    values: ValueInfoProtos of the inputs. feeds: by name.
    """
    axes_of: dict[str, list[tuple[str, int]]] = {}
    for value in values:
        dims = value.type.tensor_type.shape.dim  # a file may declare another rank
        for axis, dim in enumerate(dims[: feeds[value.name].ndim]):
            if not dim.HasField("dim_value") or dim.dim_value < 0:
                name = dim.dim_param or f"{value.name}.{axis}"
                axes_of.setdefault(name, []).append((value.name, axis))
    return axes_of


def resized(
    feeds: Mapping[str, Any], axes_of: Mapping[str, Sequence[tuple[str, int]]], added: Mapping[str, int]
) -> dict[str, Any]:
    """Arrays or tensors with other open sizes: their positions repeat. added: to each size."""
    feeds = dict(feeds)
    for name, more in added.items():
        for value, axis in axes_of[name]:
            array = feeds[value]
            if size := array.shape[axis]:
                index = torch.arange(size + more) % size
                index = index if isinstance(array, Tensor) else index.numpy()
                feeds[value] = array[(slice(None),) * axis + (index,)]
    return feeds


def longer_inputs(
    values: Sequence[Any], feeds: Mapping[str, Any], *, double: bool = False, names: Collection[str] | None = None
) -> dict[str, Any]:
    """Arrays or tensors with more of each size that the file leaves open, each by another number.

    values: ValueInfoProtos of the inputs. feeds: by name.
    double: twice as much of all but the first axis, as some sizes have to be even. names: of the
    sizes. Default: all.
    """
    axes_of = open_sizes(values, feeds)
    added = {}
    for name, ((value, axis), *_) in axes_of.items():
        if names is None or name in names:
            added[name] = feeds[value].shape[axis] if double and axis else len(added) + 1
    return resized(feeds, axes_of, added)


def _nudge(inputs: Inputs, seed: int) -> list[Tensor]:
    """Inputs with every number rounded to one of its neighbors, at random."""
    draw, nudged = torch.Generator().manual_seed(seed), []
    for x in inputs:
        if x.is_floating_point():
            ends = torch.where(torch.rand(x.shape, generator=draw) < 0.5, math.inf, -math.inf)
            with contextlib.suppress(NotImplementedError):  # of floats of 8 bits
                x = torch.nextafter(x.detach(), ends.to(x))
        nudged.append(x)
    return nudged


def _with_noise(source: str | bytes, seed: int) -> str | bytes:
    """The bytes of a file with every weight rounded to one of its neighbors, and the output of every sum and product
    multiplied by one plus or minus a rounding error, at random. Both are floats of several axes: vectors may
    be sizes and factors of these. Zeros stay zeros."""
    from onnx import helper, numpy_helper, shape_inference

    proto, draw = _load_model(source), np.random.default_rng(seed)
    nodes = []
    with contextlib.suppress(Exception):  # inference refuses files of more than 2 GiB
        inferred = shape_inference.infer_shapes(proto).graph
        types = {v.name: v.type.tensor_type for v in (*inferred.value_info, *inferred.output)}
        for node in proto.graph.node:
            nodes.append(node)
            for k, name in enumerate(node.output):
                kind = types[name].elem_type if name in types and len(types[name].shape.dim) > 1 else 0
                if kind in FLOATS and node.op_type in ROUNDS:
                    node.output[k], part, eps = f"{name} exact", f"{name} noise", f"{name} epsilon"
                    size = FLOATS[kind] * draw.choice([-1, 1])
                    proto.graph.initializer.append(helper.make_tensor(eps, kind, [], [size]))
                    nodes.append(helper.make_node("Mul", [node.output[k], eps], [part]))
                    nodes.append(helper.make_node("Add", [node.output[k], part], [name]))
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind == "f" and array.ndim > 1:
            step = array * draw.choice([-1, 1], array.shape).astype(array.dtype)
            array = np.where(np.isfinite(array), array + step * np.finfo(array.dtype).eps, array)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return proto.SerializeToString()


# ------------------------------------------------------------------------------------ originals


class Original(Protocol):
    """What files are compared with. by: what runs it, a name in this module; None for torch.
    is_quantized: whether it quantizes values while it runs. failure: why it failed last."""

    by: str | None
    is_quantized: bool
    failure: str

    def outputs(self, inputs: Inputs, *, optimized: bool) -> Outputs | None:
        """What it computes; None if it fails, as it may on some inputs."""
        ...

    def roundings(self, inputs: Inputs, *, optimized: bool) -> Iterator[Outputs | None]:
        """What it computes with other rounding errors."""
        ...

    def slack(self, cases: Sequence[Draw], *, optimized: bool) -> float:
        """The relative difference of values of few bits that is always allowed."""
        ...


class NetworkOriginal:
    """A network of torch. filled: returns its args and kwargs for input tensors. table: of its
    ops. steps: relative size of two steps of its coarsest quantized values, 0 without any."""

    by: str | None = None
    failure = ""

    def __init__(self, network: fx.GraphModule, filled: Filled, table: Table, steps: float):
        self.network, self.filled, self.steps = network, filled, steps
        self.is_quantized, self.rounding = steps > 0, Rounding(network, table)

    def outputs(self, inputs: Inputs, *, optimized: bool) -> Outputs | None:
        args, kwargs = self.filled([x.clone() for x in inputs])
        try:
            with torch.no_grad():
                return _tensor_leaves(self.network(*args, **kwargs))
        except Exception as error:  # whatever a network raises of inputs that it does not take
            self.failure = first_line(error)
            return None

    def roundings(self, inputs: Inputs, *, optimized: bool) -> Iterator[Outputs | None]:
        """In float64, then with every call rounded; none from one that fails on, as an index may be
        out of range then."""
        with contextlib.suppress(Exception):
            yield from map(_tensor_leaves, self.rounding.runs(*self.filled(inputs)))

    def slack(self, cases: Sequence[Draw], *, optimized: bool) -> float:
        """Without bound where the runtime replaces quantized ops by coarser kernels of its own: a
        network has no such form, and the file as it is written is compared too."""
        return math.inf if self.is_quantized and optimized else max(self.steps, ATTRIBUTES)


class FileOriginal:
    """A file. source: its path or bytes."""

    failure = ""

    def __init__(self, source: str | bytes, *, is_quantized: bool):
        self.source, self.is_quantized, first = source, is_quantized, runner(source)
        self.by: str | None = first.by
        self._runners = {(0, True): first}  # by the seed of the weights' rounding, and optimized
        self._own_error: float | None = None

    def outputs(self, inputs: Inputs, *, optimized: bool) -> Outputs | None:
        return self._outputs(inputs, 0, optimized)

    def _outputs(self, inputs: Inputs, seed: int, optimized: bool) -> Outputs | None:
        """seed: of the rounding of the weights; 0 for none."""
        try:
            if (one := self._runners.get((seed, optimized))) is None:
                source = _with_noise(self.source, seed) if seed else self.source
                one = runner(source, optimized=optimized, by=self.by)
                self._runners[seed, optimized] = one
            return _torch_of(one(inputs))
        except Exception as error:  # a runtime's exceptions share no base class
            self.failure = f"{self.by}: {first_line(error)}"
            return None

    def roundings(self, inputs: Inputs, *, optimized: bool) -> Iterator[Outputs | None]:
        """Without the runtime's optimizations, then with inputs, weights and the outputs of calls rounded to
        their neighbors: a sum in another order is one of such weights."""
        if optimized:
            yield self.outputs(inputs, optimized=False)
        for seed in range(SEEDS):
            yield self._outputs(_nudge(inputs, seed), seed + 1, optimized)

    def slack(self, cases: Sequence[Draw], *, optimized: bool) -> float:
        """What the runtime's own kernels for quantized ops, which it chooses by sizes, move the
        outputs of the original at most; at least a few steps of 8 bits."""
        if not self.is_quantized or not optimized:
            return 0.0
        if self._own_error is None:
            self._own_error = FLIPS
            for case in cases:
                a, b = (self.outputs(case.inputs, optimized=on) for on in (False, True))
                errors = [pair.difference.relative for pair in pair_up(a or [], b or [])]
                self._own_error = max([self._own_error, *(e for e in errors if e < math.inf)])
        return self._own_error


def _tensor_leaves(outputs: Any) -> Outputs:
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _torch_of(value: Any) -> Any:
    """What a runtime returns, with tensors in place of arrays; text as lists."""
    if isinstance(value, list):
        return [_torch_of(each) for each in value]
    if isinstance(value, dict):
        return {key: _torch_of(each) for key, each in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype in TORCH:
        return torch.from_numpy(np.array(value))
    dtype = getattr(torch, value.dtype.name, None)
    if isinstance(dtype, torch.dtype) and dtype.itemsize == value.dtype.itemsize and value.dtype.itemsize in BITS:
        return torch.from_numpy(np.array(value).view(f"i{value.dtype.itemsize}")).view(dtype)
    return value.tolist() if value.dtype.kind in "OSU" else torch.from_numpy(value.astype(np.float32))


# --------------------------------------------------------------------------------------- verdict


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """How far an ONNX file is from the original."""

    error: float | None  # largest difference, relative to the largest value of its output; None if nothing was compared
    by: str  # what ran the files
    visible: float = 0.0  # largest difference relative to the outputs of the example, too
    on: str = ""  # the inputs of `visible`
    remark: str = ""  # of the outputs

    @property
    def warning(self) -> str:
        """What a user has to know of a difference that rounding explains; "" if it is small."""
        if self.visible <= VISIBLE:
            return ""
        return (
            f"outputs differ by {self.visible:.2g} of the largest on {self.on}: there, "
            "rounding alone moves the outputs of the original as much"
        )

    def __str__(self) -> str:
        if self.error is None:
            return "unchecked: not compared with the original"
        remark = f"; {self.remark}" if self.remark else ""
        return f"largest difference {self.error:.2g} of the largest output, in {self.by}{remark}"


UNCHECKED = FileVerdict(None, "nothing")


class Judge:
    """Compares files with one original.

    Args:
        original: a file or a network.
        inputs: of the original file, or of one that was written from the network: their
            ValueInfoProtos.
        example: example inputs, in the order of the file's.
        tolerance: largest allowed difference / largest value of the output. Default: None, for
            that of the dtype or what rounding moves.
        domains: of the inputs. Default: what the example shows.
    """

    def __init__(
        self,
        original: Original,
        inputs: Sequence[Any],
        example: Sequence[Tensor],
        tolerance: float | None = None,
        domains: Sequence[Domain] | None = None,
    ):
        self.original, self.tolerance, self.inputs = original, tolerance, inputs
        example = tuple(x.detach() for x in example)
        self.draws = list(draw_inputs(example, domains or domains_of(example, NOTHING), [(kind, 0) for kind in KINDS]))
        self._expected: dict[tuple[int, bool], Outputs | None] = {}

    @classmethod
    def of_file(cls, source: str | bytes, example: Sequence[Tensor], tolerance: float | None = None) -> Self:
        """The judge of files that replace a file (its path or bytes).

        Raises:
            BadInput: nothing here runs it.
        """
        proto = installed().load(source, load_external_data=False) if isinstance(source, str) else _load_model(source)
        ops = {node.op_type for part in (proto.graph, *proto.functions) for node in part.node}
        inputs = inputs_of(proto)
        del proto  # which has all weights
        release_free_memory()
        original = FileOriginal(source, is_quantized=not ops.isdisjoint(QUANTIZED))
        return cls(original, inputs, example, tolerance)

    @cached_property
    def cases(self) -> list[Draw]:
        """All inputs: the draws, and each at larger sizes, of those that the original takes: all
        larger at once or, if it fails, each alone."""
        sizes, cases = list(open_sizes(self.inputs, self._feeds(self.draws[0]))), [*self.draws]
        for names in (sizes, *([name] for name in sizes if len(sizes) > 1)):
            for double in (False, True) if names else ():
                longer = [self._longer(draw, double, names) for draw in self.draws]
                if self.original.outputs(longer[0].inputs, optimized=True) is not None:
                    cases += longer
                    break
            if len(names) > 1 and len(cases) > len(self.draws):
                break
        return cases

    def _feeds(self, draw: Draw) -> dict[str, Tensor]:
        return dict(zip((value.name for value in self.inputs), draw.inputs, strict=True))

    def _longer(self, draw: Draw, double: bool, names: Collection[str]) -> Draw:
        longer = longer_inputs(self.inputs, self._feeds(draw), double=double, names=names)
        return Draw(f"{draw.kind}, larger sizes", tuple(longer.values()))

    def compare(self, data: bytes) -> FileVerdict:
        """The largest difference of a file. Inputs on which the original fails are left out.

        Raises:
            Mismatch: an output differs by more than is allowed, or the file fails where the
                original does not.
            BadInput: nothing runs the file, or the original fails on the example.
        """
        quantized, by = self.original.is_quantized, self.original.by
        try:
            file = runner(data, by=by)
            unoptimized = runner(data, optimized=False, by=file.by) if quantized else None
        except BadInput as error:
            if by is None:
                raise
            raise Mismatch(f"the file does not load: {error}") from error
        begin, compared, verdict, visible, on = time.monotonic(), 0, Verdict(), 0.0, ""
        sizes: dict[str, float] = {}
        steady: set[str] = set()  # outputs that were compared
        for k in range(len(self.cases)):
            if compared and file.by == REFERENCE and time.monotonic() - begin > REFERENCE_SECONDS:
                break
            compared += 1
            for one in (unoptimized, file):
                if one is None or (pairs := self._pairs(k, one, optimized=one is file)) is None:
                    continue
                sizes = sizes or {pair.name: pair.difference.size for pair in pairs}  # of the example's outputs
                verdict += Verdict.of(pairs, f"on {self.cases[k].kind}")
                if verdict.difference:
                    raise Mismatch(verdict.difference)
                for pair in pairs:
                    if not pair.is_unsteady:
                        steady.add(pair.name)
                        seen = pair.difference.gap / (max(pair.difference.size, sizes.get(pair.name, 0.0)) or 1.0)
                        if pair.difference.eps and seen > visible:
                            visible, on = seen, self.cases[k].kind
        if missing := sizes.keys() - steady:
            raise Mismatch(f"output {min(missing)} cannot be compared: rounding alone moves its sizes on all inputs")
        if verdict.failure:
            raise Mismatch(f"the comparison {verdict.failure}")
        words = "" if compared == len(self.cases) else f" on {compared} of {len(self.cases)} inputs"
        return FileVerdict(verdict.relative, file.by + words, visible, on, verdict.remark)

    def _pairs(self, k: int, file: Runner, *, optimized: bool) -> list[Pair] | None:
        """The outputs of the original and a file on one of the cases; None where the original fails. Raises
        Mismatch where the file does."""
        draw = self.cases[k]
        if (k, optimized) not in self._expected:
            self._expected[k, optimized] = self.original.outputs(draw.inputs, optimized=optimized)
        if (expected := self._expected[k, optimized]) is None:
            if k == 0:
                raise BadInput(f"the original fails on {draw.kind}: {self.original.failure}")
            return None
        try:
            outputs = _torch_of(file(draw.inputs))
        except Exception as error:  # a runtime's exceptions share no base class
            raise Mismatch(f"the file fails on {draw.kind}: {first_line(error)}") from error
        if self.tolerance is not None:
            return pair_up(expected, outputs, relative=self.tolerance, only=True)
        pairs = pair_up(expected, outputs, relative=self.original.slack(self.cases, optimized=optimized))
        if not all(pair.is_same for pair in pairs):
            for run in self.original.roundings(draw.inputs, optimized=optimized):
                others = by_name(run or [])
                for pair in pairs:
                    pair.move(others.get(pair.name))  # it can only explain more
                if all(pair.is_same for pair in pairs):
                    break
        return pairs
