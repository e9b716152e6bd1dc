"""Depth-first execution of networks within a memory budget, with equal results."""

from demask.exec.device import Device, Memory
from demask.exec.planning.plan import Segment
from demask.exec.planning.plan import TilePlan as Plan
from demask.traverse.batching.batch import batch, traffic
from demask.traverse.halo import Halo, halo
from demask.traverse.normalization import FrozenStatistics, calibrate
from demask.traverse.stream import Streamed, stream
from demask.traverse.tile import plan, spread, tile
from demask.traverse.units import LayoutTraffic, UnitTraffic

__all__ = [
    "Device",
    "FrozenStatistics",
    "Halo",
    "LayoutTraffic",
    "Memory",
    "Plan",
    "Segment",
    "Streamed",
    "UnitTraffic",
    "batch",
    "calibrate",
    "halo",
    "plan",
    "spread",
    "stream",
    "tile",
    "traffic",
]
