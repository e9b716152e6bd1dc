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
from torch import nn
from torch.export import ExportedProgram

from demask.errors import BadInput, NotExportable
from demask.failures import public
from demask.files.atomic import check_writable, write
from demask.files.onnx.grids import on_grids, opset_for, translations
from demask.files.onnx.read import installed
from demask.files.onnx.steps import kept_whole, translation
from demask.files.tracing import traced
from demask.graph.capture import capture
from demask.graph.program import Program
from demask.graph.provenance import Interface, Port, Provenance, Sizes
from demask.graph.result import Demasked, build
from demask.shrink.demask import inputs_of

ALIGNED = 4096  # where weights start in a file of their own, so that they can be mapped
APART = 256  # bytes; smaller constants stay in the graph, where runtimes read sizes and axes
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
) -> None:
    """Write a network, in eval mode, as an ONNX file that any runtime takes.

    args, kwargs: example inputs; a demasked network needs none. dynamic_shapes: as `demask.demask`
    takes it. opset: version of ONNX's op set, None for the exporter's own. A network that came from
    an ONNX file keeps the names of its inputs, outputs and dynamic sizes, and its metadata; others
    get the names of forward's arguments. More than 2 GiB of weights go to a file beside it.
    Raises NotExportable, or BadInput where the file cannot be written. Needs demask[onnx].

    >>> import torch, demask
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU())
    >>> demask.to_onnx(net, "net.onnx", (torch.randn(3, 4),))    # doctest: +SKIP
    """
    check_writable(path)
    save(proto_of(module, args, kwargs, dynamic_shapes=dynamic_shapes, opset=opset), path)


def proto_of(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
) -> Any:
    """The network as an `onnx_ir.Model`; arguments and errors as `to_onnx`."""
    if isinstance(module, Demasked) and not args and not kwargs:
        slim = module.plain()
    else:
        slim = remembering(capture(module, args, kwargs, dynamic_shapes))
    interface = slim.demasked.interface or _interface(slim)
    exported = traced(on_grids(slim))
    model = _translated(exported, opset_for(slim, opset))
    for node in model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, with paths of this machine
    _named(model, interface)
    return model


def save(model: Any, path: str | os.PathLike[str], largest: int = LARGEST) -> None:
    """Check an `onnx_ir.Model` and write it, whole or not at all. Where its weights are larger than
    one file can hold they go to a second one, named after what it holds, that is written first."""
    tensors = [v.const_value for v in model.graph.initializers.values()]
    if sum(t.nbytes for t in tensors if t is not None) <= largest:
        data = serialized(model)
        with write(path) as file:
            file.write(data)
        return
    _save_apart(model, Path(path))


def serialized(model: Any) -> bytes:
    """The bytes of an `onnx_ir.Model`, checked; weights and all, so at most 2 GiB."""
    import onnx_ir

    proto = onnx_ir.to_proto(model)
    _check(proto)
    return proto.SerializeToString()


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
    data = ir.to_proto(model).SerializeToString()
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
    inputs = tuple(Port(spec.name, spec.dtype, spec.sizes) for spec in slim.demasked.inputs)
    made = slim.graph.output_node().args[0]
    count = len(made) if isinstance(made, Sequence) else 1
    names = ["output"] if count == 1 else [f"output_{k}" for k in range(count)]
    return Interface(inputs, tuple(Port(name, "", None) for name in names))


def _translated(exported: ExportedProgram, opset: int | None) -> Any:
    installed()
    try:
        kept_whole(exported)
        with quiet(), torch.no_grad():
            program = torch.onnx.export(
                exported, (), dynamo=True, verbose=False, opset_version=opset,
                custom_translation_table=translations() | translation(),
            )  # fmt: skip
    except ImportError as error:
        raise BadInput("writing ONNX needs onnxscript: pip install 'demask[onnx]'") from error
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        words = next((n for n in lines if "No ONNX function" in n or "aten." in n), lines[0])
        advice = "write .pt2 instead, or demask a part: modules=[...]"
        raise NotExportable(f"torch.onnx: {words}", "the demasked graph", advice) from error
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


def _sizes(pairs: Sequence[tuple[Any, Port]]) -> dict[str, str]:
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
