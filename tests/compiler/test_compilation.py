"""A memory limit is met, costs time, and raises an error if nothing fits."""

import json
from dataclasses import replace
from importlib import resources

import jax
import numpy as np
import pytest

import pase
from pase.errors import Infeasible, PaseError
from pase.machine import load
from tests.command import run
from tests.compiler.meshes.models import MODEL


@pytest.fixture(scope="module")
def free():
    return pase.compile(MODEL, devices=4, mesh="2x2", memory_limit="none", baselines=False)


def test_tighter_limits_are_kept_and_cost_time():
    free = pase.compile("zoo:mlp", devices=8, mesh="2x4", baselines=False)
    limit = free.memory.total * 0.95  # there are strategies with 0.942 of it
    plan = pase.compile("zoo:mlp", devices=8, mesh="2x4", memory_limit=limit, baselines=False)
    assert plan.memory.total <= limit < free.memory.total
    assert plan.cost > free.cost
    assert plan.bound <= plan.cost
    with pytest.raises(Infeasible):
        pase.compile("zoo:mlp", devices=8, mesh="2x4", memory_limit=free.memory.total / 2, baselines=False)


def test_a_limit_that_does_not_bind_changes_nothing(free):
    plan = pase.compile(MODEL, devices=4, mesh="2x2", memory_limit=free.memory.total, baselines=False)
    assert plan.cost == free.cost
    assert plan.optimal


def small_machine(nbytes):
    """Return an H100 node whose devices hold this many bytes."""
    h100 = load("h100x8")
    return replace(h100, device=replace(h100.device, memory_bytes=int(nbytes), reserved_bytes=0))


def test_a_plan_fits_by_default_and_methods_that_do_not_are_named(free):
    small = small_machine(0.7 * free.memory.total)
    options = {"devices": 4, "mesh": "2x2", "machine": small}
    plan = pase.compile(MODEL, **options)
    assert plan.fits and plan.memory_limit == small.device.memory_bytes and plan.misfit is None
    assert set(plan.baseline_memory) == set(plan.baselines)
    fitting = set(plan.baselines) - set(plan.too_large)
    assert "data_parallel" in plan.too_large and fitting
    assert all(plan.cost <= plan.baselines[name] * (1 + 1e-9) for name in fitting)
    assert ", does not fit" in str(plan)
    lifted = pase.compile(MODEL, **options, memory_limit="none", baselines=False)
    assert lifted.cost < plan.cost and not lifted.fits and lifted.memory_limit is None
    assert "WARNING it does not fit" in str(lifted)
    with_room = pase.compile(MODEL, devices=4, mesh="2x2", baselines=False)
    assert with_room.cost == free.cost and with_room.fits


def test_compare_says_which_methods_do_not_fit(free):
    small = small_machine(0.7 * free.memory.total)
    plans = dict(pase.compare(MODEL, devices=4, mesh="2x2", machine=small))
    assert plans["pase"].fits
    assert not plans["data_parallel"].fits
    assert all(plans["pase"].cost <= p.cost * (1 + 1e-9) for p in plans.values() if p.fits)


def test_where_nothing_fits_the_plan_says_so_and_what_would(tmp_path):
    small = small_machine(2**20)
    with pytest.warns(UserWarning, match="it does not fit: no strategy found"):
        plan = pase.compile(MODEL, devices=4, mesh="2x2", machine=small)
    assert not plan.fits and plan.misfit is not None
    assert set(plan.too_large) == set(plan.baselines)
    assert plan.cost == pase.compile(MODEL, devices=4, mesh="2x2", memory_limit="none", baselines=False).cost
    assert f"WARNING it does not fit: {plan.misfit[:40]}" in " ".join(str(plan).split())
    plan.save(tmp_path / "layout.json")
    again = pase.load(tmp_path / "layout.json")
    kept = ("memory_limit", "misfit", "baseline_memory", "fits", "too_large")
    assert [getattr(again, k) for k in kept] == [getattr(plan, k) for k in kept]


def test_the_program_warns_and_strict_ends_with_status_1(tmp_path):
    text = (resources.files("pase.machine") / "data" / "h100x8.toml").read_text(encoding="utf-8")
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(text.replace("memory_bytes = 80_000_000_000", "memory_bytes = 1_001_000_000"))
    words = ("zoo:mlp", "--devices", 2, "--machine", tiny)
    for command in ("compile", "compare"):
        code, out, err = run(command, *words, "--json")
        assert code == 0 and json.loads(out)["misfit"] and "WARNING it does not fit" in err
        code, out, err = run(command, *words, "--strict")
        assert code == 1 and out.count("WARNING it does not fit") == 1 and "WARNING" not in err
        assert run(command, "zoo:mlp", "--devices", 2, "--strict")[0] == 0


def test_what_is_made_of_a_layout_that_does_not_fit_says_so_once(tmp_path):
    plan = pase.compile("zoo:gpt2?layers=1&batch=16", devices=2, memory_limit="none")
    small = tmp_path / "layout.json"
    replace(plan, memory_limit=plan.memory.total - 1, misfit="no strategy found that fits").save(small)
    for words in (
        ("emit", small, "--to", "names", "-o", tmp_path / "names.json"),
        ("report", small, "-o", tmp_path / "page.html", "--time-limit", 0),
        ("explain", small, "--time-limit", 0),
        ("explain", small, "--time-limit", 0, "--json"),
    ):
        code, out, err = run(*words)
        assert code == 0 and (out + err).count("WARNING it does not fit") == 1, words
        code, out, err = run(*words, "--strict")
        assert code == 1 and (out + err).count("WARNING it does not fit") == 1, words
    _, _, err = run("schedule", small)
    assert err.count("WARNING it does not fit") == 1


def test_only_a_loss_is_run_in_micro_batches():
    w, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 64), (32, 64)))
    with pytest.raises(PaseError, match=r"accumulate: .*mode='inference'"):
        pase.compile(lambda w, x: x @ w, w, x, devices=2, mode="inference", accumulate=2)


def test_a_plan_that_does_not_fit_says_what_was_not_tried() -> None:
    """Micro-batches and recomputation are left out in silence otherwise: both are what people ask for first."""
    small = small_machine(2**16)
    w, batch = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 64), (4096, 64)))

    def misfit(loss, x=batch, **options):
        with pytest.warns(UserWarning, match="does not fit"):
            return pase.compile(loss, w, x, devices=2, machine=small, baselines=False, **options).misfit

    def of_the_batch(w, x):
        y = (x @ w) ** 2
        return y[:, 0].sum() / y.sum()

    met = misfit(of_the_batch)
    assert "Not tried: micro-batches, because examples of the batch meet in div at" in met
    assert "recomputation, because the model has no loop over layers" in met
    odd = jax.ShapeDtypeStruct((4097, 64), "float32")
    assert "because a batch of 4097 does not divide by 2" in misfit(lambda w, x: ((x @ w) ** 2).mean(), odd)
    tried = misfit(lambda w, x: ((x @ w) ** 2).mean())
    assert "micro-batches, because" not in tried and "recomputation, because" in tried
    assert "micro-batches, because" not in misfit(lambda w, x: ((x @ w) ** 2).sum())
    first = misfit(lambda w, x: ((x @ w) ** 2 * (np.arange(len(x)) < 8)[:, None]).mean())
    assert "More micro-batches were not tried" in first and "meet in mul" in first
    with pytest.raises(pase.Infeasible, match="Not tried: micro-batches"):
        pase.compile(of_the_batch, w, batch, devices=2, memory_limit="64KiB")
