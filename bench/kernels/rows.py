"""Reads public tables of kernel times. Each gives groups of rows of one kind, with the function that prices them.

A table is recognized by its name (``READERS``); the shared folder's README files say where each is from. Rows that no
machine file stands for are left out.
"""

from __future__ import annotations

import fnmatch
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import csv_rows
from bench.kernels.by_rule import PROGRAMS, bytes_moved, convolution
from bench.published.cards import card
from pase import machine
from pase.costmodels.analytic import Analytic
from pase.costmodels.attention import SQUARE
from pase.errors import PaseError
from pase.ir.precision import FP4, FP8, HIGHEST, operand_bytes
from pase.machine import CostModel, Machine
from pase.tables.build import work_price
from pase.tables.work import BACKWARD_PRODUCTS

__all__ = ["READERS", "SYSTEMS", "KernelRows", "Price", "TableReader", "kept_back", "read", "table"]

Price = Callable[[CostModel], np.ndarray]
KEPT_OF = 3
"""One row in so many is kept back from fits, by the checksum of its shape."""


@dataclass(frozen=True, kw_only=True)
class KernelRows:
    """Measured kernels of one kind.

    kind: what they are, e.g. "product bfloat16".
    seconds: float [rows].
    price: from a cost model to predicted seconds, float [rows].
    kept: whether a row is kept back from fits, bool [rows].
    steady: whether they ran one after the other in a model, so that the card was at its power limit.
    """

    kind: str
    machine: Machine
    seconds: np.ndarray
    price: Price
    kept: np.ndarray
    steady: bool = False


TableReader = Callable[[Path], Iterator[KernelRows]]


def kept_back(*columns: Sequence[Any]) -> np.ndarray:
    """Returns whether a row is kept back, bool [rows], by the checksum of its columns."""
    texts = ("x".join(map(str, row)).encode() for row in zip(*columns, strict=True))
    return np.array([zlib.crc32(t) % KEPT_OF == 0 for t in texts], dtype=bool)


def _product(dtype: str, m: np.ndarray, n: np.ndarray, k: np.ndarray, batch: Any = 1.0) -> Price:
    """The price of m x n x k products. The operands are read and the result, in at least 16 bits, is written once."""
    width = operand_bytes(dtype)
    nbytes = batch * (width * (m * k + k * n) + max(width, 2.0) * m * n)
    flops = 2.0 * batch * m * n * k

    def price(model: CostModel) -> np.ndarray:
        slow: Any = 1.0
        kernels = model.machine.device.products
        if kernels is not None:
            row = 16 / width
            slow = np.where((n % row == 0) & (k % row == 0), 1.0, kernels.slowdown(dtype))
        return model.compute("matmul", dtype, flops * slow, nbytes, mnk=(m * slow, n, k))

    return price


def _light(dtype: str, *passes: Any) -> Price:
    """The price of kernels that move these bytes, one after the other."""
    return lambda model: sum((model.compute("memory", dtype, 0.0, p) for p in passes), np.float64(0))


def _cast(nbytes: np.ndarray) -> Price:
    """The price of a kernel that brings an operand to eight or four bits, as steps in these bits have it
    (``pase.stated.kernels``)."""
    return lambda model: model.machine.device.cast_s(nbytes)


def table(file: Path, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns columns of a Parquet file by name."""
    import pyarrow.parquet as pq

    table = pq.read_table(file, columns=list(columns))
    return {c: table[c].to_numpy() for c in columns}


SYSTEMS = {
    "a100_sxm": "a100x8",
    "h100_sxm": "h100x8",
    "h200_sxm": "h200x8",
    "b200_sxm": "b200x8",
    "gb200": "gb200_nvl72",
    "b300_sxm": "b300x8",
    "gb300": "gb300_nvl72",
}
_QUANTIZE_KERNELS = {("trtllm", FP8): 4, ("vllm", FP8): 1, ("trtllm", FP4): 2}
"""Kernels that bring an operand to eight or four bits. TensorRT-LLM: maximum, two for the scale, cast
(quantization.cu); to four bits, a maximum and a cast. vLLM: one for each token (per_token_quant)."""


def _gemm(file: Path) -> Iterator[KernelRows]:
    system, _, framework = file.name.split("__")[:3]
    t = table(file, ["gemm_dtype", "m", "n", "k", "latency"])
    for theirs, dtype in (("bfloat16", "bfloat16"), ("fp8", FP8), ("nvfp4", FP4)):
        at = t["gemm_dtype"] == theirs
        m, n, k = (t[c][at].astype(float) for c in "mnk")
        if not at.any():
            continue
        product = _product(dtype, m, n, k)
        kind = f"product {theirs}"
        price = product
        if dtype != "bfloat16":
            kind += f" with its cast, {framework}"
            kernels = _QUANTIZE_KERNELS[framework, dtype]
            width = 1.0 if dtype == FP8 else 0.5
            maximum = (2.0 * m * k,) if kernels > 1 else ()
            scale = _light("bfloat16", *maximum, *(np.full(len(m), 4.0) for _ in range(kernels - 2)))
            price = _sum(product, scale, _cast((2 + width) * m * k))
        yield KernelRows(
            kind=kind,
            machine=machine.load(SYSTEMS[system]),
            seconds=t["latency"][at] * 1e-3,
            price=price,
            kept=kept_back(m, n, k),
        )


def _sum(*prices: Price) -> Price:
    return lambda model: sum((p(model) for p in prices), np.float64(0))


def _attention_price(
    b: Any, h: Any, kv: Any, s: Any, width: Any, *, causal: bool, backward: bool = False, kernel: str = ""
) -> Price:
    """The price of self-attention over s positions, as of a graph's op (``pase.tables.work``).

    kernel: a kernel of the machine file, instead of the one by which training is priced.
    """
    whole = 4.0 * b * h * s * s * width
    part = 0.5 if causal else 1.0
    diagonal = np.minimum(part + SQUARE / (2 * s), 1.0) / part
    result = 2.0 * b * s * h * width
    nbytes = 2.0 * b * s * width * 2 * (h + kv)

    def price(model: CostModel) -> np.ndarray:
        if kernel:
            device = model.machine.device
            curve = next(k for k in device.attention_kernels if k.name == kernel).curve(backward=False)
            model = Analytic(replace(model.machine, device=replace(device, attention=curve)), steady=False)
        flops = part * diagonal * whole
        forward = model.compute("attention", "bfloat16", flops, nbytes, mnk=(s, s, width))
        if not backward:
            return forward
        passes = 3 * result + 8 * result / 2
        more = BACKWARD_PRODUCTS * flops
        second = model.compute("attention", "bfloat16", more, 2 * nbytes, mnk=(s, s, width))
        return forward + second + model.compute("memory", "bfloat16", 0.0, passes)

    return price


_PREPARED = 2.0
"""TensorRT-LLM's kernel that adds biases, rotates, and writes the cache takes twice the time of a copy of its bytes."""


def _context(file: Path) -> Iterator[KernelRows]:
    """Prefill by TensorRT-LLM: a kernel for the sequences' lengths, one for rotation and cache, and attention."""
    names = "batch_size isl num_heads num_key_value_heads head_dim window_size attn_dtype kv_cache_dtype"
    t = table(file, [*names.split(), "kernel_source", "latency"])
    whole = (t["window_size"] == 0) & (t["attn_dtype"] == "bfloat16") & (t["kv_cache_dtype"] == "bfloat16")
    whole &= t["kernel_source"] == "torch_flow"
    for kind, at in (
        ("attention forward, up to 1,024 positions", t["isl"] <= 1024),
        ("attention forward, above 1,024 positions", t["isl"] > 1024),
    ):
        b, s, h, kv, width = (t[c][at & whole].astype(float) for c in names.split()[:5])
        kv = np.where(kv == 0, h, kv)
        prepared = 2 * 2.0 * b * s * width * (h + 2 * kv)
        yield KernelRows(
            kind=kind,
            machine=machine.load(SYSTEMS[file.name.split("__")[0]]),
            seconds=t["latency"][at & whole] * 1e-3,
            price=_sum(
                _attention_price(b, h, kv, s, width, causal=True, kernel="trtllm"),
                _light("bfloat16", np.full(len(b), 4.0), _PREPARED * prepared),
            ),
            kept=kept_back(b, s, h, kv, width),
        )


def _experts(file: Path) -> Iterator[KernelRows]:
    names = "moe_dtype kernel_source distribution num_tokens hidden_size inter_size topk num_experts"
    names += " moe_tp_size moe_ep_size latency"
    t = table(file, names.split())
    at = (t["moe_dtype"] == "bfloat16") & (t["distribution"] == "balanced")
    at &= t["kernel_source"] == "moe_torch_flow_cutlass"
    tokens, hidden, inter, top, experts, tp, ep = (t[c][at].astype(float) for c in names.split()[3:10])
    rows, local, inner = tokens * top / ep, experts / ep, inter / tp
    used = np.minimum(local, np.maximum(rows, 1.0))
    each = rows / used
    up, down = (_product("bfloat16", each, n, k, used) for n, k in ((2 * inner, hidden), (hidden, inner)))
    # Rows are sorted by expert by four small kernels, copied into that order, and added up for each token at the end.
    moved = [_light("bfloat16", np.full(len(rows), 4.0)) for _ in range(4)]
    moved += [_light("bfloat16", 2 * 2 * rows * hidden), _light("bfloat16", 2 * (rows + tokens) * hidden)]
    yield KernelRows(
        kind="experts bfloat16, balanced",
        machine=machine.load(SYSTEMS[file.name.split("__")[0]]),
        seconds=t["latency"][at] * 1e-3,
        price=_sum(up, _light("bfloat16", 2 * 3 * rows * inner), down, *moved),
        kept=kept_back(tokens, hidden, inter, top, experts, tp, ep),
    )


def _vidur(file: Path) -> Iterator[KernelRows]:
    """The ops of a layer of Llama-2 70B, timed within the model. Each row is the median of its repetitions."""
    rows = csv_rows(file)
    chip = machine.load(f"{file.name.split('__')[3]}x8")
    tokens, ways = (
        np.array([float(r[c]) for r in rows]) for c in ("num_tokens", "num_tensor_parallel_workers")
    )
    width, inner = 8192.0, 28672.0
    heads, kv = 64 * 128 / ways, 2 * 8 * 128 / np.minimum(ways, 8)
    products = {
        "attn_pre_proj": (heads + kv, width + 0 * ways),
        "attn_post_proj": (width + 0 * ways, heads),
        "mlp_up_proj": (2 * inner / ways, width + 0 * ways),
        "mlp_down_proj": (width + 0 * ways, inner / ways),
    }
    light = {
        "input_layernorm": ("norm", 2 * 2 * tokens * width),
        "post_attention_layernorm": ("norm", 2 * 2 * tokens * width),
        "mlp_act": ("activation", 2 * 3 * tokens * inner / ways),
        "add": ("sum", 2 * 3 * tokens * width),
    }
    priced: dict[str, tuple[str, Price]] = {
        op: ("product bfloat16, in a model", _product("bfloat16", tokens, n, k))
        for op, (n, k) in products.items()
    }
    priced |= {
        op: (f"{kind} bfloat16, in a model", _light("bfloat16", nbytes))
        for op, (kind, nbytes) in light.items()
    }
    for op, (kind, price) in priced.items():
        yield KernelRows(
            kind=kind,
            machine=chip,
            seconds=np.array([float(r[f"time_stats.{op}.median"]) * 1e-3 for r in rows]),
            price=price,
            kept=kept_back(tokens.astype(int), ways.astype(int)),
            steady=True,
        )


def _all_bits(file: Path) -> Iterator[KernelRows]:
    """Products of float32 in PyTorch, which rounds no factor unless it is told to."""
    kind = "batched product" if "bmm" in file.name else "product"
    rows = csv_rows(file)
    for name, chip in {"NVIDIA H100 80GB HBM3": machine.load("h100x8"), **_pcie()}.items():
        own = [r for r in rows if r["Device"] == name]
        b, m, n, k = (np.array([float(r[c]) for r in own]) for c in "BMNK")
        yield KernelRows(
            kind=f"{kind} {HIGHEST}, PyTorch",
            machine=chip,
            seconds=np.array([float(r["Latency"]) * 1e-3 for r in own]),
            price=_product(HIGHEST, m, n, k, b),
            kept=kept_back(b, m, n, k),
        )


def _pcie() -> dict[str, Machine]:
    """Device of the table -> its machine."""
    return {"NVIDIA A100 80GB PCIe": card("A100-80GB-PCIe"), "NVIDIA A100-PCIE-40GB": card("A100-40GB-PCIe")}


def _neusight(file: Path) -> Iterator[KernelRows]:
    """Softmax and layer norm in float32."""
    kind = "softmax" if "softmax" in file.name else "norm"
    rows = csv_rows(file)
    for name, chip in _pcie().items():
        own = [r for r in rows if r["Device"] == name]
        b, h = (np.array([float(r[c]) for r in own]) for c in "BH")
        yield KernelRows(
            kind=f"{kind} float32, PCIe cards",
            machine=chip,
            seconds=np.array([float(r["Latency"]) * 1e-3 for r in own]),
            price=_light("float32", 2 * 4 * b * h),
            kept=kept_back(b, h),
        )


def _simumax(file: Path) -> Iterator[KernelRows]:
    """Shares of the peak that Megatron's products and attention reach on 8 B200."""
    ops = json.loads(file.read_text())["accelerator"]["op"]
    for op, kind in (("matmul", "product"), ("group_matmul", "grouped product")):
        peak = ops[op]["tflops"] * 1e12
        for accumulates in (False, True):
            found = [
                (dict(p.split("=") for p in key.split(", ")), share)
                for key, share in ops[op]["accurate_efficient_factor"].items()
                if ("accumulate=True" in key) == accumulates
            ]
            batch, m, n, k = map(np.array, zip(*(_extents(key) for key, _ in found), strict=True))
            share = np.array([s for _, s in found])
            # The sum of gradients is read and written in float32, in place of a result in 16 bits.
            more = 6.0 * batch * m * n if accumulates else None
            yield KernelRows(
                kind=f"{kind} bfloat16, Megatron" + (", added to gradients" if accumulates else ""),
                machine=machine.load("b200x8"),
                seconds=2 * batch * m * n * k / (share * peak),
                price=_with_bytes(batch, m, n, k, more),
                kept=kept_back(batch, m, n, k),
                steady=True,
            )


_OF_PASS = {"fwd": "MNK", "bwd_grad_act": "MKN", "bwd_grad_w": "NKM"}
"""A grouped product's rows, columns and contraction by its pass. Its table names those of forward."""


def _extents(key: Mapping[str, str]) -> list[float]:
    """Returns the [batch, m, n, k] of a product of SimuMax's."""
    names = ("b", "m", "n", "k") if "b" in key else ("ng", *_OF_PASS[key["stage"]])
    return [float(key[name]) for name in names]


def _with_bytes(
    batch: np.ndarray, m: np.ndarray, n: np.ndarray, k: np.ndarray, more: np.ndarray | None
) -> Price:
    nbytes = 2 * batch * (m * k + k * n + m * n) + (0.0 if more is None else more)
    return lambda model: model.compute("matmul", "bfloat16", 2 * batch * m * n * k, nbytes, mnk=(m, n, k))


def _tracelens(file: Path) -> Iterator[KernelRows]:
    """The products of one model in PyTorch. Above 10 us: below, the times are those of the launch."""
    rows = [r for r in csv_rows(file) if float(r["Kernel Time (µs)_median"]) > 10]
    m, n, k, b = (np.array([float(r[f"param: {c}"]) for r in rows]) for c in "MNKB")
    yield KernelRows(
        kind="product bfloat16, in a model",
        machine=machine.load("mi300x8" if "mi300" in file.name else "h100x8"),
        seconds=np.array([float(r["Kernel Time (µs)_median"]) * 1e-6 for r in rows]),
        price=_product("bfloat16", m, n, k, b),
        kept=kept_back(m, n, k, b),
        steady=True,
    )


def _ops(file: Path) -> Iterator[KernelRows]:
    """Single ops by XLA on an H100. Each row is a group of its own kind; ``read`` joins them."""
    h100 = machine.load("h100x8")
    for r in csv_rows(file):
        found = _op_price(r["kind"], r["dtype"], [int(x) for x in r["shape"].split("x")], r["note"])
        if found is not None:
            kind, price = found
            if r["kind"] in _LIGHT:
                price = _sum(price, _without_gap)
            yield KernelRows(
                kind=f"{kind} {r['dtype']}, XLA",
                machine=h100,
                seconds=np.array([float(r["device_s"])]),
                price=price,
                kept=kept_back([r["kind"]], [r["dtype"]], [r["shape"]], [r["note"]]),
            )


def _without_gap(model: CostModel) -> np.ndarray:
    """The profiler times a kernel without the gap before it: the smallest ones take 1.4 us."""
    return np.asarray(1.4e-6 - model.machine.device.launch_s)


_PASSES = {
    ("elementwise", "x+y"): 3,
    ("elementwise", ""): 2,
    ("reduce all", ""): 1,
    ("reduce rows", ""): 1,
    ("reduce columns", ""): 1,
    ("transpose", ""): 2,
    ("adam", ""): 7,
}
"""How often a single light op moves its array. Of several ops together, pase's own rule says it (``by_rule``)."""
_LIGHT = {kind for kind, _ in _PASSES} | set(PROGRAMS)


def _op_price(kind: str, dtype: str, shape: list[int], note: str) -> tuple[str, Price] | None:
    width = 4.0 if dtype == "float32" else 2.0
    sizes = [np.array([float(x)]) for x in shape]
    if kind == "matmul":
        return "product", _product(dtype, sizes[0], sizes[1], sizes[2])
    if kind == "batched matmul":
        return "batched product", _product(dtype, sizes[1], sizes[2], sizes[3], sizes[0])
    if kind == "attention":
        b, h, s, d = sizes
        price = _attention_price(b, h, h, s, d, causal="causal" in note, backward="gradients" in note)
        return (
            (f"attention, cuDNN, {note.partition(' ')[2].partition(' ')[2]}", price)
            if "cudnn" in note
            else None
        )
    if kind == "conv":
        work = convolution(dtype, shape, note)
        return f"convolution, {note}", lambda model: work_price(work, model)
    if kind == "embedding":
        rows, d, tokens = sizes
        return f"embedding {note}", _light(
            dtype, 2 * 4 * tokens * d + (4 * rows * d if note == "gradient" else 0.0)
        )
    named = f"{kind}{', ' + note if 'forward' in note else ''}"
    if kind in PROGRAMS:
        extents = (shape[0], shape[1], *shape[1:]) if kind.startswith("batch norm") else tuple(shape)
        return named, _light(
            dtype, np.array([bytes_moved(kind, dtype, extents, backward="gradient" in note)])
        )
    passes = _PASSES.get((kind, note)) or _PASSES.get((kind, ""))
    return None if passes is None else (named, _light(dtype, passes * width * np.prod(sizes, axis=0)))


READERS: Mapping[str, TableReader] = {
    "*gemm_perf.parquet": _gemm,
    "*context_attention_perf.parquet": _context,
    "*moe_perf.parquet": _experts,
    "*profiling__compute__*mlp.csv": _vidur,
    "*dataset__test__softmax.csv": _neusight,
    "*dataset__test__linear.csv": _all_bits,
    "*dataset__test__bmm.csv": _all_bits,
    "*dataset__test__ln.csv": _neusight,
    "*configs__system__b200*.json": _simumax,
    "*perf_report_csvs__GEMM.csv": _tracelens,
    "*ops.csv": _ops,
}


def read(file: Path, readers: Mapping[str, TableReader] = READERS) -> list[KernelRows]:
    """Reads a table by the first reader whose pattern its name matches. Rows of one kind on one machine are one group.

    Raises PaseError if its name is not known.
    """
    for pattern, reader in readers.items():
        if fnmatch.fnmatch(file.name, pattern):
            try:
                groups = [g for g in reader(file) if len(g.seconds)]
            except (OSError, KeyError, ValueError, ArithmeticError) as e:
                raise PaseError(f"this table cannot be read: {e}", where=str(file)) from e
            return list(_joined(groups))
    raise PaseError(
        "it is not known which table this is",
        where=str(file),
        fix=f"name it as it was published: {', '.join(re.sub('[*]', '…', p) for p in readers)}",
    )


def _joined(groups: list[KernelRows]) -> Iterator[KernelRows]:
    by: dict[tuple[str, str, bool], list[KernelRows]] = {}
    for g in groups:
        by.setdefault((g.kind, g.machine.digest, g.steady), []).append(g)
    for same in by.values():
        prices = [g.price for g in same]
        yield replace(
            same[0],
            seconds=np.concatenate([g.seconds for g in same]),
            kept=np.concatenate([g.kept for g in same]),
            price=lambda model, prices=prices: np.concatenate([np.atleast_1d(p(model)) for p in prices]),
        )
