"""A handful of mutated traces, as ``bench/replay_fuzz.py`` makes by the thousand: nothing absurd without a warning."""

from bench.replay_fuzz import fuzz


def test_faults_that_were_found_stay_mended() -> None:
    """4019: with less to do, ops that nothing in the trace orders changed places, and the run was predicted longer."""
    found, faults = fuzz([4019], seed=0)
    assert not faults and sum(found.values()) == 1


def test_mutated_traces_are_refused_or_answered_soundly() -> None:
    found, faults = fuzz(range(24), seed=7)
    assert not faults
    assert sum(found.values()) == 24
