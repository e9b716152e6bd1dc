"""Checkpoint folders of Hugging Face: a masked one becomes a smaller one that loaders read."""

from demask.checkpoint.report import CheckpointReport
from demask.checkpoint.requested import DROP_ZERO, read_numbers
from demask.checkpoint.slim import slim

__all__ = ["DROP_ZERO", "CheckpointReport", "read_numbers", "slim"]
