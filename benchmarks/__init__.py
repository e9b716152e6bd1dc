"""Scripts that measure speed, memory and loss, a folder per engine: `python -m benchmarks list`."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Networks that tests and benchmarks share.
sys.path.append(str(ROOT / "tests" / "networks" / "zoo"))
