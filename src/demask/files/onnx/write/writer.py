"""A network as an ONNX file: torch's exporter, and the names that people gave their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.onnx_exporter import list_functions_once
from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.failures import public
from demask.files.atomic_write import check_writable, write
from demask.files.onnx.check import Judge, batched, draws
from demask.files.onnx.check import check as check_file
from demask.files.onnx.quantized_weights import on_grids, opset_for, translations
from demask.files.onnx.read.reader import installed
from demask.files.onnx.write.canonical_calls import spell
from demask.files.onnx.write.clean import clean
from demask.files.onnx.write.functions import functions
from demask.files.onnx.write.prepare import ready
from demask.files.onnx.write.recurrent_ops import kept_whole, translation
from demask.files.onnx.write.size_conditions import refuse_sizes
from demask.files.retrace import example, takes, traced
from demask.graph.capture.capture import capture
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program
from demask.graph.provenance import Interface, OnnxPort, Provenance, Sizes
from demask.graph.result.class_result import as_graph
from demask.graph.result.demasked_module import Demasked, build
from demask.ops import TABLE, Table, schema
from demask.ops.quantization import DTYPES
from demask.shrink.pipeline import inputs_of

ALIGNED = 4096  # where weights start in a file of their own, so that they can be mapped
APART = 256  # bytes; smaller constants stay in the graph, where runtimes read sizes and axes
FLIPS = 2  # steps of a quantized value: a sum halfway between two goes to either
LARGEST = 2**31 - 2**20  # bytes of one protobuf message, less what surrounds the weights


@public
def to_onnx(
    module: nn.Module,
    path: str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    check: bool = True,
    tolerance: float | None = None,
    table: Table = TABLE,
) -> None:
    """Write a network, in eval mode, as an ONNX file that any runtime takes.

    args, kwargs: example inputs; a demasked network needs none. dynamic_shapes: as `demask.demask`
    takes it. opset: version of ONNX's op set, None for the exporter's own. A network that came from
    an ONNX file keeps the names of its inputs, outputs and dynamic sizes, and its metadata; others
    get the names of forward's arguments. Where a network cannot be written with dynamic sizes, the
    file is for those of the example, and a UserWarning says so. More than 2 GiB of weights go to a
    file beside it.
    check: call the file and the network with the example, zeros, tiny, large, negative and random
    numbers before anything is written, in ONNX Runtime where it is installed, else by the reference
    implementation of the onnx package (files of more than 2 GiB, and networks that draw random
    numbers, are not called). tolerance: the largest difference allowed, relative to the largest
    value of an output; None for 1e-5, or what rounding alone makes of that output where it is more.
    table: the op table, by which rounding is judged.
    Raises NotExportable; BadInput where the file cannot be written, or the runtime does not take
    it; Mismatch where the file computes something else. Needs demask[onnx].

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> demask.to_onnx(net, "net.onnx", (torch.randn(3, 4),))    # doctest: +SKIP
    """
    check_writable(path)
    check_tolerance(tolerance)
    slim = _network(module, args, kwargs, dynamic_shapes)
    try:
        model = _model(slim, opset)
    except NotExportable as error:
        if (slim := _of_one_size(slim, args, kwargs)) is None:
            raise
        model = _model(slim, opset)
        sizes = ", ".join(f"{s.name} {list(s.sizes)}" for s in slim.demasked.inputs)
        warnings.warn(f"{path} is for inputs of these sizes alone: {sizes}. With dynamic sizes it "
                      f"cannot be written: {error}", stacklevel=2)  # fmt: skip
    if not _fits(model, LARGEST):
        _save_apart(model, Path(path))
        return
    data = serialized(model)
    if check and not _draws_numbers(slim):
        _check_values(slim, data, (args, kwargs or {}), tolerance, table)
    with write(path) as file:
        file.write(data)


def check_tolerance(tolerance: float | None) -> None:
    """Raise BadInput where a tolerance is no positive number."""
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise BadInput(f"expected tolerance=None or a number above 0, got {tolerance}")


def proto_of(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
) -> Any:
    """The network as an `onnx_ir.Model`; arguments and errors as `to_onnx`, but for Mismatch."""
    return _model(_network(module, args, kwargs, dynamic_shapes), opset)


def _network(module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> Demasked:
    graph = as_graph(module) if dynamic_shapes is None else module
    if isinstance(graph, Demasked) and takes(graph, args, kwargs):
        return graph.plain()
    return remembering(capture(module, args, kwargs, dynamic_shapes))


def _of_one_size(slim: Demasked, args: Any, kwargs: Any) -> Demasked | None:
    """The network for the sizes of its example alone; None where it has no others."""
    if not any(isinstance(size, str) for spec in slim.demasked.inputs for size in spec.sizes):
        return None
    given = (args, dict(kwargs or {})) if args or kwargs else example(slim)[:2]
    return remembering(capture(slim, *given, dynamic_shapes={}))


def _model(slim: Demasked, opset: int | None) -> Any:
    interface = slim.demasked.interface or _interface(slim)
    model = _translated(on_grids(slim), opset_for(slim, opset))
    clean(model)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    _named(model, interface)
    refuse_sizes(model, slim.demasked.inputs, slim.demasked.guards)
    return model


def _check_values(
    slim: Demasked, data: bytes, call: Any, tolerance: float | None, table: Table
) -> None:
    """Mismatch where a file computes something else than the network it was written from."""
    call = call if any(call) else example(slim)[:2]
    inputs = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    judge = judge_of(slim, call, tolerance, table)
    several = draws(inputs)
    axes = [bool(spec.sizes) and str(spec.sizes[0]).isidentifier() for spec in slim.demasked.inputs]
    if any(axes):
        several.append(batched(several[-1], axes))
    try:
        check_file(data, judge, several)
    except Mismatch as error:
        raise Mismatch(
            f"the ONNX file does not compute what the network does: {error}. Nothing was written. "
            "Please report it, with the network; check=False writes the file all the same, "
            "tolerance=... allows a larger difference"
        ) from error
    except BadInput as error:
        raise BadInput(
            f"{error}. Nothing was written; check=False writes the file for other runtimes"
        ) from error


def judge_of(slim: Demasked, given: Any, tolerance: float | None, table: Table) -> Judge:
    """The judge of files written from a network. given: (args, kwargs) of one call."""
    leaves, spec = pytree.tree_flatten(given)
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def filled(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return pytree.tree_unflatten(filled, spec)

    network: Any = structural_copy(slim, share=True).eval()
    return Judge(network, filled, table, tolerance, _step(slim))


def _step(slim: fx.GraphModule) -> float:
    """What the coarsest values of a quantized network may be off by, relative; 0 for others."""
    calls = slim.graph.find_nodes(op="call_function", target=torch.ops.demask.quantize.default)
    sizes = [DTYPES[schema.arguments(node)["dtype"]].itemsize for node in calls]
    return FLIPS / (2 ** (8 * min(sizes)) - 1) if sizes else 0.0


def _draws_numbers(slim: fx.GraphModule) -> bool:
    tags = (getattr(node.target, "tags", ()) for node in slim.graph.nodes)
    return any(torch.Tag.nondeterministic_seeded in found for found in tags)


def _fits(model: Any, largest: int) -> bool:
    tensors = [v.const_value for v in model.graph.initializers.values()]
    return sum(t.nbytes for t in tensors if t is not None) <= largest


def save(model: Any, path: str | os.PathLike[str], largest: int = LARGEST) -> None:
    """Check an `onnx_ir.Model` and write it, whole or not at all. Where its weights are larger than
    one file can hold they go to a second one, named after what it holds, that is written first."""
    if _fits(model, largest):
        data = serialized(model)
        with write(path) as file:
            file.write(data)
        return
    _save_apart(model, Path(path))


def serialized(model: Any) -> bytes:
    """The bytes of an `onnx_ir.Model`, checked; weights and all, so at most 2 GiB."""
    proto = _proto(model)
    _check(proto)
    return proto.SerializeToString()


def _proto(model: Any) -> Any:
    """The `onnx.ModelProto`, without the types of inner values, which every runtime infers."""
    import onnx_ir

    proto = onnx_ir.to_proto(model)
    del proto.graph.value_info[:]
    return proto


def _save_apart(model: Any, path: Path) -> None:
    """Weights in a file of their own, each at a multiple of 4096 bytes. Its name is made of what it
    holds, so that no earlier file is written over that a network still reads."""
    import onnx_ir as ir

    values = [v for v in model.graph.initializers.values()
              if v.const_value is not None and v.const_value.nbytes >= APART]  # fmt: skip
    digest, places = hashlib.sha256(), []
    for value in values:
        digest.update(value.const_value.tobytes())
    final = check_writable(path).with_name(f"{path.stem}.{digest.hexdigest()[:12]}.weights")
    with write(final) as file:
        for value in values:
            data = value.const_value.tobytes()
            file.write(b"\0" * (-file.tell() % ALIGNED))
            places.append((file.tell(), len(data)))
            file.write(data)
    for value, (offset, length) in zip(values, places, strict=True):
        old = value.const_value
        value.const_value = ir.ExternalTensor(final.name, offset, length, old.dtype,
                                              shape=old.shape, name=value.name,
                                              base_dir=str(final.parent))  # fmt: skip
    data = _proto(model).SerializeToString()
    with write(path) as file:
        file.write(data)


def copy_file(given: str | bytes, path: str | os.PathLike[str]) -> None:
    """The network given, written to `path`: with the weights that its file has beside it."""
    import onnx_ir

    if isinstance(given, bytes):
        with write(path) as file:
            file.write(given)
        return
    model = onnx_ir.load(given)
    if any(isinstance(v.const_value, onnx_ir.ExternalTensor)
           for v in model.graph.initializers.values()):  # fmt: skip
        _save_apart(model, Path(path))
        return
    with open(given, "rb") as source, write(path) as file:
        shutil.copyfileobj(source, file)


def size_of(given: str | bytes) -> int:
    """The bytes of a network, the weights that its file has beside it included."""
    import onnx_ir

    if isinstance(given, bytes):
        return len(given)
    tensors = (v.const_value for v in onnx_ir.load(given).graph.initializers.values())
    apart = sum(t.nbytes for t in tensors if isinstance(t, onnx_ir.ExternalTensor))
    return os.path.getsize(given) + apart


def _check(proto: Any) -> None:
    import onnx

    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        words = f"the exported graph is not valid ONNX: {error}"
        raise NotExportable(words, "torch.onnx", "report it, with the network") from error


def remembering(program: Program) -> Demasked:
    """A captured network, whole, as a module that knows what its inputs are."""
    nothing = Sizes(0, 0, 0)
    provenance = Provenance({}, (), {}, program.notes, inputs_of(program), nothing, nothing,
                            guards=program.guards, interface=program.interface)  # fmt: skip
    return build(program, provenance).eval()


def _interface(slim: Demasked) -> Interface:
    """Names for a network that came from no ONNX file."""
    inputs = tuple(OnnxPort(spec.name, spec.dtype, spec.sizes) for spec in slim.demasked.inputs)
    made = slim.graph.output_node().args[0]
    count = len(made) if isinstance(made, Sequence) else 1
    names = ["output"] if count == 1 else [f"output_{k}" for k in range(count)]
    return Interface(inputs, tuple(OnnxPort(name, "", None) for name in names))


def _translated(slim: Demasked, opset: int | None) -> Any:
    installed()
    try:
        with contextlib.suppress(Exception), torch.no_grad(), quiet():
            # Of torch, whose internals differ between versions; what it says is said again below.
            if (exported := ready(slim, _functions())) is not None:
                return _exported(exported, opset)
        exported = traced(slim)
        kept_whole(exported.graph)
        spell(exported.graph)
        return _exported(exported, opset)
    except ImportError as error:
        raise BadInput("writing ONNX needs onnxscript: pip install 'demask[onnx]'") from error
    except DemaskError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = next((n for n in lines if "No ONNX function" in n or "aten." in n), lines[0])
        advice = "write .pt2 instead, or demask a part: modules=[...]"
        raise NotExportable(f"torch.onnx: {words}", "the demasked graph", advice) from error


def _functions() -> dict[Any, Any]:
    """The ONNX functions of ops that the exporter has none for, or wrong ones."""
    return translations() | translation() | functions()


def _exported(exported: ExportedProgram, opset: int | None) -> Any:
    """The `onnx_ir.Model` of an exported program, as the exporter writes it."""
    with quiet(), torch.no_grad(), list_functions_once():
        program = torch.onnx.export(
            exported, (), dynamo=True, verbose=False, opset_version=opset, optimize=False,
            custom_translation_table=_functions(),
        )  # fmt: skip
    assert program is not None
    return program.model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the exporter logs, warns and prints."""
    loggers = [logging.getLogger(name) for name in ("torch", "onnxscript", "onnx_ir", "onnx")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _named(model: Any, interface: Interface) -> None:
    """Give inputs, outputs and dynamic sizes their names, and the model its metadata."""
    graph = model.graph
    _own_outputs(graph)
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    ports = len(interface.inputs), len(interface.outputs)
    if (len(inputs), len(graph.outputs)) != ports:
        raise NotExportable("an input or output that is a sequence, or None", "the interface",
                            "let the network take and return tensors")  # fmt: skip
    pairs = list(zip(inputs, interface.inputs, strict=True))
    pairs += zip(graph.outputs, interface.outputs, strict=True)
    _free(graph, {port.name for _, port in pairs}, {id(value) for value, _ in pairs})
    sizes = _sizes(pairs[: len(inputs)])
    for k, (value, port) in enumerate(pairs):
        value.name = port.name
        own = port.sizes if k >= len(inputs) else None
        _resize(value, sizes, own)
    for value in _values(graph):
        _resize(value, sizes, None)
    graph.name, graph.doc_string = interface.name or "demasked", interface.doc or None
    model.doc_string = graph.doc_string
    model.metadata_props.clear()
    model.metadata_props.update(interface.metadata)
    model.producer_name, model.producer_version = "demask", None


def _own_outputs(graph: Any) -> None:
    """Let every output be a value of its own: inputs, constants and repeated ones are copied."""
    import onnx_ir as ir

    seen: set[int] = set()
    for k, value in enumerate(list(graph.outputs)):
        if value.producer() is None or id(value) in seen:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            node.outputs[0].dtype = value.dtype
            graph.append(node)
            graph.outputs[k] = node.outputs[0]
        seen.add(id(graph.outputs[k]))


def _values(graph: Any) -> Iterator[Any]:
    for node in graph.all_nodes():
        yield from node.outputs


def _free(graph: Any, names: set[str], own: set[int]) -> None:
    """Rename values inside the graph that have the names wanted for inputs and outputs."""
    taken = {v.name for v in _values(graph)} | set(graph.initializers) | names
    for value in [*_values(graph), *list(graph.initializers.values())]:
        if id(value) not in own and value.name in names:
            old, k = value.name, 0
            while f"{old}_{k}" in taken:
                k += 1
            value.name = f"{old}_{k}"
            taken.add(value.name)


def _sizes(pairs: Sequence[tuple[Any, OnnxPort]]) -> dict[str, str]:
    """What each symbol is called: the name that the interface has for that size."""
    found: dict[str, str] = {}
    for value, port in pairs:
        for axis, size in enumerate(value.shape or ()):
            symbol = None if isinstance(size, int) else size.value
            if symbol is None or symbol in found:
                continue
            given = None if port.sizes is None else port.sizes[axis]
            plain = isinstance(given, str) and bool(given) and not re.fullmatch(r"[su]\d+", given)
            free = "batch" if axis == 0 and "batch" not in found.values() else None
            found[symbol] = str(given) if plain else free or f"{port.name}_{axis}"
    return found


def _resize(value: Any, sizes: Mapping[str, str], own: Sequence[int | str] | None) -> None:
    """Spell a value's symbolic sizes by their names, or as its port has them."""
    import onnx_ir as ir

    if value.shape is None:
        return
    made: list[Any] = []
    for axis, size in enumerate(value.shape):
        if isinstance(size, int) or str(size.value).isdecimal():
            made.append(int(size if isinstance(size, int) else size.value))
            continue
        given = own[axis] if own is not None and axis < len(own) else None
        text = re.sub(r"[A-Za-z_]\w*", lambda m: sizes.get(m[0], m[0]), str(size.value))
        made.append(given if isinstance(given, str) and given else text)
    value.shape = ir.Shape(made)
