"""Rewriting of strided convolutions for targets that lack them, and the inverse.

`lower` replaces strided convolutions by the ops that a `Target` has; `raise_strides` is the
inverse. `instructions` lists the steps of an accelerator, a `Machine`. `TARGETS` has the built-in
targets by name: "max_pool", "avg_pool", "slice", "no_pool", "space_to_depth", "fhe" (homomorphic
encryption) and "matrix_unit".

Example:
    >>> from demask.stride import TARGETS
    >>> sorted(TARGETS["fhe"].ops)
    ['add', 'crop', 'dilation', 'multiply', 'rotate']
"""

from demask.stride.accelerator.instructions import Instructions, instructions
from demask.stride.accelerator.machine import Machine
from demask.stride.lower import NoSoundForm, lower
from demask.stride.raise_strides import raise_strides
from demask.stride.targets import TARGETS, Target

__all__ = ["TARGETS", "Instructions", "Machine", "NoSoundForm", "Target", "instructions", "lower", "raise_strides"]
