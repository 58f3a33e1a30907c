"""Makes the helper modules beside this file importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
