"""Fitted tables agree with known true times; implausible measurements are rejected by name."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pase import costmodels
from pase.calibrate import Journal, Refused, Settings, fit, session, suite
from pase.calibrate.fit import Believed, Ceilings, fit_line, smoothed
from pase.machine import COLLECTIVES, Mesh, dumps, parse
from pase.tables.build import work_price
from pase.tables.work import Work
from tests.calibrate.synthetic import ONE, TWO, Fake, target

WITHIN = Settings(budget_s=1e9)


def measured(bench, tasks):
    journal = Journal(None, {})
    session(tasks, bench, journal, WITHIN)
    return journal.samples


def fitted(samples, tasks, levels, **more):
    more = {
        "name": "fake",
        "device_name": "Fake",
        "memory_bytes": 1 << 30,
        "provenance": {"date": "d"},
    } | more
    return fit(tasks, samples, levels=levels, **more)


@pytest.mark.parametrize("levels", [ONE, TWO], ids=["one level", "two levels"])
def test_the_truth_comes_back(levels):
    bench, tasks = Fake(levels=levels), suite(target(levels))
    found = fitted(measured(bench, tasks), tasks, levels)
    machine = found.machine
    assert machine.device.launch_s == pytest.approx(bench.launch)
    assert machine.device.vector_flops == pytest.approx(bench.peak / 10)
    assert machine.host is not None
    assert (machine.host.program_s, machine.host.op_s) == pytest.approx(bench.host)
    assert {c.kind for c in machine.collectives} == set(COLLECTIVES)
    for level, latency, bandwidth in zip(machine.levels, bench.latency, bench.bandwidth, strict=False):
        assert level.latency_s == pytest.approx(latency, rel=1e-6)
        assert level.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    model = costmodels.get("analytic", machine)
    # On and between points of the table, the mean of the three forms is a launch plus work / peak.
    for m, n, k in ((8, 32, 128), (512, 512, 512), (100, 300, 200)):
        flops = 2.0 * m * n * k
        want = bench.launch + flops / bench.peak
        got = float(model.compute("matmul", "float32", flops, 0.0, mnk=(m, n, k)))
        assert got == pytest.approx(want, rel=1e-6 if {m, n, k} <= {8, 32, 128, 512} else 0.05)
    for nbytes in (1 << 12, 1 << 20, 3 << 20):
        want = bench.launch + nbytes / bench.memory
        assert float(model.compute("memory", "float32", 0.0, nbytes)) == pytest.approx(want, rel=0.03)
    assert machine.device.efficiency["window"] == pytest.approx(bench.window, rel=0.15)
    # Apart from the launch, a conv takes twice as long as a matmul of the same extents.
    assert machine.device.efficiency["conv"] == pytest.approx(0.5, rel=0.12)
    names = [level.name for level in reversed(levels)]
    mesh = Mesh(names=tuple(names), sizes=tuple(level.ways for level in reversed(levels)))
    by_key = {t.key: t for t in tasks}
    checked = 0
    for key, task in by_key.items():
        if not task.ways or not all(w in (1, l.ways) for w, l in zip(task.ways, levels, strict=True)):
            continue
        axes = sum(1 << (len(names) - 1 - l) for l, w in enumerate(task.ways) if w > 1)
        got = float(model.collective(task.op, mesh, axes, task.nbytes))
        assert got == pytest.approx(bench.truth(task), rel=1e-9), key
        checked += 1
    assert checked > 50
    assert all(ratio == pytest.approx(1.0, abs=0.1) for ratio in found.checks.values()) and found.checks


def test_a_cpu_has_the_habits_of_its_compiler():
    tasks = suite(target(ONE))
    bench = Fake(levels=ONE)
    samples = measured(bench, tasks)
    plain = fitted(samples, tasks, ONE).machine
    assert (
        plain.bucket_bytes == float(25 << 20)
        and plain.sums_readers
        and "memory" not in plain.device.efficiency
    )
    cpu = fitted(samples, tasks, ONE, provenance={"date": "d", "platform": "cpu"}).machine
    assert cpu.bucket_bytes == 0.0 and not cpu.sums_readers
    assert cpu.device.efficiency["memory"] == pytest.approx(bench.light, rel=0.2)
    by = {(c.kind, c.ways): c.curve for c in cpu.collectives}
    truth = {op: [bench.truth(t) for t in tasks if (t.op, t.ways) == (op, (4,))] for op, _ in by}
    assert by["all_reduce", (4,)] == by["reduce_scatter", (4,)]
    mean = np.mean([sorted(truth["all_reduce"]), sorted(truth["reduce_scatter"])], axis=0)
    assert by["all_reduce", (4,)].seconds == pytest.approx(mean)
    traffic = Work(
        kind="memory",
        dtype="float32",
        flops=np.zeros(1),
        nbytes=np.array([float(1 << 24)]),
        mnk=None,
        phase="forward",
        times=1.0,
    )
    light, update = (
        float(work_price(w, costmodels.get("analytic", cpu))[0])
        for w in (traffic, dataclasses.replace(traffic, phase="update"))
    )
    assert update == pytest.approx((1 << 24) / bench.memory, rel=0.05)
    pool = dataclasses.replace(traffic, windowed=np.array([1e6]))
    walk = 1e6 / (cpu.device.efficiency["window"] * cpu.device.vector_flops)
    assert float(work_price(pool, costmodels.get("analytic", cpu))[0]) == pytest.approx(light + walk)
    rate = cpu.device.efficiency["memory"] * cpu.device.memory_bandwidth_bytes_per_s
    assert light == pytest.approx((1 << 24) / rate)


def test_the_file_reads_back():
    tasks = suite(target(TWO))
    machine = fitted(measured(Fake(levels=TWO, noise=0.03), tasks), tasks, TWO).machine
    assert parse(dumps(machine), "again") == machine


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 0.08))
def test_noise_moves_the_tables_by_no_more_than_itself(seed, noise):
    tasks = [t for t in suite(target(ONE)) if t.rank < 4]
    bench = Fake(levels=ONE, noise=noise, seed=seed)
    samples = measured(bench, tasks)
    machine = fitted(samples, tasks, ONE, believed=Believed(max_spread=math.inf)).machine
    # Each sample is a median of at least five. The worst of about 300 samples is within five sigma of one program.
    by_size = {(t.op, float(t.nbytes)): bench.truth(t) for t in tasks if t.ways == (4,)}
    assert machine.collectives
    for c in machine.collectives:
        assert list(c.curve.seconds) == sorted(c.curve.seconds)
        if c.ways == (4,):
            truth = np.array([by_size[c.kind, n] for n in c.curve.nbytes])
            assert np.abs(np.log(np.array(c.curve.seconds) / truth)).max() <= 5 * noise + 1e-9


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=27), st.integers(1, 3))
def test_smoothing_rises_and_leaves_what_rises(values, ndim):
    side = {1: len(values), 2: math.isqrt(len(values)), 3: round(len(values) ** (1 / 3) - 0.49)}[ndim]
    side = max(side, 1)
    x = np.array(values[: side**ndim]).reshape((side,) * ndim)
    best, change, at = smoothed(x)
    for axis in range(ndim):
        assert (np.diff(best, axis=axis) >= -1e-12 * best.max()).all()
    rises = all((np.diff(x, axis=axis) >= 0).all() for axis in range(ndim))
    assert (change < 1e-12) == rises or change < 1e-9
    ratio = best.flat[at] / x.flat[at]
    assert change == pytest.approx(max(ratio, 1 / ratio) - 1)


@given(st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(alpha, beta):
    n = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
    a, b = fit_line(n, alpha + beta * n)
    assert a == pytest.approx(alpha, rel=1e-4, abs=1e-9 * beta * 1e7) and b == pytest.approx(beta, rel=1e-4)


@pytest.fixture(scope="module")
def clean():
    tasks = suite(target(ONE))
    return tasks, measured(Fake(levels=ONE), tasks)


def refusal(clean, changes, **more):
    with pytest.raises(Refused) as e:
        changed(clean, changes, **more)
    return e.value


def changed(clean, changes, **more):
    tasks, samples = clean
    other = {k: dataclasses.replace(samples[k], **v) for k, v in changes.items()}
    return fitted({**samples, **other}, tasks, ONE, **more)


def test_a_wide_spread_is_refused_and_doubted(clean):
    key = "all_reduce float32 65536B over [4]"
    error = refusal(clean, {key: {"spread": 0.9}})
    assert key in str(error) and "90%" in str(error) and "--max-spread" in str(error)
    assert error.doubtful == (key,)


def test_a_falling_curve_is_refused_and_both_sides_doubted(clean):
    key = "all_gather float32 4194304B over [4]"
    error = refusal(clean, {key: {"seconds": 1e-6}})
    assert "all_gather over [4]: not monotone" in str(error)
    assert key in error.doubtful and len(error.doubtful) > 1
    assert all(d.startswith("all_gather") for d in error.doubtful)


def test_a_fall_within_its_spread_is_smoothed(clean):
    tasks, samples = clean
    key = "all_gather float32 1024B over [4]"
    high = dataclasses.replace(samples[key], seconds=samples[key].seconds * 1.1)
    found = fitted({**samples, key: high}, tasks, ONE)
    assert 0.01 < found.smoothed["all_gather over [4]"] < 0.06


def test_a_falling_matmul_is_refused(clean):
    error = refusal(
        clean, {f"matmul.{f} float32 1x512x512x512": {"seconds": 1e-9} for f in ("nn", "nt", "tn")}
    )
    assert "matmul float32: not monotone" in str(error)
    assert "matmul.nn float32 1x512x512x512" in error.doubtful


def test_rates_above_physics_are_refused(clean):
    slow = Ceilings(flops_per_s=1e11, memory_bytes_per_s=1e9, source="the datasheet")
    error = str(refusal(clean, {}, believed=Believed(ceilings=slow)))
    assert "matmul float32: 9.93e+11 FLOP/s" in error and "the datasheet gives at most 1e+11" in error
    assert "memory-bound ops:" in error and "all_gather over [4]" in error


def test_small_products_faster_than_large_ones_are_refused(clean):
    _, samples = clean
    large = {
        k: {"seconds": s.seconds * 400}
        for k, s in samples.items()
        if k.startswith("matmul") and "512x512x512" in k
    }
    error = str(refusal(clean, large))
    assert "over 10 times the largest product's" in error and "please report it" in error


def test_no_time_is_refused(clean):
    assert "launch float32: nan s" in str(refusal(clean, {"launch float32": {"seconds": math.nan}}))


def test_a_negative_latency_is_refused_and_doubted(clean):
    tasks, _ = clean
    # The times are superlinear from the first byte, so the fitted line starts below zero.
    gathers = {t.key: t for t in tasks if t.op == "all_gather" and t.ways == (4,)}
    bent = {k: {"seconds": 1e-12 * t.nbytes**1.5} for k, t in gathers.items()}
    error = refusal(clean, bent)
    assert "link level 'device'" in str(error) and "a latency of -" in str(error)
    assert set(error.doubtful) == set(gathers)


def test_a_link_whose_times_are_flat_has_the_bandwidth_that_was_reached(clean):
    tasks, _ = clean
    gathers = [t for t in tasks if t.op == "all_gather" and t.ways == (4,)]
    flat = changed(clean, {t.key: {"seconds": 5.94e-4} for t in gathers})
    largest = max(t.nbytes for t in gathers)
    level = next(l for l in flat.machine.levels if l.name == "device")
    assert level.bandwidth_bytes_per_s == pytest.approx(3 / 4 * largest / 5.94e-4) and level.latency_s == 0
    assert any("its bandwidth is a lower bound" in n for n in flat.notes)


def test_who_accepts_more_spread_than_usual_accepts_it_between_sizes(clean):
    tasks, _ = clean
    gathers = sorted((t for t in tasks if t.op == "all_gather" and t.ways == (4,)), key=lambda t: t.nbytes)
    noisy = {t.key: {"seconds": 1e-3 * (5 if i % 2 == 0 else 1)} for i, t in enumerate(gathers)}
    assert "not monotone" in str(refusal(clean, noisy))
    changed(clean, noisy, believed=Believed(max_spread=1000.0))


def test_too_little_is_refused():
    tasks = suite(target(ONE))
    one = [t for t in tasks if t.op in ("launch", "vector")]
    with pytest.raises(Refused, match="no matmul table"):
        fitted(measured(Fake(levels=ONE), one), tasks, ONE)


def test_a_hosts_launch_that_no_host_needs_is_refused():
    tasks = suite(target(ONE))
    bench = Fake(levels=ONE, host=(2e-5, 0.5))
    with pytest.raises(Refused, match=r"the host's launch of an op: 0.5 s") as e:
        fitted(measured(bench, tasks), tasks, ONE)
    assert e.value.doubtful == ("host.op float32",)


def test_without_the_hosts_launches_a_machine_says_so():
    tasks = [t for t in suite(target(ONE)) if t.op != "host.op"]
    found = fitted(measured(Fake(levels=ONE), tasks), tasks, ONE)
    assert found.machine.host is None and any("host's launches were not measured" in n for n in found.notes)


def test_what_a_tpu_was_measured_on_has_its_compilers_memory():
    tasks = suite(target(ONE))
    samples = measured(Fake(levels=ONE), tasks)
    for platform, fuses, tile in (("tpu", True, (8, 128)), ("gpu", False, ())):
        m = fitted(samples, tasks, ONE, provenance={"date": "d", "platform": platform}).machine
        assert (m.fuses_products, m.device.memory_tile) == (fuses, tile)
        assert parse(dumps(m), "again") == m
