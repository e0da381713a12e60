"""Models collectives at the level of sends and receives, as a ring or with parameter servers, chunk by chunk."""

from __future__ import annotations

from functools import lru_cache

from pase.replay.graph import DataflowGraph, build_graph
from pase.replay.simulation.simulate import replay_graph

__all__ = ["best_parts", "parameter_server", "ring_all_reduce", "sync_ns"]


def ring_all_reduce(
    nbytes: float, ranks: int, parts: int, latency_ns: float, bytes_per_ns: float
) -> DataflowGraph:
    """Returns the graph of a ring all-reduce of a tensor in ``parts`` consecutive parts, 2(n−1) steps each.

    Each rank's link to the next rank is a device. A send is one task on it, which takes latency + bytes/bandwidth. A
    chunk must be received in one step before it is sent in the next one (Patarasuk & Yuan 2009).
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
    """Returns the graph in which every worker pushes ``parts`` parts of a tensor to servers and pulls them back.

    Each direction of a link is a device. A server's links carry the parts of all workers, so they are the bottleneck if
    there are few servers. A part is pulled when all workers have pushed it.
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
    """Returns dPRO's t_sync(s, k): the time (ns) to synchronise a tensor of s bytes in k parts, by replay of a
    subgraph.

    scheme: "ring" or "ps" (parameter servers, with one server per worker). Raises ValueError for any other scheme.
    """
    if ranks < 2 or nbytes <= 0:
        return 0.0
    if scheme == "ring":
        # All ranks and steps take the same time, so the time is proportional to ranks − 1 at equal chunk sizes.
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
    raise ValueError(f"there is no scheme '{scheme}'; choose ring or ps")


def best_parts(
    nbytes: float, *, ranks: int, latency_ns: float, bytes_per_ns: float, scheme: str = "ring", most: int = 16
) -> tuple[int, float]:
    """Returns dPRO's OptPartNum: the fastest number of parts among 1, 2, 4, …, most, and its time (ns)."""
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
