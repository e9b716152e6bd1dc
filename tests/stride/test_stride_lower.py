"""lower(): no strided convolution is left, and the network computes what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import demask.stride
from architectures import transformers
from demask.errors import BadInput
from demask.graph.result.module_calls import graph_of_calls
from demask.ops.traits import CONVOLUTIONS_ANY_PADDING as CONVS
from demask.stride import TARGETS, NoSoundForm, Target
from demask.stride.lower import lower, lowered
from demask.stride.targets import OPS, parsed, target

aten = torch.ops.aten
MASKING = ("max_pool", "avg_pool", "slice", "space_to_depth", "matrix_unit")


def strides(module: Any) -> list[Any]:
    return [
        n.args[3]
        for n in graph_of_calls(module).nodes
        if n.target in CONVS and len(n.args) > 3 and any(s > 1 for s in n.args[3])
    ]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def drawn(model: nn.Module) -> nn.Module:
    """Everything drawn, running statistics too; in eval mode."""
    draw = generator()
    with torch.no_grad():
        for name, values in [*model.named_parameters(), *model.named_buffers()]:
            if values.is_floating_point():
                wide = values.ndim > 1
                size = (2 * len(values) / values.numel()) ** 0.5 if wide else 0.3
                values.normal_(0 if wide or "bias" in name else 1, size, generator=draw)
                if "running_var" in name or "norm" in name:
                    values.abs_()
    return model.eval()


def equal(model: nn.Module, made: nn.Module, x: Tensor, within: float = 1e-5) -> None:
    with torch.no_grad():
        expected, found = model(x), made(x)
    expected = getattr(expected, "logits", expected)
    found = getattr(found, "logits", found)
    assert float(expected.std()) > 0, "the case is void"
    assert float((expected - found).abs().max()) <= within * float(expected.abs().max())


# --- full networks ---


def hub(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = transformers()
        return getattr(module, model)(getattr(module, config)(num_labels=5, **options))

    return make


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (hub("ResNetForImageClassification", "ResNetConfig", embedding_size=8,
                   hidden_sizes=[8, 12, 16], depths=[1, 2, 1], layer_type="basic"), 41),
    "resnet bottleneck": (hub(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16],
        depths=[1, 1], layer_type="bottleneck", downsample_in_bottleneck=True), 33),
    "mobilenet": (hub("MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=32,
                      depth_multiplier=0.25, tf_padding=True), 32),
    "efficientnet": (hub(
        "EfficientNetForImageClassification", "EfficientNetConfig", image_size=32,
        width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, depth_divisor=4,
        dropout_rate=0.0), 32),
    "convnext": (hub("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 12, 16],
                     depths=[1, 1, 1], num_stages=3), 35),
    "swin": (hub("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2,
                 embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4), 32),
}  # fmt: skip


QUICK = [("resnet", "matrix_unit")]
PAIRS = [
    pytest.param(name, goal, marks=() if (name, goal) in QUICK else pytest.mark.nightly)
    for name in NETWORKS
    for goal in MASKING
]


@pytest.mark.parametrize(("name", "goal"), PAIRS)
def test_a_network_is_lowered(name: str, goal: str) -> None:
    try:
        transformers()
    except ImportError as error:
        pytest.skip(f"transformers is not installed: {error}")
    make, side = NETWORKS[name]
    model = drawn(make())
    x = torch.randn(2, 3, side, side, generator=generator())
    made = lower(model, (x,), target=goal)
    assert strides(made) == []
    equal(model, made, x)
    equal(model, made, x[:1])
    equal(model.double(), made.double(), x.double(), 1e-12)


# --- what is chosen, and why ---


def choices(model: nn.Module, shape: tuple[int, ...], goal: str | Target) -> list[str]:
    """The forms taken, checked to be what the network computes."""
    x = torch.randn(shape, generator=generator())
    made = lower(model.eval(), (x,), target=goal)
    assert strides(made) == []
    equal(model, made, x)
    names = [*TARGETS, "mask", "two_masks", "pool", "slice", "split", "rotate", "dilation", "phase"]
    return [
        note.split(": ")[1].split(",")[0]
        for note in made.demasked.notes
        if any(note.split(": ")[1].startswith(n) for n in (*names, "select", "space"))
    ]


def stem(*behind: nn.Module, stride: Any = 2) -> nn.Sequential:
    return drawn(nn.Sequential(nn.Conv2d(3, 4, 3, stride, 1), *behind))  # type: ignore[return-value]


def test_the_patents_form_is_taken_where_values_are_not_negative() -> None:
    """Row 002-a: mask and max-pool, behind what makes values >= 0; elsewhere a sound one."""
    shape = (2, 3, 9, 8)
    for function in (nn.ReLU(), nn.ReLU6(), nn.Sigmoid(), nn.Softplus(), nn.Hardsigmoid()):
        assert choices(stem(nn.BatchNorm2d(4), function), shape, "matrix_unit") == ["mask_max_pool"]
    for function in (nn.Identity(), nn.LeakyReLU(), nn.SiLU(), nn.GELU(), nn.Tanh()):
        assert choices(stem(nn.BatchNorm2d(4), function), shape, "matrix_unit") == ["split"]


def test_the_mask_holds_ones_and_zeros_and_windows_are_the_strides() -> None:
    """Rows 002-b and 002-c, in the module that comes out."""
    model, x = stem(nn.ReLU(), stride=(2, 3)), torch.randn(1, 3, 8, 9, generator=generator())
    made = lower(model, (x,), target="matrix_unit")
    mask = dict(made.named_buffers())["0.mask"]
    assert mask.shape == (8, 9)
    assert mask.unique().tolist() == [0, 1]
    assert bool((mask[::2, ::3] == 1).all()) and int(mask.sum()) == 4 * 3
    (pool,) = (n for n in graph_of_calls(made).nodes if n.target is aten.max_pool2d.default)
    assert list(pool.args[1]) == list(pool.args[2]) == [2, 3]


def test_two_masks_are_taken_where_numbers_are_bounded() -> None:
    ops = frozenset({"max_pool", "multiply"})
    goal = Target("two", ops, finite=True, forms=("two_masks",))
    assert choices(stem(nn.ReLU6()), (1, 3, 8, 8), goal) == ["two_masks"]
    assert choices(stem(nn.ReLU()), (1, 3, 8, 8), goal) == ["two_masks"]  # declared finite, times the mask too
    with pytest.raises(NoSoundForm, match="may overflow"):
        choices(stem(nn.ReLU()), (1, 3, 8, 8), replace(goal, finite=False, ops=ops | {"select"}))


@pytest.mark.parametrize("mask", [2.0, (2.0, 4.0, 2.0**60), (1.0, 8.0)])
def test_two_masks_have_respective_values(mask) -> None:
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU()).eval(), torch.randn(2, 3, 15, 16)
    goal = Target("two", frozenset({"max_pool", "multiply"}), finite=True, forms=("two_masks",), mask=mask)
    plain = lower(net, (x,), target=goal)
    assert torch.equal(plain(x), net(x))
    values = [
        plain.get_parameter(n) if n in dict(plain.named_parameters()) else t
        for n, t in plain.named_buffers()
        if "mask" in n
    ]
    factors = set(mask if isinstance(mask, tuple) else (mask,))
    assert {*values[0].unique().tolist()} == {0.0, *factors}


@pytest.mark.parametrize(("stride", "expected"), [(2, "phase_split"), (1, None)])
def test_the_least_multiply_adds_are_taken(stride: int, expected: str | None) -> None:
    every = Target("every", frozenset(OPS) - {"dilation"}, finite=True)
    assert choices(stem(stride=stride), (1, 3, 8, 8), every) == [expected] * (stride > 1)


def test_a_stride_that_the_target_has_stays() -> None:
    goal = Target("two", frozenset({"slice"}), conv_stride=2)
    model, x = stem(nn.Conv2d(4, 4, 2, 3)), torch.randn(1, 3, 12, 12, generator=generator())
    made = lower(model, (x,), target=goal)
    assert strides(made) == [[2, 2]]
    equal(model, made, x)


def test_lines_volumes_and_images_without_a_batch() -> None:
    for rank, conv in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        model = drawn(nn.Sequential(conv(4, 6, 3, 2, 1, groups=2), nn.ReLU(), conv(6, 4, 2, 3)))
        for goal in MASKING[rank - 1 : rank + 1 if rank < 3 else rank]:
            assert len(choices(model, (2, 4, *[9] * rank), goal)) == 2
            assert len(choices(model, (4, *[9] * rank), goal)) == 2


def test_equal_to_what_stride_1_makes_bit_for_bit() -> None:
    """Of forms that only drop; the strided kernel itself may sum in another order."""
    model, x = stem(), torch.randn(2, 3, 10, 11, generator=generator())
    conv: Any = model[0]
    wide = nn.functional.conv2d(x, conv.weight, conv.bias, 1, 1)[..., ::2, ::2]
    for goal in ("max_pool", "avg_pool", "slice", "matrix_unit"):
        assert torch.equal(lower(model, (x,), target=goal)(x), wide)


def test_nan_in_what_is_dropped_stays_there() -> None:
    """A selection keeps it away, where a product does not."""
    model, x = drawn(nn.Sequential(nn.Conv2d(1, 2, 1, 2), nn.ReLU())), torch.ones(1, 1, 4, 4)
    x[..., 1::2] = torch.nan
    x[..., 1::2, :] = torch.inf
    for goal in ("max_pool", "avg_pool", "slice"):
        assert torch.equal(lower(model, (x,), target=goal)(x), model(x))


def test_transposed_convolutions_and_pools_stay() -> None:
    model = stem(nn.ConvTranspose2d(4, 4, 2, 2), nn.MaxPool2d(2), nn.AvgPool2d(2))
    assert choices(model, (1, 3, 8, 8), "slice") == ["slice"]


def test_constants_are_shared_and_the_model_is_not_changed() -> None:
    model = drawn(nn.Sequential(nn.Conv2d(3, 3, 3, 2, 1), nn.Upsample(scale_factor=2), nn.Conv2d(3, 3, 3, 2, 1)))
    x = torch.randn(1, 3, 8, 8, generator=generator())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = lower(model, (x,))
    assert sorted(n for n, _ in made.named_buffers()) == ["0.fill", "0.mask"]
    made.get_parameter("0.weight").data.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert dict(made.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_a_program_can_be_lowered() -> None:
    from demask.rewrites.driver import rewrite
    from demask.rewrites.normalize import CANONICAL
    from demask.shrink.pipeline import capture_program

    program = rewrite(capture_program(stem(nn.ReLU()), (torch.ones(2, 3, 8, 8),), None, None), CANONICAL)
    after, (choice,) = lowered(program, "slice")
    assert (choice.node, choice.module, choice.form) == ("conv2d", "0", "slice")
    assert choice.cost is not None and choice.cost.macs == 4 * 64 * 27  # of one image
    assert "has no max_pool" in choice.refused["mask_max_pool"]
    assert next(n for n in program.graph.nodes if n.target in CONVS).args[3] == [2, 2]
    assert not strides(after)


def test_strides_go_downstream_where_nothing_else_is_left() -> None:
    """And average pools are convolutions where a target has none."""
    model = drawn(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1),
            nn.ReLU(),
            nn.AvgPool2d(3, 2, 1),
            nn.Conv2d(4, 6, 3, 2, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 5),
        )
    )
    for goal in ("no_pool", "fhe"):
        assert set(choices(model, (2, 3, 31, 30), goal)) == {"dilation"}
    made = lower(model, (torch.ones(2, 3, 31, 30),), target="fhe")
    assert not any(
        "pool" in str(n.target) and "adaptive" not in str(n.target)
        for n in graph_of_calls(made).nodes
        if n.op == "call_function"
    )
    assert choices(stem(nn.ReLU()), (2, 3, 11, 9), "fhe") == ["rotate"]  # what it returns is dense


def test_weights_in_another_order_are_parameters() -> None:
    model, x = stem(), torch.ones(1, 3, 8, 8)
    made = lower(model, (x,), target="space_to_depth")
    assert dict(made.named_parameters())["0.blocks"].shape == (4, 12, 2, 2)


# --- refusals ---


def test_a_network_without_a_sound_form_is_refused_with_every_reason() -> None:
    x = torch.ones(1, 3, 8, 8)
    goal = Target("bare", frozenset({"max_pool", "multiply"}), pool_windows="stride")
    with pytest.raises(NoSoundForm) as caught:
        lower(stem(nn.ReLU()), (x,), target=goal)
    assert "conv2d (0)" in str(caught.value) and "'bare'" in str(caught.value)
    reason = caught.value.reasons["mask_max_pool"]
    assert reason.startswith("values from -inf to inf may be below the zeros of the mask, and ")
    assert "after function 1: 0 times Inf or NaN is NaN" in reason
    assert "no dilation" in caught.value.reasons["dilation"]


def test_dynamic_spatial_sizes_are_refused() -> None:
    from torch.export import Dim

    shapes = ({2: Dim.AUTO, 3: Dim.AUTO},)
    model = stem()
    with pytest.raises(NoSoundForm, match="spatial sizes are dynamic"):
        lower(model, (torch.ones(1, 3, 8, 8),), dynamic_shapes=shapes)


def test_ops_that_a_target_forbids_are_named() -> None:
    with pytest.raises(BadInput, match=r"'fhe' has no max_pool, which max_pool2d"):
        lower(stem(nn.MaxPool2d(2)), (torch.ones(1, 3, 8, 8),), target="fhe")


# --- targets ---

MINE = """
name = "mine"
ops = ["max_pool", "multiply", "relu", "add", "pad"]
finite = true
[pool]
size = 3
windows = "stride"
ceil = false
"""


def test_a_users_own_target(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    mine = target(path)
    assert (mine.name, mine.pool_size, mine.pool_ceil, mine.finite) == ("mine", 3, False, True)
    assert mine == target(str(path))
    model = stem(nn.ReLU(), nn.Conv2d(4, 4, 2, 3))
    assert choices(model, (2, 3, 9, 14), mine) == ["mask_max_pool", "split"]
    path.write_text(MINE.replace("size = 3", "size = 2"))
    with pytest.raises(NoSoundForm, match=r"windows up to 2"):
        lower(model, (torch.ones(1, 3, 9, 14),), target=path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a list `ops`"),
        ("ops = 3", "ops is 3; expected a list of names"),
        ("ops = ['warp']", "op 'warp' is unknown; expected some of max_pool"),
        ("ops = []\nspeed = 3", "key 'speed' is unknown"),
        ("ops = []\nfinite = 1", "finite is 1; expected true or false"),
        ("ops = []\n[pool]\nsize = 0", "expected a pool size of 1 or more, an integer, got 0"),
        ("ops = []\n[conv]\nstride = 1.5", "an integer, got 1.5"),
        ("ops = []\n[pool]\nwindows = 'round'", "windows 'round' is unknown"),
        ("ops = []\nmask = nan", "mask is nan; expected a number"),
        ("ops = []\nforbidden = ['conv']", "forbidden op 'conv' is unknown"),
        ("ops = [", "expected a TOML document"),
    ],
)
def test_a_file_that_is_no_target_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        target(path)
    assert message in str(caught.value)


def test_no_such_target() -> None:
    with pytest.raises(BadInput, match=r"no target 'tpu': expected max_pool, avg_pool, slice"):
        target("tpu")
    with pytest.raises(BadInput, match=r"nowhere.toml: no such file"):
        target("nowhere.toml")
    with pytest.raises(BadInput, match="expected a target's name"):
        target(3)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="form 'warp' is unknown"):
        lower(stem(), (torch.ones(1, 3, 8, 8),), target=Target("w", frozenset(), forms=("warp",)))
    with pytest.raises(BadInput, match=r"key 'a\.b' is unknown"):
        parsed({"a": {"b": 3}}, "here")


def test_every_built_in_target_says_what_it_is() -> None:
    assert list(demask.stride.TARGETS) == [
        "max_pool",
        "avg_pool",
        "slice",
        "no_pool",
        "space_to_depth",
        "fhe",
        "matrix_unit",
    ]
    assert all(name == goal.name for name, goal in TARGETS.items())


def test_the_cost_of_a_form_is_that_of_one_image():
    net = nn.Conv2d(3, 8, 3, stride=2).eval()
    for batch, dynamic in ((1, None), (2, None), (1, {}), (2, {})):
        lowered = lower(net, (torch.randn(batch, 3, 9, 9),), target="slice", dynamic_shapes=dynamic)
        expected = 7 * 7 * 8 * 27 * (2 if batch == 2 and dynamic == {} else 1)
        notes = "".join(lowered.demasked.notes)
        assert f"({expected} multiply-adds" in notes
