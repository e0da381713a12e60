"""Loss curves of plain data parallelism and of bucket plans with delays.

    python -m bench schedule.training [--steps 400] [--only deft] [--picture FILE.png] [-o FILE]

GPT-2 in its reduced size on 8 host devices predicts the next byte of this repository's documentation, on a network so
slow that gradients take twice as long as compute. Losses are those of batches of a held-out page; nothing here is a
measured time. Writes bench/results/schedule_training.json.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

from bench.cases.plans import case_of
from bench.runner import ROOT, Benchmark, option
from pase import zoo
from pase.backends.jax.bucket_runner import step_from_plan
from pase.plan.buckets import problem_of
from pase.schedule import Link, Options, SendTime, evaluate, get_policy

BATCH, SEQ, RATE = 64, 16, 1e-3
COMPUTE_S = 0.012
HELD_OUT = "cost-model.md"
COLOURS = {
    "plain step": "#000000",
    "ours": "#59a14f",
    "ours, 2 late": "#f28e2b",
    "deft": "#e15759",
    "deft, rate scaled": "#b07aa1",
}


def text(held_out: bool) -> np.ndarray:
    """Returns the bytes of the docs as training data, or those of the held-out page."""
    files = sorted((ROOT / "docs").rglob("*.md"))
    joined = "\n".join(f.read_text() for f in files if (f.name == HELD_OUT) == held_out)
    return np.frombuffer(joined.encode(), np.uint8).astype(np.int32)


def batch_of(data: np.ndarray, g: np.random.Generator) -> dict[str, Any]:
    """Returns a batch of byte sequences, and the byte after each byte as the label."""
    at = g.integers(0, len(data) - SEQ - 1, BATCH)
    rows = np.stack([data[a : a + SEQ + 1] for a in at])
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def slow_links(params: Any, compute_s: float) -> tuple[Link, Link]:
    """Returns links like DeFT's NCCL and gloo: gradients take twice the compute time on the first, 1.65 times that on
    the second."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    beta = 2 * compute_s / nbytes
    return (
        Link(name="nccl", curve=SendTime.alpha_beta(alpha_s=compute_s * 1e-3, beta_s_per_byte=beta)),
        Link(name="gloo", curve=SendTime.alpha_beta(alpha_s=compute_s * 1e-3, beta_s_per_byte=1.65 * beta)),
    )


@dataclass(kw_only=True)
class LossCurves:
    """What all runs share: the model and its first parameters, batches, and the problem of sending its gradients."""

    steps: int
    model: Any = field(default_factory=lambda: zoo.reduced("gpt2"))
    optimizer: Any = field(default_factory=lambda: optax.adam(RATE))

    def __post_init__(self) -> None:
        self.start = self.model.init(0)[0]
        self.train, test = text(False), text(True)
        self.held = [batch_of(test, np.random.default_rng(10**6 + i)) for i in range(8)]
        self.score = jax.jit(self.model.loss_fn)
        plan = case_of(self.model.loss_fn, self.start, self.held[0]).plan("data_parallel")
        assert plan is not None
        self.plan = plan
        problem = problem_of(plan, links=slow_links(self.start, COMPUTE_S))
        scale = COMPUTE_S / problem.compute_s
        blocks = tuple(replace(b, seconds=b.seconds * scale) for b in problem.blocks)
        self.problem = replace(problem, blocks=blocks)

    def curve(self, step: Callable[[Any], None], parameters: Callable[[], Any]) -> dict[str, Any]:
        """Returns the held-out losses over the steps. step: trains on a batch. parameters: those after it."""
        every = max(1, self.steps // 20)
        out: dict[str, Any] = {"step": [], "loss": []}
        for i in range(self.steps + 1):
            if i % every == 0:
                params = parameters()
                out["step"].append(i)
                out["loss"].append(float(np.mean([float(self.score(params, b)) for b in self.held])))
            if i < self.steps:
                step(batch_of(self.train, np.random.default_rng(i)))
        return out

    def plain(self) -> tuple[dict[str, Any], Any]:
        """Returns the curve of plain data parallelism, and its last parameters."""
        state = self.start, self.optimizer.init(self.start)

        @jax.jit
        def one(params: Any, state: Any, batch: Any) -> Any:
            _, grads = jax.value_and_grad(self.model.loss_fn)(params, batch)
            updates, state = self.optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def step(batch: Any) -> None:
            nonlocal state
            state = one(*state, batch)

        return self.curve(step, lambda: state[0]), state[0]

    def by_plan(self, policy: str, staleness: int, scaled: bool, expected: Any) -> dict[str, Any]:
        """Returns the curve of a policy's bucket plan, its predicted times, and without delays its difference from
        the expected parameters. scaled: the learning rate is divided by the number of merged batches, which the
        Preserver's verdict assumes."""
        plan = get_policy(policy).make(self.problem, Options(staleness=staleness, mode="fast"))
        e = evaluate(self.problem, plan)
        optimizer = optax.adam(RATE / plan.updates_per_iteration) if scaled else self.optimizer
        runner = step_from_plan(self.plan, self.model.loss_fn, optimizer, buckets=(self.problem, plan))
        run = runner.init(self.start)

        def step(batch: Any) -> None:
            nonlocal run
            run, _ = runner.step(run, batch)

        out = self.curve(step, lambda: runner.finish(run)[0]) | {
            "iteration_ms": e.iteration_s * 1e3,
            "updates_per_iteration": e.updates_per_iteration,
            "staleness": e.staleness,
            "messages": e.messages,
            "preserver": str(plan.detail.get("preserver", "")),
        }
        if not staleness:
            pairs = zip(*map(jax.tree.leaves, (runner.finish(run)[0], expected)), strict=True)
            out["largest_parameter_difference_to_plain"] = max(float(np.abs(a - b).max()) for a, b in pairs)
        return out


def curves(runs: dict[str, tuple[Any, ...]], given: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the curve of each run. The plain step always runs: the others are compared with it."""
    training = LossCurves(steps=given.steps)
    curve, expected = training.plain()
    yield "plain step", curve
    for name, run in runs.items():
        if run:
            yield name, training.by_plan(*run, expected=expected)


def head(curves: dict[str, Any]) -> dict[str, Any]:
    """Returns what the runs share, and their last losses."""
    return {
        "devices": "8 host devices",
        "compute_ms": COMPUTE_S * 1e3,
        "final": {name: c["loss"][-1] for name, c in curves.items()},
    }


def draw(out: dict[str, Any], given: Namespace) -> None:
    """Draws the loss by step and by predicted time: a run that is behind per step may be ahead per second."""
    if not given.picture:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, c in out["curves"].items():
        style = {"color": COLOURS[name], "linewidth": 3.5 if name == "plain step" else 1.5}
        style["alpha"] = 0.35 if name == "plain step" else 1.0
        left.plot(c["step"], c["loss"], label=name, **style)
        ms = c.get("iteration_ms", out["curves"]["ours"]["iteration_ms"])
        label = name if "iteration_ms" in c else "plain step, sent as ours"
        right.plot(
            np.asarray(c["step"]) * ms * 1e-3, c["loss"], label=f"{label}: {ms:.1f} ms a step", **style
        )
    left.set_xlabel("step")
    right.set_xlabel("predicted seconds")
    left.set_ylabel("held-out loss, nats a byte")
    for ax in (left, right):
        ax.legend(fontsize=8, frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("GPT-2 (reduced) on this repository's docs, 8 host devices", fontsize=11)
    figure.savefig(given.picture, dpi=110)


BENCH = Benchmark(
    "schedule_training",
    {
        "plain step": (),
        "ours": ("ours", 0, False),
        "ours, 2 late": ("ours", 2, False),
        "deft": ("deft", 4, False),
        "deft, rate scaled": ("deft", 4, True),
    },
    stream=curves,
    at="curves",
    head=head,
    line=lambda name, c: f"{name:18} loss {c['loss'][0]:.3f} -> {c['loss'][-1]:.4f}",
    options=[option("--steps", type=int, default=400), option("--picture", type=Path)],
    page=draw,
)
