"""Loss curves side by side: plain data parallelism, and the same training by bucket plans with and without delays.

    python -m bench.schedule.training [--steps 400] [--only deft] [--picture FILE.png] [-o FILE]

GPT-2 in its reduced size on 8 host devices, next-byte prediction on this repository's documentation, a network slow
enough that gradients take twice as long as compute. Writes bench/results/schedule_training.json. Losses are of a
held-out page's batches; nothing here is a time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax

from bench.arguments import parser, wanted
from bench.provenance import ROOT, save
from pase import zoo
from pase.backends.jax.bucket_runner import BucketRunner, gradient_problem
from pase.schedule import Link, Options, SendTime, evaluate, get_policy

BATCH, SEQ, RATE = 64, 16, 1e-3
HELD_OUT = "cost-model.md"
COLOURS = {
    "plain step": "#000000",
    "ours": "#59a14f",
    "ours, 2 late": "#f28e2b",
    "deft": "#e15759",
    "deft, rate scaled": "#b07aa1",
}


def text(held_out: bool) -> np.ndarray:
    """The bytes of the docs as training data, or of the one page that is held out."""
    files = sorted((ROOT / "docs").rglob("*.md"))
    joined = "\n".join(f.read_text() for f in files if (f.name == HELD_OUT) == held_out)
    return np.frombuffer(joined.encode(), np.uint8).astype(np.int32)


def batch_of(data: np.ndarray, g: np.random.Generator) -> dict[str, Any]:
    """A batch of byte sequences and what follows each byte."""
    at = g.integers(0, len(data) - SEQ - 1, BATCH)
    rows = np.stack([data[a : a + SEQ + 1] for a in at])
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def slow_links(params: Any, compute_s: float) -> tuple[Link, Link]:
    """As DeFT's NCCL and gloo: gradients take twice the compute on the first alone, 1.65 times that on the second."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    beta = 2 * compute_s / nbytes
    return (
        Link(name="nccl", curve=SendTime.alpha_beta(alpha_s=compute_s * 1e-3, beta_s_per_byte=beta)),
        Link(name="gloo", curve=SendTime.alpha_beta(alpha_s=compute_s * 1e-3, beta_s_per_byte=1.65 * beta)),
    )


def main() -> None:
    """Writes bench/results/schedule_training.json: loss curves with and without bucket plans."""
    options = parser(__doc__, "schedule_training")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--picture", type=Path)
    given = options.parse_args()
    model = zoo.reduced("gpt2")
    start = model.init(0)[0]
    train, test = text(False), text(True)
    held = [batch_of(test, np.random.default_rng(10**6 + i)) for i in range(8)]
    score = jax.jit(model.loss_fn)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("data",))
    problem = gradient_problem(
        start, slow_links(start, 0.012), forward_s=0.004, backward_s=0.008, name="GPT-2, reduced"
    )
    optimizer = optax.adam(RATE)
    every = max(1, given.steps // 20)
    curves: dict[str, Any] = {}

    def held_out(params: Any) -> float:
        return float(np.mean([float(score(params, b)) for b in held]))

    @jax.jit
    def plain(params: Any, state: Any, batch: Any) -> Any:
        _, grads = jax.value_and_grad(model.loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def record(name: str, steps: list[int], losses: list[float], **figures: Any) -> None:
        curves[name] = {"step": steps, "loss": losses} | figures
        print(f"{name:14s} {losses[0]:.3f} -> {losses[-1]:.4f}", figures, flush=True)

    params, state, losses, steps = start, optimizer.init(start), [held_out(start)], [0]
    for i in range(given.steps):
        params, state = plain(params, state, batch_of(train, np.random.default_rng(i)))
        if (i + 1) % every == 0:
            steps.append(i + 1)
            losses.append(held_out(params))
    record("plain step", steps, losses)
    expected = params
    runs = (
        ("ours", "ours", 0, False),
        ("ours, 2 late", "ours", 2, False),
        ("deft", "deft", 4, False),
        ("deft, rate scaled", "deft", 4, True),
    )
    for name, policy, staleness, scaled in wanted([(run[0], run) for run in runs], given.only):
        plan = get_policy(policy).make(problem, Options(staleness=staleness, mode="fast"))
        e = evaluate(problem, plan)
        # The Preserver's verdict takes k times the learning rate for k merged batches.
        mine = optax.adam(RATE / plan.updates_per_iteration) if scaled else optimizer
        runner = BucketRunner(
            loss_fn=model.loss_fn,
            problem=problem,
            plan=plan,
            optimizer=mine,
            mesh=mesh,
            data_axes=("data",),
        )
        run, losses, steps = runner.init(start), [held_out(start)], [0]
        for i in range(given.steps):
            run, _ = runner.step(run, batch_of(train, np.random.default_rng(i)))
            if (i + 1) % every == 0:
                steps.append(i + 1)
                losses.append(held_out(runner.finish(run)[0]))
        figures: dict[str, Any] = {
            "iteration_ms": e.iteration_s * 1e3,
            "updates_per_iteration": e.updates_per_iteration,
            "staleness": e.staleness,
            "messages": e.messages,
            "preserver": str(plan.detail.get("preserver", "")),
        }
        if not staleness:
            got = runner.finish(run)[0]
            worst = [
                float(np.abs(a - b).max())
                for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True)
            ]
            figures["largest_parameter_difference_to_plain"] = max(worst)
        record(name, steps, losses, **figures)
    out = {
        "devices": "8 host devices",
        "compute_ms": problem.compute_s * 1e3,
        "final": {name: c["loss"][-1] for name, c in curves.items()},
        "curves": curves,
    }
    save(out, given.o)
    if given.picture:
        draw(out, given.picture)


def draw(out: dict[str, Any], path: Path) -> None:
    """Loss by step, and by predicted time: what is late per step may be early per second."""
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
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
