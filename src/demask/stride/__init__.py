"""Rewriting of strided convolutions for targets that lack them, and the inverse."""

from demask.stride.accelerator.instructions import Instructions, instructions
from demask.stride.accelerator.machine import Machine
from demask.stride.lowering.lower import Choice, NoSoundForm, lower, lowered
from demask.stride.raising.raise_strides import raise_strides, raised
from demask.stride.targets import TARGETS, Target

__all__ = [
    "TARGETS", "Choice", "Instructions", "Machine", "NoSoundForm", "Target", "instructions",
    "lower", "lowered", "raise_strides", "raised",
]  # fmt: skip
