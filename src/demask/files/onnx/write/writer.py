"""Writing of networks as ONNX files: torch's exporter, cleanup, names of inputs and outputs."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from demask.compat.onnx_exporter import list_functions_once
from demask.errors import BadInput, DemaskError, Mismatch, NotExportable
from demask.failures import is_strict, public, warn_caller
from demask.files.atomic_write import check_writable, write
from demask.files.node_codec import WRITE
from demask.files.onnx.check import REFERENCE, Judge, NetworkOriginal, inputs_of, onnxruntime
from demask.files.onnx.quantized_weights import opset_for, quantize_constants, translations
from demask.files.onnx.read.reader import installed
from demask.files.onnx.write.clean import clean
from demask.files.onnx.write.functions import functions
from demask.files.onnx.write.prepare import prepare, translation, wrap_recurrent
from demask.files.onnx.write.size_conditions import refuse_sizes
from demask.files.retrace import accepts, example, export_graph
from demask.graph.capture.capture import capture
from demask.graph.capture.functionalize import functionalize
from demask.graph.editor import GraphEditor
from demask.graph.input_domains import NOTHING, Domains, domains_of, state_domains
from demask.graph.isolation import in_isolation
from demask.graph.module_copy import structural_copy
from demask.graph.program import Program
from demask.graph.provenance import Interface, OnnxPort
from demask.graph.result.class_result import as_graph
from demask.graph.result.demasked_module import Demasked, build, unmeasured
from demask.installation import install_command
from demask.judge import FLIPS
from demask.ops import TABLE, Table, schema
from demask.ops.quantization import DTYPES
from demask.rewrites.driver import apply_rules
from demask.rewrites.onnx import ONNX

ALIGNED = 4096  # bytes; alignment of weights in a separate file, so that they can be mapped
MIN_EXTERNAL = 256  # bytes; smaller constants stay in the graph, as runtimes read sizes and axes
LARGEST = 2**31 - 2**20  # bytes of one protobuf message, less the graph


@in_isolation
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
    inputs: Mapping[str, Any] | None = None,
) -> None:
    """Write a network, in eval mode, to an ONNX file with the same outputs.

    Inputs are named after the arguments of `forward`; a network from `from_onnx` has the names,
    dynamic sizes and metadata of its file. If the network cannot be written with dynamic sizes, the
    file is for the sizes of the example, and a UserWarning says so. Weights of more than 2 GiB are
    written to a second file in the same folder, such as "net.0123456789ab.weights" for "net.onnx",
    with a hash of the weights. Needs the extra `onnx`.

    Args:
        module: a network that torch.export can capture, an exported program, or a result of
            demask's functions.
        path: name of the file, which is replaced if it exists.
        args: example inputs by position, a tuple such as (x,). Default: (), as for a demasked
            network or an exported program.
        kwargs: example inputs by name, a mapping. Default: None, for no such inputs.
        dynamic_shapes: sizes that may differ from call to call, as for `demask.demask`.
        opset: version of ONNX's op set, an int such as 20. Where torch's exporter cannot convert to
            it, the file has version 18, with a warning. Default: None, for its default.
        check: whether to compare the outputs of file and network before the file is written, on the
            example inputs, zeros, ones, and tiny, large, negative and random numbers, also at
            larger sizes where they are dynamic. The file runs in ONNX Runtime, or where that is
            missing or cannot, in onnx's reference implementation. Not compared are files of more
            than 2 GiB and networks that draw random numbers. Default: True.
        tolerance: largest allowed difference / largest value of the output, above 0. Default: None,
            for 1e-5 or, if that is larger, the effect of rounding.
        table: the table of ops, used to compute the effect of rounding. Default:
            `demask.ops.TABLE`.
        inputs: the values that inputs may have, by name of an argument of forward, for the random
            inputs of the check: (low, high), both included, or "mask" (zeros and ones), "one-hot",
            "sorted" or "distinct". Default: None, for what the example shows: integers stay in its
            range, other numbers are normally distributed.

    Raises:
        NotExportable: torch.export cannot capture the network, or an op cannot be written as ONNX.
        BadInput: an argument has a wrong value, the file cannot be written, the runtime cannot load
            it, or a package is not installed.
        Mismatch: outputs of the file differ from those of the network. No file is written.

    Example:
        >>> import demask, tempfile, torch
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()), torch.ones(3, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demask.to_onnx(net, f"{folder}/net.onnx", (x,))
        ...     [port.name for port in demask.from_onnx(f"{folder}/net.onnx").interface.inputs]
        ['input_1']
    """
    check_writable(path)
    check_tolerance(tolerance)
    check_opset(opset)
    stated = state_domains(module, args, kwargs, inputs)
    slim = _as_network(module, args, kwargs, dynamic_shapes)
    try:
        model = _build_model(slim, opset)
    except NotExportable as error:
        if (slim := _with_example_sizes(slim, args, kwargs)) is None:
            raise
        model = _build_model(slim, opset)
        sizes = ", ".join(f"{s.name} {list(s.sizes)}" for s in slim.demasked.inputs)
        warn_caller(
            f"{path} is for inputs of these sizes alone: {sizes}. With dynamic sizes it cannot be written: {error}"
        )
    if opset is not None and (version := model.opset_imports[""]) != opset:
        warn_caller(f"{path} has op set {version}: torch's exporter does not convert this network to op set {opset}")
    if not _fits_in_one_file(model, LARGEST):
        _save_with_external_data(model, Path(path))
        return
    data = serialized(model)
    if check and not any(map(schema.draws_random_numbers, slim.graph.nodes)):
        _check_values(slim, data, (args, dict(kwargs or {})), tolerance, table, stated)
    with write(path) as file:
        file.write(data)


def check_tolerance(tolerance: float | None) -> None:
    """Raise BadInput where a tolerance is not a positive finite number."""
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
    """The network as an `onnx_ir.Model`; arguments and errors as `to_onnx`, except Mismatch."""
    return _build_model(_as_network(module, args, kwargs, dynamic_shapes), opset)


def _as_network(module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> Demasked:
    graph = as_graph(module) if dynamic_shapes is None else module
    if isinstance(graph, Demasked) and accepts(graph, args, kwargs):
        written = next((n.args[0] for n in graph.graph.nodes if n.target is WRITE), None)
        if written is not None:
            raise NotExportable(
                f"input {written} is changed by forward",
                "the demasked graph",
                "an ONNX file cannot do that: clone the input first",
            )
        return graph.plain()
    return _capture_network(module, args, kwargs, dynamic_shapes)


def _capture_network(module: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> Demasked:
    """A network, not reduced, without in-place calls and custom ops; raises NotExportable if it changes inputs."""
    program = capture(module, args, kwargs, dynamic_shapes)
    has_writes = any(map(schema.has_effect, program.graph.nodes))
    return as_demasked(functionalize(program) if has_writes else program).plain()


def _with_example_sizes(slim: Demasked, args: Any, kwargs: Any) -> Demasked | None:
    """The network with the sizes of its example; None where no size is dynamic."""
    if not any(isinstance(size, str) for spec in slim.demasked.inputs for size in spec.sizes):
        return None
    call = (args, dict(kwargs or {})) if args or kwargs else example(slim)[:2]
    return _capture_network(slim, *call, {})


def _build_model(slim: Demasked, opset: int | None) -> Any:
    interface = slim.demasked.interface or default_interface(slim)
    model = _translate(quantize_constants(slim), opset_for(slim, opset))
    clean(model, _tied_names(slim))
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    _set_names(model, interface)
    refuse_sizes(model, slim.demasked.inputs, slim.demasked.guards)
    return model


def _tied_names(slim: nn.Module) -> dict[str, str]:
    """The first name of each tensor that has several, by its further names."""
    firsts: dict[Any, str] = {}
    tensors = (*slim.named_parameters(remove_duplicate=False), *slim.named_buffers(remove_duplicate=False))
    ties = {}
    for name, tensor in tensors:
        if tensor.numel():
            key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if (first := firsts.setdefault(key, name)) != name:
                ties[name] = first
    return ties


def _check_values(
    slim: Demasked, data: bytes, call: Any, tolerance: float | None, table: Table, stated: Domains
) -> None:
    """Raise Mismatch where a file computes other values than the network it was written from."""
    call = call if any(call) else example(slim)[:2]
    try:
        verdict = judge_of(slim, data, call, tolerance, table, stated).compare(data)
    except Mismatch as error:
        raise Mismatch(
            f"the ONNX file does not compute what the network does: {error}. Nothing was written. "
            "Please report it, with the network; check=False writes the file anyway, "
            "tolerance=... allows a larger difference"
        ) from error
    except BadInput as error:
        raise BadInput(f"{error}. Nothing was written; check=False writes the file for other runtimes") from error
    if verdict.by.startswith(REFERENCE) and onnxruntime() is not None:
        warn_caller(f"ONNX Runtime does not take the file; it was compared in {verdict.by}")
    if verdict.warning and tolerance is None:
        warn_caller(f"the ONNX file is written, but {verdict.warning}")


def judge_of(
    slim: Demasked, data: bytes, call: Any, tolerance: float | None, table: Table, stated: Domains = NOTHING
) -> Judge:
    """The judge of files written from a network. data: one of them. call: (args, kwargs)."""
    leaves, spec = pytree.tree_flatten(call)
    tensors = {k: leaf for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    domains = domains_of(leaves, stated)

    def filled(inputs: Sequence[Tensor]) -> tuple[Any, Any]:
        values = tensors.keys()
        filled = {**dict(enumerate(leaves)), **dict(zip(values, inputs, strict=True))}
        return pytree.tree_unflatten(list(filled.values()), spec)

    network: Any = structural_copy(slim, share=True).eval()
    original = NetworkOriginal(network, filled, table, _largest_quantization_step(slim))
    inputs = inputs_of(installed().ModelProto.FromString(data))
    return Judge(original, inputs, list(tensors.values()), tolerance, [domains[k] for k in tensors])


def _largest_quantization_step(slim: fx.GraphModule) -> float:
    """Allowed relative difference of the coarsest quantized values; 0 for other networks."""
    calls = slim.graph.find_nodes(op="call_function", target=torch.ops.demask.quantize.default)
    sizes = [DTYPES[schema.arguments(node)["dtype"]].itemsize for node in calls]
    return 255 * FLIPS / (2 ** (8 * min(sizes)) - 1) if sizes else 0.0


def _fits_in_one_file(model: Any, largest: int) -> bool:
    tensors = [v.const_value for v in model.graph.initializers.values()]
    return sum(t.nbytes for t in tensors if t is not None) <= largest


def save(model: Any, path: str | os.PathLike[str], largest: int = LARGEST) -> None:
    """Check an `onnx_ir.Model` and write it, complete or not at all. Weights of more than `largest`
    bytes are written to a second file, named by a hash of its contents, before the first."""
    if _fits_in_one_file(model, largest):
        data = serialized(model)
        with write(path) as file:
            file.write(data)
        return
    _save_with_external_data(model, Path(path))


def serialized(model: Any) -> bytes:
    """The bytes of an `onnx_ir.Model`, checked, with weights, so at most 2 GiB."""
    import onnx

    proto = _to_proto(model)
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        reason = f"the exported graph is not valid ONNX: {error}"
        raise NotExportable(reason, "torch.onnx", "report it, with the network") from error
    return proto.SerializeToString()


def _to_proto(model: Any) -> Any:
    """The `onnx.ModelProto`, without the types of inner values, which every runtime infers."""
    import onnx_ir

    proto = onnx_ir.to_proto(model)
    del proto.graph.value_info[:]
    return proto


def _save_with_external_data(model: Any, path: Path) -> None:
    """Write a model with its weights in a second file, whose name has a hash of its contents, so
    that no file of another network is overwritten."""
    import onnx_ir as ir

    values = [
        v
        for v in model.graph.initializers.values()
        if v.const_value is not None and v.const_value.nbytes >= MIN_EXTERNAL
    ]
    final, ranges = write_weights(path, [v.const_value.tobytes for v in values])
    for value, (offset, length) in zip(values, ranges, strict=True):
        old = value.const_value
        value.const_value = ir.ExternalTensor(
            final.name, offset, length, old.dtype, shape=old.shape, name=value.name, base_dir=str(final.parent)
        )
    data = _to_proto(model).SerializeToString()
    with write(path) as file:
        file.write(data)


def write_weights(path: Path, tensors: Sequence[Callable[[], bytes]]) -> tuple[Path, list[tuple[int, int]]]:
    """Write the bytes of tensors to a file in the folder of `path`, each at a multiple of 4096, and
    named with a hash of its contents; its path, and the offset and length of each."""
    digest, ranges = hashlib.sha256(), []
    for data in tensors:
        digest.update(data())
    final = check_writable(path).with_name(f"{path.stem}.{digest.hexdigest()[:12]}.weights")
    with write(final) as file:
        for data in tensors:
            file.write(b"\0" * (-file.tell() % ALIGNED))
            begin = file.tell()
            ranges.append((begin, file.write(data())))
    return final, ranges


def copy_file(original: str | bytes, path: str | os.PathLike[str]) -> None:
    """Write a copy of an ONNX network (path or bytes) to `path`, with its external weights."""
    import onnx_ir

    if isinstance(original, bytes):
        with write(path) as file:
            file.write(original)
        return
    model = onnx_ir.load(original)
    if any(isinstance(v.const_value, onnx_ir.ExternalTensor) for v in model.graph.initializers.values()):
        _save_with_external_data(model, Path(path))
        return
    with open(original, "rb") as source, write(path) as file:
        shutil.copyfileobj(source, file)


def size_of(original: str | bytes) -> int:
    """Bytes of an ONNX network (path or bytes), with its external weights."""
    import onnx_ir

    if isinstance(original, bytes):
        return len(original)
    tensors = (v.const_value for v in onnx_ir.load(original).graph.initializers.values())
    external = sum(t.nbytes for t in tensors if isinstance(t, onnx_ir.ExternalTensor))
    return os.path.getsize(original) + external


def as_demasked(program: Program) -> Demasked:
    """A captured network, not reduced, as a module with `.demasked`."""
    return build(program, unmeasured(program, interface=program.interface)).eval()


def default_interface(slim: Demasked) -> Interface:
    """Names of inputs and outputs of a network that is not from an ONNX file."""
    inputs = tuple(OnnxPort(spec.name, spec.dtype, spec.sizes) for spec in slim.demasked.inputs)
    outputs = slim.graph.output_node().args[0]
    count = len(outputs) if isinstance(outputs, Sequence) else 1
    names = ["output"] if count == 1 else [f"output_{k}" for k in range(count)]
    return Interface(inputs, tuple(OnnxPort(name, "", None) for name in names))


def _translate(slim: Demasked, opset: int | None) -> Any:
    installed()
    try:
        try:
            with torch.no_grad(), quiet():
                if (exported := prepare(slim, _onnx_functions(opset))) is not None:
                    return _export_model(exported, opset)
        except Exception:  # internals of torch differ between versions: by torch.export then
            if is_strict():
                raise
        exported = export_graph(slim)
        wrap_recurrent(exported.graph)
        apply_rules(GraphEditor.in_place(exported.graph), ONNX)
        return _export_model(exported, opset)
    except ImportError as error:
        raise BadInput(f"writing ONNX needs onnxscript: {install_command('onnx')}") from error
    except DemaskError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = next((n for n in lines if "No ONNX function" in n or "aten." in n), lines[0])
        advice = "write .pt2 instead, or demask a part: modules=[...]"
        raise NotExportable(f"torch.onnx: {message}", "the demasked graph", advice) from error


def check_opset(opset: int | None) -> None:
    """Raise BadInput for a version that the installed onnx does not know."""
    installed()
    from onnx.defs import onnx_opset_version

    latest = onnx_opset_version()
    if opset is not None and (isinstance(opset, bool) or opset not in range(1, latest + 1)):
        raise BadInput(f"expected a version of ONNX's op set from 1 to {latest}, got {opset!r}")


def _onnx_functions(opset: int | None) -> dict[Any, Any]:
    """ONNX functions of ops for which the exporter has none, or inaccurate ones."""
    return translations() | translation() | functions(opset)


def _export_model(exported: ExportedProgram, opset: int | None) -> Any:
    """The `onnx_ir.Model` of an exported program, as the exporter writes it."""
    with quiet(), torch.no_grad(), list_functions_once():
        program = torch.onnx.export(
            exported,
            (),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            optimize=False,
            custom_translation_table=_onnx_functions(opset),
        )
    assert program is not None
    return program.model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress logs, warnings and output of the exporter."""
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


def _set_names(model: Any, interface: Interface) -> None:
    """Set names of inputs, outputs and dynamic sizes, and the metadata."""
    graph = model.graph
    _separate_outputs(graph)
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    ports = len(interface.inputs), len(interface.outputs)
    if (len(inputs), len(graph.outputs)) != ports:
        raise NotExportable(
            "an input or output that is a sequence, or None", "the interface", "let the network take and return tensors"
        )
    pairs = list(zip(inputs, interface.inputs, strict=True))
    pairs += zip(graph.outputs, interface.outputs, strict=True)
    _free_names(graph, {port.name for _, port in pairs}, {id(value) for value, _ in pairs})
    sizes = _size_names(pairs[: len(inputs)])
    for k, (value, port) in enumerate(pairs):
        value.name = port.name
        own = port.sizes if k >= len(inputs) else None
        _set_value_sizes(value, sizes, own)
    for value in _all_values(graph):
        _set_value_sizes(value, sizes, None)
    graph.name, graph.doc_string = interface.name or "demasked", interface.doc or None
    model.doc_string = graph.doc_string
    model.metadata_props.clear()
    model.metadata_props.update(interface.metadata)
    model.producer_name, model.producer_version = "demask", None


def _separate_outputs(graph: Any) -> None:
    """Copy outputs that are inputs, constants or other outputs, so that all are distinct values."""
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


def _all_values(graph: Any) -> Iterator[Any]:
    for node in graph.all_nodes():
        yield from node.outputs


def _free_names(graph: Any, names: set[str], own: set[int]) -> None:
    """Rename inner values whose names are those of inputs and outputs. own: ids of these."""
    taken = {v.name for v in _all_values(graph)} | set(graph.initializers) | names
    for value in [*_all_values(graph), *list(graph.initializers.values())]:
        if id(value) not in own and value.name in names:
            old, k = value.name, 0
            while f"{old}_{k}" in taken:
                k += 1
            value.name = f"{old}_{k}"
            taken.add(value.name)


def _size_names(pairs: Sequence[tuple[Any, OnnxPort]]) -> dict[str, str]:
    """The name of each symbolic size, from the interface if that has one."""
    names: dict[str, str] = {}
    for value, port in pairs:
        for axis, size in enumerate(value.shape or ()):
            symbol = None if isinstance(size, int) else size.value
            if symbol is None or symbol in names:
                continue
            size_name = None if port.sizes is None else port.sizes[axis]
            has_name = isinstance(size_name, str) and bool(size_name) and not re.fullmatch(r"[su]\d+", size_name)
            batch_name = "batch" if axis == 0 and "batch" not in names.values() else None
            names[symbol] = str(size_name) if has_name else batch_name or f"{port.name}_{axis}"
    return names


def _set_value_sizes(value: Any, sizes: Mapping[str, str], own: Sequence[int | str] | None) -> None:
    """Name a value's symbolic sizes: by `own`, the sizes of its port, or else by `sizes`."""
    import onnx_ir as ir

    if value.shape is None:
        return
    dims: list[Any] = []
    for axis, size in enumerate(value.shape):
        if isinstance(size, int) or str(size.value).isdecimal():
            dims.append(int(size if isinstance(size, int) else size.value))
            continue
        port_size = own[axis] if own is not None and axis < len(own) else None
        text = re.sub(r"[A-Za-z_]\w*", lambda m: sizes.get(m[0], m[0]), str(size.value))
        dims.append(port_size if isinstance(port_size, str) and port_size else text)
    value.shape = ir.Shape(dims)
