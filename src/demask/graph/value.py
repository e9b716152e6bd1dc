"""Typed values of a graph that is edited: what rewrites read, and the calls that they append."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from demask.compat.dispatch import OpOverload
from demask.graph.editor import GraphEditor
from demask.ops import Declined, Relation, bind, schema
from demask.ops.schema import same_shape

aten = torch.ops.aten


def _op(target: Any, on_sizes: Any = None) -> Callable[..., Value]:
    """A method that appends a call of an op. on_sizes: the function in its place for two sizes."""

    def call(self: Value, *args: Any, **kwargs: Any) -> Value:
        return self.call(target if on_sizes is None or self.is_tensor else on_sizes, self, *args, **kwargs)

    return call


@dataclass(frozen=True, slots=True)
class Value:
    """A node seen through the editor of its graph: a tensor, or a size known only at run time.

    Methods with the names of ops (`x.slice(dim, start, end)`, `x * y`) append a call at the editor's
    insertion point and return its value. They take values, numbers, and lists of both.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from demask.graph.capture.capture import capture
        >>> editor = GraphEditor(capture(nn.ReLU(), (torch.ones(2, 6),)))
        >>> (relu,) = (Value(node, editor) for node in editor.calls())
        >>> with editor.graph.inserting_after(relu.node):
        ...     half = relu.slice(1, 0, 3)
        >>> str(half.target), half.shape[1], half.arg("self") == relu
        ('aten.slice.Tensor', 3, True)
    """

    node: fx.Node
    editor: GraphEditor

    # --------------------------------------------------------------------------------- what it is

    @property
    def fake(self) -> Any:
        """The fake tensor (or symbolic number, or list of fake tensors) of the node."""
        return self.node.meta["val"]

    @property
    def is_tensor(self) -> bool:
        """Whether it is one tensor."""
        return isinstance(self.node.meta.get("val"), Tensor)

    @property
    def shape(self) -> torch.Size:
        """Sizes of a tensor; those known only at run time are symbols."""
        return self.fake.shape

    @property
    def rank(self) -> int:
        """Number of axes of a tensor."""
        return self.fake.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Type of a tensor's elements."""
        return self.fake.dtype

    @property
    def target(self) -> Any:
        """The op that is called; the name of the constant that is read."""
        return self.node.target

    @property
    def name(self) -> str:
        """The node's name in the graph."""
        return self.node.name

    @property
    def constant(self) -> Tensor | None:
        """The tensor, if this is a constant of the program; else None."""
        return self.editor.tensor(self.node)

    @property
    def users(self) -> tuple[Value, ...]:
        """The calls that read it."""
        return tuple(Value(user, self.editor) for user in self.node.users)

    @property
    def only_user(self) -> Value | None:
        """The only call that reads it; None if there are several or none."""
        return self.users[0] if len(self.node.users) == 1 else None

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values that the call reads, each once."""
        return tuple(Value(node, self.editor) for node in self.node.all_input_nodes)

    @property
    def arguments(self) -> dict[str, Any]:
        """Every argument of the call by its name in the op's schema, operands as values. Functions
        of Python, which have no schema, have their arguments by position."""
        if isinstance(self.target, OpOverload):
            named = schema.arguments(self.node)
        else:
            named = {str(k): value for k, value in enumerate(self.node.args)}
        return {name: values_in(value, self.editor) for name, value in named.items()}

    @property
    def outputs_read(self) -> frozenset[int]:
        """Which of a call's several outputs are read."""
        return frozenset(schema.output_of(user) for user in self.node.users)

    @property
    def relation(self) -> Relation | Declined | None:
        """What the table of ops, which the editor has, states of the call."""
        return bind(self.node, self.editor.table)

    def arg(self, name: str) -> Any:
        """An argument of the call by its name in the op's schema; operands are values."""
        return self.arguments[name]

    def calls(self, *targets: Any) -> bool:
        """Whether it is a call of one of these ops."""
        return self.node.op == "call_function" and self.target in targets

    def is_shaped(self, other: Value) -> bool:
        """Whether two tensors have the same shape, for all sizes."""
        return same_shape(self.fake, other.fake)

    # ----------------------------------------------------------------------- what rewrites append

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Value:
        """The value of a new call of any op."""
        return Value(self.editor.call(target, *map(node_of, args), **node_of(kwargs)), self.editor)

    def like(self, /, **changed: Any) -> Value:
        """The value of a new call of the same op, with some arguments changed."""
        arguments = schema.arguments(self.node) | node_of(changed)
        return Value(self.editor.call_named(self.target, arguments), self.editor)

    def size(self, axis: int) -> Any:
        """One size as an argument of calls: a number, or the value of a call that reads it."""
        size = self.shape[axis]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, self, axis)

    @property
    def sizes(self) -> list[Any]:
        """All sizes, as in `size`."""
        return [self.size(axis) for axis in range(self.rank)]

    def read(self, name: str, tensor: Tensor) -> Value:
        """A new constant of the program, read before this value's call. name: of the constant, with
        a number if that is taken."""
        return Value(self.editor.add_constant(name, tensor, self.node, separator=""), self.editor)

    def cat(self, others: list[Value], dim: int) -> Value:
        """This value and others, joined along an axis."""
        return self.call(aten.cat.default, [self, *others], dim)

    __add__ = _op(aten.add.Tensor, operator.add)
    __neg__ = _op(aten.neg.default, operator.neg)
    __sub__ = _op(aten.sub.Tensor, operator.sub)
    __mul__ = _op(aten.mul.Tensor, operator.mul)
    __truediv__ = _op(aten.div.Tensor, operator.truediv)
    addcmul = _op(aten.addcmul.default)
    amax = _op(aten.amax.default)
    amin = _op(aten.amin.default)
    argmax = _op(aten.argmax.default)
    argmin = _op(aten.argmin.default)
    exp = _op(aten.exp.default)
    expand = _op(aten.expand.default)
    flatten = _op(aten.flatten.using_ints)
    index_select = _op(aten.index_select.default)
    linear = _op(aten.linear.default)
    log = _op(aten.log.default)
    masked_fill = _op(aten.masked_fill.Tensor)
    mean = _op(aten.mean.dim)
    pad = _op(aten.constant_pad_nd.default)
    permute = _op(aten.permute.default)
    reshape = _op(aten.reshape.default)
    rsqrt = _op(aten.rsqrt.default)
    select = _op(aten.select.int)
    sigmoid = _op(aten.sigmoid.default)
    slice = _op(aten.slice.Tensor)
    square = _op(aten.square.default)
    squeeze = _op(aten.squeeze.dim)
    squeeze_dims = _op(aten.squeeze.dims)
    sum = _op(aten.sum.dim_IntList)
    to = _op(aten.to.dtype)
    tanh = _op(aten.tanh.default)
    unsqueeze = _op(aten.unsqueeze.default)
    var = _op(aten.var.correction)
    view_as_real = _op(aten.view_as_real.default)


def node_of(value: Any) -> Any:
    """Arguments of a call with nodes in the place of values."""
    if isinstance(value, Value):
        return value.node
    if isinstance(value, (list, tuple)):
        return [node_of(item) for item in value]
    if isinstance(value, dict):
        return {name: node_of(item) for name, item in value.items()}
    return value


def values_in(argument: Any, editor: GraphEditor) -> Any:
    """An argument of a call with values in the place of nodes."""
    if isinstance(argument, fx.Node):
        return Value(argument, editor)
    if isinstance(argument, (list, tuple)):
        return [values_in(item, editor) for item in argument]
    return argument
