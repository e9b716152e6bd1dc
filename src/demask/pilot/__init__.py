"""A cheap run first: what it saw conditions the run that follows."""

from demask.pilot.conditioned import Condition, Conditioned, Decision

__all__ = ["Condition", "Conditioned", "Decision"]
