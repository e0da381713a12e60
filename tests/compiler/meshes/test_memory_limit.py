"""A memory limit is met, costs time, and raises an error if nothing fits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources

import jax
import numpy as np
import pytest

import pase
from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.errors import Infeasible, PaseError
from pase.ir import Graph, Node
from pase.ir.types import WORKLESS
from pase.machine import Mesh, load, mesh_from
from pase.memory.account import in_flight, memory, profile
from pase.tables.itemize import collectives
from pase.tables.layouts import (
    PARTIAL,
    REPLICATED,
    forward_states,
    gradient_states,
    local_bytes,
    read_states,
    write_states,
)
from tests.command import run

MODEL = "zoo:gpt2?layers=2&batch=32&vocab=4096"


@pytest.fixture(scope="module")
def free():
    return pase.compile(MODEL, devices=4, mesh="2x2", memory_limit="none", baselines=False)


@pytest.mark.parametrize("more", ["", "&scan=0&remat=1"], ids=["loop", "regions"])
def test_the_profile_is_the_plans_own_account(more):
    """For any configs, the profile's peak is the memory that the plan reports, without buffers.

    This also holds if layers are separate regions, and a node keeps one part in its region and another throughout.
    """
    problem = SplitProblem.of(resolve(MODEL + more).graph, 4, None, "analytic", "adam")
    mesh = mesh_from("2x2", 4)
    _, space = problem.tables(mesh)
    p = profile(problem.graph, mesh, space.configs, float("inf"))
    assert (len(p.bytes) > len(problem.graph.nodes)) == bool(more)
    rng = np.random.default_rng(0)
    for _ in range(20):
        choice = np.array([rng.integers(len(c)) for c in space.configs])
        configs = {n.name: c[i] for n, c, i in zip(problem.graph.nodes, space.configs, choice, strict=True)}
        moved = collectives(problem.graph, mesh, configs, problem.model)
        account = memory(problem.graph, mesh, configs)
        assert p.usage(choice).max() == pytest.approx(account.total - account.buffers, abs=8)
        flight = [flying(problem.graph, n, configs, mesh) for n in problem.graph.nodes]
        assert list(in_flight(problem.graph, configs, mesh).values()) == pytest.approx(flight)
        assert account.buffers == round(max(*flight, *(c.nbytes for c in moved)))


def written_over(graph: Graph, n: Node) -> dict[str, str]:
    """Return result of a node -> the operand whose array it takes over."""
    of: dict[str, list[str]] = {}
    for op in n.ops:
        for made in (a.tensor for a in op.writes if op.kind in ("elementwise", "view", "copy")):
            nbytes = graph.tensors[made].nbytes
            same = [a.tensor for a in op.reads if graph.tensors[a.tensor].nbytes == nbytes]
            of[made] = [x for t in same for x in (t, *of.get(t, ()))]
    places: dict[str, str] = {}
    for t, operands in of.items():
        mine = [
            x
            for x in operands
            if graph.producer.get(x, n) is not n
            and graph.producer[x].kind != "parameter"
            and not graph.read_outside(n, x)
            and x not in places.values()
        ]
        if mine and (t not in n.internal or graph.read_outside(n, t)):
            places[t] = mine[0]
    return places


def flying(graph: Graph, n: Node, configs: Mapping[str, np.ndarray], mesh: Mesh) -> float:
    """Compute ``in_flight`` for one node: the tensors that it reads and makes, each once.

    A parameter counts if it is read in another layout than it is stored in. Its gradient counts if its layout differs
    from the stored one. What elementwise ops make from an operand that only this node reads takes over its array.
    """
    seen, out = set(), 0.0
    over = written_over(graph, n)
    for op in () if n.kind == "parameter" or n.kind in WORKLESS else n.ops:
        for a in (*op.writes, *op.reads):
            source = graph.producer.get(a.tensor)
            inner = a.tensor in n.internal and not graph.read_outside(n, a.tensor)
            if (
                source is None
                or inner
                or a.tensor in seen
                or (a.sparse and source is not n)
                or a.tensor in over
            ):
                continue
            seen.add(a.tensor)
            t, cfg = graph.tensors[a.tensor], configs[n.name][None]
            local = float(local_bytes(n, t, a, cfg, mesh)[0])
            if source.kind != "parameter":
                out += local
                continue
            written = write_states(source, *source.write_of(t.name), t, configs[source.name][None], mesh)
            read = read_states(n, op, a, t, cfg, mesh)
            moved = (forward_states(written) != np.where(read == PARTIAL, REPLICATED, read)).any()
            cast = source.ops[0].writes[0].tensor != t.name
            out += local * (op.region is not None and bool(moved or cast))
            out += local * (t.needs_grad and bool((gradient_states(written) != read).any()))
    return out


def test_tighter_limits_are_kept_and_cost_time():
    free = pase.compile("zoo:mlp", devices=4, mesh="2x2", baselines=False)
    limit = free.memory.total * 0.985  # every strategy needs at least 0.975 of it
    plan = pase.compile("zoo:mlp", devices=4, mesh="2x2", memory_limit=limit, baselines=False)
    assert plan.memory.total <= limit < free.memory.total
    assert plan.cost > free.cost
    assert plan.bound <= plan.cost
    with pytest.raises(Infeasible):
        pase.compile("zoo:mlp", devices=4, mesh="2x2", memory_limit=free.memory.total / 2, baselines=False)


def test_a_limit_that_does_not_bind_changes_nothing(free):
    plan = pase.compile(MODEL, devices=4, mesh="2x2", memory_limit=free.memory.total, baselines=False)
    assert plan.cost == free.cost
    assert plan.optimal


def test_what_cannot_fit_says_what_would():
    with pytest.raises(Infeasible, match=r"0\.0009766 GiB .* on 4 devices: .* [\d.]+ GiB") as e:
        pase.compile(MODEL, devices=4, memory_limit=2**20)
    assert "devices" in e.value.fix


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


def test_bytes_are_read_as_people_write_them():
    def limit(text, machine="h100x8"):
        return CompileOptions(devices=1, memory_limit=text).limit_bytes(load(machine))

    assert limit("80GiB") == 80 * 2**30
    assert limit("1.5 gb") == 1.5e9
    assert limit(2**30) == limit("1GiB")
    assert limit("machine", "v100x8") < limit("machine", "h200x8")
    assert limit("none") is limit(None) is None
    assert limit("machine") == load("h100x8").device.usable_bytes < load("h100x8").device.memory_bytes
    for text in ("much", "-3GiB", "nan", "inf", "0", "3 PB", ""):
        with pytest.raises(PaseError) as e:
            limit(text)
        assert e.value.where == "memory limit" and f"'{text}'" in e.value.what
