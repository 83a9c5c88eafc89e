import sys
from pathlib import Path

# The scripted engine is that of the tests of episodes.
sys.path.insert(0, str(Path(__file__).parents[1] / "episodes"))
