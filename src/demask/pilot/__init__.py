"""A cheap run first: what it saw conditions the run that follows."""

from demask.pilot.chains.exact_conditions import Certified, Columns, unconditioned
from demask.pilot.compare import Comparison, compare
from demask.pilot.condition import condition
from demask.pilot.conditions.base import Condition, Conditioned, Decision
from demask.pilot.conditions.channel_conditions import ConstantChannels as Constant
from demask.pilot.conditions.channel_conditions import PilotValue as Value
from demask.pilot.conditions.channel_conditions import Precision, Skip
from demask.pilot.conditions.regions import Missed, Regions
from demask.pilot.data.collect import collect
from demask.pilot.data.execution_data import ExecutionData
from demask.pilot.explain import Explanation, explain
from demask.pilot.gate import Gate
from demask.pilot.guarantee import Guarantee, by_mean, clopper_pearson, guarantee, paired_bound, splits
from demask.pilot.packet_writer import PacketReader
from demask.pilot.packet_writer import write as write_packets
from demask.pilot.route import Calibrated, Route, Router
from demask.pilot.simplifiers.channels import Channels
from demask.pilot.simplifiers.downsample import Downsample
from demask.pilot.simplifiers.low_rank import LowRank
from demask.pilot.simplifiers.rounding import Bits, Exponents
from demask.pilot.simplifiers.simplify import Simplifier, simplifier, simplify

__all__ = [
    "Bits",
    "Calibrated",
    "Certified",
    "Channels",
    "Columns",
    "Comparison",
    "Condition",
    "Conditioned",
    "Constant",
    "Decision",
    "Downsample",
    "ExecutionData",
    "Explanation",
    "Exponents",
    "Gate",
    "Guarantee",
    "LowRank",
    "Missed",
    "PacketReader",
    "Precision",
    "Regions",
    "Route",
    "Router",
    "Simplifier",
    "Skip",
    "Value",
    "by_mean",
    "clopper_pearson",
    "collect",
    "compare",
    "condition",
    "explain",
    "guarantee",
    "paired_bound",
    "simplifier",
    "simplify",
    "splits",
    "unconditioned",
    "write_packets",
]
