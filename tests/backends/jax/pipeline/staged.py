"""Shared by the tests of pipelines: plans under other schedules, cuts and strategies, and a small chain of layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import pase
from pase.pipeline.registry import schedule
from pase.plan.pipeline import StagePlan
from pase.tables.itemize import split_of
from pase.tables.layouts import configs
from tests.pipeline.small import MICRO, arguments, gpt


@cache
def planned(scan, remat="none"):
    with jax.enable_x64(True):
        params, batch = arguments(scan)
        return pase.compile(
            gpt,
            params,
            batch,
            devices=8,
            machine="h100x8",
            pipeline=2,
            baselines=False,
            mesh="2x2",
            accumulate=MICRO,
            memory_limit="none",
            remat=remat,
        )


def staged(plan, name, chunks, cuts, seed=None):
    """The plan under another schedule with other cuts. seed: draws a random strategy for each stage."""
    p, ranks = plan.pipeline, schedule(name, 2, MICRO, chunks).rank_of
    first, middle, last = p.stages[0].strategy, p.stages[1].strategy, p.stages[-1].strategy
    which = [first, *[middle] * (len(cuts) - 2), last]
    strategies, again = p.strategies, p.recompute
    if seed is not None:
        rng, graph = np.random.default_rng(seed), plan.graph
        strategies = tuple(
            {n.name: split_of(n, rng.choice(configs(n, plan.mesh)), plan.mesh) for n in graph.nodes}
            for _ in which
        )
        which, again = range(len(cuts)), tuple(p.recompute[i] for i in which)
    stages = tuple(
        StagePlan(
            rank=rank,
            blocks=n,
            strategy=s,
            recomputes=False,
            weights="each" if rank else "hoisted",
            forward_s=1.0,
            backward_s=2.0,
            memory_bytes=1,
        )
        for k, (rank, n, s) in enumerate(zip(ranks, cuts, which, strict=True))
    )
    made = replace(
        p, schedule=name, chunks=chunks, cuts=cuts, stages=stages, strategies=strategies, recompute=again
    )
    return replace(plan, pipeline=made)


def chain(params, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2), {"x": x.sum()}


@cache
def chained():
    with jax.enable_x64(True):
        w, x = (
            jnp.full((4, 4, 4), 0.3) * jnp.arange(1, 5)[:, None, None],
            jnp.arange(64.0).reshape(16, 4) / 64,
        )
        plan = pase.compile(
            chain, w, x, devices=2, machine="h100x8", pipeline=2, baselines=False, mesh="1", accumulate=MICRO
        )
        return plan, w, x, jax.value_and_grad(chain, has_aux=True)(w, x)
