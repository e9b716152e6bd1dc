"""Reports on demasked networks: as a value, a text table, a dictionary, and a web page."""

from demask.report.report import Report, report
from demask.report.values import Decline

__all__ = ["Decline", "Report", "report"]
