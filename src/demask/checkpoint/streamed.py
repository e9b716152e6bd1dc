"""Models that read their weights while they run: one module's at a time is in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from demask.checkpoint.family import Family
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.tensors import StoredTensors


class StreamedModel:
    """A model of which the parameters are in a folder, and on the meta device until a module runs.

    Args:
        family: its class.
        path: the folder.

    Attributes:
        model: the model. It runs in the dtype of its files, or of `streaming`.
        change: makes the values of a parameter that is read, of its name, into others.
        missing: parameters that no tensor of the folder is.
        unused: tensors of the folder that the model does not have.
    """

    def __init__(self, family: Family, path: Path):
        folder = CheckpointFolder.read(path)
        data = family.full_config(folder.config)
        with _parameters_on_meta():
            self.model: Any = family.model(family.config.from_dict(dict(folder.config))).eval()
        self.model.tie_weights()
        self.stored = StoredTensors(folder, family.build(data), ())
        tied: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        self._source: dict[str, str] = {}  # by parameter, that of its names that is in the folder
        for names in tied.values():
            for name in names:
                own = next((n for n in names if self.stored.is_stored(n)), None)
                if own is not None:
                    self._source[name] = own
        self.missing = sorted(n for names in tied.values() for n in names if n not in self._source)
        several = [name for name in self._source.values() if self.stored.name_of(name) is None]
        merged = {part.tensor for name in several for part in self.stored.parts(name, 1)}
        self.unused = sorted(name for name, parameter in self.stored.parameter_of.items()
                             if parameter is None and name not in merged)  # fmt: skip
        self.change: Callable[[str, Tensor], Tensor] = lambda _, values: values
        self._load_buffers()

    def _load_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            if (stored := self.stored.name_of(name)) is not None:
                buffer.copy_(self.stored.folder.tensor(stored))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype of most of its tensors."""
        folder = self.stored.folder
        kinds = Counter(folder.stored(name).dtype for name in folder.file_of)
        return max((k for k in kinds if k.is_floating_point), key=lambda k: kinds[k])

    def read(self, name: str, memory: Memory | None = None) -> Tensor:
        """The values of a parameter, in new memory or some of `memory`; zeros of one that is in no
        file."""
        source = self._source.get(name)
        if source is None:
            shape = self.model.get_parameter(name).shape
            return torch.zeros(shape, dtype=self.dtype)
        if (stored := self.stored.name_of(source)) is None:
            return self.change(source, self.stored.merged(source))
        block = memory and memory.take(self.stored.folder.stored(stored).nbytes)
        return self.change(source, self.stored.folder.tensor(stored, block))

    @contextmanager
    def loaded(self, names: Iterable[str]) -> Iterator[None]:
        """A context in which some parameters have their values."""
        meta: list[tuple[Any, str, Any]] = []
        try:
            for name in names:
                path, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(path)
                meta.append((module, leaf, module._parameters[leaf]))
                module._parameters[leaf] = nn.Parameter(self.read(name), requires_grad=False)
            yield
        finally:
            for module, leaf, parameter in meta:
                module._parameters[leaf] = parameter

    @contextmanager
    def streaming(self, dtype: torch.dtype | None = None) -> Iterator[Any]:
        """The model, ready to run. dtype: to which floating-point weights are converted."""
        handles, memory, old = [], Memory(), list[tuple[dict[str, Any], str, Any]]()
        kind = dtype or self.dtype
        try:
            for path, module in self.model.named_modules():
                for leaf, buffer in module._buffers.items():
                    if dtype is not None and buffer is not None and buffer.is_floating_point():
                        old.append((module._buffers, leaf, buffer))
                        module._buffers[leaf] = buffer.to(dtype)
                for leaf, parameter in module._parameters.items():  # code reads dtypes of weights
                    if parameter is not None and parameter.is_floating_point():
                        old.append((module._parameters, leaf, parameter))
                        module._parameters[leaf] = nn.Parameter(parameter.to(kind), False)
                own = {leaf: f"{path}.{leaf}".lstrip(".") for leaf, p in module._parameters.items()
                       if p is not None}  # fmt: skip
                if own:
                    before, after = self._hooks(own, dtype, memory)
                    handles.append(module.register_forward_pre_hook(before))
                    handles.append(module.register_forward_hook(after, always_call=True))
            yield self.model
        finally:
            for handle in handles:
                handle.remove()
            for tensors, leaf, tensor in old:
                tensors[leaf] = tensor

    def _hooks(
        self, own: dict[str, str], dtype: torch.dtype | None, memory: Memory
    ) -> tuple[Any, Any]:
        """Hooks that read a module's parameters before it runs, and free them after it."""
        meta: dict[str, Any] = {}

        def before(module: nn.Module, _: Any) -> None:
            for leaf, name in own.items():
                value = self.read(name, memory)
                if dtype not in (None, value.dtype) and value.is_floating_point():
                    block = memory.take(value.numel() * dtype.itemsize)
                    wide = block.view(dtype)[: value.numel()].view(value.shape).copy_(value)
                    memory.free(value)
                    value = wide
                meta[leaf] = module._parameters[leaf]
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

        def after(module: nn.Module, _: Any, output: Any) -> Any:
            weights = [module._parameters[leaf] for leaf in own]
            module._parameters.update(meta)
            output = pytree.tree_map_only(Tensor, partial(_own_memory, weights), output)
            for weight in weights:
                assert weight is not None
                memory.free(weight)
            return output

        return before, after


def _own_memory(weights: Sequence[Any], value: Tensor) -> Tensor:
    """A module's output, copied if it is in the memory of one of its weights."""
    start = value.untyped_storage().data_ptr()
    is_view = any(start == weight.untyped_storage().data_ptr() for weight in weights)
    return value.clone() if is_view else value


class Memory:
    """Blocks of memory that are used again: pages of new blocks would be faulted in each time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._used: dict[int, Tensor] = {}  # by address

    def take(self, nbytes: int) -> Tensor:
        """A block of at least some bytes, uint8: the smallest free one, or a new one in the place
        of the largest."""
        fitting = [block for block in self._free if len(block) >= nbytes]
        if not fitting and self._free:
            largest = max(self._free, key=len)
            self._free = [block for block in self._free if block is not largest]
        block = min(fitting, key=len, default=None)
        if block is None:
            block = torch.empty(max(nbytes, 8), dtype=torch.uint8)
        else:
            self._free = [other for other in self._free if other is not block]
        self._used[block.data_ptr()] = block
        return block

    def free(self, values: Tensor) -> None:
        """Take back the block that some values are in; others are ignored."""
        block = self._used.pop(values.untyped_storage().data_ptr(), None)
        if block is not None:
            self._free.append(block)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which parameters of new modules have no memory, and buffers have values."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None:
            meta = nn.Parameter(value.to("meta"), requires_grad=False)
            vars(meta).update(vars(value))
            module._parameters[name] = meta

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
