"""Reads public tables of collectives: NCCL and RCCL within a node, sends, DeepEP, and what NCCL itself assumes.

``LINKS`` says which tables are known. Left out: all-reduces between A100 nodes whose machines share one slow adapter
(vidur), pairs joined by PCIe, and kernels of a server that are no library's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.cases import csv_rows
from bench.kernels.rows import SYSTEMS, KernelRows, Price, TableReader, kept_back, table
from pase import machine
from pase.costmodels.analytic import Analytic
from pase.costmodels.collectives import by_library
from pase.machine import CollectiveKind, CostModel, Mesh

__all__ = ["ASSUMED", "LINKS"]

ASSUMED = "NCCL's own model"
"""How the name of rows begins that nobody measured: what a library assumes when it chooses."""

_KINDS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "send_recv": "permute",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
}
"""A table's name of a collective -> ours."""
_LARGE_BYTES = 16e6


def _price(
    kind: CollectiveKind, nbytes: np.ndarray, *ways: int, added: bool = True, library: str = ""
) -> Price:
    """The price of one call of NCCL, whose rings go through all devices.

    ways: devices of one node, or nodes of eight devices and how many of each. added: whether a switch can add the
    elements up. library: another one than NCCL.
    """
    nodes, each = ways if len(ways) == 2 else (1, *ways)
    sizes = (nodes, 8 // each, each) if nodes > 1 else (1, 1, each)
    mesh, axes = Mesh(names=("nodes", "between", "devices"), sizes=sizes), 0b101

    def price(model: CostModel) -> np.ndarray:
        m = model.machine
        if not added:
            m = replace(m, algorithms=tuple(a for a in m.algorithms if a.algorithm != "in_network"))
        m = by_library(m, (library,))
        return Analytic(m, flat=True).collective(kind, mesh, axes, nbytes)

    return price


def _size_of(large: bool) -> str:
    return "from 16 MB" if large else "below 16 MB"


def _nccl(file: Path) -> Iterator[KernelRows]:
    """Collectives among some devices of one node. Sizes are in elements, of the larger buffer. NVLink SHARP adds up
    floating-point numbers only."""
    t = table(file, ["nccl_dtype", "num_gpus", "message_size", "op_name", "latency"])
    half = t["nccl_dtype"] == "half"
    nbytes = t["message_size"].astype(float) * np.where(half, 2, 1)
    for theirs, kind in _KINDS.items():
        for ways in (2, 4, 8):
            for large in (True, False):
                for floats in (True, False):
                    at = (t["op_name"] == theirs) & (t["num_gpus"] == ways) & (half == floats)
                    at &= (nbytes >= _LARGE_BYTES) == large
                    if at.any():
                        yield KernelRows(
                            kind=f"{kind} among {ways}, {_size_of(large)}",
                            machine=machine.load(SYSTEMS[file.name.split("__")[0]]),
                            seconds=t["latency"][at] * 1e-3,
                            price=_price(kind, nbytes[at], ways, added=floats),
                            kept=kept_back(np.full(at.sum(), theirs), t["num_gpus"][at], nbytes[at]),
                        )


def _vidur(file: Path) -> Iterator[KernelRows]:
    """All-reduces within a node and sends, by PyTorch. A row is the median of its repetitions, in whole microseconds:
    those below 10 us are left out."""
    _, _, _, box, op = file.stem.split("__")
    rows = [r for r in csv_rows(file) if float(r[f"time_stats.{op}.median"]) >= 0.01]
    groups = defaultdict(list)
    for r in rows:
        inside = r["num_workers"] == r["devices_per_node"]
        if inside or (op == "send_recv" and box == "h100_dgx"):
            groups[int(r["num_workers"]), inside, float(r["size"]) >= _LARGE_BYTES].append(r)
    kind = _KINDS[op]
    for (ways, inside, large), own in groups.items():
        nbytes = np.array([float(r["size"]) for r in own])
        yield KernelRows(
            kind=f"{kind} among {ways}{'' if inside else ' nodes'} in PyTorch, {_size_of(large)}",
            machine=machine.load(f"{box.split('_')[0]}x8"),
            seconds=np.array([float(r[f"time_stats.{op}.median"]) * 1e-3 for r in own]),
            price=_price(kind, nbytes, *((ways,) if inside else (ways, 1))),
            kept=kept_back(np.full(len(own), op), nbytes),
        )


_EIGHT_BITS = 1 + 4 / 128
"""Bytes of an element that DeepEP dispatches: eight bits, and a float32 scale for each 128."""
_MOST_UNITS = 24.0
"""Units of an H100 that send at full speed; tables have rows of fewer, too."""


def _deepep(file: Path) -> Iterator[KernelRows]:
    """Tokens on their way to the experts of eight devices (dispatch) and back (combine), with 24 units sending.

    A device receives a token once, however many of its experts it is for: with k experts of uniformly random choice,
    a token goes to 8 (1 - (7/8)^k) of 8 devices.
    """
    t = table(
        file, ["num_token", "hidden_size", "num_topk", "dispatch_sms", *(f"{w}_transmit_us" for w in _WAYS)]
    )
    at = t["dispatch_sms"] == _MOST_UNITS
    tokens, hidden, top = (t[c][at].astype(float) for c in ("num_token", "hidden_size", "num_topk"))
    elements = tokens * hidden * 8 * (1 - (7 / 8) ** top)
    for way, width in _WAYS.items():
        nbytes = elements * width
        for large in (True, False):
            own = (nbytes >= _LARGE_BYTES) == large
            yield KernelRows(
                kind=f"{way} among 8, DeepEP, {_size_of(large)}",
                machine=machine.load(SYSTEMS[file.name.split("__")[0]]),
                seconds=t[f"{way}_transmit_us"][at][own] * 1e-6,
                price=_price("all_to_all", nbytes[own], 8, library="DeepEP"),
                kept=kept_back(tokens[own], hidden[own], top[own]),
            )


_WAYS = {"dispatch": _EIGHT_BITS, "combine": 2.0}
"""Direction -> bytes of an element that is sent."""


def _rccl(file: Path) -> Iterator[KernelRows]:
    """FSDP's collectives in a trace of eight MI300X, without the time in which devices wait for the last one."""
    rows = [r for r in csv_rows(file) if r["Collective name"] in _KINDS]
    for r in rows:
        kind = _KINDS[r["Collective name"]]
        nbytes = np.array([float(r["Full msg size (MB)"]) * 2**20])
        yield KernelRows(
            kind=f"{kind} among {r['Group size']}, RCCL, from 16 MB",
            machine=machine.load("mi300x8"),
            seconds=np.array([float(r["comm_latency_median"]) * 1e-6]),
            price=_price(kind, nbytes, int(r["Group size"])),
            kept=np.zeros(1, dtype=bool),
        )


def _tuning(file: Path) -> Iterator[KernelRows]:
    """What NCCL 2.27 assumes on H100 nodes, at its best algorithm and protocol for each size."""
    lines: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for r in csv_rows(file):
        group = "all_gather" if "AGRS" in r["table"] else "all_reduce"
        line = float(r["latency_us"]) * 1e-6, 1e-9 / float(r["bandwidth_GBps"])
        lines[group, int(r["n_nodes"]), int(r["gpus_per_node"])].append(line)
    nbytes = np.geomspace(2**20, 2**32, 13)
    for (group, nodes, ways), known in lines.items():
        alpha, beta = (np.array(x)[:, None] for x in zip(*known, strict=True))
        yield KernelRows(
            kind=f"{ASSUMED}, {group} of {nodes} nodes",
            machine=machine.load("h100x8"),
            seconds=(alpha + beta * nbytes).min(axis=0),
            price=_price(_KINDS[group], nbytes, nodes, ways),
            kept=np.zeros(len(nbytes), dtype=bool),
        )


LINKS: Mapping[str, TableReader] = {
    "*nccl_perf.parquet": _nccl,
    "*profiling__network__*_dgx__*.csv": _vidur,
    "*deepep_normal_perf.parquet": _deepep,
    "*nccl_summary_implicit_sync.csv": _rccl,
    "tuning.csv": _tuning,
}
"""Pattern of a file's name -> its reader."""
