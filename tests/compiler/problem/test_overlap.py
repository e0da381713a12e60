"""Collectives of parameters that overlap with compute, compared with enumeration at the items' own prices."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pase
from pase.compiler.meshes.plans import plan_of
from pase.compiler.problem.overlap import OverlapSearch
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.problem.variants import Variant
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.machine import load, mesh_from
from pase.machine.scale import scaled
from pase.plan.communication import communication_problem, transfer_origins
from pase.questions.explain import causes
from pase.search import cost_of, solve
from pase.tables.layouts import configs
from pase.tables.work import node_work

S = jax.ShapeDtypeStruct


def one_layer(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def two_layers(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def rerun(params, x):
    hidden = jax.checkpoint(lambda w, y: jnp.tanh(y @ w))(params["w"], x)
    return jnp.mean((hidden @ params["v"]) ** 2)


def weights(width, *names):
    return {n: S((width, width), "float32") for n in names}


def step(problem, plan, mesh, chosen):
    """Compute the step of a model without loops directly, from the plan's collectives and the work of each op."""
    graph, turns, once = problem.graph, problem.variant.accumulate, problem.variant.hoisted
    stored = {n.name for n in graph.nodes if n.kind == "parameter"}
    place = {n.name: i for i, n in enumerate(graph.nodes)}
    readers = [place[e.dst] for e in graph.edges if e.src in stored]
    again = [place[e.dst] for e in graph.edges if e.src in stored and e.access.recompute]
    first, last = min(readers), max(readers)
    waited, compute, moved = 0.0, {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    updated = 0.0
    for c in plan.collectives:
        gathered = c.phase == "forward"
        lone = graph.tensors[c.tensor].nbytes < problem.machine.lone_gather_bytes
        if c.source not in stored:
            waited += c.cost
        elif c.phase == "update":  # of a parameter whose state is split further, before its reader in forward
            early = place[next(e.dst for e in graph.edges if e.src == c.node)] == first or lone
            waited, updated = waited + c.cost * early, updated + c.cost * (not early)
        elif not gathered:
            late = problem.machine.sums_alone or place[c.node] == first
            waited, moved["backward"] = waited + c.cost * late, moved["backward"] + c.cost * (not late)
        else:
            runs = turns if once == "none" else 1
            each = c.cost / c.times * runs
            early = place[c.node] == first or lone
            waited, moved["forward"] = waited + each * early, moved["forward"] + each * (not early)
            if c.times == 2 * runs:
                early = place[c.node] == max(again) or lone
                waited, moved["backward"] = waited + each * early, moved["backward"] + each * (not early)
    for n in graph.nodes:
        for w in node_work(graph, n, chosen[n.name][None, :], mesh, problem.optimizer):
            each = float(np.ravel(problem.model.compute(w.kind, w.dtype, w.flops, w.nbytes, mnk=w.mnk))[0])
            if w.phase == "update" or place[n.name] >= last:
                waited += w.times * each
            elif w.phase == "backward":
                compute["backward"] += w.times * each
            else:
                compute["forward"] += turns * each
                compute["backward"] += (w.times - turns) * each
    slow = problem.machine.collective_units / problem.machine.device.compute_units
    for phase, single in (("forward", once != "none"), ("backward", once == "all")):
        if single:  # only one micro-batch has collectives to overlap with
            waited += (1 - 1 / turns) * compute[phase]
            compute[phase] /= turns
    first = 1 / turns if once == "none" else 1.0  # updated parameters are gathered before their first read
    there = first * compute["forward"], first * moved["forward"] + updated
    later = (1 - first) * compute["forward"], (1 - first) * moved["forward"]
    return waited + sum(
        max(c + slow * m, m) for c, m in (there, later, (compute["backward"], moved["backward"]))
    )


CASES = [
    (one_layer, ("w",), 64, 4096),
    (one_layer, ("w",), 4096, 256),
    (two_layers, ("w", "v"), 1024, 1024),
    (two_layers, ("w", "v"), 4096, 1024),
    (rerun, ("w", "v"), 2048, 1024),
]


@pytest.mark.parametrize(("loss", "names", "rows", "width"), CASES)
def test_a_strategy_costs_what_its_items_do_by_position(loss, names, rows, width):
    """No directly priced strategy is cheaper than the answer, whether collectives or compute dominate the model."""
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    problem = SplitProblem.of(traced.graph, 2, None, "analytic", "adam", "parameters")
    priced = []
    every = list(itertools.product(*(configs(n, mesh) for n in problem.graph.nodes)))
    some = np.random.default_rng(0).permutation(len(every))[:150]
    for choice in (every[i] for i in some):
        chosen = {n.name: row for n, row in zip(problem.graph.nodes, choice, strict=True)}
        plan = plan_of(problem, chosen, mesh, "loss", traced)
        priced.append(step(problem, plan, mesh, chosen))
        assert plan.cost == pytest.approx(priced[-1], rel=1e-9)
        assert plan.cost + plan.hidden == pytest.approx(sum(n.cost.total for n in plan.nodes), rel=1e-9)
    options = {"devices": 2, "mesh": "2", "baselines": False, "memory_limit": None}
    plan = pase.compile(loss, *args, overlap="parameters", **options)
    assert "under cost model 'analytic', collectives of parameters hidden behind compute" in str(plan)
    additive = pase.compile(loss, *args, overlap="none", **options)
    assert "under cost model 'analytic', nothing hidden behind compute" in str(additive)
    assert plan.optimal
    assert plan.cost <= min(priced) * (1 + 1e-9)
    assert plan.cost <= additive.cost * (1 + 1e-9)


@pytest.mark.parametrize("once", ["none", "gathers", "all"])
@pytest.mark.parametrize(("loss", "names", "rows", "width"), [CASES[1], CASES[4]])
def test_what_is_sent_once_has_one_micro_batch_beside_it(loss, names, rows, width, once):
    """The price equals the direct computation from the plan's collectives and the work of each op."""
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    written = SplitProblem.of(traced.graph, 2, None, "analytic", "adam", "parameters")
    problem = written.varied(traced, Variant(accumulate=4, hoisted=once))
    every = list(itertools.product(*(configs(n, mesh) for n in problem.graph.nodes)))
    for i in np.random.default_rng(1).permutation(len(every))[:60]:
        chosen = {n.name: row for n, row in zip(problem.graph.nodes, every[i], strict=True)}
        plan = plan_of(problem, chosen, mesh, "loss", traced)
        assert plan.cost == pytest.approx(step(problem, plan, mesh, chosen), rel=1e-9)


@pytest.mark.parametrize(
    ("case", "waiting"),
    [(CASES[2], {"sums_alone": True}), (CASES[4], {"sums_alone": True, "lone_gather_bytes": 1 << 23})],
)
def test_what_the_compiler_runs_alone_is_waited_for(case, waiting):
    """These are sums of gradients, and gathers of parameters that are too small to be combined or hidden."""
    loss, names, rows, width = case
    args = (weights(width, *names), S((rows, width), "float32"))
    traced, mesh = trace(loss, *args), mesh_from("2", 2)
    both = [
        SplitProblem.of(traced.graph, 2, replace(load("h100x8"), **changed), "analytic", "adam", "parameters")
        for changed in (waiting, {})
    ]
    assert both[0].machine.digest != both[1].machine.digest == load("h100x8").digest
    every = list(itertools.product(*(configs(n, mesh) for n in both[0].graph.nodes)))
    longer = 0
    for i in np.random.default_rng(2).permutation(len(every))[:60]:
        chosen = {n.name: row for n, row in zip(both[0].graph.nodes, every[i], strict=True)}
        waits, hides = (plan_of(problem, chosen, mesh, "loss", traced) for problem in both)
        assert waits.cost == pytest.approx(step(both[0], waits, mesh, chosen), rel=1e-9)
        assert waits.cost >= hides.cost * (1 - 1e-9)
        longer += waits.cost > hides.cost * 1.001
    assert longer


def _random_machine(rng):
    """Return an H100 with random links, rates and fraction of the device that collectives occupy."""
    factors = {q: float(4 ** rng.uniform(-1, 1)) for q in ("bandwidth", "latency", "flops", "memory")}
    return replace(scaled(load("h100x8"), factors), collective_units=int(rng.integers(0, 60)))


@pytest.mark.parametrize("seed", range(8))
def test_bound_optimum_and_answer_are_in_order_on_random_machines(seed):
    """Of all choices of the tables of a small model, none is below the bound, and a proven answer is the least."""
    rng = np.random.default_rng(seed)
    width, rows = int(2 ** rng.integers(8, 12)), int(2 ** rng.integers(8, 13))
    loss, names = [(two_layers, ("w", "v")), (rerun, ("w", "v"))][seed % 2]
    traced = trace(loss, weights(width, *names), S((rows, width), "float32"))
    problem = SplitProblem.of(traced.graph, 4, _random_machine(rng), "analytic", "adam", "parameters")
    if seed in (3, 5, 6, 7):  # forward of the first micro-batch is then a separate pass
        problem = problem.varied(traced, Variant(accumulate=4))
    mesh = mesh_from("4", 4)
    search = problem.pricing.search(mesh)
    assert isinstance(search, OverlapSearch)
    every = itertools.product(*(range(len(c)) for c in search.tables.space.configs))
    least = min(search.cost(np.array(c)) for c in every)
    found = problem.pricing.solve(mesh)
    assert found.bound <= least * (1 + 1e-9)
    assert least <= found.cost * (1 + 1e-9)
    closed = problem.pricing.close(mesh, np.inf)
    assert closed.optimal
    assert closed.cost == pytest.approx(least, rel=1e-9)
    for weight in itertools.product((0.0, 0.3, 1.0), repeat=len(search.best)):
        mean = search.mean(weight)  # solved for all weights after one loading, and for these alone
        assert mean.cost == pytest.approx(cost_of(search.at(weight), mean.choice), rel=1e-12)
        assert mean.cost == pytest.approx(solve(search.at(weight)).cost, rel=1e-12)
        assert mean.optimal and mean.bound == pytest.approx(mean.cost, rel=1e-12)
        assert mean.cost <= least * (1 + 1e-9)


@pytest.mark.parametrize("model", ["mlp", "alexnet", "gpt2?layers=2", "transformer?batch=64"])
def test_never_worse_than_a_baseline_priced_alike(model):
    plan = pase.compile(f"zoo:{model}", devices=8, mesh="2x4", overlap="parameters")
    additive = pase.compile(f"zoo:{model}", devices=8, mesh="2x4", overlap="none")
    assert plan.bound <= plan.cost <= additive.cost * (1 + 1e-9)
    assert plan.cost - plan.bound <= 1e-3 * plan.cost
    assert all(plan.cost <= c * (1 + 1e-12) for c in plan.baselines.values())
    assert all(plan.baselines[k] <= c * (1 + 1e-12) for k, c in additive.baselines.items())


def test_as_much_is_hidden_of_layers_written_out_as_of_a_loop():
    parts = []
    for scan in (1, 0):
        model = f"zoo:gpt2?layers=4&batch=32&scan={scan}"
        plan, summed = (pase.compile(model, devices=8, mesh="8", overlap=o) for o in ("parameters", "none"))
        parts.append(plan.cost / summed.cost)
    assert parts[0] == pytest.approx(parts[1], rel=2e-3)


@pytest.mark.parametrize("model", ["gpt2?layers=6&batch=32", "llama3_8b?layers=4&batch=32"])
def test_the_timeline_shows_the_step_that_is_priced(model):
    plan = pase.compile(f"zoo:{model}", devices=8, mesh="8", baselines=False, overlap="parameters")
    (mark,) = plan.timeline.marks
    assert plan.hidden > 0.01 * plan.cost
    assert (mark.end_ns - mark.start_ns) / 1e9 == pytest.approx(plan.cost, rel=0.02)


TURN = ("backward", "forward")


@pytest.mark.parametrize("once", ["none", "gathers", "all"])
def test_the_timeline_runs_one_micro_batch_after_the_other(once):
    """Hoisted collectives run in the first or last micro-batch, and the step is close to its price."""
    options = {
        "devices": 8,
        "mesh": "8",
        "accumulate": 4,
        "remat": "none",
        "once": once,
        "memory_limit": "none",
    }
    plan = dict(pase.compare("zoo:gpt2?layers=4&batch=32", **options))["fsdp"]
    (mark,) = plan.timeline.marks
    assert (mark.end_ns - mark.start_ns) / 1e9 == pytest.approx(plan.cost, rel=0.04)
    problem, origins = plan.bucket_problem, transfer_origins(plan)
    phases = [phase for phase, _ in itertools.groupby(b.phase for b in problem.blocks)]
    assert phases == ["forward", "backward"] * 4
    sent = {way: [o for o in origins if o.node == "wte:dot" and o.gradient is way] for way in (True, False)}
    gathers, sums = (sorted({o.repeat for o in sent[way]}) for way in (False, True))
    assert gathers == ([0, 1, 2, 3] if once == "none" else [0])
    assert sums == ([3] if once == "all" else [0, 1, 2, 3])
    begins = [
        i for i, (a, b) in enumerate(itertools.pairwise(problem.blocks), 1) if (a.phase, b.phase) == TURN
    ]
    for t, o in zip(problem.tensors, origins, strict=True):
        m = o.repeat // (o.times // 4)
        if o.gradient and m < 3:
            assert (t.needed_before, t.lag) == (begins[m], 0)
        elif not o.gradient and not o.recompute and m:
            assert (t.ready_after, t.lag) == (begins[m - 1] - 1, 0)


def test_updated_parameters_are_gathered_in_the_first_micro_batch():
    """In ZeRO-2 this holds for the timeline and for the price: forward hides at most one micro-batch's compute."""
    slow = scaled(load("h100x8"), {"bandwidth": 0.02})
    options = {"devices": 8, "mesh": "8", "accumulate": 8, "remat": "none", "machine": slow}
    plan = dict(pase.compare("zoo:gpt2?layers=4&batch=64", memory_limit="none", **options))["zero2"]
    updated = sum(c.cost for c in plan.collectives if c.phase == "update")
    forward = sum((1 - w.late) * w.cost for n in plan.nodes for w in n.work if w.phase == "forward")
    backward = plan.compute - forward
    assert updated > forward / 8
    assert plan.hidden <= (forward / 8 + backward) * (1 + 1e-9)
    origins = [o for o in transfer_origins(plan) if o.updated]
    assert origins and all(o.repeat < max(o.times // 8, 1) for o in origins)
    sent = communication_problem(plan, where="the plan").tensors
    mine = [t.nbytes for t, o in zip(sent, transfer_origins(plan), strict=True) if o.updated]
    assert sum(mine) == pytest.approx(
        sum(c.nbytes for c in plan.collectives if c.phase == "update"), rel=1e-3
    )


def test_the_machine_says_whether_anything_runs_beside_compute():
    gpu, cpu = (
        pase.compile("zoo:mlp", devices=4, mesh="4", machine=m, overlap="machine")
        for m in ("h100x8", "cpu_host")
    )
    assert gpu.objective == "collectives of parameters hidden behind compute"
    assert gpu.overlap == 20 / 132
    assert cpu.objective == "nothing hidden behind compute"
    assert cpu.overlap is None
    served = pase.compile(
        "zoo:mlp", devices=4, mesh="4", mode="inference", overlap="machine", baselines=False
    )
    assert served.overlap is None


def test_what_cannot_be_asked_for():
    with pytest.raises(PaseError, match="'all'") as e:
        pase.compile("zoo:mlp", devices=2, overlap="all")
    assert e.value.where == "overlap"


def test_stages_hide_their_gathers_and_sums_too():
    """The price is comparable with that of a step without stages; the rest waits for other ranks.

    The test asks for 1F1B, because the circular schedule, which is faster here, hides nothing.
    """
    options = {"devices": 4, "mesh": "2", "accumulate": 4, "remat": "none"}
    options |= {"pipeline": 2, "stage_schedule": "1f1b"}
    name = "zoo:gpt2?layers=4&batch=32&remat=0"
    none, beside = (pase.compile(name, overlap=how, **options) for how in ("none", "machine"))
    p = beside.pipeline
    assert none.overlap is None and none.hidden < 1e-12 and beside.overlap == 20 / 132
    assert p is not None and beside.hidden == p.hidden_s > 0
    assert beside.bound <= beside.cost < none.cost
    assert "parameters hidden behind compute" in beside.objective and "not hidden" in none.objective
    for plan in (none, beside):
        assert sum(c.cost for c in causes(plan)) == pytest.approx(plan.cost, rel=1e-9)
        (mark,) = {(m.start_ns, m.end_ns) for m in plan.timeline.marks}
        assert (mark[1] - mark[0]) / 1e9 == pytest.approx(plan.cost, rel=1e-6)
    options |= {"stage_schedule": "auto", "baselines": False}
    scan = pase.compile(name, **options)
    assert scan.pipeline is not None and scan.pipeline.schedule == "circular" and scan.hidden == 0
    assert scan.cost < beside.cost
    either = pase.compile(name, **options | {"pipeline": "auto", "mesh": None})
    flat = pase.compile(name, devices=4, baselines=False, remat="none", accumulate=4)
    assert either.overlap == flat.overlap and either.cost <= flat.cost * (1 + 1e-9)


def test_a_memory_limit_holds_with_overlap_too():
    """The answer fits and hides gradients. A limit that does not bind does not change it."""
    options = {"devices": 8, "mesh": "2x4", "overlap": "parameters"}
    free = pase.compile("zoo:gpt2?layers=2&batch=32", **options)
    same = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=free.memory.total, **options)
    assert same.cost == pytest.approx(free.cost, rel=1e-9)
    limit = 0.6 * free.memory.total
    tight = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=limit, **options)
    additive = pase.compile("zoo:gpt2?layers=2&batch=32", memory_limit=limit, **options | {"overlap": "none"})
    assert tight.memory.total <= limit
    assert free.cost <= tight.cost <= additive.cost * (1 + 1e-9)
    assert 0.99 * tight.cost <= tight.bound <= tight.cost
