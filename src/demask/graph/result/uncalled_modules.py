"""Modules of a network that are not called: they hold names."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from demask.errors import BadInput


class Uncalled(nn.Module):
    """A module that holds names of others and of tensors: the network does not call it, so what is
    put on it would never run."""

    def _refuse(self, what: str) -> BadInput:
        inside = [*self._modules, *self._parameters, *self._buffers]
        held = ", ".join(inside[:4]) + (", ..." if len(inside) > 4 else "")
        return BadInput(
            f"{what} would never run: this module, which holds {held}, is not called in this "
            "network, it only keeps names; put it on the layers inside that are called "
            "(network.graph.find_nodes(op='call_module') names them), or on the whole network"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """BadInput: what it was is in the network's graph."""
        raise self._refuse("forward of a part")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """BadInput for what torch.nn.utils.prune begins with: its mask would be ignored."""
        if name.removesuffix("_orig") != name and name.removesuffix("_orig") in self._parameters:
            raise self._refuse(f"a pruning of {name.removesuffix('_orig')}")
        super().register_parameter(name, param)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """BadInput: it would be ignored."""
        raise self._refuse("a forward hook")

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """BadInput: it would be ignored."""
        raise self._refuse("a forward pre hook")

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        """BadInput: it would be ignored."""
        raise self._refuse("a backward hook")

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        """BadInput: it would be ignored."""
        raise self._refuse("a backward pre hook")


def is_holder(module: nn.Module) -> bool:
    """Does a module hold names, and nothing else?"""
    return type(module) in (nn.Module, Uncalled)


def refuse_hooks(network: fx.GraphModule) -> None:
    """Let the modules of a network that only hold names refuse what they could not run."""
    for module in network.modules():
        if type(module) is nn.Module:
            module.__class__ = Uncalled
