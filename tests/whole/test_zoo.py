"""torchvision's networks, half of their channels masked: exact at two image sizes, one demask."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

import demask
from demask.judge import RELATIVE
from graphs import form_of

try:
    from networks import built, mask, mask_inside, nms, randomised, torchvision, zoo

    NAMES = zoo()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

QUICK = ("squeezenet1_1",)
# Of images. An axis with one element on the example is fixed for torch.export, so the example is
# large enough to leave none with one: inception_v3 makes it about 50 times smaller.
SIZES = ((112, 144), (145, 121))

# Networks that take one size of image alone, or that torch.export takes at one alone.
STATIC = {
    "maxvit": "its windows are laid out for the size of image that it is built for",
    "swin_v2": "torch.export takes minutes for windows of dynamic size",
    "vit": "it asserts the size of image that it is built for",
}
# What torch.export makes of other windows holds for sizes that are padded, and shifted, alike.
WINDOWED = {"swin_t": ((160, 180), (181, 137))}
WINDOWED |= dict.fromkeys(("swin_s", "swin_b"), WINDOWED["swin_t"])
DEPENDS = 1e-3  # of the largest output: at least so much differs between two images


def is_static(name: str) -> bool:
    return name.startswith(tuple(STATIC))


def sizes_of(name: str) -> tuple[tuple[int, int], ...]:
    """The image sizes a network is compared at; the first is that of the example."""
    return ((224, 224),) if is_static(name) else WINDOWED.get(name, SIZES)


def compare(model: nn.Module, slim: nn.Module, *args: object) -> float:
    """The largest difference, relative; equal to 1e-10 in every output, all finite."""
    with torch.no_grad():
        expected, found = model(*args), slim(*args)
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.dtype is torch.float64:
            assert bool(torch.isfinite(a).all()), "the case is void: an output is not finite"
            assert float((a - b).abs().max()) <= RELATIVE * float(a.abs().max())
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1e-300)))
        else:
            assert torch.equal(a, b)
    return worst


def assert_depends(model: nn.Module, images: Tensor) -> None:
    """Fails where the outputs hardly depend on the image: equality would prove nothing."""
    with torch.no_grad():
        for leaf in pytree.tree_leaves(model(images)):
            apart = float((leaf[0] - leaf[1]).abs().max() / leaf.abs().max())
            assert apart >= DEPENDS, f"the case is void: two images differ by {apart:.1e}"


def case(name: str) -> object:
    return pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly)


@pytest.mark.parametrize("name", [case(name) for name in NAMES])
def test_a_classifier_is_exact_at_two_sizes(name: str, result: Callable[..., None]) -> None:
    result(suite="torchvision", network=name, mask="channels")
    generator = torch.Generator().manual_seed(0)
    model = mask(built(name, generator), generator).double()
    sizes = sizes_of(name)

    def images(batch: int, size: tuple[int, int]) -> Tensor:
        return torch.randn(batch, 3, *size, generator=generator, dtype=torch.float64)

    dynamic = (0,) if is_static(name) else (0, 2, 3)
    shapes = (dict.fromkeys(dynamic, Dim.AUTO),)
    slim = demask.demask(model, (images(2, sizes[0]),), dynamic_shapes=shapes)

    found = slim.demasked.inputs[0].sizes
    assert tuple(k for k, size in enumerate(found) if isinstance(size, str)) == dynamic
    assert_depends(model, images(2, sizes[0]))
    report = demask.report(slim)
    form = form_of(slim)
    result(before=report.before.parameters, after=report.after.parameters, form=form)
    if form != "graph":
        graph = demask.demask(model, (images(2, sizes[0]),), dynamic_shapes=shapes, result="graph")
        result(graph=demask.report(graph).after.parameters)
        assert form_of(graph) == "graph"
        assert compare(model, graph, images(3, sizes[0])) <= RELATIVE
    inputs = [images(batch, size) for size in sizes for batch in (1, 3)]
    result(error=max(compare(model, slim, given) for given in inputs), allowed=RELATIVE)
    assert report.after.parameters < report.before.parameters
    assert report.after.macs < report.before.macs


# One network of each family (of EfficientNets' second version, random weights make a chaotic one:
# an error of 1e-15 in the image is one of 4e-8 in the output).
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet",
    "inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf",
    "regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "squeezenet1_1", "swin_t", "vgg11_bn", "vit_b_16",
)  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly) for n in FAMILIES])
def test_masks_inside_of_blocks_leave_the_class(name: str, result: Callable[..., None]) -> None:
    result(suite="torchvision", network=name, mask="inside")
    generator = torch.Generator().manual_seed(0)
    model = built(name, generator).double()
    assert mask_inside(model) >= 5
    size = (224, 224) if name in WINDOWED else sizes_of(name)[0]  # no padded windows
    x = torch.randn(2, 3, *size, generator=generator, dtype=torch.float64)
    slim = demask.demask(model, (x,))
    report = demask.report(slim)
    form = form_of(slim)
    result(before=report.before.parameters, after=report.after.parameters, form=form)
    other = torch.randn(3, 3, *size, generator=generator, dtype=torch.float64)
    result(error=max(compare(model, slim, x), compare(model, slim, other)), allowed=RELATIVE)
    assert report.after.parameters < report.before.parameters
    assert form == "class", slim.demasked.graph_reasons


@pytest.mark.parametrize("name", ["convnext_tiny", "resnet18"])
def test_every_parameter_and_statistic_is_drawn(name: str) -> None:
    made, again = (built(name, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    others = again.state_dict()
    for key, values in made.state_dict().items():
        assert not values.is_floating_point() or not torch.equal(values, others[key]), key
        assert values.numel() == 1 or float(values.double().std()) > 0, f"{key} is as it was made"


def test_half_of_the_channels_are_masked_in_two_ways() -> None:
    generator = torch.Generator().manual_seed(0)
    model = mask(built("resnet18", generator), generator)
    convs = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    for k, conv in enumerate(convs):
        dead = int((conv.weight.detach().flatten(1) == 0).all(1).sum())
        assert dead == conv.out_channels // 2
        assert hasattr(conv, "weight_mask") == (k % 2 == 0)


@pytest.mark.nightly
def test_the_comparison_finds_a_planted_fault() -> None:
    generator = torch.Generator().manual_seed(0)
    model = mask(built("squeezenet1_1", generator), generator).double()
    images = torch.randn(2, 3, 64, 64, generator=generator, dtype=torch.float64)
    slim = demask.demask(model, (images,))
    compare(model, slim, images)
    with torch.no_grad():
        weight = slim.get_parameter("classifier.1.weight")
        weight[0] *= 1 + 1e-8
    with pytest.raises(AssertionError):
        compare(model, slim, images)
    with pytest.raises(AssertionError, match="void"):
        assert_depends(model, images[:1].expand(2, -1, -1, -1))
    with pytest.raises(AssertionError, match="void"):
        compare(model, slim, images * math.inf)


def test_zoo_names_networks_by_their_size() -> None:
    assert len(NAMES) >= len(QUICK)
    assert set(QUICK) <= set(NAMES)
    assert "vit_h_14" not in NAMES
    assert zoo(1.3e6) == ["squeezenet1_0", "squeezenet1_1"]


DETECTORS = (
    pytest.param("ssdlite320_mobilenet_v3_large", (0,), {}, id="ssdlite"),
    pytest.param(
        "retinanet_resnet50_fpn",
        (0, 2, 3),
        {"min_size": 96, "max_size": 160},
        id="retinanet",
        marks=pytest.mark.nightly,
    ),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "dynamic", "options"), DETECTORS)
def test_part_of_a_detector(name: str, dynamic: tuple[int, ...], options: dict[str, int]) -> None:
    """The backbone alone is demasked. The rest, which no export would take (lists of images of any
    size, boxes that are selected by value), goes on as it was."""
    generator = torch.Generator().manual_seed(0)
    detection = torchvision().models.detection
    model = getattr(detection, name)(
        weights=None, weights_backbone=None, num_classes=5, detections_per_img=20, **options
    )
    model = mask(randomised(model, generator), generator).double()

    def images(*sizes: tuple[int, int]) -> list[Tensor]:
        return [torch.rand(3, *s, generator=generator, dtype=torch.float64) for s in sizes]

    given = images((96, 128), (120, 90))
    shapes = (dict.fromkeys(dynamic, Dim.AUTO),)
    slim = demask.demask(model, (given,), modules=["backbone"], dynamic_shapes=shapes)

    for batch in (given, images((96, 128), (120, 90)), images((100, 100))):
        compare(model, slim, batch)
    with torch.no_grad():
        (first, second), other = model(given), model(images((96, 128)))[0]
    assert len(first["boxes"]) == len(second["boxes"]) == 20, "the case is void: nothing is found"
    assert not torch.equal(first["boxes"], other["boxes"]), "the case is void: same boxes anywhere"
    report = demask.report(slim.get_submodule("backbone"))
    assert report.after.parameters < report.before.parameters / 2


def test_nms_keeps_what_overlaps_nothing_better() -> None:
    boxes = torch.tensor([[0, 0, 2, 2], [10, 0, 12, 2], [0, 0, 2, 1.9], [0, 1, 2, 3.0]])
    scores = torch.tensor([0.5, 0.1, 0.9, 0.4])
    assert nms(boxes, scores, 0.5).tolist() == [2, 3, 1]  # 0 lies on 2 by 0.95, 3 by 0.3
    assert nms(boxes, scores, 0.2).tolist() == [2, 1]
    assert nms(boxes[:0], scores[:0], 0.5).tolist() == []
