"""Scripts of the benchmarks import each other by bare names, from the folder that they lie in."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
