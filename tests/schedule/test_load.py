"""Links as the command line writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.schedule.load import parse_link


def test_links_on_the_command_line(tmp_path: Path) -> None:
    assert parse_link("n:2ms:8Gbit/s").curve.seconds_for(1_000_000) == pytest.approx(3e-3)
    table = tmp_path / "t.csv"
    table.write_text("bytes,seconds\n100,1.0\n200,3.0\n")
    assert parse_link(f"n:{table}").curve.seconds_for(150) == 2.0
    for bad in ("n", "n:5:1GB/s", "n:5us:0GB/s", "n:5us:fast"):
        with pytest.raises(PaseError, match="--link"):
            parse_link(bad)
