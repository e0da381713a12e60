"""Measures collectives on two levels of links: each level alone, both as one group, and both in one program.

A machine file has each of them alone. A program may have all-reduces on both levels that do not depend on each other;
this measures their time, and the bytes that each host sends for an all-reduce over both levels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.netlab.jobs import results_of
from bench.netlab.net import LabError, Network, Topology
from bench.netlab.session import Session

__all__ = ["MESSAGES", "measure", "run_cells", "summary"]

MESSAGES = (1 << 20, 1 << 22)
"""Message sizes in bytes on each host."""
REPEATS = 7
WAYS = {"host": ("host",), "rack": ("rack",), "as one group": ("rack", "host")}
BOTH = "host and rack, independent"


def run_cells(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Runs on every host: measures the all-reduces until the last host is done, and the bytes that each host sent."""
    import jax
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(job["shape"]), ("rack", "host"))
    spec = PartitionSpec(("rack", "host"))
    sums = [tuple(axes) for axes in WAYS.values()]
    for cell in job["cells"]:
        say({"key": cell["key"], "begun": time.time()})
        which = sums[:2] if cell["what"] == BOTH else [WAYS[cell["what"]]]

        def program(*xs: Any, which: Any = tuple(which)) -> Any:
            return [lax.psum(x, axes) for x, axes in zip(xs, which, strict=True)]

        elements = cell["nbytes"] // 4
        xs = [
            jax.make_array_from_callback(
                (mesh.size * elements,),
                NamedSharding(mesh, spec),
                lambda _, n=elements: np.ones(n, np.float32),
            )
            for _ in which
        ]
        mapped = jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        step = jax.jit(mapped).lower(*xs).compile()
        took = []
        for _ in range(REPEATS + 1):
            multihost_utils.sync_global_devices("levels")
            sent, began = _sent(), time.perf_counter()
            jax.block_until_ready(step(*xs))
            took.append((time.perf_counter() - began, float(_sent() - sent)))
        every = np.asarray(multihost_utils.process_allgather(np.array(took[1:]))).reshape(-1, REPEATS, 2)
        seconds, sent_bytes = every[:, :, 0].max(axis=0), np.median(every[:, :, 1], axis=1)
        say({"key": cell["key"], "seconds": seconds.tolist(), "sent_bytes": sent_bytes.tolist()})


def _sent() -> int:
    """Returns the bytes that this host's link has sent, including headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def measure(topology: Topology, session: Session) -> dict[str, Any]:
    """Returns a row for each size and each kind of all-reduce."""
    about = [(n, what) for n in MESSAGES for what in (*WAYS, BOTH)]
    cells = [{"key": f"{what} {n}", "what": what, "nbytes": n} for n, what in about]
    with Network(topology) as network:
        shape = [len(topology.racks), topology.racks[0]]
        found = results_of(network, session, f"levels_{topology.slug}", cells, kind="levels", shape=shape)
    rows = []
    for cell in cells:
        got = found[cell["key"]]
        if "seconds" not in got:
            raise LabError(f"{cell['key']}: {got.get('failed') or got.get('left_out')}")
        low, middle, high = statistics.quantiles(got["seconds"], n=4)
        row = {
            "network": topology.name,
            "what": cell["what"],
            "nbytes": cell["nbytes"],
            "sent_bytes": got["sent_bytes"],
        }
        rows.append(
            {**row, "measured_s": middle, "least_s": min(got["seconds"]), "spread": (high - low) / middle}
        )
    return {"summary": summary(rows), "rows": rows}


def summary(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns by size the time of both levels' all-reduces in one program over the sum of both alone, and over the
    longer one, which is at most 1 if they overlap; and the bytes that a host sends for an all-reduce over both levels,
    over those of the message."""
    out: dict[str, Any] = {}
    for n in sorted({r["nbytes"] for r in rows}):
        by = {r["what"]: r for r in rows if r["nbytes"] == n}
        host, rack, both = (by[what]["measured_s"] for what in ("host", "rack", BOTH))
        out[str(n)] = {
            "both_over_their_sum": both / (host + rack),
            "both_over_the_longer": both / max(host, rack),
            "sent_over_message": max(by["as one group"]["sent_bytes"]) / n,
        }
    return out
