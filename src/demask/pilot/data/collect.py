"""collect(): execution data of a network, from one input or many, in memory or slice by slice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from demask.errors import BadInput
from demask.exec.call_groups import Constants, Walk, bind_inputs, stored_constants, walk
from demask.facts.analysis import Analysis
from demask.failures import public
from demask.files.archive import Outline, outline
from demask.files.pt2 import read_model
from demask.files.weight_file import StoredTensor, WeightFile, with_weights
from demask.graph.capture.capture import capture
from demask.graph.capture.functionalize import functionalize
from demask.graph.isolation import in_isolation
from demask.graph.provenance import Cut, Provenance
from demask.graph.split_recurrent import split_recurrent
from demask.machine.byte_sizes import parse_memory
from demask.ops import TABLE, Table
from demask.pilot.data.contributions import contributions
from demask.pilot.data.execution_data import MEASURES, ExecutionData
from demask.pilot.data.measured_values import MeasuredValue, count_inputs, sites_of
from demask.shrink.pipeline import capture_program

Model = nn.Module | ExportedProgram | str | os.PathLike[str]
Inputs = tuple[Any, ...] | Iterable[tuple[Any, ...]]


@in_isolation
@public
def collect(
    model: Model,
    inputs: Inputs,
    *,
    per: str = "channel",
    memory: int | str | None = None,
    weights: str | os.PathLike[str] | None = None,
    measure: str = "mean",
    source: str | None = None,
    progress: Callable[[str], None] | None = None,
    table: Table = TABLE,
) -> ExecutionData:
    """An `ExecutionData`: how large the values of each channel of each layer are in a run.

    The magnitude of a channel is the mean of |value| (or the largest, as `measure` says) over the
    channel, after the layer's norm and activation, for each input; or what it contributes to the outputs: how much
    they change, to first order, if the channel is set to zero. For a network that demask cut,
    channels are those of the original network, and removed ones have magnitude 0.

    Args:
        model: an nn.Module, an ExportedProgram, or the path of a .demask or .pt2 file.
        inputs: the arguments of one call, a tuple, or an iterable of such tuples (a calibration
            set, earlier frames).
        per: the part that is measured: "channel" (the default: outputs of convolutions and linear
            layers), "unit" (of linear layers), "head" (of attention), "token" (positions of a
            sequence) or "tile:T" (T x T positions of an image).
        memory: limit of the bytes of weights in memory at a time, a number or a text such as
            "64MiB"; default None: no limit. With a limit the network runs in slices, all inputs
            through one slice before the next; values between slices that exceed the limit are
            written to disk.
        weights: path of a .safetensors file with the module's names, for a module that may be on
            the meta device; default None: the module's own weights, or those of the .demask file.
        measure: "mean" (the default) or "max" of |value|, or "contribution": the length (Euclidean norm) of the
            change of all outputs if the part were zero, to first order, in the outputs' units. It takes a derivative
            per output, of more than 64 outputs 64 derivatives by which it is estimated; the network is in memory.
        source: a description of the inputs; default None: "live input" for one call, "calibration
            set" for several.
        progress: function that is called with a line of text after each step; default None.
        table: facts about each ATen op; default: the library's table.

    Returns:
        An `ExecutionData`, whose `magnitudes` are by layer name float32 [inputs, positions], with a
        row per element of a batch, in the order of the calls.

    Raises:
        BadInput: there are no inputs, an input does not fit, `per` or `measure` is unknown, the
            network has no such parts, contributions are to be collected with `memory` or `weights`,
            a file cannot be read, or `memory` is less than the weights of the largest layer.
        RefusedFile: a file is not safe to read.
        NotExportable: torch.export cannot capture the model.

    Example:
        >>> import torch
        >>> from demask.pilot import collect
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.ReLU())
        >>> net[0].weight.data = torch.tensor([[1.0, 2.0], [-1.0, 0.0]])
        >>> data = collect(net, (torch.tensor([[1.0, 1.0], [3.0, 1.0]]),))
        >>> data.magnitudes["0"]  # [inputs, units]
        tensor([[3., 0.],
                [5., 0.]])
    """
    if measure not in MEASURES:
        raise BadInput(f"expected a measure of {', '.join(MEASURES)}, got {measure!r}")
    budget = None if memory is None else parse_memory(memory)
    calls = [inputs] if isinstance(inputs, tuple) else list(inputs)
    if not calls:
        raise BadInput("expected one input or more, got none")
    if measure == "contribution" and (budget is not None or weights is not None):
        raise BadInput("contributions need derivatives through the full network: leave memory and weights out")
    constants, cuts = _read(model, calls[0], budget, weights)
    program = constants.program
    sites = sites_of(Analysis(program, table), per, cuts)
    gathered = _Gathered(sites, measure)
    bound = [bind_inputs(program, args, {}) for args in calls]
    if measure == "contribution":
        run = Walk(1)
        contributions(program, gathered.sites, bound, gathered.add, progress)
    else:
        run = walk(constants, bound, gathered.see, budget=budget, progress=progress)
    single = isinstance(inputs, tuple)
    description = source or ("live input" if single else "calibration set")
    count = count_inputs(bound)
    text = f"{description}, {count} input{'s' if count != 1 else ''}"
    return ExecutionData(per, gathered.magnitudes(), text, measure, gathered.grids, run.groups, run.peak_weight_bytes)


def _read(model: Model, args: Any, budget: int | None, weights: Any) -> tuple[Constants, Mapping[str, Cut]]:
    """The captured network and where its weights come from, and how it was cut."""
    if not isinstance(args, tuple):
        raise BadInput(
            f"expected a tuple of arguments for each call, got {type(args).__name__}: write (x,) for one tensor"
        )
    is_file = isinstance(model, str | os.PathLike)
    if weights is not None or (is_file and budget is not None):
        if not isinstance(model, nn.Module) and not is_file:
            raise BadInput("weights in a file are for modules; pass the module they belong to")
        hollow = _outlined(model, weights)
        program = split_recurrent(functionalize(capture(hollow.slim, args)))
        return Constants(program, hollow.file, stored_constants(program, hollow.places)), _cuts(hollow.slim)
    network: Any = read_model(model) if is_file else model
    return Constants(split_recurrent(capture_program(network, args, {}, None))), _cuts(network)


def _outlined(model: nn.Module | str | os.PathLike[str], weights: Any) -> Outline:
    """A network and its file: a .demask archive, or a module and a .safetensors file of its names.

    Raises BadInput where the file does not fit, RefusedFile for an unsafe one.
    """
    if isinstance(model, nn.Module):
        file = WeightFile.read(weights)
        copy, places = with_weights(model, file, StoredTensor.hollow)
        return Outline(copy, file, {name: (t, tuple(range(len(t.shape)))) for name, t in places.items()})
    path = Path(model)
    if path.suffix == ".pt2":
        raise BadInput(
            f"{path}: a .pt2 is read in full; to run it slice by slice, write it "
            "as .demask once: demask.save(demask.demask(program), path)"
        )
    return outline(path)


def _cuts(model: Any) -> Mapping[str, Cut]:
    record = getattr(model, "demasked", None)
    return record.cuts if isinstance(record, Provenance) else {}


class _Gathered:
    """Magnitudes as they come in, call by call."""

    def __init__(self, sites: Iterable[MeasuredValue], measure: str):
        self.sites: dict[fx.Node, list[MeasuredValue]] = {}
        self.names = [site.name for site in sites]
        for site in sites:
            self.sites.setdefault(site.node, []).append(site)
        self.measure, self.grids = measure, {}
        self.rows: dict[str, dict[int, Tensor]] = {name: {} for name in self.names}

    def see(self, k: int, node: fx.Node, value: Any) -> None:
        for site in self.sites.get(node, ()):
            self.add(k, site, site.measured(value, self.measure))

    def add(self, k: int, site: MeasuredValue, measured: tuple[Tensor, tuple[int, int] | None]) -> None:
        """Add the magnitudes of a call, and the grid of tiles."""
        self.rows[site.name][k], grid = measured
        if grid is not None:
            self.grids[site.name] = grid

    def magnitudes(self) -> dict[str, Tensor]:
        """float32 [inputs, positions]."""
        return {name: torch.cat([rows[k] for k in sorted(rows)]) for name, rows in self.rows.items()}
