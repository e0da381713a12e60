"""A handful of mutated traces, as ``bench/replay_fuzz.py`` makes by the thousand: nothing absurd without a warning."""

from bench.replay_fuzz import fuzz


def test_mutated_traces_are_refused_or_answered_soundly() -> None:
    found, faults = fuzz(range(24), seed=7)
    assert not faults
    assert sum(found.values()) == 24
