"""The modules of torch.nn and the ATen calls that they make: one table, read in both directions.

A call in a graph that is what a module would make becomes a call of that module (graph/restore.py);
a module called in a graph becomes the call that it makes (`spell`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from demask.ops import schema

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Row:
    """The call that the modules of a kind make in eval mode.

    tensors, numbers: per argument of the op, the attribute of the module that it is. always:
    arguments that every such call has; None for those that change nothing. set: attributes that
    have to be so for this call to be all that the module does. default: is a call whose tensors
    stand together such a module, wherever it was made?
    """

    op: Any
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False

    @property
    def x(self) -> str:
        """The argument that is what the module is called on."""
        return next(a.name for a in schema.signature(self.op)
                    if a.tensors and a.name not in self.tensors)  # fmt: skip

    def given(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the module's call but for its tensors and what it is called on."""
        found = {
            a.name: a.default
            for a in schema.signature(self.op)
            if a.name != self.x and a.name not in self.tensors
        }
        found |= {name: argument_of(name, getattr(module, at)) for name, at in self.numbers.items()}
        found |= {name: value for name, value in self.always.items() if name in found}
        if self.op is aten.batch_norm.default:
            found["training"] = module.running_mean is None
        return found

    def asked(self, call: fx.Node) -> dict[str, Any]:
        """The same arguments as a call has them."""
        found = schema.arguments(call)
        ignored = dict.fromkeys(_IGNORED & found.keys(), False)
        return {n: v for n, v in (found | ignored).items() if n != self.x and n not in self.tensors}


# Not the module's to say: a flag of the backend, and whether the network trains.
_IGNORED = {"cudnn_enable", "cudnn_enabled", "train"}
# The value that an argument of an op has where the module's attribute is None.
_FOR_NONE = {"padding_idx": -1, "momentum": 0.0}


def _names(text: str) -> dict[str, str]:
    return {name: name for name in text.split()}


def _row(op: Any, numbers: str = "", tensors: str = "", **others: Any) -> Row:
    return Row(op, _names(tensors), _names(numbers), **others)


_AFFINE = "weight bias"
_PLAIN: Any = {"set": {"inplace": False}}
_ROWS: dict[type[nn.Module], Row] = {
    nn.Linear: _row(aten.linear.default, "", _AFFINE, default=True),
    nn.LayerNorm: _row(aten.layer_norm.default, "normalized_shape eps", _AFFINE,
                       always={"cudnn_enable": False}, default=True),
    nn.RMSNorm: _row(aten.rms_norm.default, "normalized_shape eps", "weight", default=True),
    nn.GroupNorm: _row(aten.group_norm.default, "num_groups eps", _AFFINE,
                       always={"cudnn_enabled": False}, default=True),
    nn.Embedding: _row(aten.embedding.default, "padding_idx scale_grad_by_freq sparse", "weight",
                       set={"max_norm": None}, default=True),
    nn.Dropout: _row(aten.dropout.default, "p", always={"train": False}, **_PLAIN),
    nn.PReLU: _row(aten.prelu.default, "", "weight", default=True),
    nn.ReLU: _row(aten.relu.default, **_PLAIN),
    nn.ReLU6: _row(aten.hardtanh.default, "min_val max_val", **_PLAIN),
    nn.Hardtanh: _row(aten.hardtanh.default, "min_val max_val", **_PLAIN),
    nn.LeakyReLU: _row(aten.leaky_relu.default, "negative_slope", **_PLAIN),
    nn.ELU: _row(aten.elu.default, "alpha", **_PLAIN),
    nn.CELU: _row(aten.celu.default, "alpha", **_PLAIN),
    nn.SELU: _row(aten.selu.default, **_PLAIN),
    nn.GELU: _row(aten.gelu.default, "approximate"),
    nn.SiLU: _row(aten.silu.default, **_PLAIN),
    nn.Mish: _row(aten.mish.default, **_PLAIN),
    nn.Sigmoid: _row(aten.sigmoid.default),
    nn.LogSigmoid: _row(aten.log_sigmoid.default),
    nn.Hardsigmoid: _row(aten.hardsigmoid.default, **_PLAIN),
    nn.Hardswish: _row(aten.hardswish.default, **_PLAIN),
    nn.Tanh: _row(aten.tanh.default),
    nn.Softplus: _row(aten.softplus.default, "beta threshold"),
    nn.Softshrink: _row(aten.softshrink.default, "lambd"),
    nn.Hardshrink: _row(aten.hardshrink.default, "lambd"),
    nn.Threshold: _row(aten.threshold.default, "threshold value", **_PLAIN),
    nn.GLU: _row(aten.glu.default, "dim"),
    nn.Softmax: _row(aten.softmax.int, "dim"),
    nn.LogSoftmax: _row(aten.log_softmax.int, "dim"),
}  # fmt: skip
_WINDOW, _ZEROS = "stride padding dilation groups", {"padding_mode": "zeros"}
for _kind, _op in (
    (nn.Conv1d, aten.conv1d.default),
    (nn.Conv2d, aten.conv2d.default),
    (nn.Conv3d, aten.conv3d.default),
):
    _ROWS[_kind] = _row(_op, _WINDOW, _AFFINE, set=_ZEROS, default=True)
for _kind, _op in (
    (nn.ConvTranspose1d, aten.conv_transpose1d.default),
    (nn.ConvTranspose2d, aten.conv_transpose2d.input),
    (nn.ConvTranspose3d, aten.conv_transpose3d.input),
):
    _ROWS[_kind] = _row(_op, f"{_WINDOW} output_padding", _AFFINE, set=_ZEROS, default=True)
_STATISTICS = "weight bias running_mean running_var"
for _kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    _ROWS[_kind] = _row(aten.batch_norm.default, "momentum eps", _STATISTICS,
                        always={"cudnn_enabled": False}, default=True)  # fmt: skip
for _kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
    _ROWS[_kind] = _row(aten.feature_dropout.default, "p", always={"train": False}, **_PLAIN)

ROWS: Mapping[type[nn.Module], Row] = _ROWS
KINDS = {kind.__name__: kind for kind in ROWS}
# What forward calls, and a subclass that computes something else changes.
_FORWARD = (
    "forward",
    "__call__",
    "__getattr__",
    "_conv_forward",
    "_output_padding",
    "_slow_forward",
)
READS = "reads"  # in `meta` of a call of a module: the fake values of its tensors
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of the table whose forward a module has: its own, or the one it is derived from."""
    for k, base in enumerate(mro := type(module).__mro__):
        if base in ROWS:
            changes = any(name in vars(sub) for sub in mro[:k] for name in _FORWARD)
            return None if changes else base
    return None


def argument_of(name: str, value: Any) -> Any:
    """An attribute of a module as an op takes it."""
    value = _FOR_NONE.get(name) if value is None else value
    return list(value) if isinstance(value, tuple) else value


# ------------------------------------------------------------------------------ modules -> calls


def spell(graph: fx.Graph, root: nn.Module) -> list[fx.Node]:
    """Put the ATen calls of modules in their places, in a graph; what is left: calls of modules
    that are not in the table, or that have hooks, which no call runs."""
    left = []
    for node in graph.find_nodes(op="call_module"):
        module = root.get_submodule(str(node.target))
        kind = kind_of(module)
        hooked = any(getattr(module, hooks) for hooks in _HOOKS)
        if kind is None or hooked or len(node.args) != 1 or node.kwargs:
            left.append(node)
        else:
            _spell(node, module, ROWS[kind])
    return left


def _spell(node: fx.Node, module: nn.Module, row: Row) -> None:
    path, (x,) = node.target, node.args
    found = {row.x: x, **row.given(module)}
    values = node.meta.get(READS, {})
    with node.graph.inserting_before(node):
        for name, leaf in row.tensors.items():
            held = getattr(module, leaf)
            if held is None:
                found[name] = None
                continue
            found[name] = read = node.graph.create_node("get_attr", f"{path}.{leaf}")
            if leaf in values:
                read.meta["val"] = values[leaf]
    args, kwargs = schema.call(row.op, found)
    node.op, node.target, node.args, node.kwargs = "call_function", row.op, args, kwargs


def in_calls(network: fx.GraphModule) -> fx.Graph:
    """The graph of a network with modules spelled as calls, as far as they can be: for those who
    look at what it computes. Nodes keep their names."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(network.graph, mapping))
    for old, new in mapping.items():
        new.name = old.name
    spell(graph, network)
    return graph


# ------------------------------------------------------------------------------------ in files


def fields_of(module: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """What the constructor of a kind is given to make a module like this one, but for tensors."""
    for name in inspect.signature(kind).parameters:
        if name in ("device", "dtype") or name.startswith("_") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        yield name, (value is not None if name == "bias" else value)


_WORDS = {"padding_mode": {"zeros"}, "approximate": {"none", "tanh"}}


def hollow(kind: type[nn.Module], fields: Mapping[str, Any]) -> nn.Module:
    """A module of a kind that takes no memory, of what `fields_of` gave. ValueError where it gives
    no such thing."""
    known = inspect.signature(kind).parameters
    for name, value in fields.items():
        if name not in known or name in ("device", "dtype") or not _is_plain(name, value):
            raise ValueError(f"{name} = {value!r:.40}")
    meta = {"device": "meta"} if "device" in known else {}
    return kind(**fields, **meta)


def _is_plain(name: str, value: Any) -> bool:
    if isinstance(value, str):
        return value in _WORDS.get(name, ())
    if isinstance(value, (list, tuple)):
        return len(value) < 10 and all(type(n) is int and 0 <= n < 2**31 for n in value)
    return (
        value is None
        or isinstance(value, (bool, float))
        or (isinstance(value, int) and -(2**31) < value < 2**31)
    )
