"""Checkpoint folders of Hugging Face: a masked one becomes a smaller one that loaders read."""

from demask.checkpoint.load import load
from demask.checkpoint.report import CheckpointReport
from demask.checkpoint.requested import DROP_ZERO, read_numbers
from demask.checkpoint.slim import slim

__all__ = ["DROP_ZERO", "CheckpointReport", "load", "read_numbers", "slim"]
