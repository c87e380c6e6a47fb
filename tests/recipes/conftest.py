"""Let the tests of this folder import the recipes, what they share, and the trainer tests's."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "recipes"), str(HERE.parent / "trainer")]
