"""Candidate programs to benchmark, each built from the fastest implementation of every layer.

The cost model predicts the time of single layers. Full candidates are measured, since layers share
caches and call overhead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from demask.failures import Log
from demask.graph.editor import GraphEditor
from demask.graph.program import Program
from demask.graph.provenance import TuneDecision
from demask.graph.queries import input_dependent
from demask.graph.value import Value
from demask.ops import Table
from demask.rewrites.activations import ACTIVATIONS
from demask.rewrites.driver import rewrite
from demask.rewrites.rule import Phase
from demask.tune.absorb_gathers import ABSORB_GATHERS
from demask.tune.channels_last import CONVOLUTIONS as IMAGES
from demask.tune.channels_last import Wants, images_channels_last, is_image_convolution, may_change_layout
from demask.tune.epilogue import Epilogue
from demask.tune.fold_affine import FOLD_AFFINE, contraction_weight
from demask.tune.fuse_epilogues import Wanted, epilogue_chain, epilogues_fused
from demask.tune.join_as_sum import JOINS_AS_SUMS
from demask.tune.layer_costs import PLAIN, LayerCosts
from demask.tune.one_pixel_convs import ONE_PIXEL
from demask.tune.pad_channels import PADS_REMOVED, widths_rounded

GAIN = 0.97  # channels last must take less than this share of the time without
# What every candidate begins with.
PLAIN_LAYERS = Phase("plain layers", (*ACTIVATIONS.entries, FOLD_AFFINE, ONE_PIXEL))


def fastest_layers(fuse: Wanted, last: Wants) -> Phase:
    """The rewrites of one candidate, each where its chooser says that it is faster."""
    return Phase("fastest layers", (epilogues_fused(fuse), images_channels_last(last)))


def _always(*_: object) -> bool:
    return True


# All rewrites that only `tune` has, with choosers that always agree, as the laws test them.
_OF_RUNTIMES = (ABSORB_GATHERS, JOINS_AS_SUMS, PADS_REMOVED, widths_rounded(8))
TUNE = Phase("fastest layers", (ONE_PIXEL, *_OF_RUNTIMES, *fastest_layers(_always, _always).entries))


@dataclass(slots=True)
class Candidate:
    """A program to benchmark, with its name and the decisions for its layers. exact: the same
    program with exact weights, if this one stores weights in fewer bits."""

    name: str
    program: Program
    decisions: list[TuneDecision] = field(default_factory=list)
    exact: Program | None = None


def generate_candidates(
    program: Program,
    asker: LayerCosts,
    table: Table,
    tell: Callable[[str], object],
    *,
    few: bool = False,
    log: Log | None = None,
) -> Iterator[Candidate]:
    """The program with norms folded into weights, then with the fastest implementation of each
    layer: in the default layout, in channels last, or in the faster one for each image size.

    few: of networks of images only channels last. Next to segments, the default layout was not
    within 3 % of the fastest on any of 21 networks of torchvision and CIFAR, half masked or not.
    log: notes the rewrites that failed, which are left out.
    """
    log = Log() if log is None else log
    base = rewrite(program, PLAIN_LAYERS, table, log)
    tell("measuring layers")
    groups = seconds_by_image_size(base, asker)
    has_images = bool(groups) and may_change_layout(base)
    if not (few and has_images):
        yield Candidate("norms in the weights", base)
        builder = CandidateBuilder(asker, lambda _: False, table, log)
        yield builder.build("layers with their epilogues", base)
    if not has_images:
        return
    yield CandidateBuilder(asker, lambda _: True, table, log).build("channels last", base)
    choice = {size: costs[True] < GAIN * costs[False] for size, costs in groups.items()}
    if len(set(choice.values())) > 1:
        last = partial(_is_faster_channels_last, asker, choice)
        yield CandidateBuilder(asker, last, table, log).build("channels last for some sizes", base)


def _is_faster_channels_last(asker: LayerCosts, choice: dict[tuple[int, ...], bool], value: Value) -> bool:
    """Whether channels last was chosen for images of a value's size."""
    return choice.get(asker.shape(value.node)[2:], False)


def seconds_by_image_size(program: Program, asker: LayerCosts) -> dict[tuple[int, ...], dict[bool, float]]:
    """Seconds of all convolutions by output image size, in channels last (True) and without."""
    editor = GraphEditor(program)
    live = input_dependent(editor.graph)
    seconds: dict[tuple[int, ...], dict[bool, float]] = defaultdict(lambda: {True: 0.0, False: 0.0})
    for node in editor.calls(*IMAGES):
        layer = Value(node, editor)
        if node in live and contraction_weight(layer) is not None and is_image_convolution(layer):
            after = epilogue_chain(layer, live)
            for last in (True, False):
                _, taken = asker.layer(asker.of(node), last, after.after, other=after.other is not None)
                seconds[asker.shape(node)[2:]][last] += taken
    return seconds


@dataclass(slots=True)
class CandidateBuilder:
    """Builds one candidate. last: whether a convolution runs in channels last. log: notes the
    rewrites that failed, which are left out."""

    asker: LayerCosts
    last: Wants
    table: Table
    log: Log
    decisions: list[TuneDecision] = field(default_factory=list)

    def build(self, name: str, base: Program) -> Candidate:
        """The candidate for a program whose norms are folded into the weights."""
        phase = fastest_layers(self.fuse, self.last)
        return Candidate(name, rewrite(base, phase, self.table, self.log), self.decisions)

    def fuse(self, call: Value, after: Epilogue, other: bool) -> bool:
        """Whether a layer is faster as a oneDNN call with its epilogue."""
        layer, last = self.asker.of(call.node), self.last(call)
        names = self.asker.implementations(layer)
        seconds = {name: self.asker.seconds(layer, name, last, after, other) for name in names}
        best = min(seconds, key=seconds.__getitem__)
        self.decisions.append(TuneDecision(_layer_name(call), best, seconds))
        return best != PLAIN


def _layer_name(layer: Value) -> str:
    name = str(layer.arg("weight").target)
    return name.rpartition(".")[0] or name
