"""Runs a function on several ranks of ``torch.distributed`` on this machine, without torchrun."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pase.errors import PaseError

__all__ = ["on_local_ranks"]

T = TypeVar("T")


def on_local_ranks(count: int, run: Callable[..., T], *args: object) -> T:
    """Returns ``run(*args)`` of rank 0. Each of so many processes calls it; they form one group, over Gloo.

    run, its arguments and its result must be picklable. Raises the PaseError of a rank. A rank that ends in any other
    way stops all others.
    """
    import torch.multiprocessing as mp

    # It lists each rank that it stops.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="pase-ranks-") as folder:
        try:
            mp.spawn(_rank, (count, folder, run, args), nprocs=count)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as e:
            if failed := sorted(Path(folder).glob("failed*")):
                raise pickle.loads(failed[0].read_bytes()) from None
            # A rank is killed most often because the memory was used up.
            fix = "try a smaller model" if "SIGKILL" in str(e) else ""
            raise PaseError(f"rank {e.error_index} of {count} ended: {str(e).strip()}", fix=fix) from None
        answer: T = pickle.loads((Path(folder) / "answer").read_bytes())
    return answer


def _rank(rank: int, count: int, folder: str, run: Callable[..., object], args: tuple[object, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    try:
        answer = run(*args)
    except PaseError as e:
        (Path(folder) / f"failed{rank:05d}").write_bytes(pickle.dumps(e))
        raise
    if rank == 0:
        (Path(folder) / "answer").write_bytes(pickle.dumps(answer))
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may abort the interpreter's shutdown. What libraries do at exit, such as giving semaphores back, is
    # done before.
    atexit._run_exitfuncs()
    os._exit(0)
