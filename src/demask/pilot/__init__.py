"""A cheap run first: what it saw conditions the run that follows."""

from demask.pilot.chain import Certified, Columns, unconditioned
from demask.pilot.channels import Channels
from demask.pilot.collect import collect
from demask.pilot.compare import Comparison, compare
from demask.pilot.conditioned import Condition, Conditioned, Decision
from demask.pilot.data import ExecutionData
from demask.pilot.downsample import Downsample
from demask.pilot.lowrank import LowRank
from demask.pilot.rounding import Bits, Exponents
from demask.pilot.simplify import Simplifier, simplifier, simplify

__all__ = [
    "Bits",
    "Certified",
    "Channels",
    "Columns",
    "Comparison",
    "Condition",
    "Conditioned",
    "Decision",
    "Downsample",
    "ExecutionData",
    "Exponents",
    "LowRank",
    "Simplifier",
    "collect",
    "compare",
    "simplifier",
    "simplify",
    "unconditioned",
]
