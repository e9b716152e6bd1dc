"""demask() with a graph for a result, for tests of what stands in one."""

from __future__ import annotations

import functools

import demask

to_graph = functools.partial(demask.demask, result="graph")
