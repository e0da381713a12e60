"""The work of launched ops of compiled programs."""

from __future__ import annotations

import pytest

from pase.hlo.module import modules
from pase.hlo.work import OpWork, op_work

TEXT = """\
HloModule m, is_scheduled=true

%taken (stack: f32[12,64,32], at: s32[]) -> f32[64,32] {
  %stack = f32[12,64,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  %next = s32[] add(%at, %at)
  %part = f32[1,64,32]{2,1,0} dynamic-slice(%stack, %next, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = f32[64,32]{1,0} bitcast(%part)
}

%put (stack: f32[12,64,32], new: f32[1,64,32], at: s32[]) -> f32[12,64,32] {
  %stack = f32[12,64,32]{2,1,0} parameter(0)
  %new = f32[1,64,32]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %written = f32[12,64,32]{2,1,0} dynamic-update-slice(%stack, %new, %at, %zero, %zero)
}

%scaled (x: f32[64,32], y: f32[64,32]) -> f32[64,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %y = f32[64,32]{1,0} parameter(1)
  ROOT %times = f32[64,32]{1,0} multiply(%x, %y)
}

ENTRY %main {
  %stack = f32[12,64,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %w = f32[32,128]{1,0} parameter(2)
  %image = f32[2,8,8,3]{3,2,1,0} parameter(3)
  %filter = f32[3,3,3,16]{3,2,1,0} parameter(4)
  %zero = s32[] constant(0)
  %filled = s32[1]{0} broadcast(%zero), dimensions={}
  %first = s32[] bitcast(%filled)
  %slice = f32[64,32]{1,0} fusion(%stack, %first), kind=kLoop, calls=%taken, metadata={NAMED}
  %scale = f32[64,32]{1,0} fusion(%slice, %slice), kind=kLoop, calls=%scaled
  %row = f32[1,64,32]{2,1,0} bitcast(%scale)
  %stored = f32[12,64,32]{2,1,0} fusion(%stack, %row, %at), kind=kLoop, calls=%put
  %seen = f32[2,8,8,16]{3,2,1,0} convolution(%image, %filter), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  %copied = f32[64,32]{0,1} copy(%slice)
  ROOT %out = f32[64,128]{1,0} dot(%copied, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


@pytest.fixture(scope="module")
def work() -> dict[str, OpWork]:
    pytest.importorskip("jaxlib._hlo")
    named = 'op_name="jit(f)/layer/slice" source_file="model.py" source_line=7'
    (module,) = modules(TEXT.replace("NAMED", named))
    return {i.name: op_work(module, module.entry, i) for i in module.entry.instructions.values()}


def test_flops_of_products_and_convolutions(work: dict[str, OpWork]) -> None:
    assert work["out"].flops == 2 * 64 * 128 * 32
    assert work["seen"].flops == 2 * (2 * 8 * 8 * 16) * (3 * 3 * 3)
    assert work["scale"].flops == 0


def test_of_an_array_of_which_a_part_is_read_or_written_that_part_counts(work: dict[str, OpWork]) -> None:
    part, index = 64 * 32 * 4, 4
    assert work["slice"].nbytes == 2 * part + index
    assert work["stored"].nbytes == 2 * part + index
    assert work["scale"].nbytes == 3 * part


def test_kinds_of_work(work: dict[str, OpWork]) -> None:
    kinds = {n: work[n].work for n in ("out", "seen", "slice", "stored", "scale", "copied")}
    assert kinds == {
        "out": "product",
        "seen": "convolution",
        "slice": "copy",  # the arithmetic in it is on an index
        "stored": "copy",
        "scale": "elementwise",
        "copied": "copy",
    }


def test_an_op_has_the_users_name_and_line(work: dict[str, OpWork]) -> None:
    assert (work["slice"].name, work["slice"].source) == ("jit(f)/layer/slice", "model.py:7")
    assert work["copied"].name == "copy of jit(f)/layer/slice"
    assert work["filled"].name == "for jit(f)/layer/slice"
