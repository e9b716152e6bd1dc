"""Addresses for the steps of a network, and the parts in which it runs where its values do not fit a memory.

Each value is stored where its lifetime allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from demask.errors import BudgetTooSmall
from demask.exec.analysis.flow import Flow
from demask.exec.device import Device
from demask.exec.parts import flow_in_calls, write_out
from demask.exec.planning.plan import Segment, TilePlan
from demask.exec.planning.planner import Planners, plan_flow
from demask.graph.program import Program
from demask.machine.arena import Block, align_size, owners, plan_arena
from demask.ops import Table
from demask.stride.accelerator.emit_compute import RULES
from demask.stride.accelerator.emitter import Listing, UnitStep, ValueRef, emit
from demask.stride.accelerator.machine import ACTIVATIONS, WEIGHTS, BufferOperand, Instruction, Machine
from demask.stride.accelerator.units import ABILITIES, work_of

SHARES = tuple(0.85**k for k in range(10))  # of a memory for which plans of parts are tried
WORSE = 2  # plans that take more cycles, after which no others are tried
INSTRUCTION_BYTES = 16


@dataclass(frozen=True, slots=True)
class AddressedListing:
    """The steps of a network with addresses. sizes: used bytes of each buffer. plan: of its parts."""

    listing: Listing
    instructions: tuple[Instruction, ...]
    sizes: Mapping[str, int]
    plan: TilePlan | None = None

    def bytes_in(self, device: Device) -> int:
        """Bytes of a device's memory: values, and weights and instructions where they are not outside."""
        if device.weights == "outside":
            return self.sizes[ACTIVATIONS]
        return sum(self.sizes.values()) + INSTRUCTION_BYTES * len(self.instructions)

    def cycles(self, machine: Machine) -> int:
        """Cycles of a run, and of loading the weights."""
        return sum(work_of(row, machine).cycles for row in self.instructions)


def list_in_one_piece(program: Program, device: Device) -> AddressedListing:
    """The steps of a program whose values are in memory in full. Raises BadInput if the machine lacks an op."""
    return assign_addresses(emit(program, RULES, device))


def list_in_parts(program: Program, machine: Machine, device: Device, table: Table) -> AddressedListing | None:
    """The steps of a program whose values do not fit a device's memory: parts, in the order of a plan for it. None
    where its inputs have no rows, or its calls run on full values only.

    A plan's bytes are those of values. Units that write before they read take more, and smaller parts in more
    segments may take fewer cycles: of plans for several shares of the memory, the one with the fewest cycles is
    selected. If none fits, the one for the least memory, so that the bytes that an error asks for are enough.
    """
    flow = flow_in_calls(program, table)
    if not flow.local:
        return None
    weights = 0 if device.weights == "outside" else device.weight_bytes(flow.constants.values())
    flow = replace(flow, device=replace(device, weights="outside"))
    fitting, worse, planners = list[AddressedListing](), 0, Planners()

    def listed(here: Flow, plan: TilePlan) -> AddressedListing:
        parts = write_out(here, plan.segments)
        return replace(assign_addresses(emit(parts.program, RULES, device, parts)), plan=plan)

    tried = list[tuple[Segment, ...]]()
    for share in SHARES:
        try:
            here, plan, _ = plan_flow(flow, int(max(device.bytes - weights, 0) * share), planners=planners)
        except BudgetTooSmall as error:
            if not fitting:
                return listed(*plan_flow(flow, error.least, planners=planners)[:2])
            break
        if plan.segments in tried:
            continue
        tried.append(plan.segments)
        one = listed(here, plan)
        if one.bytes_in(device) <= device.bytes:
            worse += any(one.cycles(machine) >= other.cycles(machine) for other in fitting)
            fitting.append(one)
        if worse >= WORSE:
            break
    if fitting:
        return min(fitting, key=lambda one: one.cycles(machine))
    try:
        return listed(*plan_flow(flow, 1, planners=planners)[:2])
    except BudgetTooSmall as error:
        return listed(*plan_flow(flow, error.least, planners=planners)[:2])


def assign_addresses(listing: Listing) -> AddressedListing:
    """The steps of a network with addresses.

    Weights are stored one after another, since every run needs all of them. Activations share
    memory: a value is alive from the first step that writes it to the last that reads it. The
    vector unit may write its result over an operand that no later step reads.
    """
    weights, end = dict[str, int](), 0
    for step in listing.steps:
        if step.writes.buffer == WEIGHTS:
            weights[step.writes.value] = end
            end += align_size(step.writes.bytes)
    owner_of = _owners(listing.steps)
    blocks: dict[str, Block] = {}
    for k, step in enumerate(listing.steps):
        for ref in (*step.reads, step.writes):
            if ref.buffer == ACTIVATIONS:
                owner = owner_of[ref.value]
                before = blocks.get(owner, Block(ref.bytes, k, k))
                blocks[owner] = Block(before.size, before.start, k)
    arena = plan_arena([*blocks.values()])
    offsets = dict(zip(blocks, arena.offsets, strict=True))

    def operand(ref: ValueRef) -> BufferOperand:
        address = 0
        if ref.buffer == WEIGHTS:
            address = weights[ref.value]
        elif ref.buffer == ACTIVATIONS:
            address = offsets[owner_of[ref.value]]
        return BufferOperand(ref.value, ref.buffer, address, ref.shape, ref.compressed)

    instructions = (
        Instruction(step.op, tuple(map(operand, step.reads)), operand(step.writes), step.settings)
        for step in listing.steps
    )
    return AddressedListing(listing, tuple(instructions), {WEIGHTS: end, ACTIVATIONS: arena.size})


def _owners(steps: tuple[UnitStep, ...]) -> dict[str, str]:
    """By value in the activations buffer, the value whose memory it uses: itself, or an operand."""

    def may_overwrite(k: int, value: str) -> bool:
        step = steps[k]
        is_same = any(ref.value == value and ref.bytes == step.writes.bytes for ref in step.reads)
        return is_same and step.writes.buffer == ACTIVATIONS and ABILITIES[step.op].inplace

    def name(ref: ValueRef) -> str:
        """Values of the host and of the buffer of activations may have one name."""
        return ref.value if ref.buffer == ACTIVATIONS else f"{ref.buffer} {ref.value}"

    calls = [(name(step.writes), [ref.value for ref in step.reads if ref.buffer == ACTIVATIONS]) for step in steps]
    return owners(calls, may_overwrite)
