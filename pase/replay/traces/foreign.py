"""Says what a file of another tool is, and how to get a trace that can be read.

These files are common beside traces, so that their users learn more than that they are no JSON.
"""

from __future__ import annotations

from pathlib import Path

from pase.errors import PaseError

__all__ = ["FOREIGN_SUFFIXES", "refuse_foreign"]

_MAGIC = (
    (
        b"SQLite format 3\x00",
        "it is an SQLite database, as rocprofv3 and Nsight Systems write them; their tables differ by version",
        "trace the run with torch.profiler or jax.profiler (pase profile does)",
    ),
    *(
        (
            b"\x80" + bytes([protocol]),
            "it is a Python pickle, which is no trace",
            "a memory snapshot of PyTorch is read by itself: pase diagnose FILE.pickle",
        )
        for protocol in (2, 3, 4, 5)
    ),
)
"""First bytes → what the file is, what to do."""
_ROCPROF = ((b"kernel_name", b"start_timestamp"), (b"kernelname", b"beginns"))
"""Columns of the tables of kernels that rocprofv3 and rocprof write, in lower case."""
FOREIGN_SUFFIXES = (
    ".db",
    ".rocpd",
    ".sqlite",
    ".nsys-rep",
    ".pickle",
    "_kernel_trace.csv",
    "results.csv",
)
"""How the names of such files end."""


def refuse_foreign(path: Path) -> None:
    """Raises PaseError if a file is one of another tool that is known; looks at its first bytes."""
    try:
        with path.open("rb") as f:
            head = f.read(4096)
    except OSError:
        return  # its reader reports the fault
    for magic, what, fix in _MAGIC:
        if head.startswith(magic):
            raise PaseError(what, where=str(path), fix=fix)
    columns = head.partition(b"\n")[0].lower()
    if any(all(word in columns for word in words) for words in _ROCPROF):
        raise PaseError(
            "it is rocprof's table of kernels, which has no launches, no steps and no sizes",
            where=str(path),
            fix="trace the run with torch.profiler or jax.profiler (pase profile does), which record AMD's devices",
        )
