"""A cheap run first: what it saw conditions the run that follows."""

from demask.pilot.bounds import clopper_pearson, paired_bound
from demask.pilot.calibrate import Calibrated
from demask.pilot.chain import Certified, Columns, unconditioned
from demask.pilot.channels import Channels
from demask.pilot.collect import collect
from demask.pilot.compare import Comparison, compare
from demask.pilot.condition import condition
from demask.pilot.conditioned import Condition, Conditioned, Decision
from demask.pilot.data import ExecutionData
from demask.pilot.downsample import Downsample
from demask.pilot.explain import Explanation, explain
from demask.pilot.gate import Gate
from demask.pilot.guarantee import Guarantee, by_mean, guarantee, splits
from demask.pilot.lowrank import LowRank
from demask.pilot.order_graph import Order
from demask.pilot.packets import PacketReader
from demask.pilot.packets import write as write_packets
from demask.pilot.regions import Missed, Regions
from demask.pilot.rounding import Bits, Exponents
from demask.pilot.route import Route, Router
from demask.pilot.simplify import Simplifier, simplifier, simplify
from demask.pilot.supports import Constant, Precision, Skip, Value

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
    "Order",
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
