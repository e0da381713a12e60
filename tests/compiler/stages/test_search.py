"""Stages in the search: priced like a step without stages, within each rank's memory, with a valid bound."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import pase
from pase.backends.registry import emit
from pase.compiler.meshes.baselines import price_baselines
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant, graph_of
from pase.compiler.resolve import traced_model
from pase.compiler.stages.bounds import StageBounds
from pase.compiler.stages.choice import choose_stages, even_stages
from pase.compiler.stages.costs import part_costs
from pase.compiler.stages.features import Feature
from pase.compiler.stages.menu import FIRST, LAST, MIDDLE, ONLY, StageRole, StageSplit, StageTables
from pase.compiler.stages.places import places_of
from pase.compiler.stages.search import StageMenu
from pase.errors import Infeasible, PaseError
from pase.files.codec import to_tree
from pase.frontends.jax.blocks import blocks_of
from pase.machine import Mesh
from pase.memory.account import memory
from pase.pipeline.registry import schedule
from pase.pipeline.simulate import peak_bytes, simulate
from pase.plan.layout import from_json
from pase.questions.sensitivity import sensitivity
from pase.search.check import cost_of
from pase.tables.itemize import collectives, local_work
from tests.command import printed, reported, run

SCANNED = "zoo:llama3_8b?layers=8&batch=32&seq=2048&vocab=2048&remat=0&attention=fused"
WRITTEN_OUT = "zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0&scan=0"


@cache
def tables_of(  # type: ignore[no-untyped-def]
    model: str, m: int, weights="each", again: bool = False, slow: float = 1.0
) -> StageTables:
    traced, _ = traced_model(model, None, (), CompileOptions(devices=8))
    blocks = blocks_of(traced)  # type: ignore[arg-type]
    variant = Variant(accumulate=m, blocks=blocks if again else ())
    problem = SplitProblem.of(traced.graph, 8, "h100x8", "analytic", "adam")
    graph = graph_of(traced, variant)
    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    places = places_of(graph, blocks)
    return StageTables(graph, places, variant, mesh, problem.model, "adam", weights, slow=slow)


@pytest.mark.parametrize("model", [SCANNED, WRITTEN_OUT])
@pytest.mark.parametrize("weights", ["hoisted", "each"])
@pytest.mark.parametrize("again", [False, True])
def test_the_parts_of_a_stage_are_what_the_tables_price(model, weights, again):
    """A stage's parts add up to the search's own cost. With all blocks and both ends they are the whole model."""
    t = tables_of(model, 4, weights, again)
    many = t.places.blocks
    assert many == (8 if model == SCANNED else 4)
    parts = [t.cheapest(FIRST, many / 2), t.cheapest(MIDDLE, many / 2), t.cheapest(LAST, many / 2)]
    for split in parts:
        assert split.step_s(many / 2, 4) == pytest.approx(t.least_s(split.role, many / 2))
    # Separate parts may each choose their own layouts, so their sum is a lower bound.
    apart = t.least_s(MIDDLE, many) + t.least_s(FIRST, 0) + t.least_s(LAST, 0)
    whole = t.cheapest(ONLY, many).step_s(many, 4)
    assert whole == pytest.approx(t.least_s(ONLY, many))
    assert t.places.tied or apart <= whole * (1 + 1e-9)


@pytest.mark.parametrize("machine", ["2080tix8", "v100x8", "h100x8"])
def test_one_stage_with_one_micro_batch_costs_what_the_step_without_stages_does(machine):
    """This holds for every baseline's strategy, up to rounding if nothing overlaps.

    With overlap, a stage costs no less, and at most as much more as its coarser units explain: the gathers of the first
    block and what is before it, or the compute of the last block and what is after it. For sums, the same holds in
    reverse order.
    """
    model = "zoo:gpt2?layers=4&batch=4&seq=32&vocab=2048&remat=0&scan=1"
    traced, _ = traced_model(model, None, (), CompileOptions(devices=4))
    blocks, variant = blocks_of(traced), Variant(accumulate=1, blocks=())  # type: ignore[arg-type]
    problem = SplitProblem.of(traced.graph, 4, machine, "analytic", "adam", "parameters")
    graph, slow = graph_of(traced, variant), problem.pricing.occupied
    places = places_of(graph, blocks).in_one_stage
    methods, _ = price_baselines(problem)
    assert slow is not None and {"zero2", "megatron_sp_fsdp_2x2"} <= {b.name for b in methods}
    for b in methods:
        parts = part_costs(graph, places, b.mesh, b.strategy, problem.model, "adam", "hoisted")
        step, added = (
            StageSplit(
                role=ONLY, variant=variant, weights="hoisted", configs=b.strategy, parts=parts, slow=part
            )
            for part in (slow, 1.0)
        )
        work = [w for of in local_work(graph, b.mesh, b.strategy, problem.model).values() for w in of]
        moved = collectives(graph, b.mesh, b.strategy, problem.model)
        of_parameters = sum(c.cost for c in moved if graph.producer[c.tensor].kind == "parameter")
        at = np.array([1.0, places.blocks, 1.0])
        whole = sum(w.cost for w in work) + sum(c.cost for c in moved)
        assert added.step_s(places.blocks, 1) == pytest.approx(whole)
        assert added.by_unit("before", "sums") @ at == pytest.approx(of_parameters)
        for phase, names in (
            ("forward", ("forward",)),
            ("backward", ("input", "weight")),
            ("update", ("after",)),
        ):
            assert step.by_unit(*names) @ at == pytest.approx(sum(w.cost for w in work if w.phase == phase))
        coarse = 0.0
        for sent, names in (("before", ("forward",)), ("sums", ("input", "weight"))):
            sends, works = step.by_unit(sent), step.by_unit(*names)
            coarse += max(sends[0] + sends[1], works[1] + works[2]) if sends.any() else 0.0
        more = step.step_s(places.blocks, 1) - problem.pricing.cost(b.mesh, b.strategy)
        assert -1e-9 * whole <= more <= coarse + 1e-9 * whole


@pytest.mark.parametrize("again", [False, True])
def test_the_bytes_of_a_stage_are_the_accounts(again):
    """For the whole model with one micro-batch in flight, they equal the account of a plan without stages."""
    t = tables_of(SCANNED, 4, "each", again)
    split = t.cheapest(ONLY, 8)
    account = memory(t.graph, t.mesh, split.configs)
    assert split.nbytes(8, 1) - split.buffers + max(p.inner for p in split.parts.values()) == pytest.approx(
        account.total - account.buffers, rel=1e-3
    )


def test_once_a_step_holds_whole_sums_of_gradients():
    each, once = (tables_of(SCANNED, 4, w) for w in ("each", "hoisted"))
    configs = once.cheapest(MIDDLE, 4).configs
    a, b = (
        part_costs(t.graph, t.places, t.mesh, configs, t.model, "adam", t.weights)["block"]
        for t in (each, once)
    )
    assert b.sums > a.sums == 0 and b.weight == a.weight and b.weight_sent <= a.weight_sent
    assert (
        b.forward == a.forward
        and b.forward_sent <= a.forward_sent
        and b.after <= a.after <= b.after + b.before
    )
    assert b.memory["gradients"] > 0 and a.kept == b.kept


@cache
def staged(**options):  # type: ignore[no-untyped-def]
    asked = {"devices": 8, "machine": "h100x8", "pipeline": 2, "mesh": "4", "accumulate": 4, "remat": "none"}
    return pase.compile(SCANNED, **asked | options)


def test_a_pipelined_plan_states_its_stages_its_bound_and_what_else_there_is():
    plan = staged()
    p = plan.pipeline
    assert p is not None and p.degree == 2 and p.micro_batches == plan.accumulate == 4
    assert sum(p.cuts) == 8 and len(p.stages) == len(p.cuts) == 2 * p.chunks
    assert plan.bound <= p.cuts_bound * (1 + 1e-6) and p.cuts_bound <= plan.cost * (1 + 1e-9)
    assert all(s >= plan.cost * (1 - 2e-3) for s in p.others.values()) and {"1f1b", "gpipe"} <= set(p.others)
    # A rank's own work is at most the step. The mean over ranks is the step without the bubble.
    work = np.bincount([s.rank for s in p.stages], [4 * (s.forward_s + s.backward_s) for s in p.stages])
    assert work.max() <= plan.cost and 1 - work.mean() / plan.cost == pytest.approx(p.bubble)
    assert work.max() / work.mean() - 1 == pytest.approx(p.imbalance)
    text = str(plan)
    assert "2 ranks" in text and "bubble" in text and "runs it in JAX, stage by stage" in text
    assert from_json(json.loads(json.dumps(to_tree_of(plan)))).pipeline == p


def to_tree_of(plan):  # type: ignore[no-untyped-def]
    from pase.plan.layout import to_json

    return to_tree(to_json(plan))


def test_what_does_not_take_it_says_so(tmp_path):
    plan = staged()
    for attempt in (
        lambda: emit(plan, "dtensor", tmp_path / "x"),
        plan.scheduled,
        lambda: plan.bucket_plan,
    ):
        with pytest.raises(PaseError, match=r"pipeline .2 ranks") as e:
            attempt()
        assert e.value.where.startswith("the plan for 'zoo:llama3_8b") and "plan.jax" in e.value.fix


@pytest.mark.torch
def test_pytorch_reads_its_schedule(tmp_path):
    """PyTorch's own check, sends and receives, and simulation accept every list."""
    from torch.distributed.pipelining import schedules as torch_schedules

    plan, p = staged(), staged().pipeline
    for name, chunks in [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zb-h1", 1),
        ("zb-v", 2),
        ("dualpipev", 2),
    ]:
        stages = (p.stages * 2)[: 2 * chunks]
        other = replace(p, schedule=name, chunks=chunks, stages=stages, cuts=(1,) * len(stages))
        said = emit(replace(plan, pipeline=other), "torch-schedule", tmp_path / "schedule.csv")
        lines = (tmp_path / "schedule.csv").read_text().splitlines()
        actions = {
            r: [torch_schedules._Action.from_str(a) for a in row.split(",")] for r, row in enumerate(lines)
        }
        ranks = torch_schedules._validate_schedule(actions, 2, 2 * chunks, 4)
        assert (
            f"{name}; ranks of stages 0 … {2 * chunks - 1}: {', '.join(str(ranks[k]) for k in sorted(ranks))}"
            in said
        )
        sent = torch_schedules._add_send_recv(actions, lambda s, of=ranks: of[s], 2 * chunks)
        torch_schedules._simulate_comms_compute(sent, lambda s, of=ranks: of[s], 2 * chunks)
    with pytest.raises(PaseError, match="pipeline=N"):
        emit(replace(plan, pipeline=None), "torch-schedule", tmp_path / "none.csv")


def test_its_layout_runs_in_the_reduced_size(tmp_path):
    plan, p = staged(), staged().pipeline
    ends = (p.stages[0], replace(p.stages[-1], rank=1))
    simple = replace(p, schedule="1f1b", chunks=1, cuts=(4, 4), stages=ends, stages_of={})
    replace(plan, pipeline=simple).save(tmp_path / "layout.json")
    told = reported("run", tmp_path / "layout.json", "--reduced", "--devices", "2")
    assert told["agrees"] and told["mesh"]["stage"] == 2 and told["collectives"] == []
    code, _, said = run("run", tmp_path / "layout.json", "--reduced", "--devices", "3")
    assert code and "cannot be run as the plan's stages are (2 ranks" in said


def test_explain_says_the_bubble_and_what_other_schedules_would_cost(tmp_path):
    staged().save(tmp_path / "layout.json")
    text = printed("explain", tmp_path / "layout.json")
    assert "bubble" in text and "imbalance" in text and "other schedules, each with its own best cuts" in text
    assert "other splits of stages are not priced one by one" in " ".join(text.split())
    told = reported("explain", tmp_path / "layout.json")["pipeline"]
    assert told["degree"] == 2 and told["others"] == dict(staged().pipeline.others)
    with pytest.raises(PaseError, match="leave out pipeline=2"):
        sensitivity(SCANNED, devices=8, pipeline=2, vary=["bandwidth=1,2"])


def test_a_layout_whose_stages_do_not_agree_is_refused():
    tree = to_tree_of(staged())
    tree["pipeline"]["degree"] = 4
    with pytest.raises(PaseError, match="not 8 devices in 4 ranks") as e:
        from_json(tree)
    assert e.value.where == "layout: at mesh"
    tree = to_tree_of(staged())
    tree["pipeline"]["stages"][0]["strategy"] = 99
    with pytest.raises(PaseError, match="strategy 99") as e:
        from_json(tree)
    assert e.value.where == "layout: at pipeline/stages/0"


def test_each_rank_keeps_to_the_memory_limit():
    free = staged()
    most = max(s.memory_bytes for s in free.pipeline.stages)
    tight = staged(memory_limit=0.85 * most, remat="light")
    assert max(s.memory_bytes for s in tight.pipeline.stages) <= 0.85 * most
    assert tight.cost >= free.cost * (1 - 2e-3)
    assert tight.bound <= tight.cost
    with pytest.raises(Infeasible, match="no pipeline found that fits"):
        staged(memory_limit=1e6)


def test_a_busy_machine_gives_the_same_answer(monkeypatch):
    """Budgets count work, so a clock on which an hour passes between any two readings changes nothing."""
    small = "zoo:gpt2?layers=2&batch=16&seq=128&vocab=2048&remat=0"
    asked = {"devices": 4, "pipeline": 2, "remat": "none", "max_axes": 1}
    quiet = pase.compile(small, **asked)
    clock = itertools.count(step=3600.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    busy = pase.compile(small, **asked)
    assert (busy.cost, busy.bound, busy.pipeline) == (quiet.cost, quiet.bound, quiet.pipeline)
    little = pase.compile(small, **asked, work=0.6)
    assert "more were not looked at, within the given work" in little.pipeline.scope
    assert little.cost >= quiet.cost * (1 - 1e-3) and not little.optimal


def test_auto_is_never_worse_than_no_stages():
    small = "zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0"
    plain = pase.compile(small, devices=4, baselines=False, max_axes=1, overlap="none")
    auto = pase.compile(small, devices=4, baselines=False, max_axes=1, pipeline="auto")
    assert auto.cost <= plain.cost and auto.bound <= auto.cost


def test_what_cannot_be_is_refused():
    for wrong in ("some", 0, 1, "1", -2):
        with pytest.raises(PaseError, match=r"pipeline: .*'none', 'auto' or a number"):
            pase.compile(SCANNED, devices=8, pipeline=wrong)
    with pytest.raises(PaseError, match=r"pipeline: 3 .* 8 devices"):
        pase.compile(SCANNED, devices=8, pipeline=3)
    with pytest.raises(Infeasible, match=r"pipeline: 8 blocks .* 16 stages"):
        pase.compile(SCANNED, devices=16, pipeline=16)
    with pytest.raises(PaseError, match=r"accumulate: .*32 .* 5 equal micro-batches"):
        pase.compile(SCANNED, devices=8, pipeline=2, accumulate=5)


def test_tied_tables_are_summed_between_the_ends():
    t = tables_of("zoo:gpt2?layers=4&batch=16&seq=128&vocab=2048&remat=0", 4)
    assert t.places.tied == ("wte",)
    assert replace(t.places, parts={}).tied == ()


@pytest.mark.parametrize("model", [SCANNED, WRITTEN_OUT])
@pytest.mark.parametrize("weights", ["hoisted", "each"])
@pytest.mark.parametrize("again", [False, True])
def test_the_features_of_any_split_are_its_seconds_and_no_more_than_its_bytes(model, weights, again):
    t = tables_of(model, 4, weights, again)
    space, rng = t.features.space, np.random.default_rng(0)
    for _ in range(5):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(space.graph.nodes, space.configs, choice, strict=True)}
        parts = part_costs(t.graph, t.places, t.mesh, configs, t.model, "adam", weights)
        for part in ("first", "block", "last"):
            share = 1 / t.places.blocks if part == "block" else 1.0
            shares = [share * (part in t.places.parts[n.name]) for n in space.graph.nodes]
            for f in Feature:
                tables = t.features.weighted(np.eye(len(Feature))[f], shares)
                found, told = cost_of(tables, choice), parts[part]
                if f <= Feature.AFTER:
                    name = f.name.lower()
                    seconds = getattr(told, name)
                    if name.startswith("input"):
                        seconds += getattr(told, name.replace("input", "recompute"))
                    assert found == pytest.approx(seconds, rel=1e-9, abs=1e-15)
                elif f <= Feature.KEPT:
                    assert found <= getattr(told, f.name.lower()) * (1 + 1e-9) + 1e-6
                else:
                    assert found <= (told.inner or told.kept) * (1 + 1e-9) + 1e-6


def test_the_choice_of_ways_and_blocks_is_the_one_with_the_least_busiest_rank():
    """Compared with every way and number of blocks of every stage, within each rank's bytes at every moment.

    With equal stages, each rank has the ways with the least work.
    """
    ways = [tables_of(SCANNED, 4, weights, again) for weights, again in (("hoisted", False), ("each", True))]
    for part, (name, chunks) in itertools.product((0.6, 0.8, 1.0), (("1f1b", 1), ("interleaved", 2))):
        most = part * ways[0].cheapest(FIRST, 4).nbytes(4, 2)
        menu, s = StageMenu(ways, 2, 4, most), schedule(name, 2, 4, chunks)
        roles = [StageRole(first=k == 0, last=k == s.stages - 1) for k in range(s.stages)]
        some = [[t.cheapest(r, 4, p / most, 2) for t in ways for p in (0.0, 0.3)] for r in roles]

        exact = dict[tuple[int, ...], float]()

        def least(rank, s=s, some=some, most=most, exact=exact):  # type: ignore[no-untyped-def]
            mine = [k for k, at in enumerate(s.rank_of) if at == rank]
            out: dict[int, float] = {}
            for counts in itertools.product(range(1, 8), repeat=len(mine)):
                for picked in itertools.product(*(some[k] for k in mine)):
                    kept, waiting = np.zeros(s.stages), np.zeros(s.stages)
                    held = max(w.buffers for w in picked)
                    for k, n, w in zip(mine, counts, picked, strict=True):
                        kept[k] = w.fixed("kept") + n * w.of_block("kept")
                        waiting[k] = w.fixed("kept") + n * (w.block.inner or w.block.kept)
                        held += w.fixed("static") + n * w.of_block("static")
                    seconds = sum(w.step_s(n, 4) for n, w in zip(counts, picked, strict=True))
                    if held + peak_bytes(s, kept, waiting)[rank] <= most:
                        out[sum(counts)] = min(out.get(sum(counts), np.inf), seconds)
                        exact[rank, *counts] = min(exact.get((rank, *counts), np.inf), seconds)
            return out

        one, other = least(0), least(1)
        for blocks, counts in (
            (8, [8 // s.stages] * s.stages),
            (7, [4, 3] if s.stages == 2 else [2, 2, 2, 1]),
        ):
            of = [(r, *(n for n, at in zip(counts, s.rank_of, strict=True) if at == r)) for r in (0, 1)]
            even = even_stages(s, some, blocks, menu.limits)
            assert (even is None) == any(x not in exact for x in of)
            if even is not None:
                assert even.counts.tolist() == counts
                busy = [w.step_s(n, 4) for w, n in zip(even.splits, counts, strict=True)]
                assert np.bincount(s.rank_of, busy) == pytest.approx([exact[x] for x in of])
        best = min((max(t, other[8 - n]) for n, t in one.items() if 8 - n in other), default=np.inf)
        found = choose_stages(s, some, menu.shares, 8, menu.limits)
        if found is None:
            assert np.isinf(best)
            continue
        assert found.counts.sum() == 8
        rank, seconds = (
            np.array(s.rank_of),
            [w.step_s(n, 4) for w, n in zip(found.splits, found.counts, strict=True)],
        )
        assert np.bincount(rank, seconds).max() == pytest.approx(best)
        rows, room = menu.problem(s, found.splits).memory_rows
        assert (rows @ found.counts <= room * (1 + 1e-9)).all()


@pytest.mark.parametrize(("limited", "slow"), [(False, 1.0), (True, 1.0), (False, 0.15), (True, 0.15)])
def test_no_splits_and_no_cuts_beat_the_bound(limited, slow):
    """Random splits of every stage and random cuts under a schedule, priced as for a plan, do not beat the bound.

    If only the schedule with the lowest bound gets more rounds, the least bound is as high as if all of them did.
    """
    tried = (("hoisted", False), ("each", False), ("each", True))
    ways = [tables_of(SCANNED, 4, weights, again, slow) for weights, again in tried]
    rng, closest = np.random.default_rng(0), 0.0
    most = 0.9 * ways[0].cheapest(FIRST, 4).nbytes(4, 2)
    menu = StageMenu(ways, 2, 4, most if limited else np.inf)
    bounds, fewer = (StageBounds(tables=ways, ranks=2, limit=menu.limits) for _ in range(2))
    every = [schedule(name, 2, 4, v) for name, v in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2))]
    together, alone = fewer.least_of(every, np.inf), list[float]()
    for s, low in zip(every, together, strict=True):
        roles = [StageRole(first=k == 0, last=k == s.stages - 1) for k in range(s.stages)]
        prices = [p * ways[0].least_s(MIDDLE, 4) / most for p in (0.0, 0.1, 3.0)]
        splits = [
            [t.cheapest(r, 8 / s.stages, p, 2, step) for t in ways for p in prices for step in t.steps]
            for r in roles
        ]
        alone.append(bounds.least_s(s))
        least, seen = max(alone[-1], low), 0
        for _ in range(40):
            problem = menu.problem(s, tuple(w[rng.integers(len(w))] for w in splits))
            counts = 1 + rng.multinomial(8 - s.stages, np.ones(s.stages) / s.stages)
            rows, room = problem.memory_rows
            if not limited or (rows @ counts <= room).all():
                step = simulate(s, problem.times(counts)).step_s
                assert step >= least * (1 - 1e-6)
                seen, closest = seen + 1, max(closest, least / step)
        assert seen
    assert closest > 0.8 and min(together) >= min(alone) * (1 - 5e-3)
