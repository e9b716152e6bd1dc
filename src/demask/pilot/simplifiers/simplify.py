"""simplify(): a cheaper network of the same call, from the graph of the full one.

A simplifier is a frozen dataclass that derives a module from a program: fewer bits, exponents, low
rank, a channel subset, a smaller image. Each has a file of its own and a text, which the command
line and tables use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.graph.isolation import in_isolation
from demask.graph.result.demasked_module import Demasked
from demask.ops import TABLE, Table
from demask.pilot.simplifiers.channels import Channels
from demask.pilot.simplifiers.downsample import Downsample
from demask.pilot.simplifiers.low_rank import LowRank
from demask.pilot.simplifiers.rounding import Bits, Exponents
from demask.shrink.on_device import run_through_cpu
from demask.shrink.pipeline import capture_program


@runtime_checkable
class Simplifier(Protocol):
    """The interface of simplifiers: an object that derives a cheaper network from a network.

    `Bits`, `Exponents`, `LowRank`, `Channels` and `Downsample` are the simplifiers of the library.
    Any class with these three methods can be passed where a simplifier is expected; `isinstance`
    checks that the methods exist. The cheaper network takes the same inputs and returns outputs of
    the same shapes.

    Example:
        >>> import torch
        >>> from demask.pilot import Exponents, Simplifier, compare
        >>> class Powers(Exponents):  # a simplifier of your own
        ...     def text(self):
        ...         return "powers of two"
        >>> isinstance(Powers(), Simplifier)
        True
        >>> compare(torch.nn.Linear(8, 4), (torch.randn(2, 8),), by=[Powers()], pairs=0).rows[0].by
        'powers of two'
    """

    def text(self) -> str:
        """The simplifier's text in tables and messages, such as "bits:8"."""
        ...

    def applied(self, analysis: Analysis) -> Demasked:
        """The cheaper network, a `Demasked` module.

        Args:
            analysis: the captured network (`analysis.program`, a torch.fx graph with constants) and
                facts about its calls, which the method does not change.
        """
        ...

    def weight_bytes(self, weight: Tensor, rows: int) -> float:
        """Bytes that one weight of the cheaper network would take in a file, a float.

        Args:
            weight: a tensor of any shape.
            rows: number of output units or filters of the weight.
        """
        ...


@in_isolation
@public
def simplify(
    model: nn.Module | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    by: str | Simplifier = "bits:8",
    dynamic_shapes: Any = None,
    table: Table = TABLE,
) -> Demasked:
    """A cheaper network that takes the same inputs and returns outputs of the same shapes.

    The outputs approximate those of the model; `compare` measures the error. Layers keep their
    names. The model is not changed.

    Args:
        model: the network, an nn.Module (captured in eval mode) or an ExportedProgram.
        args: example inputs by position, a tuple; only shapes and dtypes matter. Default ().
        kwargs: example inputs by name; default None: none.
        by: a simplifier or its text: "bits:N" (N bits per weight), "bits:N:G" (a scale per G
            columns), "exponents" (powers of two), "rank:F" (a share F of the rank), "channels:F" (a
            share F of the channels), "downsample:N" or "downsample:N:mode" (images N times smaller;
            mode "nearest", "bilinear", "bicubic" or "area"). Default "bits:8".
        dynamic_shapes: sizes that may vary, as torch.export takes them; default None: the batch
            axis, where torch.export can capture that; "all": all sizes that it can.
        table: facts about each ATen op; default: the library's table.

    Returns:
        A `Demasked`, a torch.fx module on the device of the model, whose `demasked.notes` say what
        changed.

    Raises:
        BadInput: `by` is no simplifier, `model` or `args` has another type, tensors are on several
            devices, or the simplifier does not fit the network: a weight contains Inf or NaN, or a
            call cannot run on smaller images.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from demask.pilot import simplify
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> x = torch.randn(3, 4)
        >>> rounded = simplify(net, (x,), by="bits:12")
        >>> torch.allclose(rounded(x), net(x), atol=0.01)
        True
    """
    chosen = simplifier(by)
    rest = {"by": chosen, "dynamic_shapes": dynamic_shapes, "table": table}
    if (elsewhere := run_through_cpu(simplify, model, args, kwargs, **rest)) is not None:
        return elsewhere
    return chosen.applied(Analysis(capture_program(model, args, kwargs, dynamic_shapes), table))


def simplifier(text: str | Simplifier) -> Simplifier:
    """The simplifier of a text such as "bits:8": a `Bits`, `LowRank`, `Channels` or another one.

    Args:
        text: "bits:N", "bits:N:G", "exponents", "rank:F", "channels:F", "downsample:N" or
            "downsample:N:mode" (`simplify` explains each); a simplifier is returned unchanged.

    Raises:
        BadInput: `text` is another text (the message lists valid ones), a value is out of range, or
            `text` is neither a str nor a simplifier.

    Example:
        >>> from demask.pilot import simplifier
        >>> simplifier("rank:0.5"), simplifier("downsample:2")
        (LowRank(fraction=0.5), Downsample(factor=2, mode='bilinear'))
    """
    if not isinstance(text, str):
        if isinstance(text, Simplifier):
            return text
        raise BadInput(f"expected a simplifier or its text, got {type(text).__name__}")
    name, *values = text.split(":")
    if name not in _MAKERS:
        raise BadInput(f"expected a simplifier such as {', '.join(map(repr, EXAMPLES))}; got {text!r}")
    try:
        return _MAKERS[name](*values)
    except (TypeError, ValueError) as error:
        if isinstance(error, BadInput):
            raise
        form = next(e for e in EXAMPLES if e.startswith(name))
        raise BadInput(f"{text!r} is not understood: expected a form such as {form!r}") from error


EXAMPLES = ("bits:8", "bits:4:64", "exponents", "rank:0.25", "channels:0.5", "downsample:2:bilinear")
_MAKERS: dict[str, Callable[..., Simplifier]] = {
    "bits": lambda bits, group=None: Bits(int(bits), None if group is None else int(group)),
    "exponents": Exponents,
    "rank": lambda fraction: LowRank(float(fraction)),
    "channels": lambda fraction: Channels(float(fraction)),
    "downsample": lambda factor, mode="bilinear": Downsample(_number(factor), mode),
}


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
