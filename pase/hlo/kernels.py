"""The kernels of a compiled program, and a roofline of their time.

A kernel is a scheduled instruction that runs on the device: a fusion, a library call, a copy, …

>>> text = '''HloModule m
... ENTRY %main (p: f32[8,4], q: f32[4,2]) -> f32[8,2] {
...   %p = f32[8,4]{1,0} parameter(0)
...   %q = f32[4,2]{1,0} parameter(1)
...   ROOT %d = f32[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }'''
>>> from pase.hlo.module import modules
>>> (m,) = modules(text)
>>> kernel_of(m, m.entry, m.entry.root)
HloKernel(work='product', flops=128, nbytes=224, dtype='f32', keys=0)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pase.errors import PaseError
from pase.hlo.module import Computation, Instruction, Module
from pase.hlo.work import HloWork, op_work
from pase.machine.types import Device

__all__ = ["HloKernel", "kernel_of", "roofline_s"]

_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"),
        *("opt-barrier", "optimization-barrier", "domain", "partition-id", "replica-id"),
    }
)
"""Instructions that no kernel runs for."""

_TYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "s8": "int8",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "f4e2m1fn": "float4_e2m1fn",
}
"""HLO's names of element types -> those of machine files. Others run at a device's slowest rate."""


@dataclass(frozen=True, kw_only=True)
class HloKernel:
    """What one execution of a kernel does. flops, nbytes, dtype: as in ``OpWork``.

    keys: for attention, how many keys a query sees.
    """

    work: HloWork
    flops: int
    nbytes: int
    dtype: str
    keys: int = 0


def kernel_of(module: Module, computation: Computation, i: Instruction) -> HloKernel | None:
    """The kernel of a scheduled instruction; None if none runs for it.

    Loops, calls, conditionals and collectives are not kernels: their parts are (``pase.hlo.schedule``). Raises
    PaseError for a product whose FLOPs the program does not show, because it must not be free.
    """
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
        return None
    if i.custom_call_target == "AllocateBuffer":
        return None
    found = op_work(module, computation, i)
    unread = i.opcode == "custom-call" and i.noted("lhs_contracting_dimensions") is None
    if (found.work in ("convolution", "attention") and not found.flops) or (
        found.work == "product" and (unread or not found.flops)
    ):
        raise PaseError(
            f"the {found.work} '{i.name}' ({i.custom_call_target or i.opcode}) does not show its sizes",
            where=f"HLO computation '{computation.name}'",
            fix="compile it with a version of JAX that pase was tested with",
        )
    scores = (i.noted("intermediate_tensor_shape") or {}).get("dimensions") or [0]
    return HloKernel(
        work=found.work, flops=found.flops, nbytes=found.nbytes, dtype=found.dtype, keys=int(scores[-1])
    )


def roofline_s(kernel: HloKernel, device: Device) -> float:
    """Seconds of one execution: its products at the rates that large ones reach on the device, or its bytes at the
    memory's rate, whichever takes longer, after the gap between two kernels.

    It knows nothing of tiles, of alignment or of how well a library does on a shape, so it is a lower bound for
    products that are not large. Arithmetic outside of products is taken to be free beside its bytes.
    """
    return device.launch_s + max(
        kernel.flops / _rate(kernel, device), kernel.nbytes / device.moved_bytes_per_s
    )


def _rate(kernel: HloKernel, device: Device) -> float:
    dtype = _TYPES.get(kernel.dtype, kernel.dtype)
    if kernel.keys and device.attention is not None:
        return device.peak(dtype) * float(device.attention.at(np.array([float(kernel.keys)]))[0])
    return device.peak(dtype) * device.reached("conv" if kernel.work == "convolution" else "matmul", dtype)
