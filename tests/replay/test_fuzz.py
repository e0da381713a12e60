"""Some of the mutated traces of ``bench/fuzz/traces.py``: no absurd result without a warning."""

import gzip
import tempfile
from pathlib import Path

import numpy as np
import pytest

from bench.cases.timelines import ImaginedRun, simulate, write
from bench.fuzz.traces import damaged, fuzz, judged, profiled, verdict
from pase.hlo.protos import parse
from pase.replay import load
from tests.needs import SHARED


def test_faults_that_were_found_stay_mended() -> None:
    """With less work, ops whose order is not fixed by the trace changed places, and a longer run was predicted."""
    known = [4019, 5461, 5871]
    found, faults = fuzz(known, seed=0)
    assert not faults and sum(found.values()) == len(known)


def test_mutated_traces_are_refused_or_answered_soundly() -> None:
    found, faults = fuzz(range(10), seed=7)
    assert not faults
    assert sum(found.values()) == 10


def test_loaded_traces_with_damage_are_refused_or_answered_soundly(tmp_path: Path) -> None:
    t = load(write(simulate(ImaginedRun(ranks=2, iterations=4, layers=2)), tmp_path / "run"))
    assert not judged(t).startswith("fault")
    for k in range(8):
        other, changes = damaged(t, np.random.default_rng([3, k]))
        assert not (said := judged(other)).startswith("fault"), (k, changes, said)


@pytest.mark.data("gpu_h100/traces")
def test_mutated_messages_of_a_profile_are_refused_or_answered_soundly() -> None:
    small = SHARED / "gpu_h100/traces/mlp.xplane.pb.gz"
    found, faults = fuzz(range(15), seed=5, write=profiled([small]))
    assert not faults and sum(found.values()) == 15


@pytest.mark.data("gpu_h100/traces")
def test_an_op_whose_time_does_not_fit_into_64_bits_is_left_out() -> None:
    """Its execution kept the time, and the diagnosis ended with a traceback."""
    small = SHARED / "gpu_h100/traces/mlp.xplane.pb.gz"
    data = gzip.decompress(small.read_bytes())
    space = parse("XSpace", data, str(small))
    line = next(
        x for p in space.planes if p.name == "/device:GPU:0" for x in p.lines if x.name.startswith("Stream")
    )
    line.timestamp_ns = (1 << 63) - 1
    assert _verdict_of_planes(space.SerializeToString()) in ("refused", "warned")


def _verdict_of_planes(data: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "x.xplane.pb").write_bytes(data)
        return verdict(Path(folder))
