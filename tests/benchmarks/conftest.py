import sys
from pathlib import Path

# The scripts of benchmarks/ are imported by name. Not in the modules of the tests: forked workers
# import those once, and begin with another sys.path.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
