"""The tasks of a calibration: their order, the groups of devices, and sizes within a budget."""

from pase.calibrate import Journal, Level, Settings, fit, session, suite
from pase.calibrate.suite import budgeted, ways_of
from tests.calibrate.synthetic import ONE, TWO, Fake, target


def test_coarse_comes_first_and_every_prefix_of_ranks_is_a_whole_machine():
    tasks = suite(target(TWO))
    assert [t.rank for t in tasks] == sorted(t.rank for t in tasks)
    assert len({t.key for t in tasks}) == len(tasks)
    for rank in range(max(t.rank for t in tasks) + 1):
        some = [t for t in tasks if t.rank <= rank]
        journal = Journal(None, {})
        session(some, Fake(levels=TWO), journal, Settings(budget_s=1e9))
        more = {"name": "f", "device_name": "F", "memory_bytes": 1, "levels": TWO, "provenance": {}}
        assert len(fit(tasks, journal.samples, **more).machine.levels) == 2


def test_groups_are_levels_parts_of_them_and_all_together():
    assert dict(ways_of(TWO)) == {(4, 1): 0, (1, 2): 0, (4, 2): 0, (2, 1): 2}
    assert ways_of((Level(name="device", ways=1),)) == []


def test_sizes_follow_from_a_first_look():
    fast, slow = Fake(levels=ONE, peak=1e15, memory=1e12, launch=1e-8), Fake(levels=ONE, peak=1e9, memory=1e8)
    for bench, extent in ((fast, 8192), (slow, 128)):
        got = budgeted(bench, Journal(None, {}), Settings(budget_s=60.0), ONE, ("float32",), 1 << 36)
        assert got.largest_extent == extent
    small = budgeted(fast, Journal(None, {}), Settings(budget_s=60.0), ONE, ("float32",), 1 << 24)
    assert small.largest_extent == 512 and 8 * small.largest_traffic < 1 << 24
