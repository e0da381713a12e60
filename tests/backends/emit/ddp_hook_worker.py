"""One rank of the tests of ``ddp_hook``: trains by a bucket plan and writes its results. Not a test module.

PyTorch is imported inside functions, because it is optional.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pase.backends.emit.ddp_hook import BucketHook, attach, ddp_options, gradient_problem
from pase.schedule import BucketPlan, Link, Options, ScheduleProblem, SendTime, Update, get_policy, whole

if TYPE_CHECKING:
    import torch

STEPS = 7


def model() -> torch.nn.Module:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 40),
        torch.nn.Tanh(),
        torch.nn.Linear(40, 3),
    )


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    g = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 12, generator=g)
    return x, torch.sin(x[:, :3]) + x[:, 3:6]


def loss_of(m: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((m(x) - y) ** 2).mean()


def optimizer_of(m: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)


def problem_of(m: torch.nn.Module) -> ScheduleProblem:
    links = (
        Link(name="a", curve=SendTime.alpha_beta(alpha_s=2e-6, beta_s_per_byte=1e-8)),
        Link(name="b", curve=SendTime.alpha_beta(alpha_s=2e-6, beta_s_per_byte=2e-8)),
    )
    return gradient_problem(m, links, forward_s=5e-6, backward_s=9e-6)


def delayed(problem: ScheduleProblem, period: int, updates: tuple[Update, ...]) -> BucketPlan:
    """Messages of whole tensors, some of which are sent an iteration later."""
    messages = []
    for u, update in enumerate(updates):
        for k, t in enumerate(reversed(range(len(problem.tensors)))):
            m = replace(whole(problem, [t], link=k % 2), update=u)
            messages.append(
                replace(m, iteration=1, phase="forward") if k % 3 == 1 and update.at > update.last else m
            )
    return BucketPlan(
        policy="x", messages=tuple(messages), dispatch="priority", period=period, updates=updates
    )


PLANS: dict[str, Any] = {
    "late by one": (1, (Update(first=0, last=0, at=1),)),
    "two merged": (2, (Update(first=0, last=1, at=1),)),
    "one, two, one": (
        4,
        (Update(first=0, last=0, at=1), Update(first=1, last=2, at=3), Update(first=3, last=3, at=4)),
    ),
}


def plan_of(problem: ScheduleProblem, name: str) -> BucketPlan:
    if name in PLANS:
        return delayed(problem, *PLANS[name])
    return get_policy(name).make(problem, Options(mode="fast", partition_elements=300))


def state(m: torch.nn.Module) -> list[float]:
    return [float(x) for p in m.parameters() for x in p.detach().double().reshape(-1)]


def train(
    rank: int, name: str | None, usual: bool = False, cap: float = 0.001
) -> tuple[list[float], BucketHook | None]:
    """The parameters after STEPS steps. name: the plan; None uses DDP without a hook. usual: whether to call the
    optimizer's own step."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    m = model()
    problem = problem_of(m)
    hook = None
    if name is None:
        ddp = DistributedDataParallel(m)
    else:
        plan = plan_of(problem, name)
        ddp = DistributedDataParallel(m, bucket_cap_mb=cap)  # type: ignore[arg-type]
        two = {x.name: dist.new_group() for x in problem.links}
        hook = attach(ddp, problem, plan, groups=two)
    optimizer = optimizer_of(m)
    for step in range(STEPS):
        loss_of(ddp, *batch(rank, step)).backward()
        if hook is None or usual:
            optimizer.step()
            optimizer.zero_grad()
        else:
            hook.step(optimizer)
    return state(m), hook


def by_hand(world: int, name: str) -> list[float]:
    """The same update sequence in one process."""
    import torch

    m = model()
    plan = plan_of(problem_of(m), name)
    optimizer = optimizer_of(m)
    grads: list[list[torch.Tensor]] = []
    for it in range(STEPS):
        total = [torch.zeros_like(p) for p in m.parameters()]
        for rank in range(world):
            made = torch.autograd.grad(loss_of(m, *batch(rank, it)), list(m.parameters()))
            total = [a + g / world for a, g in zip(total, made, strict=True)]
        grads.append(total)
        for p in range(it + 1):
            for u in plan.updates:
                if u.at + p * plan.period == it:
                    mine = grads[u.first + p * plan.period : u.last + p * plan.period + 1]
                    for w, *gs in zip(m.parameters(), *mine, strict=True):
                        w.grad = sum(gs) / len(gs)  # type: ignore[assignment]
                    optimizer.step()
    return state(m)


def main(rank: int, world: int, store: str, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    result: dict[str, Any] = {"ddp": train(rank, None)[0]}
    for name in ("ddp", "bytescheduler", "ours"):
        weights, hook = train(rank, name)
        assert hook is not None
        result[f"plan {name}"] = weights
        result[f"log {name}"] = hook.log
        result[f"messages {name}"] = len(hook.plan.messages)
    result["usual"] = train(rank, "bytescheduler", usual=True)[0]
    result["large buckets"] = train(rank, "bytescheduler", cap=25)[0]
    for name in PLANS:
        weights, hook = train(rank, name)
        assert hook is not None
        result[name] = weights
        result[f"hand {name}"] = by_hand(world, name)
    m = model()
    problem = problem_of(m)
    options = ddp_options(problem, plan_of(problem, "ddp"))
    DistributedDataParallel(m, **options)
    result["options"] = options
    with open(f"{out}.{rank}", "w") as f:
        json.dump(result, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
