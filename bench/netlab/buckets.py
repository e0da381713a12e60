"""Measures bucket plans on a network: one training step under every policy, predicted by the evaluator and measured.

The model resembles VGG: layers with many FLOPs and few parameters, then layers with nearly all parameters. The links
are set so that its gradients take 0.5, 1 and 2 times as long as its compute (the coverage rate). Each policy plans for
the cost curve that is measured on that network, and the JAX runner executes the plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.netlab.jobs import results_of
from bench.netlab.net import Network, Topology
from bench.netlab.session import Session

if TYPE_CHECKING:
    from pase.api import Plan
    from pase.backends.jax.bucket_runner import PlanRunner
    from pase.schedule.types import ScheduleProblem

__all__ = ["POLICIES", "RATES", "chosen", "measure", "run_cells"]

RATES = (0.5, 1.0, 2.0)
POLICIES = ("fifo", "priority", "ddp", "mg_wfbp", "bytescheduler", "us_byte", "tac", "deft", "ours")
TRAINED, TRAINED_AT = ("ddp", "deft", "ours"), 2.0
"""Policies that train to a fixed loss, and the coverage rate: delays pay most there."""
IN_TORCH = ("fifo", "ddp", "mg_wfbp", "us_byte", "tac", "deft", "ours")
"""DDP waits for every message before the optimizer's step, so orders that only differ after it are not run again."""
HOSTS = 2
WIDTH, ROWS, DEPTH = 256, 2048, 6
TAIL = ((256, 1024), (1024, 1024), (1024, 256))
STALENESS = 3
ROUNDS = 3
LEARNING_RATE = 0.3
# DDP's 1 and 25 MiB are meant for models a hundred times as large; these are the same fractions of this one.
DDP_FIRST, DDP_CAP = 1 << 16, 1 << 19
SIZES = tuple(1 << k for k in (10, 13, 15, 17, 18, 19, 20, 21, 22, 23))


def parameters(seed: int) -> dict[str, Any]:
    """Returns parameters, named in the order of use: a00 … in layers that compute, b0 … in those with many bytes."""
    random = np.random.default_rng(seed)
    front = {f"a{i:02}": (WIDTH, WIDTH) for i in range(DEPTH)}
    tail = {f"b{i}": shape for i, shape in enumerate(TAIL)}
    return {
        k: (random.normal(size=s) / np.sqrt(s[0])).astype(np.float32)
        for k, s in sorted((front | tail).items())
    }


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """Returns the loss. x [batch, rows, width]: layers that compute see every row, those with many bytes one per
    sample."""
    import jax.numpy as jnp

    for i in range(DEPTH):
        x = x + 0.5 * jnp.tanh(x @ params[f"a{i:02}"])
    h = x.mean(axis=1)
    for i in range(len(TAIL)):
        h = jnp.tanh(h @ params[f"b{i}"]) if i + 1 < len(TAIL) else h @ params[f"b{i}"]
    return jnp.mean((h - y) ** 2)


def batches(mesh: Any, count: int, samples: int) -> list[tuple[Any, Any]]:
    """Returns global batches, with targets from other weights of the same kind."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(mesh, PartitionSpec("data"))
    random, teacher = np.random.default_rng(1), np.random.default_rng(2).normal(size=(WIDTH, TAIL[-1][1]))
    out = []
    for _ in range(count):
        means = random.normal(size=(samples, 1, WIDTH))
        x = (means + 0.3 * random.normal(size=(samples, ROWS // samples * HOSTS, WIDTH))).astype(np.float32)
        y = np.tanh(means[:, 0] @ teacher / np.sqrt(WIDTH)).astype(np.float32)
        here = [jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in (x, y)]
        out.append((here[0], here[1]))
    return out


def _measured_problem(
    plan: Plan, compute_s: float, nbytes: list[float], seconds: list[float]
) -> ScheduleProblem:
    """Returns the plan's problem in measured seconds: its blocks take as long as the measured compute, and its one link
    has the measured curve."""
    from pase.plan.buckets import problem_of
    from pase.schedule import SendTime
    from pase.schedule.types import Link

    link = Link(name="network", curve=SendTime.table(nbytes, seconds))
    problem = problem_of(plan, links=(link,))
    scale = compute_s / problem.compute_s
    return replace(problem, blocks=tuple(replace(b, seconds=b.seconds * scale) for b in problem.blocks))


def chosen(problem: Any, policies: Sequence[str]) -> list[tuple[Any, str]]:
    """Returns (outcome, name) of each policy's plan; ours with at most DeFT's staleness, and ours without delays."""
    from pase.schedule import Options
    from pase.schedule.compare import compare_policies

    common = {"ddp_first_bytes": DDP_FIRST, "ddp_cap_bytes": DDP_CAP, "mode": "fast"}
    found = [
        (o, o.policy)
        for o in compare_policies(problem, list(policies), Options(staleness=STALENESS, **common))
        if o.plan is not None
    ]
    plain = [p for p in policies if p != "deft"]
    found += [
        (o, "ours, no staleness")
        for o in compare_policies(problem, plain, Options(**common))
        if o.policy == "ours" and o.plan is not None
    ]
    return found


def run_cells(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Runs on every host: measures compute alone, the network's curve, then each policy's plan."""
    import jax
    import optax
    from jax.sharding import Mesh

    from bench.cases.plans import case_of
    from pase.backends.jax.bucket_runner import step_from_plan
    from pase.calibrate import Settings, Task
    from pase.calibrate.device import Devices
    from pase.calibrate.here import find
    from pase.calibrate.session import measure as timed

    bench = Devices(find())
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data = batches(mesh, 8, 16)
    params = parameters(0)
    plan = case_of(loss_fn, params, *data[0], devices=HOSTS).plan("data_parallel")
    assert plan is not None
    optimizer = optax.sgd(job["learning_rate"])

    def agreed(seconds: list[float]) -> float:
        return max(v[0] for v in bench.share([statistics.median(seconds)]))

    for cell in job["cells"]:
        key = cell["key"]
        say({"key": key, "begun": time.time()})
        if cell["what"] == "compute":
            say({"key": key, "compute_s": agreed(_compute(mesh, params, optimizer, data, cell["repeats"]))})
            continue
        curve = [
            timed(Task(op="all_reduce", nbytes=n, ways=(HOSTS,)), bench, Settings(program_s=0.005))
            for n in SIZES
        ]
        seconds = [float(s) for s in np.maximum.accumulate([s.seconds for s in curve])]
        problem = _measured_problem(plan, job["compute_s"], list(map(float, SIZES)), seconds)
        plans = chosen(problem, job["policies"])
        running = [
            _RunningPlan(
                step_from_plan(plan, loss_fn, optimizer, buckets=(problem, outcome.plan)),
                outcome.plan.period,
                params,
                data,
            )
            for outcome, _ in plans
        ]
        # In turn, so that drift during a run affects all policies.
        for _ in range(ROUNDS):
            for r in running:
                r.run(-(-cell["iterations"] // ROUNDS))
        rows = []
        for r, (outcome, name) in zip(running, plans, strict=True):
            e = outcome.evaluation
            low, middle, high = np.percentile(r.times, [25, 50, 75])
            rows.append(
                {
                    "policy": name,
                    "measured_s": agreed([float(middle)]),
                    "spread": float((high - low) / middle),
                    "predicted_s": e.iteration_s,
                    "staleness": e.staleness,
                    "updates_per_iteration": e.updates_per_iteration,
                    "messages": e.messages,
                    "period": outcome.plan.period,
                    "losses": r.losses,
                }
            )
        say({"key": key, "all_reduce_s": dict(zip(map(str, SIZES), seconds, strict=True)), "rows": rows})


def _compute(mesh: Any, params: Any, optimizer: Any, data: list[Any], repeats: int) -> list[float]:
    """Returns the seconds of the step without messages: each host has its own gradients and update."""
    import jax
    import optax
    from jax.sharding import PartitionSpec as P

    def local(params: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss_fn)(params, x, y)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return jax.tree.map(lambda p: p[None], optax.apply_updates(params, updates))

    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"), check_vma=False
        )
    )
    times = []
    for i in range(repeats + 2):
        began = time.perf_counter()
        jax.block_until_ready(step(params, *data[i % len(data)]))
        times.append(time.perf_counter() - began)
    return times[2:]


class _RunningPlan:
    """A running plan: the seconds of its iterations after all programs are compiled, and its losses from the start."""

    def __init__(self, runner: PlanRunner, period: int, params: Any, data: list[Any]) -> None:
        import jax

        self.runner, self.period, self.data = runner, period, data
        self.state = runner.init(jax.tree.map(jax.numpy.asarray, params))
        self.times: list[float] = []
        self.losses: list[float] = []
        # The first period starts delayed updates, the second receives them, and the third is steady.
        self.run(3 * period)
        self.times.clear()

    def run(self, iterations: int) -> None:
        """Runs whole periods of at least this many iterations: those of a delayed plan differ, and are averaged over a
        period."""
        import jax

        period = self.period
        for _ in range(-(-iterations // period)):
            began = time.perf_counter()
            for _ in range(period):
                self.state, loss = self.runner.step(self.state, *self.data[len(self.losses) % len(self.data)])
                jax.block_until_ready((self.state.params, self.state.held, loss))
                self.losses.append(float(loss))
            self.times.append((time.perf_counter() - began) / period)


def measure(
    session: Session,
    *,
    rates: tuple[float, ...],
    policies: tuple[str, ...],
    iterations: int,
    training: int = 0,
    kind: str = "buckets",
    on_rows: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Returns rows by coverage rate and policy. kind: "buckets" for the JAX runner, "torch" for PyTorch's DDP.

    training: iterations of a longer run of ``TRAINED`` at the coverage ``TRAINED_AT``, for its losses; 0: none.
    on_rows: called with all rows so far after each rate.
    """
    nbytes = sum(p.nbytes for p in parameters(0).values())
    common = {"kind": kind, "learning_rate": LEARNING_RATE}
    rows: list[dict[str, Any]] = []
    long: list[dict[str, Any]] = []
    with Network(Topology(racks=(HOSTS,), host_mbit=0.0)) as network:
        cells = [{"key": "compute", "what": "compute", "repeats": 15}]
        name = f"{kind}_compute"
        compute = results_of(network, session, name, cells, policies=policies, **common)["compute"][
            "compute_s"
        ]
        sizes = {"compute_s": compute, "gradient_bytes": nbytes, "hosts": HOSTS}
        runs = [(rate, policies, iterations, rows, f"{rate:g}") for rate in rates]
        if training:
            runs.append((TRAINED_AT, TRAINED, training, long, "losses"))
        for rate, those, count, into, name in runs:
            # Two hosts: each sends and receives the gradients once.
            mbit = round(nbytes * 8e-6 / (rate * compute))
            expected = 30 + (len(those) + 1) * (3.0 + (count + 8) * compute * max(1.2, 1.2 * rate))
            session.say(f"{kind}, {name}: {mbit} Mbit, about {expected / 60:.1f} minutes")
            if not session.has(expected / 2):
                session.say("left out: no time")
                continue
            network.limit(mbit)
            cells = [{"key": f"coverage {rate:g}", "what": "policies", "iterations": count}]
            found = results_of(
                network, session, f"{kind}_{name}", cells, compute_s=compute, policies=those, **common
            )
            for got in found.values():
                about = {"coverage": rate, "mbit": mbit}
                if "failed" in got:
                    into.append(about | got)
                for row in got.get("rows", ()):
                    into.append(about | row | {"exposed_s": row["measured_s"] - compute})
            on_rows(sizes | {"summary": _summary(rows), "rows": rows, "training": long})
    return sizes | {"summary": _summary(rows), "rows": rows, "training": long}


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    from scipy.stats import kendalltau

    out: dict[str, Any] = {}
    for rate in sorted({r["coverage"] for r in rows}):
        mine = [r for r in rows if r["coverage"] == rate and "measured_s" in r]
        if len(mine) < 2:
            continue
        plain = [r for r in mine if not r["staleness"]]
        ddp = next((r["measured_s"] for r in mine if r["policy"] == "ddp"), None)
        priced = [r for r in mine if r["predicted_s"]]
        errors = sorted(abs(r["predicted_s"] / r["measured_s"] - 1) for r in priced)
        t = kendalltau([r["predicted_s"] for r in priced], [r["measured_s"] for r in priced]).statistic
        out[f"{rate:g}"] = {
            "kendall_tau": float(t),
            "median_error": statistics.median(errors),
            "fastest_without_staleness": min(plain, key=lambda r: r["measured_s"])["policy"],
            "over_ddp": {r["policy"]: ddp / r["measured_s"] for r in mine} if ddp else None,
        }
    return out
