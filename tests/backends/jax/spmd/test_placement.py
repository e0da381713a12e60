"""The bodies of a program in which messages are sent, and the gradients that can wait for a later step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bench.cases.plans import case_of
from pase.api import Plan
from pase.backends.jax.spmd.placement import body_of, message_bodies, waits
from pase.ir import Place
from pase.local.types import LocalMessage, MessageChunk


def loss(params: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    h = jax.lax.scan(layer, x @ params["first"], params["stack"])[0]
    h = jax.checkpoint(lambda h: jnp.sin(h @ params["again"]))(h)
    h = jax.lax.cond(h.sum() > 0, lambda h: h @ params["branch"], lambda h: h, h)
    return jnp.mean((h @ jnp.exp(params["grown"]) @ (2 * params["doubled"])) ** 2)


@functools.cache
def planned() -> Plan:
    names = ("first", "again", "branch", "grown", "doubled")
    params = {n: jnp.ones((16, 16)) for n in names} | {"stack": jnp.ones((3, 16, 16))}
    plan = case_of(loss, params, jnp.ones((16, 16))).plan("fsdp")
    assert plan is not None
    return plan


def transfers() -> dict[str, list[int]]:
    """Path of a parameter -> the numbers of its transfers."""
    plan = planned()
    path = {t.name: t.path for t in plan.graph.parameters}
    program = plan.jax.program
    out: dict[str, list[int]] = {}
    for n, t in enumerate(program.transfers):
        op = program.maker[t.tensor]
        while op.operands and op.node in program.parameters:
            op = program.maker[op.operands[0].tensor]
        if op.node in program.parameters:
            out.setdefault(path[program.original(op.results[0].tensor)], []).append(n)
    return out


def numbers_of(name: str) -> list[int]:
    """The places in the model of the equations with this primitive."""
    jaxpr = planned().jax.traced.jaxpr.jaxpr
    return [k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == name]


def test_each_equation_is_in_the_body_of_its_loop_or_recomputed_region() -> None:
    traced = planned().jax.traced
    (scan,), (cond,) = numbers_of("scan"), numbers_of("cond")
    (again,) = [k for n in ("checkpoint", "remat2", "remat") for k in numbers_of(n)]
    where = {p: body_of(traced, (), Place(p)) for p in ("0", f"{scan}.0", f"{again}.0", f"{cond}.1.0")}
    assert where == {"0": "", f"{scan}.0": f"{scan}.", f"{again}.0": f"{again}.", f"{cond}.1.0": None}


def test_messages_are_sent_in_the_bodies_of_their_readers() -> None:
    plan, found = planned(), transfers()
    traced = plan.jax.traced
    (scan,) = numbers_of("scan")
    chunks = tuple(
        MessageChunk(transfer=found[p][0], stage=0, begin=0, nbytes=8)
        for p in ("stack", "first", "branch", "doubled")
    )
    messages = (LocalMessage(way="there", link="net", chunks=chunks),)
    bodies = message_bodies(replace(plan.jax.program, messages=messages), traced, ())
    assert bodies == {f"{scan}.": [found["stack"][0]], "": [found["first"][0], found["doubled"][0]]}


def test_gradients_of_branches_and_of_functions_that_are_not_linear_cannot_wait() -> None:
    plan, found = planned(), transfers()
    can = {
        path: [waits(plan.jax.program, plan.jax.traced, (), n) for n in numbers]
        for path, numbers in found.items()
    }
    assert not any(can["branch"]) and not any(can["grown"])
    assert all(can["stack"]) and all(can["first"]) and all(can["doubled"]) and all(can["again"])
