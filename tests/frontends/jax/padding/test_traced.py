"""Padding of models of any frontend."""

from types import SimpleNamespace

import pytest

from pase.errors import PaseError
from pase.frontends.blocks import as_padded, extents_to_pad


@pytest.mark.parametrize("frontend", ["torch", "onnx", "tf"])
def test_other_frontends_are_refused_by_name(frontend):
    traced = SimpleNamespace(frontend=frontend, graph=SimpleNamespace(name="net"))
    for pad in (lambda: extents_to_pad(traced, 8, 1), lambda: as_padded(traced, {31: 32})):
        with pytest.raises(PaseError, match=f"read by the {frontend} frontend"):
            pad()
