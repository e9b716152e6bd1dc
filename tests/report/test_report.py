"""The report says what went and what stayed, the same in text, as a dictionary and as a page."""

import json
from functools import partial
from textwrap import dedent

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import demask
from demask.errors import BadInput
from demask.graph.provenance import Provenance, Reason, Sizes
from demask.report import Decline, report
from demask.report.sections import removed_rows


def demasked(**fields):
    """A network with a hand-made record, as if demask had made it."""
    record = {
        "cuts": {},
        "reasons": (),
        "effects": {},
        "notes": (),
        "inputs": (),
        "before": Sizes(parameters=1000, macs=20_000, bytes=4000),
        "after": Sizes(parameters=250, macs=5000, bytes=1000),
    }
    network = nn.Module()
    network.demasked = Provenance(**(record | fields))
    return network


FOO = "no rule for aten.foo"
FULL = {
    "reasons": (
        Reason("conv2", "layer3.conv2", 1, 48, FOO),
        Reason("cat_1", "", 1, 3, "graph output"),
        Reason("conv3", "layer3.conv3", 1, 16, FOO),
        Reason("conv3", "layer3.conv3", 2, 4, FOO),
    ),
    "effects": {"scatter-add": 2, "pad": 1},
    "notes": ("dimension 0 of x is static",),
    "removed": {"stem": 50, "layer3.conv2": 700, "idle": 0},
}
NOTHING_WENT = {"after": Sizes(parameters=1000, macs=20_000, bytes=4000)}


def test_reasons_are_grouped_by_text_with_their_counts():
    assert report(demasked(**FULL)).declined == (
        Decline(FOO, 68, ("layer3.conv2", "layer3.conv3")),
        Decline("graph output", 3, ("cat_1",)),
    )


def test_every_effect_is_counted():
    scatters = report(demasked(**FULL)).scatters
    assert scatters == {"scatter": 0, "scatter-add": 2, "gather": 0, "slice": 0, "pad": 1, "border map": 0}


def test_the_text():
    text = """\
                     before   after    share
    ─────────────────────────────────────────
     parameters       1,000     250   25.0 %
     MACs per call   20,000   5,000   25.0 %
     bytes            4,000   1,000   25.0 %

    68 slices not removed: no rule for aten.foo (layer3.conv2, layer3.conv3)
    3 slices not removed: graph output (cat_1)
    note: dimension 0 of x is static

     module         parameters removed
    ───────────────────────────────────
     layer3.conv2                  700
     stem                           50

    ops that only restore shapes: 2 scatter-add, 1 pad
    2 scatter-add: the operands of an add have different positions
    1 pad: a reader needs more positions, at one end, than were computed"""
    assert str(report(demasked(**FULL))) == dedent(text)


def test_nothing_to_remove_is_said_in_every_form(tmp_path):
    shown = report(demasked(**NOTHING_WENT))
    assert shown.nothing_removed
    assert "nothing left to remove" in str(shown).splitlines()
    assert shown.to_dict()["summary"] == "nothing left to remove"
    shown.to_html(tmp_path / "report.html")
    assert "nothing left to remove" in (tmp_path / "report.html").read_text()


def test_what_was_given_up_is_not_nothing_left():
    shown = report(demasked(**(FULL | NOTHING_WENT | {"removed": {}})))
    assert shown.summary == "nothing removed: 71 slices, for the reasons named"
    assert "nothing left" not in str(shown)


class Opaque(nn.Module):
    """Dead units in front of a call that mixes them."""

    def __init__(self, mix):
        super().__init__()
        self.a, self.b, self.mix = nn.Linear(4, 8), nn.Linear(8, 2), mix
        with torch.no_grad():
            self.a.weight[:3] = 0
            self.a.bias[:3] = 0

    def forward(self, x):
        return self.b(self.mix(self.a(x)))


def test_a_pass_that_removes_nothing_says_why():
    model = Opaque(lambda x: torch.fft.fft(x).real).eval()
    shown = report(demask.demask(model, (torch.randn(2, 4),)))
    assert "nothing left" not in str(shown)
    assert any("aten.fft_fft" in decline.text for decline in shown.declined), str(shown)


def test_rows_that_are_nearly_zero_are_named():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    assert "below" not in str(report(demask.demask(net, (torch.ones(2, 4),))).notes)
    net[0].weight.data[:3] *= 1e-9
    (note,) = (n for n in report(demask.demask(net, (torch.ones(2, 4),))).notes if "below" in n)
    assert note.startswith("rows of weights below 1e-06 of their layer's largest, 3 of 0.weight, stay")


def test_something_removed_never_says_nothing():
    assert "nothing left" not in str(report(demasked()))
    fewer_macs = demasked(after=Sizes(parameters=1000, macs=19_999, bytes=4000))
    assert not report(fewer_macs).nothing_removed


def test_long_lists_are_cut_in_the_text_only():
    many = {
        "removed": {f"layer{k}": k + 1 for k in range(30)},
        "reasons": tuple(Reason(f"n{k}", "", 0, 1, f"reason {k}") for k in range(30)),
    }
    shown = report(demasked(**many))
    lines = str(shown).splitlines()
    assert max(map(len, lines)) <= 100
    assert [" ".join(line.split()) for line in lines if "more" in line] == [
        "... and 10 more reasons",
        "10 more modules 55",
    ]
    assert len(shown.to_dict()["removed"]) == len(shown.to_dict()["declined"]) == 30


def test_many_places_are_named_by_the_first_three():
    reasons = tuple(Reason(f"n{k}", f"layer{k}", 0, 2, FOO) for k in range(5))
    text = str(report(demasked(reasons=reasons)))
    assert f"10 slices not removed: {FOO} (layer0, layer1, layer2 and 2 more)" in text


def test_a_reason_that_kept_no_slice_is_left_out_everywhere(tmp_path):
    reasons = (Reason("foo", "", 0, 0, "no rule for aten.bar"), Reason("foo", "", 0, 2, FOO))
    shown = report(demasked(reasons=reasons))
    shown.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in (str(shown), json.dumps(shown.to_dict()), page):
        assert "aten.bar" not in text
        assert FOO in text


def test_square_brackets_are_no_markup():
    text = str(report(demasked(removed={"a[bold]b": 1}, notes=("[red]x[/red]",))))
    assert "a[bold]b" in text
    assert "note: [red]x[/red]" in text


def test_the_dictionary_survives_json():
    data = report(demasked(**FULL)).to_dict()
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, sort_keys=True))
    assert data["before"] == {"parameters": 1000, "macs": 20_000, "bytes": 4000, "buffers": 0}
    assert data["after"] == {"parameters": 250, "macs": 5000, "bytes": 1000, "buffers": 0}
    assert data["removed"] == {"layer3.conv2": 700, "stem": 50}
    assert data["declined"][1] == {"text": "graph output", "slices": 3, "places": ["cat_1"]}


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        report(demasked()).to_html(tmp_path / "missing" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_demask_did_not_make_is_refused():
    with pytest.raises(BadInput, match=r"that demask returned, got a Linear"):
        report(nn.Linear(2, 3))


def pruned() -> nn.Module:
    """A network with masks of torch.nn.utils.prune, a norm to fold and two thirds of it zero."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.Flatten(), nn.Linear(48, 5)
    )
    for name in ("weight", "bias"):
        mask = torch.ones_like(getattr(model[0], name))
        mask[:8] = 0
        prune.custom_from_mask(model[0], name, mask)
    nn.init.zeros_(model[1].bias)
    return model.eval()


PARAMETERS = 3 * 12 * 9 + 12 + 2 * 12 + 12 * 12 * 9 + 12 + 48 * 5 + 5  # masks are none


def rows(shown) -> int:
    """The sum of the rows of removed parameters, as they are printed."""
    return sum(int(count.replace(",", "")) for _, count in removed_rows(shown))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", [demask.demask, partial(demask.optimize, threads=1)])
@pytest.mark.parametrize("modules", [None, ["0", "1", "2", "3"], ["3"]])
def test_every_function_counts_parameters_alike(function, modules):
    shown = report(function(pruned(), (torch.randn(1, 3, 6, 6),), modules=modules))
    assert shown.before.parameters == PARAMETERS
    assert shown.before.buffers in (2 * 12, 2 * 12 + 1)  # a captured program counts no batches
    assert rows(shown) == shown.before.parameters - shown.after.parameters


def test_what_the_result_adds_is_a_row():
    shown = report(demasked(**(FULL | {"removed": {"stem": 800}})))
    assert rows(shown) == 750
    assert "(added by the result)" in str(shown)


def test_zeros_that_are_left_for_no_known_reason_are_named():
    network = demasked(**NOTHING_WENT)
    network.layer = nn.Linear(3, 4)
    nn.init.zeros_(network.layer.weight[:2])
    assert report(network).summary == (
        "nothing removed: slices of zeros are left (2 of layer.weight), no reason is known"
    )


@pytest.mark.parametrize("batch", [1, 5])  # of one, torch.export captures two
def test_sizes_are_those_that_users_count(batch):
    """Buffers apart, MACs of one example, and the rows of a class with graphs add up."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4))
    net.train(), net(torch.randn(4, 3, 6, 6)), net.eval()
    nn.init.zeros_(net[0].weight[:4])
    shown = report(demask.demask(net, (torch.randn(batch, 3, 6, 6),)))
    assert shown.batch == batch
    assert shown.before.parameters == sum(p.numel() for p in net.parameters())
    assert shown.before.buffers == 2 * 8 + 1
    macs = 8 * 27 * 16 + 8 * 16 * 4
    assert shown.before.macs == batch * macs
    assert shown.work == ("MACs per example", macs, macs // 2)
    assert "MACs per example" in str(shown) and " buffers " in str(shown)
    assert rows(shown) == shown.before.parameters - shown.after.parameters


def test_modules_that_no_call_reaches_are_a_row():
    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.auxiliary = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 7)

        def forward(self, x):
            y = self.a(x)
            return (self.b(y), self.auxiliary(y)) if self.training else self.b(y)

    shown = report(demask.demask(Auxiliary(), (torch.randn(2, 4),), result="graph"))
    assert shown.uncalled == 8 * 7 + 7 and "(modules that are not called)" in str(shown)
    assert rows(shown) == shown.before.parameters - shown.after.parameters == 8 * 7 + 7
