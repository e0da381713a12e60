"""Finds sizes of collectives that their kernels do not record, from annotations around launches or execution traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pase.errors import PaseError, needed
from pase.replay.traces.chrome import collective_operation
from pase.replay.traces.reader import LIMITS, BoundedReader, Limits, open_stream
from pase.replay.types import COLLECTIVE, KINDS, OPERATIONS, Problem, Timeline

__all__ = ["from_annotations", "from_execution_trace", "is_execution_trace", "read_execution_trace"]

_ANNOTATION, _RUNTIME = KINDS.index("annotation"), KINDS.index("runtime")


def from_annotations(t: Timeline) -> Timeline:
    """Sets bytes and kind of NCCL kernels that are launched inside an "nccl:…" annotation that records them.

    For example, a kernel named SendRecv inside nccl:all_to_all is an all-to-all.
    """
    missing = np.flatnonzero(
        (t["kind"] == COLLECTIVE)
        & ((t["nbytes"] < 0) | (t["operation"] == OPERATIONS.index("send_recv")))
        & (t["correlation"] >= 0)
    )
    notes = np.flatnonzero((t["kind"] == _ANNOTATION) & (t["operation"] > 0))
    if not len(missing) or not len(notes):
        return t
    nbytes, operation = t["nbytes"].copy(), t["operation"].copy()
    rank = t.rank_of
    calls = np.flatnonzero(t["kind"] == _RUNTIME)
    call_of = {(int(rank[c]), int(t["correlation"][c])): int(c) for c in calls.tolist()}
    on_lane: dict[int, np.ndarray] = {}
    for lane in np.unique(t["lane"][notes]).tolist():
        mine = notes[t["lane"][notes] == lane]
        on_lane[lane] = mine[np.argsort(t["start_ns"][mine], kind="stable")]
    for e in missing.tolist():
        call = call_of.get((int(rank[e]), int(t["correlation"][e])))
        if call is None:
            continue
        around = on_lane.get(int(t["lane"][call]))
        if around is None:
            continue
        k = int(np.searchsorted(t["start_ns"][around], t["start_ns"][call], side="right")) - 1
        if k >= 0 and t.end_ns[around[k]] >= t["start_ns"][call]:
            note = int(around[k])
            if nbytes[e] < 0:
                nbytes[e] = t["nbytes"][note]
            if operation[e] == OPERATIONS.index("send_recv"):
                operation[e] = t["operation"][note]
    return replace(t, columns={**t.columns, "nbytes": nbytes, "operation": operation})


def is_execution_trace(head: bytes) -> bool:
    """Whether the first bytes of a JSON file are those of a PyTorch execution trace (Chakra schema)."""
    return b"chakra" in head and b"traceEvents" not in head


def read_execution_trace(path: Path, limits: Limits = LIMITS) -> list[tuple[int, int]]:
    """Returns (operation, bytes) of every collective in program order.

    Raises PaseError if the file is not an execution trace or has no collective.
    """
    ijson = needed("ijson", str(path))
    out = []
    try:
        with open_stream(path, limits) as stream:
            for node in ijson.items(stream, "nodes.item", use_float=True, buf_size=BoundedReader.CHUNK):
                stream.event_done()
                name = node.get("name") if isinstance(node, dict) else None
                if isinstance(name, str) and name.startswith("nccl:"):
                    out.append((collective_operation(name[5:]), _tensor_bytes(node.get("inputs"))))
    except ijson.JSONError as e:
        raise PaseError(
            f"not a readable execution trace ({' '.join(str(e).split())[:120]})", where=str(path)
        ) from e
    if not out:
        raise PaseError("this execution trace has no collective", where=str(path))
    return out


def _tensor_bytes(inputs: Any) -> int:
    """Returns the bytes of a node's input tensors.

    Each is [tensor id, storage id, offset, elements, bytes per element, device].
    """
    values = inputs.get("values") if isinstance(inputs, dict) else None
    total = 0
    for v in values if isinstance(values, list) else ():
        if isinstance(v, list) and len(v) >= 5 and all(isinstance(x, int) and x >= 0 for x in v[3:5]):
            total += v[3] * v[4]
    return total or -1


def from_execution_trace(t: Timeline, collectives: list[tuple[int, int]], where: str) -> Timeline:
    """Sets missing sizes of collectives from an execution trace, for iterations whose order of operations agrees.

    The execution trace may have several iterations; the kernels of one iteration must match a whole period of it.
    """
    nbytes = t["nbytes"].copy()
    matched = False
    for rank, iteration in sorted({(m.rank, m.iteration) for m in t.marks}):
        mine = np.flatnonzero((t["kind"] == COLLECTIVE) & (t.rank_of == rank) & (t["iteration"] == iteration))
        mine = mine[np.argsort(t["start_ns"][mine], kind="stable")]
        kinds = t["operation"][mine].tolist()
        n = len(kinds)
        starts = (
            k for k in range(len(collectives) - n + 1) if [o for o, _ in collectives[k : k + n]] == kinds
        )
        begin = next(starts, None) if n and len(collectives) % n == 0 else None
        if begin is None:
            continue
        for e, (_, size) in zip(mine.tolist(), collectives[begin : begin + n], strict=True):
            matched = True
            if nbytes[e] < 0:
                nbytes[e] = size
    if not matched:
        what = "its collectives do not match those of any traced iteration, so its sizes are not used"
        return replace(t, problems=(*t.problems, Problem(where=where, what=what)))
    return replace(t, columns={**t.columns, "nbytes": nbytes})
