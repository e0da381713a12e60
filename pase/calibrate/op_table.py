"""Makes a machine file from a table of ops that others measured on that machine: constants of products, of attention
and of copies, and collectives.

The table is a CSV file with the columns ``op,dtype,shape,seconds``, or SimuMax's file of a system (JSON with
"accelerator", whose ops have the part of the peak that each shape reaches). ``op`` is one of

- product: batch x m x n x k;
- accumulated product: the same, of which the result is added to a float32 sum in memory;
- attention, attention backward: heads x positions x width, causal;
- all_reduce, reduce_scatter, all_gather, all_to_all: devices of a node x bytes, as in ``CostModel.collective``;
- copy: bytes that it reads and writes.

A third of the products, by the checksum of their shape, is kept back from the fit and judges it.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pase.calibrate.figures import PricedOp, figures, fitted, prices, product
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine import AttentionKernel, CollectiveCurve, CollectiveKind, CostModel, Curve, Machine

__all__ = ["OpTime", "read_table", "with_table"]

_SENT: tuple[CollectiveKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_OPS = {"product": 4, "accumulated product": 4, "attention": 3, "attention backward": 3, "copy": 1}
_OPS |= {kind: 2 for kind in _SENT}
"""Op -> the number of its extents."""
_MOST_BYTES = 50 << 20
_KEPT_OF = 3
_FEWEST = 6
_LONG_S = 1e-3
_BACKWARD = 2.5
"""FLOPs of attention's backward, which makes the scores again, relative to its forward."""


@dataclass(frozen=True, kw_only=True)
class OpTime:
    """A measured op. shape: its extents, as the module says. seconds: of the device."""

    op: str
    dtype: str
    shape: tuple[float, ...]
    seconds: float

    @property
    def kept(self) -> bool:
        """Whether it is kept back from fits."""
        return zlib.crc32("x".join(f"{x:g}" for x in self.shape).encode()) % _KEPT_OF == 0


def read_table(file: Path) -> list[OpTime]:
    """Reads a table of ops. Raises PaseError if the file is no such table."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise PaseError("it is larger than any table of ops", where=str(file), fix="name a smaller file")
        text = file.read_text(encoding="utf-8")
        rows = list(_of_system(json.loads(text)) if text.lstrip().startswith("{") else _of_csv(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
        raise PaseError(
            f"this is no table of ops: {type(e).__name__}: {e}",
            where=str(file),
            fix="write a CSV file with the columns op,dtype,shape,seconds, or name a SimuMax system file",
        ) from e
    if not rows:
        raise PaseError(
            "this table of ops has no rows", where=str(file), fix="name a file with op,dtype,shape,seconds"
        )
    for r in rows:
        if (
            r.op not in _OPS
            or len(r.shape) != _OPS[r.op]
            or not all(0 < x < 1e15 for x in (*r.shape, r.seconds))
        ):
            raise PaseError(
                f"'{r.op}' of shape {'x'.join(f'{x:g}' for x in r.shape)} in {r.seconds:g} s cannot be",
                where=str(file),
                fix=f"use one of {', '.join(f'{op} ({n} extents)' for op, n in _OPS.items())}",
            )
    return rows


def _of_csv(text: str) -> Iterator[OpTime]:
    for r in csv.DictReader(text.splitlines()):
        shape = tuple(float(x) for x in r["shape"].split("x"))
        yield OpTime(op=r["op"], dtype=r["dtype"], shape=shape, seconds=float(r["seconds"]))


def _of_system(tree: Mapping[str, Any]) -> Iterator[OpTime]:
    """SimuMax's system file. Its parts of the peak count attention's scores whole, although the mask is causal."""
    ops = tree["accelerator"]["op"]
    peak = 1e12 * float(ops["matmul"]["tflops"])
    for key, part in ops["matmul"]["accurate_efficient_factor"].items():
        told = dict(p.split("=") for p in key.split(", "))
        b, m, n, k = (float(told[x]) for x in "bmnk")
        op = "accumulated product" if told["accumulate"] == "True" else "product"
        yield OpTime(op=op, dtype="bfloat16", shape=(b, m, n, k), seconds=2 * b * m * n * k / (part * peak))
    for name, op, factor in (("sdp_fwd", "attention", 1.0), ("sdp_bwd", "attention backward", _BACKWARD)):
        for key, part in ops[name]["accurate_efficient_factor"].items():
            told = dict(p.split("=") for p in key.split(", "))
            if told["qk_head_dim"] != told["v_head_dim"] or told["qkv_contiguous"] != "True":
                continue
            heads = float(told["batch"]) * float(told["head_num"])
            s, d = float(told["seq_len"]), float(told["qk_head_dim"])
            yield OpTime(
                op=op,
                dtype="bfloat16",
                shape=(heads, s, d),
                seconds=factor * 4 * heads * s * s * d / (part * peak),
            )

    if "networks" in tree:
        yield from _of_links(tree["networks"]["high_intra_node"], int(tree["num_per_node"]))
    if "bandwidth" in tree["accelerator"]:
        copies = tree["accelerator"]["bandwidth"]["default"]
        rate = float(copies["gbps"]) * 2**30 * float(copies["efficient_factor"])
        yield OpTime(op="copy", dtype="bfloat16", shape=(float(2**30),), seconds=2**30 / rate)


_SIMUMAX_KINDS: Mapping[CollectiveKind, str] = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all2all",
}
_LINE_BYTES = (2.0**16, 2.0**26, 2.0**34)


def _of_links(links: Mapping[str, Any], devices: int) -> Iterator[OpTime]:
    """Collectives by SimuMax's lines of them (simumax/core/config.py, compute_net_op_time): a latency for each step of
    a ring, one for the call, and a part of the bandwidth. Its sends would be faster than the links: they are left
    out."""
    for kind, theirs in _SIMUMAX_KINDS.items():
        op = links["op"][theirs]
        rate = float(links["bandwidth"]["gbps"]) * 2**30 * float(op["efficient_factor"])
        scale, offset = float(op["scale"]), float(op["offset"])
        for ways in (2**i for i in range(1, devices.bit_length())):
            once = op["fixed_latency_us_by_comm_num"].get(str(ways), op["fixed_latency_us"])
            start = 1e-6 * (float(op["latency_us"]) * (ways + offset) * scale + float(once))
            for nbytes in _LINE_BYTES:
                moved = nbytes * scale * (1 + offset / ways)
                yield OpTime(
                    op=kind, dtype="bfloat16", shape=(float(ways), nbytes), seconds=start + moved / rate
                )


def with_table(
    base: Machine, rows: list[OpTime], name: str, source: str, model: Callable[[Machine], CostModel]
) -> tuple[Machine, JsonObject]:
    """Returns the base with the table's rates of products in bfloat16, of long attention and of copies, and with its
    collectives; and the products' errors.

    The base must be a machine of the same card: what the table does not have (other links, other dtypes) stays.
    Products were timed one after the other, so the card was at its power limit.

    model: prices products on a machine.

    Raises PaseError if there are too few rows, or the base has no model of products.
    """
    if base.device.products is None:
        raise PaseError(
            "it has no [device.products], whose constants a table gives",
            where=f"machine '{base.name}'",
            fix="name the machine of this card: 'pase machines' lists them",
        )
    products = [r for r in rows if "product" in r.op and r.dtype == "bfloat16"]
    if len(products) < _FEWEST:
        raise PaseError(
            f"it has {len(products)} products in bfloat16, and {_FEWEST} are needed",
            where=source,
            fix="measure more",
        )
    machine = _with_products(base, products, model)
    told = _errors(model(machine), products)
    sources = {
        **base.sources,
        "device.products": f"{source}: fitted to two thirds of its products",
    }
    attention = [r for r in rows if r.op.startswith("attention")]
    with_attention = _with_attention(machine, attention)
    if with_attention != machine:
        sources["device.attention_kernels"] = (
            f"{source}, where it has both directions for {1e3 * _LONG_S:g} ms or longer; else {base.name}'s"
        )
    machine = _with_copies(with_attention, [r for r in rows if r.op == "copy"])
    if machine != with_attention:
        sources["device.efficiency.memory"] = source
    curves = _curves([r for r in rows if r.op in _SENT], len(base.levels))
    if curves:
        measured = {(c.kind, c.ways) for c in curves}
        others = (c for c in base.collectives if (c.kind, c.ways) not in measured)
        machine = replace(machine, collectives=(*others, *curves))
        sources["collectives"] = source
    made = replace(
        machine,
        name=name,
        sources=sources,
        provenance={**base.provenance, "ops from": f"{source}, {len(rows)} rows"},
    )
    return made, told


def _work(row: OpTime) -> PricedOp:
    """A product. A sum of gradients is read and written in float32, in place of a result in 16 bits."""
    b, m, n, k = row.shape
    work = product(row.dtype, 2, b, m, n, k)
    return work if row.op == "product" else replace(work, nbytes=work.nbytes + 6.0 * b * m * n)


def _errors(model: CostModel, rows: list[OpTime]) -> JsonObject:
    errors = np.abs(prices(model, [_work(r) for r in rows]) / np.array([r.seconds for r in rows]) - 1)
    kept = np.array([r.kept for r in rows])
    judged = float(np.median(errors[kept])) if kept.any() else None
    return {"rows": len(rows), "median_error": float(np.median(errors)), "kept_median_error": judged}


def _with_products(base: Machine, rows: list[OpTime], model: Callable[[Machine], CostModel]) -> Machine:
    """The base with the figures of products at which the prices are nearest to the rows that are not kept back."""
    used = [r for r in rows if not r.kept] or rows
    works, times = [_work(r) for r in used], np.array([r.seconds for r in used])
    return fitted(base, figures(base.device, works, throttled=True), works, times, model)[0]


def _with_attention(base: Machine, rows: list[OpTime]) -> Machine:
    """The base's kernels that train, with the table's part of the peak at the positions that it has at length.

    A span of short kernels is mostly the host's time between them, so only those that take ``_LONG_S`` are taken.
    """
    found: dict[tuple[str, int], list[float]] = {}
    for r in rows:
        heads, s, d = r.shape
        flops = (1.0 if r.op == "attention" else _BACKWARD) * 2 * heads * s * s * d
        if r.seconds >= _LONG_S:
            part = flops / (r.seconds * base.device.peak(r.dtype))
            found.setdefault((r.op, int(s)), []).append(part)

    def merged(kernel: AttentionKernel) -> AttentionKernel:
        if not kernel.backward or kernel.wave_s:
            return kernel
        ahead = dict(zip(kernel.keys, kernel.forward, strict=True))
        behind = dict(zip(kernel.keys, kernel.backward, strict=True))
        both = [s for op, s in found if op == "attention" and ("attention backward", s) in found]
        for s in both:
            ahead[s] = float(np.median(found["attention", s]))
            behind[s] = float(np.median(found["attention backward", s]))
        keys = tuple(sorted(ahead))
        return replace(
            kernel,
            keys=keys,
            forward=tuple(ahead[s] for s in keys),
            backward=tuple(behind[s] for s in keys),
        )

    kernels = tuple(merged(k) for k in base.device.attention_kernels)
    return replace(base, device=replace(base.device, attention_kernels=kernels))


def _with_copies(base: Machine, rows: list[OpTime]) -> Machine:
    """The base with the part of the memory bandwidth that the table's copies reach."""
    if not rows:
        return base
    bandwidth = base.device.memory_bandwidth_bytes_per_s
    part = min(float(np.median([r.shape[0] / r.seconds for r in rows])) / bandwidth, 1.0)
    return replace(base, device=replace(base.device, efficiency={**base.device.efficiency, "memory": part}))


def _curves(rows: list[OpTime], levels: int) -> list[CollectiveCurve]:
    """A curve for each kind and number of devices with two sizes or more. Rows are of the innermost level."""
    found: dict[tuple[CollectiveKind, int], dict[float, float]] = {}
    for kind in _SENT:
        for r in rows:
            if r.op == kind:
                found.setdefault((kind, int(r.shape[0])), {})[r.shape[1]] = r.seconds
    out = []
    for (kind, ways), times in found.items():
        nbytes = sorted(times)
        seconds = np.maximum.accumulate([times[n] for n in nbytes]).tolist()
        if len(nbytes) > 1 and ways > 1:
            curve = Curve(nbytes=tuple(nbytes), seconds=tuple(seconds))
            out.append(CollectiveCurve(kind=kind, ways=(ways, *[1] * (levels - 1)), curve=curve))
    return out
