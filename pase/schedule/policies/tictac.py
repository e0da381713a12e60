"""TicTac: orders the receives of a DAG by its structure (TIC) or by times (TAC). Hashemi et al., MLSys 2019.

This module deviates from the paper in two points. First, the comparator of Algorithm 3 is the reverse of Eq. 6; Eq. 6
is correct (A goes first if and only if min(P_B, M_A) < min(P_A, M_B)). Second, the comparator is not transitive,
although the paper claims it, so "the minimum" is not well defined. Eq. 6 is Johnson's rule for two machines: transfers
with M < P first, by rising M, then the others by falling P. This is a total preorder, and `tac_order` sorts by it. Ties
go to the smaller M+, then to the order of the blocks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pase.errors import PaseError
from pase.schedule.plan import BucketPlan, whole
from pase.schedule.registry import Options, register
from pase.schedule.types import AxisGroup, ComputeBlock, Link, ScheduleProblem, Transfer
from pase.schedule.view import fastest_link, ready_order

__all__ = ["dependencies", "parameter_server", "tac", "tac_order", "tic", "tic_order", "update_properties"]


def parameter_server(problem: ScheduleProblem, *, push: Link, pull: Link) -> ScheduleProblem:
    """The problem in which each all-reduce is a push after backward and a pull before the next forward.

    push and pull are the two directions of the worker's channel. A pull becomes ready when its push has arrived.
    """
    if any(t.lag != 1 or t.follows for t in problem.tensors):
        raise PaseError(
            "the problem is not plain gradient synchronisation, so it has no parameter-server form",
            where=f"problem '{problem.name}'",
            fix="give a problem with gradients only",
        )
    pushes = [
        replace(t, name=f"{t.name}.push", kind="push", axes=AxisGroup(("push",)), needed_before=None)
        for t in problem.tensors
    ]
    pulls = [
        Transfer(
            name=f"{t.name}.pull",
            nbytes=t.nbytes,
            ready_after=None,
            needed_before=t.needed_before,
            kind="pull",
            axes=AxisGroup(("pull",)),
            dtype=t.dtype,
            follows=(i,),
        )
        for i, t in enumerate(problem.tensors)
    ]
    return replace(
        problem,
        name=f"{problem.name} (parameter server)",
        tensors=(*pushes, *pulls),
        links=(replace(push, axes=(AxisGroup(("push",)),)), replace(pull, axes=(AxisGroup(("pull",)),))),
    )


def dependencies(problem: ScheduleProblem) -> np.ndarray:
    """The paper's op.dep as bool [blocks, tensors]: the transfers that a block waits for, directly or indirectly."""
    blocks: tuple[ComputeBlock, ...] = problem.blocks
    dep = np.zeros((len(blocks), len(problem.tensors)), bool)
    for i, t in enumerate(problem.tensors):
        if t.needed_before is not None:
            dep[t.needed_before, i] = True
    for b, block in enumerate(blocks):
        waits = block.after if problem.dataflow and block.after is not None else ((b - 1,) if b else ())
        for a in waits:
            dep[b] |= dep[a]
    return dep


def update_properties(
    dep: np.ndarray, block_s: np.ndarray, transfer_s: np.ndarray, outstanding: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(P, M+) of every outstanding transfer; Algorithm 1. outstanding: bool [tensors].

    P is the compute that waits only for this transfer. M+ is the least communication that frees a block which waits for
    this transfer and at least one other.
    """
    d = dep & outstanding
    count, m = d.sum(1), d @ transfer_s
    p, m_plus = np.zeros(dep.shape[1]), np.full(dep.shape[1], np.inf)
    for b in np.flatnonzero(count == 1):
        p[d[b]] += block_s[b]
    for b in np.flatnonzero(count > 1):
        m_plus[d[b]] = np.minimum(m_plus[d[b]], m[b])
    return p, m_plus


def _receives(problem: ScheduleProblem) -> list[int]:
    return [i for i, t in enumerate(problem.tensors) if t.needed_before is not None]


def tic_order(problem: ScheduleProblem) -> list[int]:
    """The receives sorted by M+ under the general time oracle (1 per transfer, 0 per block).

    The paper does not say how to break ties, and in a chain the first two transfers always tie. Here the order of the
    blocks breaks them.
    """
    dep = _distinct(dependencies(problem))
    n = len(problem.tensors)
    _, m_plus = update_properties(dep, np.zeros(len(dep)), np.ones(n), np.ones(n, bool))
    return sorted(_receives(problem), key=lambda i: (m_plus[i], problem.tensors[i].needed_before or 0, i))


def tac_order(problem: ScheduleProblem) -> list[int]:
    """The receives in TAC's order: at each step the first by Johnson's rule, with P and M+ updated."""
    dep = dependencies(problem)
    block_s = np.asarray([b.seconds for b in problem.blocks])
    transfer_s = np.asarray(
        [problem.message_s(fastest_link(problem, i), i, t.nbytes) for i, t in enumerate(problem.tensors)]
    )
    left = dict.fromkeys(_receives(problem))
    count = dep.sum(1)
    waits = dep @ transfer_s
    names = dep @ np.arange(dep.shape[1])  # if exactly one transfer is outstanding, this is its index
    outstanding = np.ones(dep.shape[1], bool)
    order: list[int] = []
    while left:
        p = np.zeros(dep.shape[1])
        single = count == 1
        np.add.at(p, names[single].astype(int), block_s[single])
        remaining = np.fromiter(left, int)
        early = transfer_s[remaining] < p[remaining]
        first = np.where(early, 0, 1)
        second = np.where(early, transfer_s[remaining], -p[remaining])
        best = np.lexsort((second, first))[0]
        tied = remaining[(first == first[best]) & (second == second[best])]
        if tied.size > 1:
            m_plus = _m_plus(dep, waits, count, tied)
            tied = tied[m_plus == m_plus.min()]
        r = int(min(tied, key=lambda i: (problem.tensors[i].needed_before or 0, i)))
        order.append(r)
        del left[r]
        outstanding[r] = False
        column = dep[:, r]
        count = count - column
        waits = waits - np.where(column, transfer_s[r], 0.0)
        names = names - np.where(column, r, 0)
    return order


def _m_plus(dep: np.ndarray, waits: np.ndarray, count: np.ndarray, which: np.ndarray) -> np.ndarray:
    several = count > 1
    if not several.any():
        return np.full(which.size, np.inf)
    return np.where(dep[several][:, which], waits[several][:, None], np.inf).min(0)


def _distinct(dep: np.ndarray) -> np.ndarray:
    return np.unique(dep, axis=0)


def _plan(problem: ScheduleProblem, policy: str, receives: list[int]) -> BucketPlan:
    """Sends in the order in which they become ready, then receives by priority; each link takes the first ready one."""
    chosen = set(receives)
    order = [t for t in ready_order(problem) if t not in chosen] + receives
    messages = tuple(whole(problem, [t], link=fastest_link(problem, t)) for t in order)
    return BucketPlan(policy=policy, messages=messages, dispatch="priority")


@register("tic", "TicTac, timing-independent: receives by the DAG's structure alone")
def tic(problem: ScheduleProblem, options: Options) -> BucketPlan:
    return _plan(problem, "tic", tic_order(problem))


@register("tac", "TicTac, timing-aware: receives by Johnson's rule on the DAG with times")
def tac(problem: ScheduleProblem, options: Options) -> BucketPlan:
    return _plan(problem, "tac", tac_order(problem))
