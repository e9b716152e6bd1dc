"""A demasked network in one file: `graph.json` and `tensors.safetensors` in an uncompressed zip.

Nothing in the file is executed: ops are looked up in lists, tensors are raw bytes, and names in the
graph must be identifiers, because torch.fx writes Python source from them.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from operator import attrgetter
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, fx, nn
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from demask.compat.fx_internals import PyTreeInfo, signature_of
from demask.compat.onednn import available
from demask.errors import BadInput, RefusedFile
from demask.failures import described, public, warn_caller
from demask.files.allowed_names import check_call_spec, check_fqn, check_name, load_spec
from demask.files.atomic_write import write
from demask.files.bounded_read import check_zip, open_zip, other_kind, read_json
from demask.files.encode_network import VERSION, build_class, encode_network, from_stored, named_tensors
from demask.files.into_class import describe_graphs, resize
from demask.files.node_codec import DTYPES, WRITE, decode, decode_target, decode_value
from demask.files.weight_file import StoredTensor, WeightFile
from demask.graph.isolation import in_isolation
from demask.graph.provenance import Provenance
from demask.graph.result.class_result import record_call
from demask.graph.result.demasked_module import Demasked, apply_pass
from demask.graph.result.module_calls import KINDS as MODULES
from demask.graph.result.module_calls import create_without_memory
from demask.graph.result.recurrent_modules import refresh_tensors
from demask.graph.result.resize import tensors_of
from demask.graph.result.restore_modules import join_twins
from demask.graph.result.uncalled_modules import is_holder
from demask.ops import schema
from demask.ops.custom import custom_op_of
from demask.registry import RESULT_KINDS
from demask.shrink.check import describe_difference
from demask.tune.epilogue import is_fused, is_pack, unfuse
from demask.tune.optimized_module import Optimized

GRAPH, TENSORS = "graph.json", "tensors.safetensors"

_OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")


@in_isolation
@public
def save(slim: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a demasked network to a file that `load` reads; after an error, none is written.

    Args:
        slim: a network with the attribute `demasked`, a result of demask's functions.
        path: name of the file, which is replaced if it exists. The usual suffix is ".demask".

    Raises:
        BadInput: `slim` has no attribute `demasked`, a module, an op or a type of argument cannot
            be stored, or the file cannot be written.

    Example:
        >>> import tempfile, torch, demask
        >>> slim = demask.demask(torch.nn.Linear(4, 2).eval(), (torch.zeros(1, 4),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demask.save(slim, f"{folder}/net.demask")
        ...     demask.load(f"{folder}/net.demask").demasked.after.parameters
        10
    """
    text, tensors = encode_network(slim)
    with write(path) as file:
        _write_zip(file, text, tensors)


def to_bytes(slim: nn.Module) -> bytes:
    """The content of the file that `save` writes; errors as there."""
    file = BytesIO()
    _write_zip(file, *encode_network(slim))
    return file.getvalue()


def _write_zip(file: BinaryIO, text: str, tensors: bytes) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        # A fixed date, so that equal networks have equal files.
        archive.writestr(zipfile.ZipInfo(GRAPH), text)
        archive.writestr(zipfile.ZipInfo(TENSORS), tensors)


@public
def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> Any:
    """The network in a file of `save`, on the CPU, with the attribute `demasked`.

    The file is checked before the network is built, and no code in it is run.

    Args:
        path: name of the file.
        into: an instance of the network's class with the sizes before it was demasked; it is not
            changed. The result is a copy of it with the file's tensors, in its mode. Where modules of the
            network became graphs, its class must compute the same, so demask with `result="class"`
            for this. Default: None, for the class that was saved where the file has what it is
            built from (layers of torch in `nn.Sequential`, models of transformers), else for a
            graph module, with a warning.

    Raises:
        BadInput: the file is missing, damaged or not of `save`, or does not fit `into`,
            or has graphs that compute something else than `into` with their tensors.
        RefusedFile: the file has contents that could run code or exhaust memory.

    Example:
        >>> import demask, tempfile, torch
        >>> slim = demask.demask(torch.nn.Linear(3, 2), (torch.ones(1, 3),))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     demask.save(slim, f"{folder}/net.demask")
        ...     demask.load(f"{folder}/net.demask", into=torch.nn.Linear(3, 2))
        Linear(in_features=3, out_features=2, bias=True)
    """
    with open_zip(path) as archive:
        if GRAPH not in archive.namelist():
            kind = other_kind(path) or "another archive"
            raise BadInput(f"expected a file of demask.save, got {kind}")
        document = _read_document(archive)
        stored = _read_tensors(archive, document)
        slim = _build_network(document, stored)
    own = document.get("own")
    if into is None and own is None:
        return slim
    rows = [row for row in document["tensors"] if row["persistent"]]
    state = {row["name"]: _make_tensor(stored[row["stored"]], False, False, row["order"]) for row in rows}
    graphs = _graph_paths(own, slim)
    if into is None:
        result = None if graphs else build_class(own, state)
    else:
        known, sources = {name for name, _ in tensors_of(into)}, nn.Module()
        _attach_tensors(sources, _source_rows(document), stored)
        state |= {name: tensor for name, tensor in tensors_of(sources) if name in known}
        try:
            result = resize(into, state, slim.demasked.numbers)
        except BadInput as error:
            if not graphs:
                raise
            raise BadInput(f"{describe_graphs(graphs)} ({error})") from error
        if graphs and (wrong := _describe_difference(result, slim)):
            raise BadInput(f"{describe_graphs(graphs)} ({wrong})")
    if result is None and graphs:
        warn_caller(
            f"demask.load() returns a graph: the network of its own class has graphs in it, {', '.join(graphs):.200}"
        )
        return slim
    if result is None:
        name = str(own.get("class") if isinstance(own, dict) else own).rpartition(".")[2]
        warn_caller(
            f"demask.load() returns a graph: for the network's own class, pass "
            f"into={name}(...), an instance of the sizes before"
        )
        return slim
    if into is None:
        grads = {row["name"]: row["requires_grad"] for row in rows if row["parameter"]}
        for name, parameter in result.named_parameters():
            parameter.requires_grad_(grads.get(name, True))
        result.train(slim.training)
    record = replace(slim.demasked, form="class", guards=())
    vars(result)["demasked"] = record
    spec = signature_of(slim.graph).in_spec
    if spec.num_leaves == len(record.inputs):  # the call, so that it can be saved again
        record_call(result, record, *pytree.tree_unflatten(record.inputs, spec))
    return result


def _graph_paths(own: Any, slim: Demasked) -> list[str]:
    """Paths of the modules that are graphs in a file's network, which older files do not name; ""
    for all of it."""
    paths = own.get("graphs") if isinstance(own, dict) else None
    if isinstance(paths, list) and paths:
        return list(map(str, paths))
    if own is None:
        return [""]
    return ["a part of it"] if slim.demasked.graph_reasons else []


def _describe_difference(result: nn.Module, slim: Demasked) -> str:
    """What a network of the caller's class computes otherwise than its graph; "" if nothing."""
    try:
        return describe_difference(result, slim.plain(), (), {})
    except MemoryError:
        raise
    except Exception as error:  # of any type: code of the class, at sizes that it does not have
        return described(error)


def from_bytes(content: bytes) -> Any:
    """The network in the content of a file; errors as `load`."""
    with check_zip(BytesIO(content), len(content), "the content") as archive:
        document = _read_document(archive)
        return _build_network(document, _read_tensors(archive, document))


def _read_document(archive: zipfile.ZipFile) -> Any:
    """The JSON document of a file with no other entries than it should have."""
    document = read_json(archive, GRAPH)
    if not isinstance(document, dict) or document.get("format") != "demask":
        raise BadInput("expected a file written by demask, got another zip archive")
    version = document.get("version")
    if version != VERSION:
        raise BadInput(f"format version {version!r}, expected {VERSION}; install a newer demask")
    if sorted(archive.namelist()) != [GRAPH, TENSORS]:
        raise RefusedFile(f"expected the entries {GRAPH} and {TENSORS} only")
    return document


def _read_tensors(archive: zipfile.ZipFile, document: Any) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load(archive.read(TENSORS))
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise BadInput(f"{TENSORS} is damaged ({error}); copy the file again") from error
    dtypes = _converted_dtypes(document)
    return {name: from_stored(values, dtypes[name]) if name in dtypes else values for name, values in tensors.items()}


def _converted_dtypes(document: Any) -> dict[Any, torch.dtype]:
    """The dtypes of the tensors that are stored as numbers of another one, by key."""
    rows = [
        row for row in (*_typed_field(document, "tensors", list, of=dict), *_source_rows(document)) if "dtype" in row
    ]
    if unknown := [row["dtype"] for row in rows if str(row["dtype"]) not in DTYPES]:
        raise RefusedFile(f"{GRAPH}: a tensor of the dtype {unknown[0]!r:.40}")
    return {str(row.get("stored")): DTYPES[row["dtype"]] for row in rows}


@dataclass(frozen=True, slots=True)
class Outline:
    """A network whose tensors stay in a file."""

    slim: Any  # with zeros of the right shapes, which take no memory
    file: WeightFile
    # by name, the stored tensor and the order of its axes in the file, outermost first
    places: Mapping[str, tuple[StoredTensor, tuple[int, ...]]]


def outline(path: str | os.PathLike[str]) -> Outline:
    """The network that `save` wrote to `path`, without its tensors; errors as `load`."""
    with open_zip(path) as archive:
        document = _read_document(archive)
        entry = archive.getinfo(TENSORS)
        with archive.open(entry):  # which checks the entry's own header
            start = _data_start(path, entry)
        file = WeightFile.read(path, (start, start + entry.file_size), TENSORS)
        if dtypes := _converted_dtypes(document):
            names = ", ".join(sorted({str(dtype) for dtype in dtypes.values()}))
            raise BadInput(f"{path}: tensors of {names} cannot be read part by part; load the file")
        slim = _build_network(document, {name: stored.hollow() for name, stored in file.tensors.items()})
    places = {row["name"]: (file.tensors[row["stored"]], tuple(row["order"])) for row in document["tensors"]}
    return Outline(slim, file, places)


def _data_start(path: str | os.PathLike[str], entry: zipfile.ZipInfo) -> int:
    """Byte offset of a stored entry's data, after its header of 30 bytes, name and extra field."""
    with open(path, "rb") as file:
        file.seek(entry.header_offset + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return entry.header_offset + 30 + name + extra


def _build_network(document: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Demasked:
    slim = nn.Module()
    _attach_modules(slim, _typed_field(document, "modules", dict))
    _attach_tensors(slim, _typed_field(document, "tensors", list), stored)
    graph = fx.Graph()
    _add_nodes(graph, _typed_field(document, "nodes", list), slim)
    join_twins(graph, slim)
    specs = _call_signature(document, sum(n.op == "placeholder" for n in graph.nodes))
    training = set(_typed_field(document, "training", list, of=str))
    kind = _network_class(document)
    fused = any(is_fused(node) or is_pack(node) for node in graph.nodes)
    if fused and kind is Demasked:
        raise RefusedFile("got calls that only optimize() writes, in a network of demask()")
    _check_own_ops(graph, slim)
    try:
        graph.lint()
        history = Provenance.from_dict(_typed_field(document, "demasked", dict))
        result = kind.of(slim, graph, specs, history)
        if fused and not available(torch.float32, torch.device("cpu")):
            result = apply_pass(result, unfuse)  # this torch was built without oneDNN
    except Exception as error:  # torch.fx and Provenance may raise anything on invalid contents
        raise BadInput(f"the graph or its history is damaged: {error}") from error
    for name, module in result.named_modules():
        module.training = name in training
    if document.get("kind") is not None:
        result._unarchived(document.get("extra"))
    return result


def _network_class(document: Mapping[str, Any]) -> type[Demasked]:
    name = document.get("kind")
    if name is None:
        return Optimized if document.get("optimized") is True else Demasked
    if not isinstance(name, str) or name not in RESULT_KINDS:
        raise BadInput(
            f"a network of kind {name!r:.40}, expected one of {RESULT_KINDS.names()}; install a newer demask"
        )
    return RESULT_KINDS.get(name)


def _check_own_ops(graph: fx.Graph, slim: nn.Module) -> None:
    """Refuse calls of demask's ops with arguments that demask never passes."""

    def value(node: fx.Node) -> Tensor | None:
        return attrgetter(str(node.target))(slim) if node.op == "get_attr" else None

    for node in graph.nodes:
        own = custom_op_of(node.target)
        if own is None or own.check is None:
            continue
        try:
            own.check(map_arg(schema.arguments(node), value))
        except (BadInput, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RefusedFile(f"node {node.name!r}: {error}") from error


def _source_rows(document: Mapping[str, Any]) -> Any:
    """The rows of tensors from which parametrizations compute others; earlier files have none."""
    return _typed_field(document, "sources", list, of=dict) if "sources" in document else []


def _typed_field(data: Mapping[str, Any], key: str, kind: type, of: type | None = None) -> Any:
    value: Any = data.get(key)
    if type(value) is not kind or (of and not all(type(item) is of for item in value)):
        raise BadInput(f"{GRAPH}: expected {key!r} to be a {kind.__name__}")
    return value


def _attach_modules(slim: nn.Module, specs: Mapping[str, Any]) -> None:
    for name, spec in specs.items():
        parent, leaf = _parent_module(slim, name)
        if leaf in parent._modules:
            raise RefusedFile(f"module {name!r} occurs twice")
        _register_name(parent.add_module, leaf, _make_module(name, spec))


def _make_module(name: str, spec: Any) -> nn.Module:
    """The module of a spec, on the meta device, so that no memory is allocated."""
    match spec:
        case {"type": str(kind), **fields} if kind in MODULES:
            try:
                return create_without_memory(MODULES[kind], {n: decode(v, {}) for n, v in fields.items()})
            except (ArithmeticError, RuntimeError, TypeError, ValueError, BadInput) as error:
                raise RefusedFile(f"module {name!r} is no {kind}: {error}") from error
    raise RefusedFile(f"module {name!r}: expected one of {', '.join(sorted(MODULES))}")


def _attach_tensors(slim: nn.Module, table: list[Any], stored: Mapping[str, Tensor]) -> None:
    tensors: dict[str, tuple[Any, Tensor]] = {}
    names: set[str] = set()
    for row in table:
        match row:
            case {
                "name": str(name),
                "stored": str(key),
                "order": list(order),
                "parameter": bool(parameter),
                "persistent": bool(persistent),
                "requires_grad": bool(requires_grad),
            } if key in stored and _is_permutation(order, stored[key].ndim):
                kind = (parameter, requires_grad, order)
            case _:
                raise RefusedFile(f"{GRAPH}: a tensor's row is not valid: {row!r:.80}")
        if key not in tensors:
            tensors[key] = kind, _make_tensor(stored[key], *kind)
        if tensors[key][0] != kind or name in names:
            raise RefusedFile(f"tensor {name!r}: occurs twice, or as parameter and buffer")
        names.add(name)
        _attach_tensor(slim, name, tensors[key][1], persistent)
    for name, tensor in (*slim.named_parameters(), *slim.named_buffers()):
        if tensor.is_meta:
            raise BadInput(f"tensor {name!r} is missing; the file is damaged: save it again")
    for module in slim.modules():
        refresh_tensors(module)


def _is_permutation(order: list[Any], ndim: int) -> bool:
    return all(type(axis) is int for axis in order) and sorted(order) == list(range(ndim))


def _make_tensor(values: Tensor, parameter: bool, requires_grad: bool, order: list[int]) -> Tensor:
    if requires_grad and not (values.is_floating_point() or values.is_complex()):
        raise RefusedFile(f"a tensor of {values.dtype} that requires a gradient")
    tensor = values.permute([order.index(axis) for axis in range(len(order))])
    return nn.Parameter(tensor, requires_grad) if parameter else tensor.requires_grad_(requires_grad)


def _attach_tensor(slim: nn.Module, name: str, tensor: Tensor, persistent: bool) -> None:
    module, leaf = _parent_module(slim, name)
    is_parameter = isinstance(tensor, nn.Parameter)
    slots: dict[str, Any] = module._parameters if is_parameter else module._buffers
    if not is_holder(module) and module is not slim:  # a layer has its own slots
        old = slots.get(leaf)
        if old is None or not old.is_meta or old.shape != tensor.shape:
            raise RefusedFile(f"tensor {name!r} does not fit its module")
        slots[leaf] = tensor
    elif is_parameter:
        _register_name(module.register_parameter, leaf, tensor)
    else:
        _register_name(module.register_buffer, leaf, tensor, persistent)


def _register_name(register: Any, leaf: str, *values: Any) -> None:
    try:
        register(leaf, *values)
    except (KeyError, TypeError) as error:
        raise RefusedFile(f"the name {leaf!r} is taken: {error}") from error


def _parent_module(slim: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module of tensor or module `name`, created if missing, and the last part of `name`."""
    *path, leaf = check_fqn(name).split(".")
    module = slim
    for part in path:
        if part not in module._modules:
            _register_name(module.add_module, part, nn.Module())
        child = module._modules[part]
        if child is None or len(path) > 100:
            raise RefusedFile(f"the path {name!r} does not lead to a module")
        module = child
    return module, leaf


def _add_nodes(graph: fx.Graph, rows: list[Any], slim: nn.Module) -> None:
    nodes: dict[str, fx.Node] = {}
    has_output = False
    tensors = {n for n, _, _ in named_tensors(slim)}
    modules = {n for n, m in slim.named_modules(remove_duplicate=False) if not is_holder(m)}
    for row in rows:
        match row:
            case {
                "op": str(op),
                "name": str(name),
                "target": str(target),
                "args": list(args),
                "kwargs": dict(kwargs),
            } if op in _OPS and name not in nodes and not has_output:
                known = {"get_attr": tensors, "call_module": modules - {""}}.get(op, {target})
            case _:
                raise RefusedFile(f"{GRAPH}: a node is not valid: {row!r:.80}")
        has_output = op == "output"
        if target not in known or (op in ("placeholder", "get_attr") and (args or kwargs)):
            raise RefusedFile(f"node {name!r}: its target {target!r:.80} is not in the file")
        node = graph.create_node(
            op,
            _decode_node_target(op, target),
            tuple(decode(argument, nodes) for argument in args),
            {check_name(key): decode(argument, nodes) for key, argument in kwargs.items()},
            name=check_name(name),
        )
        if node.target is WRITE and getattr(node.args[0], "op", "") != "placeholder":
            raise RefusedFile(f"node {name!r} writes to {node.args[0]}; expected an input")
        node.name = name
        nodes[name] = node
        if "value" in row:
            node.meta["value"] = decode_value(row["value"])
    if not has_output:
        raise BadInput(f"{GRAPH}: the graph has no output; the file is damaged")


def _decode_node_target(op: str, target: str) -> Any:
    if op == "call_function":
        return decode_target(target)
    return check_name(target) if op in ("placeholder", "output") else check_fqn(target)


def _call_signature(document: Mapping[str, Any], inputs: int) -> PyTreeInfo:
    names = [check_name(name) for name in _typed_field(document, "orig_args", list)]
    in_spec = load_spec(check_call_spec(document.get("in_spec")))
    out_spec = load_spec(document.get("out_spec"))
    if len(set(names)) != len(names) or in_spec.num_leaves != inputs:
        raise RefusedFile(f"{GRAPH}: the call signature does not fit the {inputs} inputs")
    return PyTreeInfo(names, in_spec, out_spec)
