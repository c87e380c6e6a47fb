"""Let the tests of this folder import the things they share, as their child processes do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
