"""Batched fully connected layers: their weights are read once for N inputs.

    linear(cat(x_1, ..., x_N), W)[:, rows] == cat(linear(x_k, W[rows]) for each k)

A block of a weight's rows is read, multiplied with the activations of all N inputs, and dropped
before the next block. The calls between such layers run for a few inputs at a time. The weights may
be in a file far larger than memory. Source: US 10,417,555 B2 (batched fully connected layers); the
arithmetic is in `demask.traverse.traffic`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, fx, nn
from torch.nn.functional import linear
from torch.utils import _pytree as pytree

from demask.errors import BadInput
from demask.exec.call_groups import returned, run_calls, stored_constants
from demask.exec.device import Device
from demask.failures import public
from demask.files.weight_file import StoredTensor, WeightFile, with_weights
from demask.graph.capture.capture import capture
from demask.graph.capture.fold_constants import fold_constants
from demask.graph.capture.functionalize import functionalize
from demask.graph.guards import literal_inputs
from demask.graph.isolation import in_isolation
from demask.graph.program import Program
from demask.graph.result.demasked_module import attach, build, unmeasured
from demask.graph.result.resize import tensors_of
from demask.machine.byte_sizes import BUDGET, format_bytes, parse_memory
from demask.ops import TABLE, Table
from demask.traverse.batching.batch_plan import BatchPlan, Level, StreamedLayer, Traffic
from demask.traverse.batching.levels import is_view, plan_batches, streamable

Weights = str | os.PathLike[str] | None
FILE = "weights.safetensors"  # written to the folder `weights`


@in_isolation
@public
def batch(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory: str | int | Device = BUDGET,
    inputs: int = 16,
    weights: Weights = None,
    at_once: int | None = None,
    table: Table = TABLE,
) -> Batched:
    """A module that reads each weight of fully connected layers once for up to `inputs` inputs.

    Such layers run for `inputs` inputs at once, and the operations between such layers for
    `at_once` inputs at a time, so that activations fit in memory. The weights may be in a file that
    is larger than memory; then each layer reads blocks of its weight. The module is called like the
    model, with a batch of any size, for inference only: calls record no gradients. Its attribute
    `traffic` counts the bytes of weights read.

    Outputs equal those of the model in eval mode up to rounding: torch may select other kernels for
    other batch sizes, and with weights in a file, sums may be in another order.

    Source: US 10,417,555 B2 (batched fully connected layers).

    Args:
        model: nn.Module, or ExportedProgram whose first axis is dynamic. With a file of weights it
            must be an nn.Module, which may be on the meta device.
        args: tuple of example inputs whose first axis is the batch; default (), no such inputs.
        kwargs: mapping of example keyword inputs; default None, no keyword inputs.
        memory: budget in bytes, an int or a text such as "1GiB", for activations, for blocks of
            weights and, if weights are in a file, for all constants in memory; default "512MiB".
            Inputs, results and temporary memory of convolutions do not count. Or a `Device`, whose
            memory it is, with dense weights.
        inputs: number of inputs that share one read of the weights, 1 or more; default 16.
        weights: None (default) to share the model's tensors; the path of a .safetensors file with
            the names of the model's state_dict, which may lack some; or the path of a folder, in
            which `batch` writes weights.safetensors.
        at_once: number of inputs at a time between fully connected layers, 1 or more; default None,
            the largest one that fits `memory`.
        table: op table, which describes which inputs each output position of an ATen op reads;
            default `demask.ops.TABLE`. `TABLE.extended` adds your own ops.

    Raises:
        BadInput: no plan fits `memory` (the message has the smallest budget); an argument has a
            wrong type or value; the model fails on the example; the model's outputs for one input
            depend on another input; or the file of weights is missing, damaged or does not match
            the model.
        NotExportable: torch.export cannot capture the model.
        FileError: the file of weights cannot be written.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.traverse import batch
        >>> model, x = Sequential(Linear(8, 4), ReLU(), Linear(4, 2)), torch.randn(5, 8)
        >>> small = batch(model, (x[:2],), inputs=4)
        >>> torch.allclose(small(x), model(x), atol=1e-6), small.traffic.weight_bytes_read  # 160, twice
        (True, 320)
    """
    _check_counts(inputs=inputs, at_once=inputs if at_once is None else at_once)
    program, stored, file = _capture_with_weights(model, args, kwargs, weights, inputs, table, keep=True)
    plan = plan_batches(program, stored, _budget(memory), inputs, table, at_once)
    return Batched(program, plan, file)


@in_isolation
@public
def traffic(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    memory: str | int | Device = BUDGET,
    inputs: int = 16,
    weights: Weights = None,
    at_once: int | None = None,
    table: Table = TABLE,
) -> Traffic:
    """The predicted bytes of weights that one call of the module of `batch` reads, as a `Traffic`.

    `Traffic` has `weight_bytes` (of all weights), `weight_bytes_read`, `unbatched` (bytes without
    batching) and `saved` (1 - weight_bytes_read / unbatched), and prints as a table. The prediction
    follows from the graph: the network is not executed, and no file is written.

    Args:
        model: nn.Module or ExportedProgram, as in `batch`.
        args: tuple of example inputs whose first axis is the batch; default (), no such inputs.
        kwargs: mapping of example keyword inputs; default None, no keyword inputs.
        batch: number of inputs of the call, 1 or more; default None, the value of `inputs`.
        memory: budget in bytes, an int or a text such as "1GiB", or a `Device`; default "512MiB".
        inputs: number of inputs that share one read of the weights, 1 or more; default 16.
        weights: None (default) or the path of a file or folder, as in `batch`.
        at_once: number of inputs at a time between fully connected layers, so that the weights of
            other layers are read once per `at_once` inputs; default None, the largest that fits
            `memory`.
        table: op table, as in `batch`; default `demask.ops.TABLE`.

    Raises:
        BadInput: no plan fits `memory`; an argument has a wrong type or value; the model fails on
            the example; the model's outputs for one input depend on another input; or the file of
            weights is missing, damaged or does not match the model.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> from demask.traverse import traffic
        >>> model = Sequential(Linear(8, 4), ReLU(), Linear(4, 2))
        >>> predicted = traffic(model, (torch.randn(2, 8),), inputs=16)
        >>> predicted.weight_bytes_read, predicted.unbatched, predicted.saved == 15 / 16
        (160, 2560, True)
    """
    count = inputs if batch is None else batch
    _check_counts(inputs=inputs, at_once=inputs if at_once is None else at_once, batch=count)
    program, stored, _ = _capture_with_weights(model, args, kwargs, weights, inputs, table, keep=False)
    plan = plan_batches(program, stored, _budget(memory), inputs, table, at_once)
    return plan.traffic(count)


def _budget(memory: str | int | Device) -> int:
    """The budget in bytes. Raises BadInput for a device whose weights are not read as they are."""
    if not isinstance(memory, Device):
        return parse_memory(memory)
    if memory.weights != "dense":
        raise BadInput(f'batches read weights as they are: expected Device(weights="dense"), got {memory.weights!r}')
    return memory.bytes


class Batched(nn.Module):
    """The module that `batch` returns: its fully connected layers run for many inputs at a time.

    Its parameters and buffers are the constants in memory, under the model's names.

    Attributes:
        plan: the `BatchPlan`: order of the layers, blocks of weights, predicted memory in bytes.
        traffic: `Traffic`, bytes of weights read since the module was created or copied.
        file: the opened file of weights, or None.
        front: module that checks the inputs of a call and flattens them.
    """

    def __init__(self, program: Program, plan: BatchPlan, file: WeightFile | None):
        super().__init__()
        self.plan, self.file = plan, file
        self.front = _input_checker(program)
        self.held = nn.Module()
        for name in sorted(plan.constants):
            attach(self.held, name, _frozen(program.constants[name].tensor, file))
        self._read = {layer.name: 0 for layer in plan.layers}
        self._inputs = 0
        self.eval()

    @property
    def traffic(self) -> Traffic:
        """The bytes of weights read so far, by layer, and the number of inputs, as a `Traffic`."""
        layers = (replace(layer, read=self._read[layer.name]) for layer in self.plan.layers)
        return Traffic(self._inputs, tuple(layers))

    def extra_repr(self) -> str:
        """The text in the module's repr: inputs per pass and predicted peak memory."""
        plan = self.plan
        return f"inputs={plan.inputs}, at_once={plan.at_once}, peak={format_bytes(plan.peak)}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a batch of any size of 1 or more.

        Args:
            args: inputs as in the example, of other batch sizes.
            kwargs: keyword inputs as in the example.

        Raises:
            BadInput: the batch is empty, or another axis has another size than in the example.
            RuntimeError: torch does not support the dtype or device of an input.
        """
        program, axes = self.plan.program, self.plan.batch_axes
        placeholders = program.graph.find_nodes(op="placeholder")
        inputs = dict(zip(placeholders, self.front(*args, **kwargs), strict=True))
        size = next(value.shape[0] for node, value in inputs.items() if node in axes.by_value)
        if size == 0:
            raise BadInput("expected a batch of one input or more, got none")
        constants = dict(tensors_of(self.held))
        results = dict(inputs)
        computed = [node for node in program.graph.output_node().all_input_nodes if node.op == "call_function"]
        with torch.no_grad():
            for start in range(0, size, self.plan.inputs):
                n = min(self.plan.inputs, size - start)
                values = axes.parts(inputs, inputs, size, start, n)
                for level in self.plan.levels:
                    self._run_level(level, values, constants, n)
                axes.put(results, computed, values, size, start, n)
                self._inputs += n
        return returned(program, results, constants.__getitem__)

    def _run_level(self, level: Level, values: dict[fx.Node, Any], constants: Mapping[str, Tensor], n: int) -> None:
        """Run a level for n inputs: add its results to `values`, and delete those it reads last."""
        axes, group = self.plan.batch_axes, level.group
        if level.streamed is not None:
            values[level.streamed.node] = self._run_streamed(level.streamed, values, constants)
        else:
            at_once = n if level.connected else self.plan.at_once
            written: dict[fx.Node, Any] = {}
            for start in range(0, n, at_once):
                count = min(at_once, n - start)
                parts = axes.parts(values, group.reads, n, start, count)
                run_calls(group, parts, constants.__getitem__)
                axes.put(written, group.writes, parts, n, start, count)
                for layer in level.layers:
                    self._read[layer.name] += layer.weight_bytes
            values |= written
        for node in group.last_reads:
            values.pop(node, None)  # sizes have no value

    def _run_streamed(
        self, layer: StreamedLayer, values: Mapping[fx.Node, Any], constants: Mapping[str, Tensor]
    ) -> Tensor:
        """A layer's output for all inputs, computed in blocks of a weight in a file."""
        x = values[layer.x]
        bias = None if layer.bias is None else constants[layer.bias]
        if not layer.out_first:
            return self._sum_products(layer, x, bias)
        output = x.new_empty(*x.shape[:-1], layer.outputs)
        for start, w_oi in self._blocks(layer):
            rows = slice(start, start + len(w_oi))
            output[..., rows] = linear(x, w_oi, None if bias is None else bias[rows])
        return output

    def _sum_products(self, layer: StreamedLayer, x: Tensor, bias: Tensor | None) -> Tensor:
        """A layer's output for a weight [in, out]: the sum of the blocks' partial products."""
        matrix = x.reshape(-1, x.shape[-1])
        dtype = torch.float32 if layer.sums_wide else x.dtype
        total = torch.zeros(len(matrix), layer.outputs, dtype=dtype)
        if bias is not None:
            total += bias
        for start, w_io in self._blocks(layer):
            total.addmm_(matrix[:, start : start + len(w_io)].to(dtype), w_io.to(dtype))
        return total.to(x.dtype).view(*x.shape[:-1], layer.outputs)

    def _blocks(self, layer: StreamedLayer) -> Any:
        assert self.file is not None
        stored = layer.stored
        buffer = torch.empty(layer.rows * stored.row_bytes, dtype=torch.uint8)
        for start, block in self.file.blocks(stored, layer.rows, buffer):
            self._read[layer.node.name] += block.nbytes
            yield start, block


def _frozen(tensor: Tensor, file: WeightFile | None) -> Tensor:
    # the model's memory, or a copy of a mapped file's
    tensor = tensor.detach() if file is None else tensor.detach().clone()
    if tensor.is_floating_point() or tensor.is_complex():
        return nn.Parameter(tensor, requires_grad=False)
    return tensor


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise BadInput(f"expected {name} to be one or more, got {count!r}")


def _input_checker(program: Program) -> nn.Module:
    """A module that is called like the network, checks the inputs, and returns them flattened."""
    graph = fx.Graph()
    inputs = [graph.node_copy(node) for node in program.graph.find_nodes(op="placeholder")]
    graph.output(tuple(inputs))
    record = unmeasured(program, values=literal_inputs(program.graph))
    out_spec = pytree.tree_structure(tuple(range(len(inputs))))
    return build(replace(program, graph=graph, constants={}, out_spec=out_spec), record)


# ------------------------------------------------------------------------- where weights come from


def _capture_with_weights(
    model: nn.Module, args: Any, kwargs: Any, weights: Weights, inputs: int, table: Table, *, keep: bool
) -> tuple[Program, dict[str, StoredTensor], WeightFile | None]:
    """The captured network, its constants in a file, and the file. keep: whether to write them, if
    `weights` is a folder."""
    if weights is None:
        return _capture_functional(model, args, kwargs), {}, None
    if Path(weights).is_dir():
        program = _check_on_cpu(_capture_functional(model, args, kwargs))
        stored = streamable(program, inputs, table)
        if not keep or not stored:
            return program, stored, None
        tensors = {name: program.constants[name].tensor for name in stored}
        file = WeightFile.write(Path(weights) / FILE, tensors)
        return program, {name: file.tensors[name] for name in stored}, file
    file = WeightFile.read(weights)
    program = _check_on_cpu(_capture_functional(_with_file_weights(model, file), args, kwargs, fold=False))
    stored = stored_constants(program, file.tensors)
    return program, {name: replace(tensor, name=name) for name, tensor in stored.items()}, file


def _capture_functional(model: nn.Module, args: Any, kwargs: Any, *, fold: bool = True) -> Program:
    """The captured, functional network. fold: compute calls on constants once; off where the values
    are in a file."""
    program = functionalize(capture(model, args, kwargs))
    constant = {n for n in program.graph.nodes if n.op == "get_attr"}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(n in constant for n in sources):
            constant.add(node)
    if fold and any(n.op == "call_function" and not is_view(n) for n in constant):
        return fold_constants(program)
    for node in program.graph.find_nodes(op="get_attr"):
        tensor = program.constants[str(node.target)].tensor
        if not tensor.is_floating_point():
            node.meta["positions"] = tensor.cpu()
    return program


def _check_on_cpu(program: Program) -> Program:
    """The program, if it is on the CPU, as weights from a file are; else BadInput."""
    leaves = [leaf for n in program.graph.nodes for leaf in pytree.tree_leaves(n.meta.get("val"))]
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    if devices - {"cpu"}:
        raise BadInput(
            f"weights in a file are for networks on the CPU, got one on {devices}; move it there, or give weights=None"
        )
    return program


def _with_file_weights(model: nn.Module, file: WeightFile) -> nn.Module:
    """A copy of the model with the file's mapped tensors as its own."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"expected an nn.Module, got {type(model).__name__}")
    try:
        with safe_open(file.path, framework="pt") as opened:
            return with_weights(model, file, lambda stored: opened.get_tensor(stored.name))[0]
    except SafetensorError as error:
        raise BadInput(f"{file.path}: {error}; write it again") from error
