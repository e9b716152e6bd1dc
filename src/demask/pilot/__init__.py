"""A cheap run first: what it saw conditions the run that follows."""

from demask.pilot.chain import Certified, Columns, unconditioned
from demask.pilot.channels import Channels
from demask.pilot.conditioned import Condition, Conditioned, Decision
from demask.pilot.downsample import Downsample
from demask.pilot.lowrank import LowRank
from demask.pilot.rounding import Bits, Exponents
from demask.pilot.simplify import Simplifier, simplifier, simplify

__all__ = [
    "Bits",
    "Certified",
    "Channels",
    "Columns",
    "Condition",
    "Conditioned",
    "Decision",
    "Downsample",
    "Exponents",
    "LowRank",
    "Simplifier",
    "simplifier",
    "simplify",
    "unconditioned",
]
