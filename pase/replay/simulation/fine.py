"""Collectives taken apart into sends and receives, ring and parameter server, to be replayed chunk by chunk."""

from __future__ import annotations

from functools import lru_cache

from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.simulation.simulate import replay_graph

__all__ = ["best_parts", "parameter_server", "ring_all_reduce", "sync_ns"]


def ring_all_reduce(
    nbytes: float, ranks: int, parts: int, latency_ns: float, bytes_per_ns: float
) -> DataflowGraph:
    """Every chunk's way around the ring: 2(n−1) steps of reduce-scatter and all-gather, ``parts`` tensors in a row.

    Each rank's link to the next is a device; a send is one task on it, latency + bytes/bandwidth long.
    The receive of a step must have ended before the next step's send of that chunk (Patarasuk & Yuan 2009).
    """
    tasks: list[dict[str, object]] = []
    edges: list[tuple[int, int]] = []
    step_ns = latency_ns + nbytes / parts / ranks / bytes_per_ns if ranks > 1 else 0.0
    for part in range(parts):
        before: dict[int, int] = {}
        for step in range(2 * (ranks - 1)):
            now: dict[int, int] = {}
            for r in range(ranks):
                name = f"part {part} step {step}"
                tasks.append(
                    {"device": (r, f"link {r}→{(r + 1) % ranks}"), "duration_ns": step_ns, "name": name}
                )
                now[r] = len(tasks) - 1
                if before:
                    edges.append((before[(r - 1) % ranks], now[r]))
                    edges.append((before[r], now[r]))
            before = now
    return build_graph(tasks, edges)


def parameter_server(
    nbytes: float, workers: int, servers: int, parts: int, latency_ns: float, bytes_per_ns: float
) -> DataflowGraph:
    """Push of ``parts`` pieces from every worker to their servers, then pull; each direction of a link is a device.

    A server's links carry all workers' pieces, so they are the bottleneck when servers are few. A piece is
    pulled once all workers have pushed it.
    """
    tasks: list[dict[str, object]] = []
    edges: list[tuple[int, int]] = []
    piece_ns = latency_ns + nbytes / parts / bytes_per_ns
    for part in range(parts):
        server = part % servers
        arrived = []
        for w in range(workers):
            tasks.append({"device": (w, "link up"), "duration_ns": piece_ns, "name": f"push {part}"})
            sent = len(tasks) - 1
            tasks.append(
                {"device": (workers + server, "link in"), "duration_ns": piece_ns, "name": f"receive {part}"}
            )
            edges.append((sent, len(tasks) - 1))
            arrived.append(len(tasks) - 1)
        for w in range(workers):
            tasks.append(
                {"device": (workers + server, "link out"), "duration_ns": piece_ns, "name": f"reply {part}"}
            )
            reply = len(tasks) - 1
            edges.extend((a, reply) for a in arrived)
            tasks.append({"device": (w, "link down"), "duration_ns": piece_ns, "name": f"pull {part}"})
            edges.append((reply, len(tasks) - 1))
    return build_graph(tasks, edges)


@lru_cache(maxsize=65536)
def sync_ns(
    nbytes: float, parts: int, *, ranks: int, latency_ns: float, bytes_per_ns: float, scheme: str = "ring"
) -> float:
    """dPRO's t_sync(s, k): time to synchronise a tensor of s bytes in k parts, by replay of its own subgraph.

    scheme: "ring" or "ps" (as many servers as workers).
    """
    if ranks < 2 or nbytes <= 0:
        return 0.0
    if scheme == "ring":
        # Ranks are alike, and so are steps: the replay of a ring of two sizes fixes the line exactly.
        if ranks > 8:
            scale = (ranks - 1) / 7
            small = sync_ns(
                nbytes * 8 / ranks, parts, ranks=8, latency_ns=latency_ns, bytes_per_ns=bytes_per_ns
            )
            return small * scale
        return replay_graph(ring_all_reduce(nbytes, ranks, parts, latency_ns, bytes_per_ns)).makespan_ns
    if scheme == "ps":
        return replay_graph(
            parameter_server(nbytes, ranks, ranks, parts, latency_ns, bytes_per_ns)
        ).makespan_ns
    raise ValueError(f"no scheme '{scheme}'; there are ring and ps")


def best_parts(
    nbytes: float, *, ranks: int, latency_ns: float, bytes_per_ns: float, scheme: str = "ring", most: int = 16
) -> tuple[int, float]:
    """dPRO's OptPartNum: the number of parts that synchronises fastest, and its time; grid 1, 2, 4, …, most."""
    best = (
        1,
        sync_ns(nbytes, 1, ranks=ranks, latency_ns=latency_ns, bytes_per_ns=bytes_per_ns, scheme=scheme),
    )
    k = 2
    while k <= most:
        ns = sync_ns(nbytes, k, ranks=ranks, latency_ns=latency_ns, bytes_per_ns=bytes_per_ns, scheme=scheme)
        if ns < best[1] * (1 - 1e-9):
            best = (k, ns)
        k *= 2
    return best
