"""All ranks of ``torch.distributed`` as threads of one process, by PyTorch's own threaded process group; or one of
many, whose messages go nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def on_ranks(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What ``run(rank)`` returns on each rank; the first error of a rank is raised."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    store = dist.HashStore()

    def main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=count, store=store)
        try:
            results[rank] = run(rank)
        except BaseException as e:
            errors.append(e)
            threaded.ProcessLocalGroup.exception_handle(e)  # wakes the ranks that wait
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=main, args=(r,)) for r in range(count)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results


@contextmanager
def alone_among(count: int, rank: int) -> Iterator[None]:
    """This process is one rank of so many that there are not."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
