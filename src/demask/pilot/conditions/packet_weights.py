"""Channels that are not computed are not read: a condition on a network whose weights are in a packet file.

The index of each layer selects rows of its weight. They are read from the packets that hold them when the layer runs,
and dropped after it, or retained within a budget of memory: work, bytes read and memory are proportional to what is
computed. Where the priorities are those of the file, the rows that are read are the first packets of each tensor:
priority and weights have one address.

The program is captured with weights of one element each, expanded to their shapes.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from demask.errors import BadInput
from demask.exec.call_groups import Constants, bind_inputs, consecutive_groups, returned, run_calls, stored_constants
from demask.facts.analysis import Analysis
from demask.files.weight_file import StoredTensor, WeightFile, with_weights
from demask.graph.program import Program
from demask.machine.byte_sizes import format_bytes
from demask.ops import Table, schema
from demask.pilot.conditions.base import Args, Kwargs
from demask.pilot.conditions.channel_conditions import Draft, Skip, Supported
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.packet_reader import PacketReader
from demask.pilot.weight_layers import layers_of
from demask.shrink.runtime_index import emit_indexed

aten = torch.ops.aten


def skipping_packets(
    condition: Skip,
    model: nn.Module,
    args: Args,
    kwargs: Kwargs,
    pilot: Any,
    path: str | os.PathLike[str],
    memory: int | None,
    table: Table,
) -> PacketSkip:
    """The module that `condition` returns for weights in a packet file. pilot: None for the file's priorities.

    Raises BadInput where the file does not fit the model, or the condition needs weights before the run.
    """
    reader = PacketReader(path)
    try:
        outline = _outlined(model, reader, Path(path))
        none = ExecutionData("channel", {}, f"the priorities of {Path(path).name}")
        draft = Draft(condition, outline, args, kwargs, none if pilot is None else pilot, table)
        if pilot is None:
            draft.pilot = _priorities(draft, reader)
        module = PacketSkip(draft, reader, memory)
    except BaseException:
        reader.close()
        raise
    return module


def _outlined(model: nn.Module, reader: PacketReader, path: Path) -> nn.Module:
    """The model with the tensors outside of packets, and expanded ones for those in packets."""
    blocked = {t.name: StoredTensor(t.name, t.dtype, t.shape, 0) for t in reader.index.tensors}
    stored = blocked | {section.name: section for section in reader.index.sections}
    stored |= {name: stored[other] for name, other in reader.index.aliases}

    def read(tensor: StoredTensor) -> Tensor:
        if tensor.name in blocked:
            return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        return reader.tensor(tensor.name)

    return with_weights(model, WeightFile(path, 0, 0, stored), read)[0]


def _tensor_names(program: Program, reader: PacketReader) -> dict[str, str]:
    """By constant of a program, its tensor in packets."""
    names = {t.name: t.name for t in reader.index.tensors}
    names |= {name: names[other] for name, other in reader.index.aliases if other in names}
    return stored_constants(program, names)


def _priorities(draft: Draft, reader: PacketReader) -> ExecutionData:
    """Of each row of each conditioned layer, the priority of the packet that has it."""
    names = _tensor_names(draft.program, reader)
    layers = {layer.name: layer for layer in layers_of(draft.analysis)}
    magnitudes = {}
    for target in draft.targets:
        layer = layers[target.layer]
        if layer.weight not in names or layer.rows != (0,):
            raise BadInput(
                f"the file has no priorities of {target.layer!r}, whose channels are no rows of a tensor in packets: "
                "pass the pilot that the file was written with, or layers='...' without it"
            )
        name = names[layer.weight]
        of_rows = reader.index.packets["priority"][reader.holders(name)]
        magnitudes[target.layer] = torch.from_numpy(of_rows.astype("f4"))
    return ExecutionData("channel", magnitudes, "priorities of packets")


class PacketSkip(Supported):
    """A network that computes some channels of each layer, with weights that it reads from a packet file in parts.

    Attributes, besides those of `Supported`: `bytes_read` and `peak_weight_bytes`, of the last call: bytes read from
    the file, and the most bytes of weights in memory at a time. `close` closes the file.
    """

    def __init__(self, draft: Draft, reader: PacketReader, memory: int | None):
        super().__init__(draft, {}, draft.observer())
        self.reader, self.memory = reader, memory
        self.bytes_read = self.peak_weight_bytes = 0
        program, picks = draft.constant_picks([0.0])
        self.program = emit_indexed(Analysis(program, draft.analysis.table), picks)
        if derived := self.program.constants.keys() - program.constants.keys():
            raise BadInput(f"{min(derived)} is computed of weights before the run: it cannot be read from packets")
        self.names = _tensor_names(self.program, reader)
        (self.group,) = consecutive_groups(Constants(self.program))
        self.retained: OrderedDict[str, tuple[Tensor | None, Tensor]] = OrderedDict()

    def close(self) -> None:
        """Closes the file; calls fail from then on."""
        self.reader.close()

    @torch.no_grad()
    def run(self, indices: Sequence[Tensor], args: Args, kwargs: Kwargs = None, values: Sequence[Tensor] = ()) -> Any:
        """The outputs for indices of your own, int64 [k] of distinct positions per layer, one at least."""
        self.last = tuple(indices)
        before, self.peak_weight_bytes = self.reader.bytes_read, 0
        known = bind_inputs(self.program, (*args, *indices), dict(kwargs or {}))
        run_calls(self.group, known, self._constant, compute=self._compute)
        self.bytes_read = self.reader.bytes_read - before
        return returned(self.program, known, self._constant)

    def _compute(self, node: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        """The result of a call; rows of a tensor in packets are read when a call selects them."""
        source = node.args[0] if node.target is aten.index_select.default and node.args[1] == 0 else None
        if isinstance(source, fx.Node) and source.op == "get_attr" and str(source.target) in self.names:
            index: Any = node.args[2]
            return self._rows(self.names[str(source.target)], value(index))
        return schema.call_on(node, value)

    def _constant(self, key: str) -> Tensor:
        return self._rows(self.names[key], None) if key in self.names else self.program.constants[key].tensor

    def _rows(self, name: str, rows: Tensor | None) -> Tensor:
        """Rows of a tensor in packets, from memory where they are retained."""
        old_rows, old = self.retained.pop(name, (None, None))
        if old is None or not _are_equal(rows, old_rows):
            count = self.reader.index.tensors[self.reader.number(name)]
            size = (count.rows if rows is None else len(rows)) * count.row_bytes
            if self.memory is not None and size > self.memory:
                raise BadInput(
                    f"{name}: the rows that are computed take {format_bytes(size)}, more than the memory of "
                    f"{format_bytes(self.memory)}; pass memory={size} or more, or compute a smaller share"
                )
            self._drop(size)
            old = self.reader.load_rows(name, rows)
        self.retained[name] = rows, old
        used = sum(tensor.nbytes for _, tensor in self.retained.values())
        self.peak_weight_bytes = max(self.peak_weight_bytes, used)
        return old

    def _drop(self, size: int) -> None:
        """Drop the rows that were used the longest time ago, until there is room for more bytes."""
        while self.memory is not None and self.retained:
            if size + sum(tensor.nbytes for _, tensor in self.retained.values()) <= self.memory:
                break
            self.retained.popitem(last=False)


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are the same rows; None: all."""
    return a is b or (a is not None and b is not None and a.equal(b))
