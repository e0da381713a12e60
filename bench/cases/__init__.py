"""What benches and tests share: seeded problems whose truth is known, and plans that move data."""

import os
from pathlib import Path

SHARED = Path(os.environ.get("PASE_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
"""Recorded traces, profiles and contest instances, too large for the repository."""
