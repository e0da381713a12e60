"""Sessions: the order of tasks, the budget, interruptions and resuming."""

import pytest

from pase.calibrate import Journal, Settings, fit, session, suite
from pase.calibrate.session import measure, remeasured
from pase.calibrate.types import Sample, Task
from pase.costmodels.analytic import Analytic
from pase.machine import mesh_from
from tests.calibrate.synthetic import HERE, ONE, TWO, Fake, target


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
