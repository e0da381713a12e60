"""Which instructions run a kernel, and the roofline of its time. tests/hlo/test_work.py tests FLOPs and bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pase.errors import PaseError
from pase.hlo.kernels import HloKernel, kernel_of, roofline_s
from pase.hlo.module import modules
from pase.machine import load

TEXT = """HloModule m
ENTRY %main (a: bf16[64,128], b: bf16[128,32], q: bf16[2,16,4,8]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,32]{1,0} parameter(1)
  %q = bf16[2,16,4,8]{3,2,1,0} parameter(2)
  %view = bf16[2,16,32]{2,1,0} bitcast(%q)
  %attention = (bf16[2,4,16,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %q, %q),
    custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{
      "intermediate_tensor_shape":{"dimensions":["2","4","16","16"]},"mask_type":"CAUSAL"}}
  ROOT %product = bf16[64,32]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul",
    backend_config={"gemm_backend_config":{"dot_dimension_numbers":{
      "lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}"""


def kernels(text):
    """Name -> kernel, for the entry's instructions that have one."""
    (module,) = modules(text)
    found = {i.name: kernel_of(module, module.entry, i) for i in module.entry.instructions.values()}
    return {name: kernel for name, kernel in found.items() if kernel is not None}


def test_views_and_parameters_run_nothing():
    found = kernels(TEXT)
    assert set(found) == {"attention", "product"}
    assert found["product"].flops == 2 * 64 * 128 * 32
    assert found["attention"].flops == 2 * 2 * (2 * 4 * 16 * 16) * 8 // 2 and found["attention"].keys == 16


def test_a_product_of_unknown_size_is_not_free():
    with pytest.raises(PaseError, match="product 'product'"):
        kernels(TEXT.replace('"lhs_contracting_dimensions":["1"],', ""))
    with pytest.raises(PaseError, match="attention 'attention'"):
        kernels(TEXT.replace('"dimensions":["2","4","16","16"]', '"dimensions":[]'))


def test_the_roofline_is_the_longer_of_products_and_bytes():
    device = load("h100x8").device
    product = HloKernel(work="product", flops=10**12, nbytes=0, dtype="bf16")
    rate = device.peak("bfloat16") * device.reached("matmul", "bfloat16")
    assert roofline_s(product, device) == pytest.approx(1e12 / rate + device.launch_s)
    large = dataclasses.replace(product, nbytes=10**12)
    assert roofline_s(large, device) == pytest.approx(1e12 / device.moved_bytes_per_s + device.launch_s)
    attention = dataclasses.replace(product, work="attention", keys=4096)
    assert device.attention is not None
    reached = device.peak("bfloat16") * float(device.attention.at(np.array([4096.0]))[0])
    assert 600e12 < reached < 700e12 and roofline_s(attention, device) == pytest.approx(
        1e12 / reached + device.launch_s
    )
    unknown = dataclasses.replace(product, dtype="f8e5m2fnuz")
    slowest = min(device.peak_flops.values()) * device.reached("matmul", "u64")
    assert roofline_s(unknown, device) == pytest.approx(1e12 / slowest + device.launch_s)
