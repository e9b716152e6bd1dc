"""Modules of torch.nn and their ATen calls: one table for both directions.

A call in a graph that equals a module's call becomes a call of that module (`restore_modules`); a
module that a graph calls becomes its ATen call (`lower_modules`).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from demask.graph.result.hooks import HOOKS
from demask.graph.result.recurrent_modules import create_zero_state, tensor_names
from demask.graph.result.returned_values import has_separate_reads, read_from_call
from demask.ops import schema
from demask.ops.traits import BATCH_STATISTICS

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class EvalCall:
    """The ATen call of the modules of a class in eval mode.

    tensors, numbers: the module's attribute for an argument of the op, by argument. lists: for an
    argument that is a list of tensors, the attribute that lists their names. always: arguments with
    the same value in all such calls. set: values that attributes must have for this to be the
    module's only call. returns: the module's output, by numbers of the call's outputs; None: the
    call's output. default: whether every call whose tensors have one parent is such a module.
    """

    op: Any
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, str] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    set: Mapping[str, Any] = field(default_factory=dict)
    returns: Any = None
    default: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arguments that are inputs of the module."""
        own = {*self.tensors, *self.lists}
        return tuple(a.name for a in schema.signature(self.op) if a.tensors and a.name not in own)

    def leaves(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The operands of a call that are tensors of its module, by their names in the module.
        arguments: of the call, by name."""
        leaves = {leaf: arguments[name] for name, leaf in self.tensors.items()}
        for name in self.lists:
            leaves |= dict(zip(tensor_names(arguments), arguments[name], strict=True))
        return leaves

    def value(self, module: nn.Module, name: str) -> Any:
        """The value of an argument, from an attribute of a module."""
        value = getattr(module, self.numbers[name])
        value = _FOR_NONE.get(name) if value is None else value
        length = next(a.length for a in schema.signature(self.op) if a.name == name)
        if length and isinstance(value, int):
            return [value] * length
        return list(value) if isinstance(value, tuple) else value

    def module_arguments(self, module: nn.Module) -> dict[str, Any]:
        """The arguments of the module's call, except for tensors and inputs."""
        own = {*self.tensors, *self.lists, *self.inputs}
        arguments = {a.name: a.default for a in schema.signature(self.op) if a.name not in own}
        arguments |= {name: self.value(module, name) for name in self.numbers}
        arguments |= {name: value for name, value in self.always.items() if name in arguments}
        if "running_mean" in self.tensors:
            arguments[BATCH_STATISTICS[self.op]] = module.running_mean is None
        return arguments

    def call_arguments(self, call: fx.Node) -> dict[str, Any]:
        """The arguments of a call, except for tensors and inputs."""
        arguments = schema.arguments(call)
        ignored = dict.fromkeys(_IGNORED & arguments.keys(), False)
        own = {*self.tensors, *self.lists, *self.inputs}
        return {name: v for name, v in (arguments | ignored).items() if name not in own}


# Not attributes of the module: a flag of the backend, and the training mode.
_IGNORED = {"cudnn_enable", "cudnn_enabled", "train"}
# The value that an argument of an op has where the module's attribute is None.
_FOR_NONE = {"padding_idx": -1, "momentum": 0.0}


def _names(text: str) -> dict[str, str]:
    return {name: name for name in text.split()}


def _row(op: Any, numbers: str = "", tensors: str = "", **others: Any) -> EvalCall:
    return EvalCall(op, _names(tensors), _names(numbers), **others)


def _padding(mode: str, numbers: str = "") -> EvalCall:
    return EvalCall(aten.pad.default, numbers=_names(numbers) | {"pad": "padding"}, always={"mode": mode})


_AFFINE = "weight bias"
_PLAIN: Any = {"set": {"inplace": False}}
_ROWS: list[tuple[type[nn.Module], EvalCall]] = [
    (nn.Linear, _row(aten.linear.default, "", _AFFINE, default=True)),
    (nn.Bilinear, _row(aten.bilinear.default, "", _AFFINE, default=True)),
    (
        nn.LayerNorm,
        _row(aten.layer_norm.default, "normalized_shape eps", _AFFINE, always={"cudnn_enable": False}, default=True),
    ),
    (nn.RMSNorm, _row(aten.rms_norm.default, "normalized_shape eps", "weight", default=True)),
    (
        nn.GroupNorm,
        _row(aten.group_norm.default, "num_groups eps", _AFFINE, always={"cudnn_enabled": False}, default=True),
    ),
    (
        nn.Embedding,
        _row(
            aten.embedding.default,
            "padding_idx scale_grad_by_freq sparse",
            "weight",
            set={"max_norm": None},
            default=True,
        ),
    ),
    (nn.Dropout, _row(aten.dropout.default, "p", always={"train": False}, **_PLAIN)),
    (nn.AlphaDropout, _row(aten.alpha_dropout.default, "p", always={"train": False}, **_PLAIN)),
    (nn.FeatureAlphaDropout, _row(aten.feature_alpha_dropout.default, "p", always={"train": False}, **_PLAIN)),
    (nn.PReLU, _row(aten.prelu.default, "", "weight", default=True)),
    (nn.ReLU, _row(aten.relu.default, **_PLAIN)),
    (nn.ReLU6, _row(aten.hardtanh.default, "min_val max_val", **_PLAIN)),
    (nn.Hardtanh, _row(aten.hardtanh.default, "min_val max_val", **_PLAIN)),
    (nn.LeakyReLU, _row(aten.leaky_relu.default, "negative_slope", **_PLAIN)),
    (nn.RReLU, _row(aten.rrelu.default, "lower upper", **_PLAIN)),
    (nn.ELU, _row(aten.elu.default, "alpha", **_PLAIN)),
    (nn.CELU, _row(aten.celu.default, "alpha", **_PLAIN)),
    (nn.SELU, _row(aten.selu.default, **_PLAIN)),
    (nn.GELU, _row(aten.gelu.default, "approximate")),
    (nn.SiLU, _row(aten.silu.default, **_PLAIN)),
    (nn.Mish, _row(aten.mish.default, **_PLAIN)),
    (nn.Sigmoid, _row(aten.sigmoid.default)),
    (nn.LogSigmoid, _row(aten.log_sigmoid.default)),
    (nn.Hardsigmoid, _row(aten.hardsigmoid.default, **_PLAIN)),
    (nn.Hardswish, _row(aten.hardswish.default, **_PLAIN)),
    (nn.Tanh, _row(aten.tanh.default)),
    (nn.Softplus, _row(aten.softplus.default, "beta threshold")),
    (nn.Softshrink, _row(aten.softshrink.default, "lambd")),
    (nn.Hardshrink, _row(aten.hardshrink.default, "lambd")),
    (nn.Threshold, _row(aten.threshold.default, "threshold value", **_PLAIN)),
    (nn.GLU, _row(aten.glu.default, "dim")),
    (nn.Softmax, _row(aten.softmax.int, "dim")),
    (nn.Softmax2d, _row(aten.softmax.int, always={"dim": -3})),
    (nn.LogSoftmax, _row(aten.log_softmax.int, "dim")),
    (nn.CosineSimilarity, _row(aten.cosine_similarity.default, "dim eps")),
    (nn.Flatten, _row(aten.flatten.using_ints, "start_dim end_dim")),
    (nn.Unflatten, EvalCall(aten.unflatten.int, numbers={"dim": "dim", "sizes": "unflattened_size"})),
    (nn.PixelShuffle, _row(aten.pixel_shuffle.default, "upscale_factor")),
    (nn.PixelUnshuffle, _row(aten.pixel_unshuffle.default, "downscale_factor")),
    (nn.ChannelShuffle, _row(aten.channel_shuffle.default, "groups")),
    (nn.Unfold, _row(aten.im2col.default, "kernel_size dilation padding stride")),
    (nn.Fold, _row(aten.col2im.default, "output_size kernel_size dilation padding stride")),
]
_WINDOW, _ZEROS = "stride padding dilation groups", {"padding_mode": "zeros"}
_PLACES, _STATISTICS = "kernel_size stride padding", "weight bias running_mean running_var"
_CELL = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}
_LAYERS = _names("num_layers dropout bidirectional batch_first") | {"has_biases": "bias"}
for _d in (1, 2, 3):
    _ROWS += [
        (getattr(nn, f"{name}{_d}d"), row)
        for name, row in {
            "Conv": _row(getattr(aten, f"conv{_d}d").default, _WINDOW, _AFFINE, set=_ZEROS, default=True),
            "ConvTranspose": _row(
                aten.conv_transpose1d.default if _d == 1 else getattr(aten, f"conv_transpose{_d}d").input,
                f"{_WINDOW} output_padding",
                _AFFINE,
                set=_ZEROS,
                default=True,
            ),
            "BatchNorm": _row(
                aten.batch_norm.default, "momentum eps", _STATISTICS, always={"cudnn_enabled": False}, default=True
            ),
            "InstanceNorm": _row(
                aten.instance_norm.default, "momentum eps", _STATISTICS, always={"cudnn_enabled": False}
            ),
            "Dropout": _row(aten.feature_dropout.default, "p", always={"train": False}, **_PLAIN),
            "MaxPool": _row(
                getattr(aten, f"max_pool{_d}d").default, f"{_PLACES} dilation ceil_mode", set={"return_indices": False}
            ),
            "AvgPool": _row(
                getattr(aten, f"avg_pool{_d}d").default,
                f"{_PLACES} ceil_mode count_include_pad" + " divisor_override" * (_d > 1),
            ),
            "AdaptiveAvgPool": _row(getattr(aten, f"adaptive_avg_pool{_d}d").default, "output_size"),
            "AdaptiveMaxPool": _row(
                getattr(aten, f"adaptive_max_pool{_d}d").default,
                "output_size",
                set={"return_indices": False},
                returns=0,
            ),
            "ConstantPad": _padding("constant", "value"),
            "ZeroPad": _padding("constant", "value"),
            "ReflectionPad": _padding("reflect"),
            "ReplicationPad": _padding("replicate"),
            "CircularPad": _padding("circular"),
        }.items()
    ]
for _kind, _name, _set, _returns in (
    (nn.LSTM, "lstm", {}, (0, (1, 2))),
    (nn.GRU, "gru", {}, (0, 1)),
    (nn.RNN, "rnn_tanh", {"nonlinearity": "tanh", "mode": "RNN_TANH"}, (0, 1)),
    (nn.RNN, "rnn_relu", {"nonlinearity": "relu", "mode": "RNN_RELU"}, (0, 1)),
):
    _ROWS.append(
        (
            _kind,
            EvalCall(
                getattr(aten, _name).input,
                numbers=_LAYERS,
                set=_set,
                lists={"params": "_flat_weights_names"},
                always={"train": False},
                returns=_returns,
                default=True,
            ),
        )
    )
for _kind, _name, _set in (
    (nn.LSTMCell, "lstm_cell", {}),
    (nn.GRUCell, "gru_cell", {}),
    (nn.RNNCell, "rnn_tanh_cell", {"nonlinearity": "tanh"}),
    (nn.RNNCell, "rnn_relu_cell", {"nonlinearity": "relu"}),
):
    _ROWS.append((_kind, EvalCall(getattr(aten, _name).default, _CELL, set=_set, default=True)))

ROWS: Mapping[type[nn.Module], tuple[EvalCall, ...]] = {
    kind: tuple(row for other, row in _ROWS if other is kind) for kind, _ in _ROWS
}
KINDS = {kind.__name__: kind for kind in ROWS}
# Methods that forward calls; a subclass that computes something else overrides one.
_FORWARD = ("forward", "__call__", "__getattr__", "_conv_forward", "_output_padding", "_slow_forward")
STATE = "hx"  # the argument of recurrent ops that is optional for modules
READS = "reads"  # key of `meta` of a call of a module: the fake values of its tensors


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of the table whose forward a module has: its own class or a base class; or None."""
    for k, base in enumerate(mro := type(module).__mro__):
        if base in ROWS:
            changes = any(name in vars(subclass) for subclass in mro[:k] for name in _FORWARD)
            return None if changes else base
    return None


def row_of(module: nn.Module) -> EvalCall | None:
    """The row of a module's call; None if the module does anything else."""
    kind = kind_of(module)
    for row in ROWS[kind] if kind is not None else ():
        if all(getattr(module, name) == value for name, value in row.set.items()):
            return row
    return None


def row_for(kind: type[nn.Module], op: Any) -> EvalCall | None:
    """The row of a class whose call is of an op; None if there is none."""
    return next((row for row in ROWS[kind] if row.op is op), None)


# ------------------------------------------------------------------------------ modules -> calls


def lower_modules(graph: fx.Graph, root: nn.Module) -> list[fx.Node]:
    """Replace calls of modules by ATen calls, in place; returns the calls that remain: of modules
    that are not in the table, or that have hooks."""
    remaining = []
    for node in graph.find_nodes(op="call_module"):
        module = root.get_submodule(str(node.target))
        row = row_of(module)
        hooked = any(getattr(module, hooks) for hooks in HOOKS)
        fits = row is not None and has_separate_reads(node, row.returns) and not node.kwargs
        if row is None or hooked or not fits or not _is_called_on(node, row):
            remaining.append(node)
        else:
            _spell(node, module, row)
    return remaining


def _is_called_on(node: fx.Node, row: EvalCall) -> bool:
    """Whether a module is called with the inputs of the op; an initial state is optional."""
    missing = len(row.inputs) - len(node.args)
    return missing == 0 or (missing == 1 and row.inputs[-1] == STATE)


def _spell(node: fx.Node, module: nn.Module, row: EvalCall) -> None:
    """Replace one call of a module by its ATen call, in place."""
    path, values = node.target, node.meta.get(READS, {})
    operands = dict(zip(row.inputs, node.args, strict=False))

    def read(leaf: str) -> fx.Node | None:
        if getattr(module, leaf) is None:
            return None
        constant = node.graph.create_node("get_attr", f"{path}.{leaf}")
        if leaf in values:
            constant.meta["val"] = values[leaf]
        return constant

    with node.graph.inserting_before(node):
        if row.inputs[-1] == STATE:
            state = operands.get(STATE) or create_zero_state(schema.source_of(node), module)
            operands[STATE] = list(state) if isinstance(state, tuple) else state
        operands |= {name: read(leaf) for name, leaf in row.tensors.items()}
        for name, names in row.lists.items():
            operands[name] = [read(leaf) for leaf in getattr(module, names)]
    args, kwargs = schema.bind_arguments(row.op, operands | row.module_arguments(module))
    node.op, node.target, node.args, node.kwargs = "call_function", row.op, args, kwargs
    read_from_call(node, row.returns)


def graph_of_calls(network: fx.GraphModule) -> fx.Graph:
    """A copy of a network's graph with ATen calls in the place of modules where possible, for
    analysis; nodes have the same names."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(network.graph, mapping))
    for old, new in mapping.items():
        new.name = old.name
    lower_modules(graph, network)
    return graph


# ------------------------------------------------------------------------------------ in files


def constructor_arguments(module: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The constructor arguments of a class for a module like this one, except for tensors."""
    for name in constructor_parameters(kind):
        if name in ("device", "dtype") or name.startswith("_") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        has = name == "bias" and not isinstance(value, bool)
        yield name, (value is not None if has else value)


def constructor_parameters(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    """The parameters of the constructor of a class, by name."""
    if not issubclass(kind, nn.RNNBase):
        return inspect.signature(kind).parameters
    own = {"nonlinearity"} if kind is nn.RNN else {"proj_size"} if kind is nn.LSTM else set()
    parameters = dict(inspect.signature(nn.RNNBase).parameters)
    parameters["nonlinearity"] = inspect.signature(nn.RNNCell).parameters["nonlinearity"]
    excluded = {"mode", "proj_size", "nonlinearity"} - own  # its subclasses pass the others on
    return {name: parameter for name, parameter in parameters.items() if name not in excluded}


_WORDS = {"padding_mode": {"zeros"}, "approximate": {"none", "tanh"}, "nonlinearity": {"tanh", "relu"}}
_MOST_LAYERS = 1000  # of a recurrent module in a file: the constructor loops over them


def create_without_memory(kind: type[nn.Module], fields: Mapping[str, Any]) -> nn.Module:
    """A module of a class without memory for tensors, from the values of
    `constructor_arguments`. Raises ValueError for values that it does not return."""
    known = constructor_parameters(kind)
    for name, value in fields.items():
        if name not in known or name in ("device", "dtype") or not _is_plain(name, value):
            raise ValueError(f"{name} = {value!r:.40}")
    meta = {"device": "meta"} if "device" in known else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of arguments without effect
        return kind(**fields, **meta)


def _is_plain(name: str, value: Any) -> bool:
    """Whether a constructor argument of a file has a permitted type and size."""
    if isinstance(value, str):
        return value in _WORDS.get(name, ())
    if isinstance(value, (list, tuple)):
        return len(value) < 10 and all(n is None or _is_size(n) for n in value)
    if name == "num_layers":
        return _is_size(value) and value <= _MOST_LAYERS
    return value is None or isinstance(value, (bool, float)) or _is_size(value)


def _is_size(value: Any) -> bool:
    return type(value) is int and -(2**31) < value < 2**31
