"""Modules read from HLO text and protos: types, their bytes, and the refusal of what is no compiled program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.hlo import collectives as hlo
from pase.hlo.module import Shape, modules, read
from tests.hlo.programs import module


@given(
    st.lists(st.integers(0, 9), max_size=4), st.sampled_from(["f32", "bf16", "s8", "f8e4m3fn", "pred", "c64"])
)
def test_bytes_of_a_type_are_numpys(dims, dtype):
    width = {"f32": 4, "bf16": 2, "s8": 1, "f8e4m3fn": 1, "pred": 1, "c64": 8}[dtype]
    text = f"{dtype}[{','.join(map(str, dims))}]"
    both = f"(({text}, /*index=1*/{text}), u32[])"
    (read,) = modules(module(f"ROOT %p = {both} parameter(0)", read=both, made=both))
    array = Shape(dtype=dtype, dims=tuple(dims))
    assert list(read.entry.root.shape.arrays()) == [array, array, Shape(dtype="u32")]
    assert array.nbytes == int(np.prod(dims)) * width
    assert read.entry.root.shape.nbytes == 2 * array.nbytes + 4


def test_every_type_of_jaxlib_is_known_by_its_number():
    from jaxlib import _hlo

    named = {t.name.lower(): t.value for t in _hlo.PrimitiveType}
    for dtype, number in named.items():
        if dtype not in ("primitive_type_invalid", "opaque_type", "tuple", "token"):
            (read,) = modules(
                module(f"ROOT %p = {dtype}[8] parameter(0)", read=f"{dtype}[8]", made=f"{dtype}[8]")
            )
            assert (read.entry.root.shape.dtype, number > 0) == (dtype, True)
            assert read.entry.root.shape.nbytes > 0


def test_text_that_is_no_compiled_hlo_is_refused():
    with pytest.raises(PaseError, match="HloModule") as e:
        hlo.collectives("module @f { func.func public @main() { stablehlo.add } }")
    assert ".compile()" in e.value.fix
    with pytest.raises(PaseError, match="XLA cannot parse"):
        modules("HloModule m\n\nENTRY %f (p: f32[]) -> f32[] {\n  ROOT %p = f32[] para")
    with pytest.raises(PaseError, match="entry computation") as e:
        read(b"", "trace.pb")
    assert e.value.where == "trace.pb"
    with pytest.raises(PaseError, match="HloProto") as e:
        read(b"\x0a\xff", "trace.pb")
    assert e.value.where == "trace.pb"
    with pytest.raises(PaseError, match="'#99'"):
        _ = Shape(dtype="#99", dims=(3,)).nbytes
