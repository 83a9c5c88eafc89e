import sys
from pathlib import Path

# tests/fakes.py is imported by name from every folder below.
sys.path.insert(0, str(Path(__file__).parent))
