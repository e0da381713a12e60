"""Stateful kernels: compiled and interpreted runs agree, and their parts match their definitions."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.schedules import random_problem
from pase.compiled import BreakEven, compiled_copies, is_compiled
from pase.schedule import evaluate
from pase.schedule.fast import _to_plan
from pase.schedule.greedy import instance
from pase.schedule.view import plain_view
from pase.search.bounded.flat import Flat

from .cases import PARTS, flat_instance, limit_of, results

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[pytest.mark.release] * (p != "schedule")) for p in PARTS]
)
def test_compiled_and_interpreted_come_to_the_same_bits(part: str) -> None:
    """Those of the search take most of the time, and brute force checks what they come to."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cases", part],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == results(part)


def test_a_kernel_is_compiled_once_for_all_numbers() -> None:
    """It is not compiled again for each literal that a caller passes."""
    import numba

    from pase.compiled import jit

    added = jit()(lambda x, n: x + n)
    caller = numba.njit(lambda x: added(x, 1) + added(x, n=2))
    assert caller(1) == 5 and len(added.signatures) == 1


def test_kernels_compile_without_a_folder_to_cache_them_in() -> None:
    """pase may be installed where its user cannot write, and the user may have no home directory."""
    files = [*sorted((ROOT / "pase").rglob("*kernels_*.py")), ROOT / "pase/replay/simulation/_kernels.py"]
    modules = [".".join(f.relative_to(ROOT).with_suffix("").parts) for f in files]
    code = f"""
import importlib
from numba.core import caching
caching.CompileResultCacheImpl._locator_classes = []
for module in {modules}:
    importlib.import_module(module)
from pase.schedule.kernels_chain import sequence
assert sequence.stats.cache_path is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_kernel_in_the_cache_counts_until_its_source_changes(tmp_path: Path) -> None:
    """numba compiles again what was changed after it was cached. So this is no kernel that only has to be loaded."""
    source = tmp_path / "kernel_of_a_test.py"
    source.write_text("def twice(x):\n    return 2 * x\n")
    module = _imported(source)
    copies = compiled_copies(module)
    assert not is_compiled(copies["twice"])
    assert copies["twice"](4) == 8 == module.twice(4)
    assert is_compiled(compiled_copies(_imported(source))["twice"])
    later = source.stat().st_mtime + 60
    os.utime(source, (later, later))
    assert not is_compiled(compiled_copies(_imported(source))["twice"])


def _imported(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_kernel_that_must_be_compiled_first_pays_later() -> None:
    asked: list[bool] = []
    for cached in (True, False):
        kernel = BreakEven(
            load_s=1.0, compile_s=5.0, cached=lambda known=cached: asked.append(known) or known
        )  # type: ignore
        assert not kernel.pays(0.5) and not asked
        assert kernel.pays(0.6) == cached == asked.pop()
        assert not kernel.reached or kernel.pays(0.0)
        assert kernel.pays(1.0, soon=3.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.integers(2, 12))
def test_moves_keep_a_plan_sound_and_its_cost_is_the_evaluators(seed: int, links: int, n: int) -> None:
    """After any move, each tensor keeps its bytes, a message has one group, and all messages are ordered; copy undoes
    moves."""
    from pase.schedule import kernels_search as k

    problem = random_problem(n, seed % 1000, links=links)
    inst = instance(problem, plain_view(problem))
    own = np.arange(n)
    s = k.start(own, own, inst.tensors["nbytes"].copy(), np.zeros(n, np.int64))
    before = k.start(*k.pieces_of(s))
    k.search(inst, k.pieces_of(s), 0, 0.0, seed, 0.0)  # seeds numba's random numbers
    for step in range(30):
        k.copy(s, before)
        kept = [x.copy() for x in k.pieces_of(s)]
        changed = k.move(
            inst, s, (seed + step) % (8 if links > 1 else 7), (seed // 7 + step) % s.n[k.MESSAGES]
        )
        msg, at, nbytes, link = found = k.pieces_of(s)
        if not changed:
            assert all(np.array_equal(a, b) for a, b in zip(found, kept, strict=True))
        np.testing.assert_array_equal(np.bincount(at, nbytes, n), inst.tensors["nbytes"])
        assert set(msg.tolist()) == set(range(link.size)) and (nbytes > 0).all()
        assert set(link.tolist()) <= set(range(links))
        assert all(len(set(inst.tensors["group"][at[msg == m]])) == 1 for m in range(link.size))
        cost, _, _ = k.cost_of(inst, s, np.zeros(links))
        plan = _to_plan(inst, found)
        np.testing.assert_allclose(cost, evaluate(problem, plan, timeline=False).iteration_s, rtol=1e-9)
        if step % 3 == 0:
            k.copy(before, s)
            assert all(np.array_equal(a, b) for a, b in zip(k.pieces_of(s), kept, strict=True))


def cost_by_definition(flat: Flat, choice: np.ndarray, nodes: np.ndarray) -> float:
    """Node costs of ``nodes`` and every edge with an end among them."""
    inside = np.isin(flat.head, nodes) | np.isin(flat.tail, nodes)
    width = np.diff(flat.slot)[flat.tail]
    at = flat.matrix + choice[flat.head] * width + choice[flat.tail]
    return float(flat.cost[flat.slot[:-1] + choice][nodes].sum() + flat.entries[at][inside].sum())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_a_tree_move_is_the_best_on_the_tree(seed: int) -> None:
    """``tree_cost`` matches its definition, ``forest_move`` is the best choice on the tree, and usage follows it."""
    from pase.search.bounded import kernels_flat, kernels_memory

    rng = np.random.default_rng(seed)
    flat = flat_instance(rng, nodes=8, edges=9)
    limit = limit_of(rng, flat, 4)
    w = kernels_memory.make_scratch(flat.n, flat.cost.size)
    kernels_flat.grow_tree(flat.graph, seed % 8, 4, w.picked, w.seen, w.queue, rng.random(16))
    nodes, choice = np.flatnonzero(w.picked), np.zeros(flat.n, np.int64)
    cost = kernels_memory.tree_cost(flat.graph, flat.cost, choice, nodes, w.picked)
    np.testing.assert_allclose(cost, cost_by_definition(flat, choice, nodes), rtol=1e-12)
    best = np.inf
    for config in np.ndindex(*np.diff(flat.slot)[nodes]):
        trial = choice.copy()
        trial[nodes] = config
        best = min(best, flat.cost_of(trial))
    before = choice[nodes].copy()
    kernels_flat.forest_move(flat.graph, flat.cost, choice, nodes, w.picked, w.order, w.up, w.table)
    np.testing.assert_allclose(flat.cost_of(choice), best, rtol=1e-12)
    assert not w.picked.any()
    usage = kernels_memory.Usage(np.zeros(4), np.zeros(4), np.zeros(5))
    start = np.zeros(flat.n, np.int64)
    kernels_memory.usage_of(limit, flat.slot, start, usage.used)
    moved, rise, _, first, last = kernels_memory.weigh_move(flat.graph, limit, nodes, before, choice, usage)
    after = np.zeros(4)
    kernels_memory.usage_of(limit, flat.slot, choice, after)
    assert moved == bool((choice != start).any()) and not usage.delta.any()
    reached = usage.used.copy()
    reached[first:last] = usage.after[first:last]
    np.testing.assert_allclose(reached, after, atol=1e-9)
    over = [np.maximum(u - limit.capacity, 0.0).sum() for u in (usage.used, after)]
    np.testing.assert_allclose(rise, over[1] - over[0], atol=1e-9)
