"""A trace that PyTorch's profiler records while two processes train over Gloo."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pase
from bench.cases.torch_ranks import on_processes
from pase import machine

pytestmark = [pytest.mark.torch, pytest.mark.minutes]

LAYERS, WIDTH, RANKS, STEPS = 6, 512, 2, 4


def recorded(rank: int) -> list[dict[str, list[tuple[float, float]]]]:
    """Each step's products of backward, messages, and calls that begin one, on a rank: (begin, end) of each, in
    microseconds."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    x, y = torch.randn(2, 512, WIDTH)
    on = replace(machine.load("h100x8"), bucket_bytes=float(WIDTH * WIDTH * 4))  # a message for each layer

    def loss(module: Any, x: Any, y: Any) -> Any:
        return (module(x) - y).square().mean()

    plan = pase.compile(module, x, y, devices=RANKS, machine=on, loss=loss, target="ddp", baselines=False)
    step = plan.torch.train_step(module, torch.optim.SGD, lr=0.1)
    for _ in range(2):
        step(x, y)
    found = []
    for _ in range(STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(x, y)
        spans: dict[str, list[tuple[float, float]]] = {"products": [], "messages": [], "calls": []}
        for e in profiler.events():
            span = (e.time_range.start, e.time_range.end)
            if e.name == "autograd::engine::evaluate_function: AddmmBackward0":
                spans["products"].append(span)
            elif e.name.startswith("gloo:"):
                spans["messages"].append(span)
            elif e.name == "c10d::allreduce_":
                spans["calls"].append(span)
        found.append(spans)
    return found


def test_messages_run_beside_backward() -> None:
    """A layer's message is begun when its gradient is made, and products are computed while messages are under way.

    Gloo's thread sends when it gets a core. On few cores, a message may begin late or end before the next product
    begins, so not each step of each rank shows the latter.
    """
    beside = []
    for spans in [s for steps in on_processes(RANKS, recorded, how="forkserver") for s in steps]:
        products = sorted(spans["products"])
        assert len(products) == LAYERS
        early = [at for at, _ in spans["calls"] if products[0][0] < at < products[-1][0]]
        # not those of the layer that backward reaches last and of its neighbour's bias
        assert len(early) >= LAYERS - 2
        beside.append(any(begin < p < end for begin, end in spans["messages"] for p, _ in products))
    assert any(beside)
