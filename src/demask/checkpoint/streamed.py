"""Models that read their weights while they run: one module's at a time is in memory."""

from __future__ import annotations

import copy as copies
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from demask.checkpoint.family import Family
from demask.checkpoint.folder import CheckpointFolder
from demask.checkpoint.tensors import StoredTensors
from demask.machine.allocator import release_free_memory


class StreamedModel:
    """A model of which the parameters are in a folder, and on the meta device, where each
    call reads those that it takes.

    Args:
        family: its class.
        folder: the folder.
        config: its config, if it is another than config.json says.

    Attributes:
        model: the model.
        dtype: that `from_pretrained` gives its parameters.
        change: makes the values of a parameter that is read, of its name, into others.
        missing: parameters that no tensor of the folder is.
        unused: tensors of the folder that the model does not have.
    """

    def __init__(self, family: Family, folder: CheckpointFolder, config: Mapping[str, Any] | None = None):
        data = family.full_config(config or folder.config)
        with _parameters_on_meta():
            self.model: Any = family.model(family.config.from_dict(copies.deepcopy(data))).eval()
        if self.model._can_set_experts_implementation():  # grouped products have no float64
            self.model.set_experts_implementation("eager")
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
        self.unused = sorted(
            name for name, parameter in self.stored.parameter_of.items() if parameter is None and name not in merged
        )
        self.change: Callable[[str, Tensor], Tensor] = lambda _, values: values
        for name, buffer in self.model.named_buffers():
            if (stored := self.stored.name_of(name)) is not None:
                buffer.copy_(self.stored.folder.tensor(stored))
        # As from_pretrained: that of the config, else that of the first tensor.
        floats = (
            d
            for f in folder.files.values()
            for t in f.tensors.values()
            if (d := t.dtype).is_floating_point and d.itemsize > 1
        )
        self.dtype = self.model.config.dtype or next(floats, torch.float32)
        self._convert(self.dtype, "_parameters")

    def _convert(self, dtype: torch.dtype, *kinds: str) -> None:
        """Convert floating-point tensors of the model, of which the parameters are on meta."""
        for module in self.model.modules():
            for kind in kinds:
                for leaf, tensor in getattr(module, kind).items():
                    if tensor is not None and tensor.is_floating_point():
                        new = tensor.detach().to(dtype)
                        if kind == "_parameters":
                            new = nn.Parameter(new, requires_grad=False)
                        getattr(module, kind)[leaf] = new

    def read(self, name: str) -> Tensor:
        """The values of a parameter, in new memory; zeros of one that is in no file."""
        source = self._source.get(name)
        if source is None:
            return torch.zeros(self.model.get_parameter(name).shape)
        if (stored := self.stored.name_of(source)) is None:
            return self.change(source, self.stored.merged(source))
        return self.change(source, self.stored.folder.tensor(stored))

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
        """The model, ready to run. dtype: that of its parameters and buffers; None: that of the
        folder's for parameters, and buffers as the class makes them."""
        buffers = [(module._buffers, dict(module._buffers)) for module in self.model.modules()]
        if dtype is not None:
            self._convert(dtype, "_parameters", "_buffers")
        try:
            with _ParameterReads(self, dtype or self.dtype):
                yield self.model
        finally:
            for tensors, before in buffers:
                tensors.update(before)
            self._convert(self.dtype, "_parameters")


class _ParameterReads(TorchFunctionMode):
    """A mode in which a function that takes a parameter of a model gets its values. Those of one
    module are in memory until another's are read: a module may take an expert at a time."""

    def __init__(self, streamed: StreamedModel, dtype: torch.dtype):
        super().__init__()
        self._streamed, self._dtype = streamed, dtype
        self._names = {id(p): name for name, p in streamed.model.named_parameters()}
        self._values: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # a shape or dtype, or `.T`
            hollow = tree_map_only(nn.Parameter, lambda p: torch.zeros((), dtype=p.dtype).expand(p.shape), args)
            result = func(*hollow, **kwargs)
            if not isinstance(result, Tensor):
                return result
        args, kwargs = tree_map_only(nn.Parameter, self._read, (args, kwargs))
        return func(*args, **kwargs)

    def _read(self, parameter: nn.Parameter) -> Tensor:
        name = self._names.get(id(parameter)) if parameter.is_meta else None
        if name is None:
            return parameter
        if name not in self._values:
            module = name.rpartition(".")[0]
            if any(other.rpartition(".")[0] != module for other in self._values):
                self._values.clear()
                release_free_memory()
            value = self._streamed.read(name)
            self._values[name] = value.to(self._dtype) if value.is_floating_point() else value
        return self._values[name]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which parameters of new modules have no memory, and buffers have values."""

    def on_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> Any:
        meta = nn.Parameter(parameter.to("meta"), requires_grad=False)
        vars(meta).update(vars(parameter))
        return meta

    handle = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()
