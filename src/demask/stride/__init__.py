"""Rewriting of strided convolutions for targets that lack them, and the inverse."""

from demask.stride.accelerator.instructions import Instructions, instructions
from demask.stride.accelerator.machine import Machine
from demask.stride.lowering.lower import NoSoundForm, lower
from demask.stride.raising.raise_strides import raise_strides
from demask.stride.targets import TARGETS, Target

__all__ = [
    "TARGETS", "Instructions", "Machine", "NoSoundForm", "Target", "instructions", "lower",
    "raise_strides",
]  # fmt: skip
