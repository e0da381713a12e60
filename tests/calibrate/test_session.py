"""Sessions: the order of tasks, the budget, interruptions and resuming."""

import dataclasses
import json

import pytest

from pase.calibrate import Journal, Level, Settings, fit, session, suite
from pase.calibrate.here import level_layout, parse_levels
from pase.calibrate.session import measure, remeasured
from pase.calibrate.suite import budgeted, ways_of
from pase.calibrate.types import Sample, Task
from pase.costmodels.analytic import Analytic
from pase.errors import PaseError
from pase.machine import mesh_from
from tests.calibrate.synthetic import ONE, TWO, Fake, target

HERE = {"host": "a", "devices": 4}


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


def test_the_shortest_budget_prices_all_levels_together_as_measured():
    """The simulated machine uses one ring through all devices. Level by level would be faster, but is not what runs."""
    tasks, bench, journal = suite(target(TWO)), Fake(levels=TWO), Journal(None, {})
    session(tasks, bench, journal, Settings(budget_s=1.0))
    about = {"name": "f", "device_name": "F", "memory_bytes": 1, "levels": TWO, "provenance": {}}
    model = Analytic(fit(tasks, journal.samples, **about).machine)
    for op in ("all_reduce", "all_gather"):
        whole = Task(op=op, nbytes=1 << 22, ways=(4, 2))
        priced = model.collective(op, mesh_from("data=8", 8), [1], whole.nbytes)
        assert priced[0] == pytest.approx(bench.truth(whole), rel=0.05)


def test_a_budget_ends_the_session_after_what_is_needed():
    tasks = suite(target(ONE))
    bench, journal = Fake(levels=ONE), Journal(None, {})
    outcome = session(tasks, bench, journal, Settings(budget_s=1.0))
    needed = {t.key for t in tasks if t.rank == 0}
    assert outcome.beyond > 0 and outcome.measured < len(tasks)
    assert needed - set(outcome.too_slow) <= set(journal.samples)
    # One task may begin just within the budget, and the required tasks may exceed it.
    assert outcome.measured + outcome.beyond + len(outcome.too_slow) == len(tasks)
    whole = session(tasks, Fake(levels=ONE), Journal(None, {}), Settings(budget_s=1e9))
    assert whole.beyond == 0 and not whole.too_slow


def test_what_would_eat_the_budget_is_left_out():
    slow = Fake(levels=ONE, bandwidth=(1e6,))
    journal = Journal(None, {})
    outcome = session(suite(target(ONE)), slow, journal, Settings(budget_s=60.0))
    assert "all_reduce float32 268435456B over [4]" in outcome.too_slow
    longest = max(s.seconds for s in journal.samples.values() if "all_reduce" in s.key)
    assert longest < 10.0


def test_sizes_follow_from_a_first_look():
    fast, slow = Fake(levels=ONE, peak=1e15, memory=1e12, launch=1e-8), Fake(levels=ONE, peak=1e9, memory=1e8)
    for bench, extent in ((fast, 8192), (slow, 128)):
        got = budgeted(bench, Journal(None, {}), Settings(budget_s=60.0), ONE, ("float32",), 1 << 36)
        assert got.largest_extent == extent
    small = budgeted(fast, Journal(None, {}), Settings(budget_s=60.0), ONE, ("float32",), 1 << 24)
    assert small.largest_extent == 512 and 8 * small.largest_traffic < 1 << 24


def test_dispatch_is_amortised_and_the_median_taken():
    bench = Fake(levels=ONE, noise=0.05)
    task = Task(op="elementwise", nbytes=4096)
    sample = measure(task, bench, Settings(program_s=0.01, repeats=(5, 15)))
    assert sample.inner * bench.truth(task) == pytest.approx(0.01, rel=0.3)
    assert sample.repeats in (5, 10) and sample.seconds == pytest.approx(bench.truth(task), rel=0.15)
    assert measure(Task(op="dispatch"), bench, Settings()).inner == 1


def test_what_other_programs_disturbed_is_measured_again():
    """Other programs use a core during the first tries, and then stop."""

    class Shared(Fake):
        def others_s(self):
            return min(self.clock, 0.5)

    bench, task = Shared(levels=ONE), Task(op="elementwise", nbytes=4096)
    bench.broken = {task.key: 0.02}
    sample = measure(task, bench, Settings(program_s=0.01, repeats=(5, 5)))
    assert sample.others == 0.0 and 0.5 < bench.clock < 0.8
    busy = Shared(levels=ONE, others=0.0)
    busy.others_s = lambda: 0.7 * busy.clock
    assert measure(task, busy, Settings()).others == pytest.approx(0.7)


def test_beyond_the_budget_no_sample_waits_for_a_quiet_moment():
    """Three tasks must be measured. The first begins within the budget and has five tries; the others have one."""

    def seconds(budget_s):
        bench = Fake(levels=ONE)
        bench.others_s = lambda: 0.7 * bench.clock
        tasks = [Task(op="elementwise", nbytes=4096 << i) for i in range(3)]
        session(tasks, bench, Journal(None, {}), Settings(budget_s=budget_s, repeats=(5, 5)))
        return bench.clock

    assert seconds(1e-9) == pytest.approx(7 / 15 * seconds(1e9), rel=0.1)


def test_a_stop_loses_nothing_and_the_rest_is_measured_once(tmp_path):
    path, tasks = tmp_path / "m.journal", [t for t in suite(target(ONE)) if t.rank == 0]
    settings = Settings(budget_s=1e9)
    first = Fake(levels=ONE, stop_after=7)
    with pytest.raises(KeyboardInterrupt):
        session(tasks, first, Journal(path, HERE), settings)
    assert len(path.read_text().splitlines()) == 1 + 7
    # The process is killed while it writes a line.
    with path.open("a") as f:
        f.write('{"key": "half')
    second = Fake(levels=ONE)
    taken_up = Journal(path, HERE)
    assert taken_up.resumed == 7
    outcome = session(tasks, second, taken_up, settings)
    assert outcome.resumed == 7 and first.timed + second.timed == [t.key for t in tasks]
    assert len(Journal(path, HERE).samples) == len(tasks)


def test_wide_samples_are_measured_again_on_resuming(tmp_path):
    path, task = tmp_path / "m.journal", Task(op="launch")
    Journal(path, HERE).add(Sample(key=task.key, seconds=1.0, spread=0.9, repeats=5, inner=1))
    session([task], Fake(levels=ONE), Journal(path, HERE), Settings())
    assert Journal(path, HERE).samples[task.key].seconds == pytest.approx(2e-6)


def test_what_is_doubted_is_measured_again(tmp_path):
    tasks, journal = suite(target(ONE)), Journal(None, {})
    bench = Fake(levels=ONE)
    key = tasks[5].key
    journal.add(Sample(key=key, seconds=99.0, spread=0.0, repeats=1, inner=1))
    assert remeasured(tasks, ["no such key", key], bench, journal, Settings()) == 1
    assert bench.timed == [key] and journal.samples[key].seconds < 1


def test_a_journal_of_another_machine_is_refused(tmp_path):
    path = tmp_path / "m.journal"
    Journal(path, HERE).add(Sample(key="x", seconds=1.0, spread=0.0, repeats=1, inner=1))
    with pytest.raises(PaseError, match="devices is 4") as e:
        Journal(path, {**HERE, "devices": 8})
    assert e.value.where == str(path) and "--fresh" in e.value.fix
    assert not Journal(path, {**HERE, "devices": 8}, fresh=True).samples


def test_what_is_no_journal_is_refused_and_damage_is_named(tmp_path):
    path = tmp_path / "m.journal"
    path.write_text("hello\n")
    with pytest.raises(PaseError, match="not a journal") as e:
        Journal(path, HERE)
    assert e.value.where == str(path)
    Journal(path, HERE, fresh=True)
    line = json.dumps(dataclasses.asdict(Sample(key="x", seconds=1.0, spread=0.0, repeats=1, inner=1)))
    path.write_text(path.read_text() + "torn\n" + line + "\n")
    with pytest.raises(PaseError, match="cannot be read") as e:
        Journal(path, HERE)
    assert e.value.where == f"{path}:2"


@dataclasses.dataclass(frozen=True)
class Chip:
    id: int
    process_index: int = 0
    coords: tuple[int, int, int] | None = None
    platform: str = "tpu"

    @property
    def core_on_chip(self) -> int:
        if self.platform != "tpu":
            raise AttributeError
        return 0


def test_levels_are_processes_or_a_torus():
    ordered, levels = level_layout([Chip(i, i // 4) for i in reversed(range(8))])
    assert [d.id for d in ordered] == list(range(8))
    assert [(l.name, l.ways) for l in levels] == [("device", 4), ("process", 2)]
    assert [(l.name, l.ways) for l in level_layout([Chip(i, i) for i in range(2)])[1]] == [("process", 2)]
    assert [(l.name, l.ways) for l in level_layout([Chip(0)])[1]] == [("device", 1)]
    torus, levels = level_layout([Chip(i, i // 4, (i % 4, i // 4, 0)) for i in range(8)])
    assert [(l.name, l.ways, l.topology) for l in levels] == [("x", 4, "torus"), ("y", 2, "torus")]
    assert [d.coords[:2] for d in torus] == [(x, y) for y in range(2) for x in range(4)]
    cards = [Chip(i, i // 4, (0, i // 4, i % 4), "gpu") for i in reversed(range(8))]
    ordered, levels = level_layout(cards)
    assert [d.id for d in ordered] == list(range(8))
    assert [(l.name, l.ways) for l in levels] == [("device", 4), ("process", 2)]
    with pytest.raises(PaseError, match="numbers of devices"):
        level_layout([Chip(0), Chip(1), Chip(2, 1)])


def test_levels_by_hand():
    assert [l.ways for l in parse_levels("host=2, rack=3", 6)] == [2, 3]
    with pytest.raises(PaseError, match="6 devices") as e:
        parse_levels("host=2,rack=3", 8)
    assert e.value.where == "--levels" and "8" in e.value.fix
    with pytest.raises(PaseError, match="'2x3'") as e:
        parse_levels("2x3", 6)
    assert e.value.where == "--levels" and "NAME=WAYS" in e.value.fix
