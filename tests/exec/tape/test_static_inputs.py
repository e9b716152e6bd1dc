"""Static inputs are converted once, and again whenever they may have changed: never stale."""

from __future__ import annotations

import gc
import json
import threading

import pytest
import torch
from torch import Tensor

from demask.errors import BadInput
from demask.exec.steps.segment_program import SegmentProgram
from demask.exec.steps.segment_steps import add_step
from demask.exec.tape import segment_plan as static_inputs
from demask.exec.tape.segment_plan import ConvertedInput, NoPlan, SegmentPlan, StaticInputs
from demask.sparse.segment.segment_op import segment
from segment_drafts import RELU, Draft, all_at_once, check, compare


def draft_of(batch: int = 1, size: int = 9, seed: int = 0) -> Draft:
    """A layer to which a map is added; the map also has readers in other layouts."""
    draft = Draft((batch, 3, size, size), (batch, 4, size, size), seed=seed)
    y = draft.add(draft.conv(0, 4), 1, RELU)
    z = draft.conv(draft.cat(y, 1, draft.select(1, [1, 2])), 4, add=1)
    draft.cat(draft.select(1, [3, 0], (2, 2)), draft.pool(z, stride=2), draft.pool(1, stride=2))
    return draft


@pytest.fixture
def conversions(monkeypatch) -> list[int]:
    """One entry per conversion."""
    counts: list[int] = []
    real = StaticInputs._convert

    def convert(self, tensors, threads):
        counts.append(len(tensors))
        return real(self, tensors, threads)

    monkeypatch.setattr(StaticInputs, "_convert", convert)
    return counts


class Calls:
    """Calls of one plan with a static map, each compared with float64."""

    def __init__(self, draft: Draft, threads: int = 2):
        self.draft, self.program = draft, draft.program(static=(1,))
        self.plan = SegmentPlan.of(self.program, draft.weights, draft.inputs, threads)

    def check(self, image: Tensor, border: Tensor) -> None:
        inputs = [image, border]
        compare(self.plan(inputs), self.program, self.draft.weights, inputs)


@pytest.fixture
def calls() -> Calls:
    return Calls(draft_of())


def map_like(border: Tensor, seed: int = 5) -> Tensor:
    return torch.randn(border.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_a_static_map_of_any_batch(batch: int, threads: int) -> None:
    draft = draft_of(batch, 5 + 2 * batch)
    program = draft.program(static=(1,))
    check(program, draft.weights, draft.inputs, threads)  # one per image
    expanded = draft.inputs[1][:1].expand(batch, -1, -1, -1)
    check(program, draft.weights, [draft.inputs[0], expanded], threads)
    with all_at_once(batch):
        check(program, draft.weights, draft.inputs, threads)
        check(program, draft.weights, [draft.inputs[0], expanded], threads)


def test_a_map_is_converted_once(calls, conversions) -> None:
    image, border = calls.draft.inputs
    for k in range(3):
        calls.check(image * (k + 1), border)
    assert conversions == [1]


def test_maps_of_split_batches(conversions) -> None:
    """An expanded map is converted by each part of a batch, one per image with every call."""
    draft = draft_of(7, 16)
    image, border = draft.inputs
    draft.inputs[1] = border[:1].expand(7, -1, -1, -1)
    expanded = Calls(draft)
    assert all(batch.static for batch in expanded.plan.batches)
    for _ in range(3):
        expanded.check(image, draft.inputs[1])
    assert len(conversions) == len(expanded.plan.batches)
    draft.inputs[1] = border
    calls = Calls(draft)
    assert not any(batch.static for batch in calls.plan.batches if batch.images)
    calls.check(image, border)
    border[3] += 1.0
    calls.check(image, border)


CHANGES = {
    "in place": lambda border: border.mul_(2.0),
    "one element": lambda border: border[0, 3, 8].index_fill_(0, torch.tensor([8]), 9.0),
    "a view": lambda border: border[0, 1].fill_(0.25),
    "NumPy": lambda border: border.numpy().__imul__(-1.5),
    "written through .data": lambda border: border.data.mul_(2.0),
    "another .data": lambda border: setattr(border, "data", map_like(border)),
    "set_": lambda border: border.set_(map_like(border)),
    "copy_": lambda border: border.copy_(map_like(border)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_map_is_converted_again(name: str, calls, conversions) -> None:
    image, border = calls.draft.inputs
    calls.check(image, border)
    CHANGES[name](border)
    calls.check(image, border)
    calls.check(image, border)
    assert len(conversions) == 2


def test_memory_replaced_through_data_is_not_read() -> None:
    """The memory that was converted may be freed, and unmapped: large ones are by the allocator."""
    draft = Draft((1, 4, 300, 300), (1, 4, 300, 300))
    draft.add(0, 1)
    large = Calls(draft, 1)
    image, border = draft.inputs
    large.check(image, border)
    for seed in range(3):
        border.data = torch.empty(0)
        gc.collect()
        border.data = map_like(torch.empty(1, 4, 300, 300), seed)
        large.check(image, border)


def test_a_part_of_the_same_memory(calls, conversions) -> None:
    """`.data` replaced by other elements of one storage: neither version nor storage change."""
    image, border = calls.draft.inputs
    both = torch.randn(2, *border.shape)
    border.data = both[0]
    calls.check(image, border)
    border.data = both[1]
    calls.check(image, border)
    assert len(conversions) == 2


def test_another_tensor(calls, conversions) -> None:
    image, border = calls.draft.inputs
    others = [border, border.clone() + 1.0, border, map_like(border)]
    for other in others:
        calls.check(image, other)
    assert len(conversions) == 4


def test_freed_and_allocated_again(calls) -> None:
    """A map at the address of an earlier one, with its id and its version."""
    image, border = calls.draft.inputs
    memory, identities = torch.empty(border.shape), set()
    for seed in range(1000):
        other = memory.copy_(map_like(border, seed)).data
        identity = (id(other), other.data_ptr(), other._version)
        calls.check(image, other)
        del other
        if identity in identities:
            break
        identities.add(identity)
    else:
        pytest.skip("Python gave none of 1,000 tensors the address of an earlier one")
    for seed in range(20):
        other = map_like(border, seed)
        calls.check(image, other)
        del other


def test_a_freed_map_is_not_kept(calls) -> None:
    image, border = calls.draft.inputs
    other = map_like(border)
    calls.check(image, other)
    (batch,) = calls.plan.batches
    assert batch.static is not None and batch.static.converted is not None
    (known,) = batch.static.converted.tensors
    assert known.is_current(other)
    del other
    gc.collect()
    assert known.tensor() is None and known.storage() is None


def test_inference_tensors(calls, conversions) -> None:
    """torch counts no writes to them: they are converted at each call."""
    image, border = calls.draft.inputs
    with torch.inference_mode():
        other = border.clone()
    for _ in range(2):
        calls.check(image, other)
        with torch.inference_mode():
            other[0, 0, 0, 0] += 3.0
    calls.check(image, other)
    assert len(conversions) == 3


def test_other_sizes_and_layouts_are_refused(calls) -> None:
    image, border = calls.draft.inputs
    calls.check(image, border)
    transposed = border.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (border[:, :3], transposed, border.double(), border.to_sparse(), border.to("meta")):
        with pytest.raises(NoPlan):
            calls.plan([image, other])
    calls.check(image, border)


def test_threads_with_maps_of_their_own(calls) -> None:
    image, border = calls.draft.inputs
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def work(seed: int) -> None:
        own = [map_like(border, seed), map_like(border, -seed)]
        wanted = [
            SegmentPlan.of(calls.program, calls.draft.weights, [image, other], 1)([image, other]) for other in own
        ]
        start.wait()
        try:
            for k in range(60):
                found = calls.plan([image, own[k % 2]])
                for y, want in zip(found, wanted[k % 2], strict=True):
                    torch.testing.assert_close(y, want, rtol=0, atol=1e-4)  # sums of other order
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_every_input_may_be_static(conversions) -> None:
    draft = draft_of()
    program = draft.program(static=(0, 1))
    plan = check(program, draft.weights, draft.inputs)
    draft.inputs[0].add_(1.0)
    compare(plan(draft.inputs), program, draft.weights, draft.inputs)
    assert conversions == [2, 2]


def test_a_static_input_is_an_output() -> None:
    program = SegmentProgram(("image",), (add_step(0, 0),), (0, 1), (0,))
    for x in (torch.randn(1, 3, 7, 5), torch.randn(3, 1, 2, 2)):
        check(program, [], [x])
    program = SegmentProgram(("tokens",), (), (0,), (0,))
    check(program, [], [torch.randn(4, 5)])


# --------------------------------------------------------------------------------------- the op


def compare_op(draft: Draft, program: SegmentProgram, inputs: list[Tensor]) -> None:
    compare(segment(inputs, draft.weights, program.text()), program, draft.weights, inputs)


@pytest.mark.parametrize("name", CHANGES)
def test_the_op_uses_no_stale_map(name: str) -> None:
    draft = draft_of()
    program = draft.program(static=(1,))
    image, border = draft.inputs
    compare_op(draft, program, [image, border])
    CHANGES[name](border)
    compare_op(draft, program, [image, border])
    compare_op(draft, program, [image, map_like(border, 8)])


def test_the_op_takes_other_layouts_sizes_and_dtypes() -> None:
    draft = draft_of()
    program = draft.program(static=(1,))
    image, border = draft.inputs
    compare_op(draft, program, [image, border])
    for other in (
        border.contiguous(memory_format=torch.channels_last),
        border.transpose(2, 3),
        border[:, :, :1].expand(-1, -1, 9, -1),
        border,
    ):
        compare_op(draft, program, [image, other])
    compare_op(draft, program, [image.double(), border.double()])
    larger = draft_of(2, 11)
    for inputs in (larger.inputs, draft.inputs):
        compare_op(draft, program, inputs)


@pytest.mark.parametrize(
    "bad",
    [
        lambda image, border: [image, border[:, :3]],
        lambda image, border: [image, border[:, :, 1:]],
        lambda image, border: [image, border.double()],
        lambda image, border: [image, border.to_sparse()],
        lambda image, border: [image],
        lambda image, border: [],
        lambda image, border: [image, border, border],
    ],
    ids=["channels", "height", "float64", "sparse", "too few", "none", "too many"],
)
def test_the_op_refuses_what_does_not_fit(bad) -> None:
    draft = draft_of()
    program = draft.program(static=(1,))
    for _ in range(2):
        with pytest.raises(BadInput):
            segment(bad(*draft.inputs), draft.weights, program.text())
        compare_op(draft, program, draft.inputs)  # a plan is there now


# ------------------------------------------------------------------------------------------- text


def test_static_inputs_in_text() -> None:
    draft = draft_of()
    for static in ((), (0,), (1,), (0, 1), (1, 0)):
        program = draft.program(static=static)
        assert SegmentProgram.parse(program.text()) == program
        assert ("static" in json.loads(program.text())) is bool(static)


@pytest.mark.parametrize("static", [[2], [-1], [True], [0.0], ["0"], [None], [[0]], 1, "01", [0, 9], {"x": 0}], ids=str)
def test_bad_static_inputs_are_refused(static) -> None:
    document = json.loads(draft_of().program().text())
    SegmentProgram.parse(json.dumps(document | {"static": [0]}))
    with pytest.raises(BadInput):
        SegmentProgram.parse(json.dumps(document | {"static": static}))


# --------------------------------------------------------------------------------- planted faults


FAULTS = {
    "versions": (ConvertedInput, "is_current", lambda self, tensor: True, "in place"),
    "layouts": (static_inputs, "_input_layout", lambda tensor: None, "a part"),
    "probe": (static_inputs.MemoryProbe, "same", lambda self: True, "written through .data"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, calls, monkeypatch) -> None:
    owner, attribute, fault, change = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    if name != "probe":  # one mechanism alone
        monkeypatch.setattr(static_inputs.MemoryProbe, "same", lambda self: True)
    image, border = calls.draft.inputs
    both = torch.randn(2, *border.shape)
    border.data = both[0]
    calls.check(image, border)
    CHANGES.get(change, lambda border: setattr(border, "data", both[1]))(border)
    with pytest.raises(AssertionError):
        calls.check(image, border)
