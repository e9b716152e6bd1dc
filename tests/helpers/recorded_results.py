"""What tests measured, from all workers, and shards of tests."""

import json

import pytest

KEY = ("suite", "network", "mask")  # of a result


def shard_of(text):
    """(0, 6) of "1/6": which shard, of how many. Which one a test is in depends on its name alone:
    new tests move no others."""
    first, slash, count = text.partition("/")
    good = slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)
    if not good:
        raise pytest.UsageError(f"expected --shard K/N with 1 <= K <= N, such as 2/6, got {text!r}")
    return int(first) - 1, int(count)


class Results:
    """Collects what tests measured, from all workers: one line per network and mask, sorted."""

    def __init__(self, path):
        self.path = path
        self.measured = {}

    def pytest_runtest_logreport(self, report):
        reported = dict(report.user_properties).get("result")
        wrong = report.outcome == "failed" or hasattr(report, "wasxfail")
        if not reported or report.when != "call" or (report.outcome == "skipped" and not wrong):
            return
        if wrong:
            reported = {name: reported[name] for name in KEY} | {"failed": True}
        self.measured[tuple(reported[name] for name in KEY)] = reported

    def pytest_sessionfinish(self):
        before = json.loads(self.path.read_text()) if self.path.exists() else []
        merged = {tuple(line[name] for name in KEY): line for line in before} | self.measured
        lines = [json.dumps(merged[key]) for key in sorted(merged)]
        self.path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
