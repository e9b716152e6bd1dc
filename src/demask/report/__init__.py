"""What demasking did to a network: as a value, a text table, a dictionary, and a web page."""

from demask.report.report import Decline, Report, report

__all__ = ["Decline", "Report", "report"]
