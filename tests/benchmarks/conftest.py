"""Let tests import the benchmarks' scripts, which import each other by bare names from their own folder."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
