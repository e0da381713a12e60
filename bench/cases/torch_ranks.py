"""Runs ranks of ``torch.distributed`` on one machine: all ranks as threads of one process (PyTorch's threaded process
group) or as processes (Gloo), or one rank of many whose messages are discarded.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest.mock import patch


def on_ranks(count: int, run: Callable[[int], Any]) -> list[Any]:
    """Returns the result of ``run(rank)`` on each rank, which is a thread. Raises the first error of a rank."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    store = dist.HashStore()
    functional = torch.ops._c10d_functional

    def gather_into(x: Any, ways: int, group: Any, *, out: Any) -> Any:
        """The process group of threads cannot gather into a tensor that exists."""
        return out.copy_(functional.wait_tensor(functional.all_gather_into_tensor(x, ways, group)))

    def main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            results[rank] = run(rank)
        except BaseException as e:
            errors.append(e)
            threaded.ProcessLocalGroup.exception_handle(e)  # wakes the ranks that are waiting
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=main, args=(r,)) for r in range(count)]
        with patch.object(functional, "all_gather_into_tensor_out", gather_into):
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
    if errors:
        raise errors[0]
    return results


@contextmanager
def by_threads() -> Iterator[None]:
    """Adds ``isend`` and ``recv`` between ranks that are threads, because their process group has none. A message is
    buffered until it is received."""
    import torch.distributed as dist

    boxes: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)

    def isend(x: Any, to: int, group: Any) -> None:
        boxes[group.group_name, dist.get_rank(), to].put(x.clone())

    def recv(x: Any, source: int, group: Any) -> None:
        came = boxes[group.group_name, source, dist.get_rank()].get(timeout=60)
        assert (came.shape, came.dtype) == (x.shape, x.dtype)
        x.copy_(came)

    with patch.object(dist, "isend", isend), patch.object(dist, "recv", recv):
        yield


def on_processes(
    count: int,
    run: Callable[[int], Any],
    how: str = "fork",
    seconds: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """Returns the result of ``run(rank)`` on each rank, which is a process. Raises RuntimeError if one fails.

    run: its result must be picklable and have no tensors. how: "fork" if this process has not called ``backward``
    before (PyTorch's threads for it do not survive a fork); otherwise "forkserver" or "spawn", and ``run`` must be
    picklable. backend: what the ranks send over.
    """
    made = multiprocessing.get_context(how)
    if how == "forkserver":
        made.set_forkserver_preload(["torch", __name__])
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = [made.Pipe(duplex=False) for _ in range(count)]
        ranks = [
            made.Process(target=_rank, args=(r, count, store, (seconds, backend), run, pipes[r][1]))  # type: ignore[attr-defined]
            for r in range(count)
        ]
        until = time.monotonic() + seconds
        try:
            for r, p in enumerate(ranks):
                Path(f"{store}.{r}").touch()
                p.start()
            came = [_answer(p, ours, until) for p, (ours, _) in zip(ranks, pipes, strict=True)]
            failed = [
                f"rank {r} of {count}: {said}{_where(store, r)}"
                for r, (fine, said) in enumerate(came)
                if not fine
            ]
        finally:
            for p in ranks:
                p.kill()
                p.join()
    if failed:
        raise RuntimeError("\n".join(failed))
    return [result for _, result in came]


def _answer(process: Any, pipe: Any, until: float) -> tuple[bool, Any]:
    """Returns whether a rank succeeded, and its result or what is known of its failure."""
    if not wait([pipe, process.sentinel], max(0.0, until - time.monotonic())):
        os.kill(process.pid, signal.SIGUSR1)  # it writes where its threads are
        time.sleep(1.0)
        return False, "no answer in time"
    if not pipe.poll():
        process.join()
        return False, f"ended without an answer, with exit code {process.exitcode}"
    fine, said = pipe.recv()
    return fine, said


def _where(store: str, rank: int) -> str:
    """Returns where a rank's threads were when its time was over, or when it died of a signal."""
    said = Path(f"{store}.{rank}").read_text(errors="replace")
    return f"\n{said}" if said else ""


def _rank(
    rank: int, count: int, store: str, over: tuple[float, str], run: Callable[[int], Any], answer: Any
) -> None:
    """Runs a rank in its own process. over: the seconds after which it gives up, and what it sends over."""
    seconds, backend = over
    where = open(f"{store}.{rank}", "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(where)
    faulthandler.register(signal.SIGUSR1, where)

    import torch
    import torch.distributed as dist

    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=seconds),
        )
        answer.send((True, run(rank)))
        dist.barrier()
    except BaseException:
        answer.send((False, traceback.format_exc()))
    finally:
        os._exit(0)  # Gloo's threads may abort the interpreter's shutdown


@contextmanager
def alone_among(count: int, rank: int) -> Iterator[None]:
    """Makes this process one rank of ``count`` inside this context; the others do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
