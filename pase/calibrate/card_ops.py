"""The ops that a GPU is calibrated with, and how JAX runs them: many in one program, timed by the profiler."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pase.calibrate.figures import PricedOp, product

if TYPE_CHECKING:
    from jax import Array

__all__ = ["CardOp", "ProfiledKernels", "card_ops", "kernel_seconds"]

_PASSES = {"scale": 2, "add": 3, "norm": 2, "softmax": 2, "sum rows": 1}
"""How often a light op moves its elements. ``pase.tables`` says the same of it."""
_RUNS = 5
_AT_ONCE_BYTES = 4 << 30
"""Operands and results of one program. Results are kept until its end."""


@dataclass(frozen=True, kw_only=True)
class CardOp:
    """An op of one kind of kernel.

    kind: as ``CostModel.compute`` takes it.
    extents: of a product: batch, m, n, k. Of a convolution: images, side, channels in and out, window. Of a light op:
        rows and columns.
    form: what a light op computes.
    """

    kind: Literal["matmul", "conv", "memory"]
    dtype: str
    extents: tuple[int, ...]
    form: str = ""

    @property
    def label(self) -> str:
        what = {"matmul": "product", "conv": "convolution"}.get(self.kind, self.form)
        return f"{what} {self.dtype} {'×'.join(map(str, self.extents))}"

    @property
    def width(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def nbytes(self) -> float:
        """The bytes of operands and result, each once."""
        return self.work.nbytes

    @property
    def work(self) -> PricedOp:
        if self.kind == "memory":
            moved = float(self.width * _PASSES[self.form] * math.prod(self.extents))
            return PricedOp(kind="memory", dtype=self.dtype, flops=0.0, nbytes=moved)
        if self.kind == "matmul":
            return product(self.dtype, self.width, *self.extents)
        images, side, c_in, c_out, window = self.extents
        m, n, k = images * side * side, c_out, c_in * window**2
        return PricedOp(
            kind="conv",
            dtype=self.dtype,
            flops=2.0 * m * n * k,
            nbytes=float(self.width * (m * (c_in + c_out) + c_in * c_out * window**2)),
            mnk=(m, n, k),
        )


def card_ops() -> tuple[CardOp, ...]:
    """The ops from which a calibration chooses; the first thirty have every kind.

    Extents are those of layers: large products first, then thin, deep and small ones, and some with odd rows.
    """
    out: list[CardOp] = []
    products = [
        (1, 4096, 4096, 4096),
        (1, 16384, 4096, 1024),
        (1, 512, 512, 8192),
        (1, 128, 4096, 4096),
        (1, 4096, 4097, 4096),
        (1, 2048, 8192, 2048),
        (1, 1024, 1024, 1024),
        (64, 512, 512, 64),
        (1, 8192, 1024, 1024),
        (1, 8192, 8192, 8192),
        (1, 16, 4096, 4096),
        (1, 256, 256, 256),
        (1, 1000, 50257, 768),
        (1, 4096, 14336, 4096),
        (1, 32768, 512, 512),
        (192, 1024, 64, 1024),
        (1, 208, 792, 1368),
        (1, 3976, 2416, 224),
        (1, 4100, 4100, 4100),
        (1, 768, 768, 16384),
        (1, 2016, 80, 2448),
        (1, 512, 32000, 1024),
    ]
    light = [
        ("scale", (1, 1024)),
        ("scale", (8192, 8192)),
        ("softmax", (16384, 1024)),
        ("add", (4096, 4096)),
        ("norm", (16384, 1024)),
        ("scale", (1024, 1024)),
        ("sum rows", (16384, 4096)),
        ("add", (16384, 8192)),
        ("norm", (4096, 8192)),
        ("softmax", (4096, 2048)),
    ]
    convolutions = [(64, 56, 64, 64, 3), (64, 28, 128, 128, 3), (64, 14, 256, 256, 3), (64, 56, 64, 256, 1)]
    for k in range(len(products)):
        for dtype in ("bfloat16", "float32"):
            out.append(CardOp(kind="matmul", dtype=dtype, extents=products[k]))
        if k < len(light):
            form, extents = light[k]
            dtype = "bfloat16" if k % 2 else "float32"
            out.append(CardOp(kind="memory", dtype=dtype, extents=extents, form=form))
        if k < 2 * len(convolutions):
            dtype = ("bfloat16", "float32")[k % 2]
            out.append(CardOp(kind="conv", dtype=dtype, extents=convolutions[k // 2]))
    return tuple(out)


class ProfiledKernels:
    """Times ops by JAX's profiler (implements ``KernelClock``): each op once in a program, which runs a few times."""

    def seconds(self, ops: Sequence[CardOp]) -> list[float | None]:
        out: list[float | None] = []
        group: list[CardOp] = []
        for op in ops:
            if group and sum(o.nbytes for o in group) + op.nbytes > _AT_ONCE_BYTES:
                out += self._together(group)
                group = []
            group.append(op)
        return out + self._together(group)

    def _together(self, ops: Sequence[CardOp]) -> list[float | None]:
        """The kernels' seconds of each op. If the program does not run, each op is tried alone."""
        import jax

        try:
            return self._profiled(ops)
        except jax.errors.JaxRuntimeError:  # an op that the compiler or the memory refuses
            if len(ops) == 1:
                return [None]
            return [s for op in ops for s in self._together([op])]

    def _profiled(self, ops: Sequence[CardOp]) -> list[float | None]:
        import jax

        programs = [_program(op) for op in ops]
        keys = iter(jax.random.split(jax.random.key(0), sum(len(shapes) for shapes, _ in programs)))
        given = [
            [(jax.random.normal(next(keys), shape, "float32") * 0.02).astype(op.dtype) for shape in shapes]
            for op, (shapes, _) in zip(ops, programs, strict=True)
        ]

        def calibration(given: list[list[Array]]) -> list[Array]:
            done: list[Array] = []
            for k, ((_, run), xs) in enumerate(zip(programs, given, strict=True)):
                # The barrier keeps an op from being fused with another one.
                mine = jax.lax.optimization_barrier(xs)
                with jax.named_scope(_scope(k)):
                    done.append(run(*mine))
            return list(jax.lax.optimization_barrier(done))

        step = jax.jit(calibration)
        jax.block_until_ready(step(given))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(_RUNS):
                    jax.block_until_ready(step(given))
            found = kernel_seconds(Path(folder), len(ops))
        return [s if s > 0 else None for s in found]


def _scope(k: int) -> str:
    return f"card_op_{k}_"


_SCOPE = re.compile(r"card_op_(\d+)_")


def kernel_seconds(folder: Path, count: int) -> list[float]:
    """The seconds of each op's kernels in a run of a profiled program, the mean of its runs; 0 for one without any."""
    from pase.replay import load
    from pase.replay.types import on_stream

    t = load(folder)
    of_name = {
        k: int(found.group(1))
        for k, name in enumerate(t.names)
        if name in t.compiled and (found := _SCOPE.search(t.compiled[name].op_name))
    }
    out = [0.0] * count
    for e in np.flatnonzero(on_stream(t["kind"])).tolist():
        op = of_name.get(int(t["name"][e]))
        if op is not None:
            out[op] += float(t.end_ns[e] - t["start_ns"][e]) / 1e9 / _RUNS
    return out


def _program(op: CardOp) -> tuple[list[tuple[int, ...]], Callable[..., Array]]:
    """(Shapes of the operands, the op)."""
    import jax
    import jax.numpy as jnp

    if op.kind == "matmul":
        batch, m, n, k = op.extents
        b = (batch,) if batch > 1 else ()
        return [(*b, m, k), (*b, k, n)], jnp.matmul
    if op.kind == "conv":
        images, side, c_in, c_out, window = op.extents

        def conv(x: Array, w: Array) -> Array:
            return jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        return [(images, side, side, c_in), (window, window, c_in, c_out)], conv

    def norm(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    forms: dict[str, Callable[..., Array]] = {
        "scale": lambda x: x * np.array(2, x.dtype) + np.array(1, x.dtype),
        "add": lambda x, y: x + y,
        "norm": norm,
        "softmax": lambda x: jax.nn.softmax(x, axis=-1),
        "sum rows": lambda x: x.sum(-1),
    }
    return [op.extents] * (2 if op.form == "add" else 1), forms[op.form]
