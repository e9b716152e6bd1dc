"""Models that read their weights while they run: one module's at a time is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from demask.checkpoint.family import Family
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.tensors import StoredTensors
from demask.machine.allocator import release_free_memory


class StreamedModel:
    """A model of which the parameters are in a folder, and on the meta device until a module runs.

    Args:
        family: its class.
        path: the folder.

    Attributes:
        model: the model. It runs in the dtype of its files, or of `streaming`.
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
        self._load_buffers()

    def _load_buffers(self) -> None:
        for name, buffer in self.model.named_buffers():
            if (stored := self.stored.name_of(name)) is not None:
                buffer.copy_(self.stored.folder.tensor(stored))

    def read(self, name: str) -> Tensor:
        """The values of a parameter, in new memory; zeros of one that is in no file."""
        source = self._source.get(name)
        if source is None:
            shape = self.model.get_parameter(name).shape
            return torch.zeros(shape, dtype=self.model.dtype)
        if (stored := self.stored.name_of(source)) is not None:
            return self.stored.folder.tensor(stored)
        return self.stored.merged(source)

    @contextmanager
    def streaming(self, dtype: torch.dtype | None = None) -> Iterator[Any]:
        """The model, ready to run. dtype: to which floating-point weights are converted."""
        handles = []
        floats = [name for name, b in self.model.named_buffers() if b.is_floating_point()]
        if dtype is not None:
            for name in floats:
                path, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(path)
                module._buffers[leaf] = module._buffers[leaf].to(dtype)
        try:
            for path, module in self.model.named_modules():
                own = {leaf: f"{path}.{leaf}".lstrip(".") for leaf, p in module._parameters.items()
                       if p is not None}  # fmt: skip
                if own:
                    before, after = self._hooks(own, dtype)
                    handles.append(module.register_forward_pre_hook(before))
                    handles.append(module.register_forward_hook(after, always_call=True))
            yield self.model
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self, own: dict[str, str], dtype: torch.dtype | None) -> tuple[Any, Any]:
        """Hooks that read a module's parameters before it runs, and free them after it."""
        meta: dict[str, Any] = {}

        def before(module: nn.Module, _: Any) -> None:
            for leaf, name in own.items():
                value = self.read(name)
                if dtype is not None and value.is_floating_point():
                    value = value.to(dtype)
                meta[leaf] = module._parameters[leaf]
                module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

        def after(module: nn.Module, _: Any, __: Any) -> None:
            module._parameters.update(meta)
            release_free_memory()

        return before, after


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
