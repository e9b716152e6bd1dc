"""Checkpoint folders of Hugging Face: a masked one becomes a smaller one that loaders read."""

from demask.checkpoint.report import CheckpointReport
from demask.checkpoint.slim import slim

__all__ = ["CheckpointReport", "slim"]
