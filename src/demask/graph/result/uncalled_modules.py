"""Modules of a network that are not called: they only contain other modules and tensors."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from demask.errors import BadInput


class Uncalled(nn.Module):
    """A module that only contains other modules and tensors. The network does not call it, so that
    its hooks would never run."""

    def _refuse(self, what: str) -> BadInput:
        inside = [*self._modules, *self._parameters, *self._buffers]
        names = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
        return BadInput(
            f"{what} would never run: this module, which contains {names}, is not called in this "
            "network; register it on the layers inside that are called "
            "(network.graph.find_nodes(op='call_module') names them), or on the full network"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BadInput: the network's graph contains its calls."""
        raise self._refuse("forward of a part")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise BadInput for the parameters of torch.nn.utils.prune: its mask would be ignored."""
        if name.removesuffix("_orig") != name and name.removesuffix("_orig") in self._parameters:
            raise self._refuse(f"a pruning of {name.removesuffix('_orig')}")
        super().register_parameter(name, param)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BadInput: it would never run."""
        raise self._refuse("a forward hook")

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BadInput: it would never run."""
        raise self._refuse("a forward pre hook")

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BadInput: it would never run."""
        raise self._refuse("a backward hook")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BadInput: it would never run."""
        raise self._refuse("a backward pre hook")


def is_holder(module: nn.Module) -> bool:
    """Whether a module only contains other modules and tensors."""
    return type(module) in (nn.Module, Uncalled)


def refuse_hooks(network: fx.GraphModule) -> None:
    """Let the modules of a network that are not called refuse hooks, in place."""
    for module in network.modules():
        if type(module) is nn.Module:
            module.__class__ = Uncalled
