"""Audits plans of PyTorch models: their numbers and collectives.

    python -m bench audit.torch                      # twelve models, eight strategies; 10 minutes on one core
    python -m bench audit.torch --only Llama         # these again
    python -m bench audit.torch --page               # docs/evidence/torch-steps.md from the result file

Numbers: in float64, on 4 ranks that are threads of one process (a 2x2 mesh, or 4), the loss, every gradient, and the
parameters and buffers after an update by AdamW are compared with the unsharded step. ``gloo``: the same with four
processes. Bytes: one rank of 32 runs on fake tensors, and each collective is compared with the plan's list by kind,
axes and bytes. Each model runs in its own process. Writes bench/results/torch_truth.json and
docs/evidence/torch-steps.md.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections import Counter
from typing import Any

import numpy as np

from bench.cases.torch_models import MODELS, TorchExample, in_float64, state_of
from bench.cases.torch_ranks import alone_among, on_processes, on_ranks
from bench.runner import ROOT, Benchmark, OwnProcess

APART = OwnProcess(
    preloaded=(
        "torch.export",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.integrations.moe",
        "pase.compiler.compilation",
        "pase.frontends.torch.frontend",
        "bench.cases.torch_models",
    ),
    cpu_s=300,
    memory=24 << 30,
)
FEW, MANY, RANK = 4, 32, 5
STRATEGIES = {
    "data parallel": ("data_parallel", "data_parallel"),
    "ZeRO-2": ("zero2", "zero2"),
    "FSDP": ("fsdp", "fsdp"),
    "Megatron": ("megatron/megatron_2x2", "megatron/megatron_8x4"),
    "Megatron, sequence": ("megatron/megatron_sp_2x2", "megatron/megatron_sp_8x4"),
    "ours": ("ours@2x2", "ours@4x8"),
    "random 1": ("random1@2x2", "random1@4x8"),
    "random 2": ("random2@2x2", "random2@4x8"),
}
"""Strategy -> its names for few and for many devices, as in ``bench.cases.plans.Case``."""
OVER_GLOO = {
    "Llama": ("ours", "Megatron, sequence"),
    "GPT-2": ("FSDP", "random 1"),
    "Mixtral": ("ours", "Megatron"),
    "ResNet": ("data parallel", "ours"),
}
"""Strategies that four processes run as well."""
PAGE = ROOT / "docs" / "evidence" / "torch-steps.md"


def measured(name: str) -> dict[str, Any]:
    """Returns a model's rows: the errors of the numbers and the sent bytes, by strategy."""
    import torch

    torch.set_num_threads(1)
    few, many = (TorchExample.of(name, batch, devices) for batch, devices in ((2 * FEW, FEW), (MANY, MANY)))
    rows: dict[str, Any] = {s: {} for s in STRATEGIES}
    ran: list[tuple[str, str, Any]] = []
    for how, chosen in (
        ("gloo", OVER_GLOO.get(name, ())),
        ("threads", tuple(STRATEGIES)),
    ):  # gloo forks, so it comes first
        for s in chosen:
            ran.append((s, how, _tried(lambda s=s, how=how: _stepped(few, STRATEGIES[s][0], how))))
    for s, how, made in ran:
        rows[s][how] = made if isinstance(made, dict) else {"mesh": made[0], **_apart(made[1], few.alone)}
    for s, (_, label) in STRATEGIES.items():
        rows[s]["bytes"] = _tried(lambda label=label: _sent(many, label))
    trained = [p for p in few.module.parameters() if p.requires_grad]
    return {
        "model": MODELS[name].name,
        "parameters": sum(p.numel() for p in trained),
        "nodes": len(few.case.problem.graph.nodes),
        "gradients": sum(k.startswith("gradient") for k in few.alone),
        "strategies": rows,
    }


def _tried(run: Any) -> Any:
    """Returns its result, or the reason why it has none."""
    from pase.errors import PaseError

    try:
        return run()
    except PaseError as e:
        return {"refused": str(e)}
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:2000]}


def _plan(e: TorchExample, label: str) -> Any:
    """Returns the plan. Raises Infeasible with the baseline's reason if it has no strategy for this model."""
    from pase.baselines import Skipped, baselines
    from pase.errors import Infeasible

    plan = e.case.plan(label)
    if plan is None:
        p, (method, _, which) = e.case.problem, label.partition("/")
        made = baselines(p.graph, p.devices, p.machine, p.model, only=(method,))
        said = [b.reason for b in made if isinstance(b, Skipped) and b.name in (method, which)]
        raise Infeasible(f"{method} does not apply: {'; '.join(said) or 'it has no such variant'}")
    return plan


def _stepped(e: TorchExample, label: str, how: str) -> Any:
    """Returns the mesh, and each rank's state after a step."""
    plan = _plan(e, label)
    run = plan.torch
    assert run.program.ops and run.leaves  # computed once, not on each thread

    def on_rank(rank: int) -> dict[str, Any]:
        module = copy.deepcopy(e.module)
        step = run.parallelize(module)
        loss = step(e.batch)
        loss.backward()
        return state_of(module, loss)

    with in_float64():
        made = on_processes(FEW, on_rank) if how == "gloo" else on_ranks(FEW, on_rank)
    return list(run.mesh.sizes), made


def _apart(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, Any]:
    """Returns the largest difference of an element on any rank for the loss, the gradients, and the state after the
    update.

    It is relative to the largest element of the same tensor, or to a thousandth of that of all tensors if that is more.
    """
    out: dict[str, Any] = {}
    for kind in ("loss", "gradient", "after"):
        mine = {k: v for k, v in alone.items() if k.startswith(kind)}
        largest = max(float(np.abs(v).max()) for v in mine.values())
        worst, at = 0.0, ""
        for made in ranks:
            if (got := {k for k in made if k.startswith(kind)}) != set(mine):
                raise ValueError(f"other tensors than the unsharded step's: {sorted(got ^ set(mine))[:5]}")
            for k, v in mine.items():
                scale = max(float(np.abs(v).max()), 1e-3 * largest)
                apart = float(np.abs(made[k] - v).max()) / scale
                if not apart <= worst:  # NaN is worse than any number
                    worst, at = apart, k
        out[kind] = worst
        if worst > LIMIT:
            out["worst"] = at
    return out


LIMIT = 1e-9
"""Rounding in float64 stays below this; a missing or superfluous term does not."""


def _sent(e: TorchExample, label: str) -> dict[str, Any]:
    """Returns what one rank of many sends in a step, and the plan's list."""
    from pase.backends.audit.torch import planned_in_step, sent_by_one_rank

    plan = _plan(e, label)
    with alone_among(MANY, rank=RANK):
        sent = sent_by_one_rank(plan.torch)
    listed = planned_in_step(plan.torch)
    return {
        "mesh": list(plan.torch.mesh.sizes),
        "collectives": sum(listed.values()),
        "exact": sent == listed,
        "sent_bytes": _by_kind(sent),
        "planned_bytes": _by_kind(listed),
        "apart": [[*k, sent[k], listed[k]] for k in sorted(sent | listed) if sent[k] != listed[k]][:20],
    }


def _by_kind(counts: Any) -> dict[str, int]:
    out: Counter[str] = Counter()
    for (kind, _, nbytes), times in counts.items():
        out[kind] += nbytes * times
    return dict(sorted(out.items()))


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns counts over all models and strategies, for each way to run them."""
    out: dict[str, Any] = {}
    cells = [(m, s, r) for m, row in rows.items() for s, r in row.get("strategies", {}).items()]
    for how in ("threads", "gloo"):
        ran = [r[how] for _, _, r in cells if "loss" in r.get(how, {})]
        worst = [max(r[k] for k in ("loss", "gradient", "after")) for r in ran]
        out[how] = {
            "pairs": sum(how in r for _, _, r in cells),
            "ran": len(ran),
            "equal": sum(w <= LIMIT for w in worst),
            "largest_difference": max(worst, default=None),
            "refused": sum("refused" in r.get(how, {}) for _, _, r in cells),
            "errors": sum("error" in r.get(how, {}) for _, _, r in cells),
        }
    ran = [r["bytes"] for _, _, r in cells if "exact" in r.get("bytes", {})]
    out["bytes"] = {
        "pairs": len(cells),
        "ran": len(ran),
        "exact": sum(r["exact"] for r in ran),
        "same_bytes_by_kind": sum(r["sent_bytes"] == r["planned_bytes"] for r in ran),
        "refused": sum("refused" in r["bytes"] for _, _, r in cells),
        "errors": sum("error" in r["bytes"] for _, _, r in cells),
    }
    return out


def head(rows: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions, and the summary of all rows."""
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers")}
    return {"versions": versions, "summary": summary(rows)}


def write_page(found: dict[str, Any]) -> None:
    """Writes docs/evidence/torch-steps.md."""
    from bench.audit.torch_page import page

    PAGE.write_text(page(found, tuple(STRATEGIES), LIMIT))


BENCH = Benchmark(
    "torch_truth",
    list(MODELS),
    measured,
    apart=APART,
    head=head,
    line=lambda name, row: f"{name} {row.get('error') or summary({name: row})}",
    page=write_page,
)
