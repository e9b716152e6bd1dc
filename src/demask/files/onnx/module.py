"""An ONNX file as a PyTorch module."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from demask.errors import BadInput, DemaskError
from demask.failures import public
from demask.files.onnx.fix_inputs import fix_inputs
from demask.files.onnx.model import OnnxFile
from demask.files.onnx.op_functions import OnnxCall
from demask.files.onnx.plan import OnnxPlan, OnnxPlanner, OnnxStep
from demask.files.onnx.read.reader import read
from demask.files.onnx.recording import OnnxRecorder, OnnxRecording, Recordings, key_of
from demask.files.onnx.values import Host, Value, tensor_of
from demask.graph.provenance import Interface
from demask.graph.result.demasked_module import attach


@public
def from_onnx(
    path: str | os.PathLike[str], *, inputs: Mapping[str, Any] | None = None
) -> OnnxModule:
    """The network in an ONNX file as an `nn.Module`: the file's inputs in their order, by position;
    its one output, or a tuple of them.

    inputs: constants in place of inputs, by name: a number, a list, an array or a tensor; the
    module takes the others. An `If` or `Loop` that such an input decides is decided then. Weights
    keep their names, so that `state_dict`, pruning and training work as on any module. Raises
    BadInput or RefusedFile. Feature: ONNX in; needs `pip install demask[onnx]`.

    >>> import demask, torch
    >>> net = demask.from_onnx("model.onnx")             # doctest: +SKIP
    >>> net(torch.randn(1, 3, 224, 224)).shape           # doctest: +SKIP
    torch.Size([1, 1000])
    >>> demask.from_onnx("speech.onnx", inputs={"rate": 16000})    # doctest: +SKIP
    """
    try:
        return OnnxModule(fix_inputs(read(path), inputs or {}))
    except BadInput as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error


class OnnxModule(nn.Module):
    """The graph of an ONNX file, run node by node. For inference it is as fast as its PyTorch ops;
    it is there to be demasked, pruned, trained or exported."""

    def __init__(self, file: OnnxFile):
        super().__init__()
        planner = OnnxPlanner(file)
        try:
            self.plan = planner.plan()
        except RecursionError as error:
            raise BadInput("expected functions that do not call themselves") from error
        self.interface = Interface(
            file.graph.inputs, file.graph.outputs, file.graph.name, file.doc, dict(file.metadata),
            planner.grids,
        )  # fmt: skip
        for name, tensor in planner.tensors.items():
            fixed = name in planner.stored
            attach(self, name, tensor if fixed else nn.Parameter(tensor))
        self.recordings = Recordings()
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> OnnxModule:
        memo[id(self.plan)] = self.plan  # frozen
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        nn.Module.__init__(twin)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def forward(self, *inputs: Any) -> Any:
        """The outputs for the file's inputs, in their order."""
        names = self.plan.inputs
        if len(inputs) != len(names):
            raise TypeError(f"expected {len(names)} inputs {list(names)}, got {len(inputs)}")
        made = [self._tensor(v) for v in self._outputs(inputs)]
        return made[0] if len(made) == 1 else tuple(made)

    def _outputs(self, inputs: Sequence[Any]) -> list[Value]:
        """The values of the outputs: by a recording of an earlier call like this one, where there
        is one and its sizes are those of this call."""
        key = key_of(inputs, self)
        recording = self.recordings.get(key) if key else None
        if isinstance(recording, OnnxRecording):
            named = dict(zip(self.plan.inputs, inputs, strict=True))
            # What fails is run again node by node, for an error that names the node.
            with suppress(Exception):
                if (made := recording.run(named, self._held)) is not None:
                    return made
        values = [_given(v) for v in inputs]
        if recording is not ...:
            return self._run(self.plan, values, {})
        recorder = OnnxRecorder(self.plan, self._held)
        made = self._run(self.plan, values, {}, recorder)
        self.recordings.put(key, recorder.recording(made))
        return made

    def _run(
        self,
        plan: OnnxPlan,
        inputs: Sequence[Value],
        outer: Mapping[str, Value],
        recorder: OnnxRecorder | None = None,
    ) -> list[Value]:
        values: dict[str, Value] = {**outer, "": None}
        for name, known in plan.constants.items():
            values[name] = known if isinstance(known, Host) else self._held(known)
        values |= dict(zip(plan.inputs, inputs, strict=True))
        for step in plan.steps:
            self._do(step, plan, values, recorder)
        for name in plan.outputs:
            if name not in values:
                raise BadInput(f"demask makes no {name!r}, an output that few networks ask for")
        return [values[name] for name in plan.outputs]

    def _do(
        self,
        step: OnnxStep,
        plan: OnnxPlan,
        values: dict[str, Value],
        recorder: OnnxRecorder | None,
    ) -> None:
        node = step.node
        context: dict[str, Any] = {
            "version": step.version,
            "outputs": len(node.outputs),
            "run": lambda inner, inputs: self._run(
                inner, inputs, values, recorder and recorder.branch(inner, node, values)
            ),
        }
        try:
            inputs = [values[name] for name in node.inputs]
            context["device"] = device = self._device(inputs)
            context["as_tensor"] = lambda value: tensor_of(value, self._held, device)
            record = recorder and recorder.called
            made = step.entry(node, inputs, OnnxCall(self._held, device, context, record))
            if recorder:
                recorder.node(step, plan, inputs, made)
        except DemaskError as error:
            if str(node) in str(error):
                raise
            raise type(error)(f"{node}: {error}") from error
        except Exception as error:  # whatever torch and numpy raise of odd sizes and types
            raise BadInput(f"{node}: {type(error).__name__}: {error}") from error
        values.update(zip(node.outputs, made, strict=False))
        values[""] = None
        for name in step.drops:
            values.pop(name, None)

    def _held(self, name: str) -> Tensor:
        return reduce(getattr, name.split("."), self)  # type: ignore[arg-type]

    def _device(self, inputs: Sequence[Value]) -> torch.device:
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        owned = next(self.parameters(), None) if not tensors else tensors[0]
        return torch.device("cpu") if owned is None else owned.device

    def _tensor(self, value: Value) -> Any:
        if isinstance(value, list):
            return [self._tensor(v) for v in value]
        if isinstance(value, Host) and value.dtype is None:
            return value.array
        return tensor_of(value, self._held, self._device([]))


def _given(value: Any) -> Any:
    """An input of the caller's as a value; text comes as an array of numpy's."""
    if isinstance(value, list):
        return [_given(v) for v in value]
    if isinstance(value, np.ndarray) and value.dtype.kind in "OUT":
        return Host.of(value.astype(object))
    return value
