"""Protocol buffers of XLA."""

from __future__ import annotations

import pytest

from pase.errors import PaseError
from pase.hlo.protos import parse


def test_a_name_that_is_not_utf8_is_refused():
    """XLA's strings are UTF-8. If they were read as bytes, later comparisons with text would fail."""
    plane = b"\x12\x03\xff\xfe\xfd"  # XPlane.name
    with pytest.raises(PaseError, match="XSpace") as e:
        parse("XSpace", b"\x0a" + bytes([len(plane)]) + plane, "rank0")
    assert e.value.where == "rank0"
