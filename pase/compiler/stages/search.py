"""Finds the best pipeline for a number of ranks, a number of micro-batches and a mesh of a stage's devices.

It chooses the schedule, how each stage is split, and how many blocks each stage has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from pase.compiler.stages.bounds import StageBounds
from pase.compiler.stages.choice import StageChoice, aligned, choose_stages, even_stages
from pase.compiler.stages.circular import circular_bound_s, circular_staged
from pase.compiler.stages.menu import SUMMED, StageRole, StageSplit, StageTables, roles_of
from pase.compiler.stages.places import Places, ends_sum_s, send_s
from pase.ir import Graph, Tensor
from pase.machine import CostModel, Mesh
from pase.pipeline.cuts import CutProblem, Cuts, StageBytes, best_cuts
from pase.pipeline.overlap import HoistedCollectives
from pase.pipeline.registry import SCHEDULES, Discipline, schedule
from pase.pipeline.simulate import simulate
from pase.pipeline.types import Schedule, StageTimes
from pase.tables.axis_layout import forward_states
from pase.tables.build import charge_price
from pase.tables.charges import Charge
from pase.tables.layouts import local_bytes, write_rule
from pase.tables.reshard import reshard

__all__ = ["StageMenu", "Staged"]

PRICES = (0.1, 0.5, 4.0)
"""Prices per byte at which stages are split: the value of a device's memory, as a multiple of the stage's step."""
SIMULATIONS = 12
GAP = 1e-3
NODES = 300
"""The most nodes of the tree of one integer program. For cuts, a relative gap of ``GAP`` is enough."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Staged:
    """A pipelined step. splits: the split of each stage."""

    schedule: Schedule
    problem: CutProblem
    cuts: Cuts
    splits: tuple[StageSplit, ...]
    mesh: Mesh
    micro_batches: int

    @property
    def step_s(self) -> float:
        return np.inf if self.cuts.simulated is None else self.cuts.simulated.step_s


def chunks_of(d: Discipline, blocks: int, ranks: int) -> Iterator[int]:
    """Yield the numbers of stages per rank to try: powers of two for which there are enough blocks, and the maximum."""
    low, high = d.chunks
    most = blocks // ranks if not high else min(high, blocks // ranks)
    tried = {low, most, *(2**i for i in range(most.bit_length()))}
    yield from sorted(v for v in tried if low <= v <= most)


class StageMenu:
    """Ways to split the stages on some devices. They are found once, and each schedule chooses among them.

    tables: those of every device group.
    limit: bytes on a device, of every rank or one value per rank.
    groups: the device group of each rank; empty if all ranks are equal.
    between: prices what ranks of different groups send each other.
    only: the one schedule to try; "auto" for all except those that run as one program; or "every".
    """

    def __init__(
        self,
        tables: Sequence[StageTables],
        ranks: int,
        micro_batches: int,
        limit: float | np.ndarray,
        groups: Sequence[int] = (),
        between: CostModel | None = None,
        only: str = "auto",
    ) -> None:
        self.tables, self.ranks, self.micro_batches = tables, ranks, micro_batches
        self.limits = np.broadcast_to(np.asarray(limit, float), (ranks,))
        self.groups, self.between = tuple(groups) or (0,) * ranks, between
        self.only = only
        self.models: dict[int, CostModel] = {t.group: t.model for t in tables}
        self.places: Places = tables[0].places
        self.graph: Graph = tables[0].graph
        self.mesh: Mesh = tables[0].mesh
        self.spent = tables[0].spent
        self._splits: dict[StageRole, list[StageSplit]] = {}
        self._sends: dict[tuple[StageSplit, StageSplit], tuple[float, float]] = {}
        self._found: dict[tuple[str, int], Staged] = {}
        self._chosen: dict[tuple[Schedule, bool], StageChoice | None] = {}
        self.bounds: StageBounds | None = None

    @cached_property
    def block_s(self) -> np.ndarray:
        """The least seconds per step of one block on each rank, float64 [ranks]."""
        of = {i: self._at(i)[0].least_s(StageRole(group=i), self.places.blocks) for i in set(self.groups)}
        return np.array([of[i] for i in self.groups]) / self.places.blocks

    @property
    def shares(self) -> np.ndarray:
        """The fraction of the blocks with which each rank works as long as the others, float64 [ranks]."""
        return 1 / self.block_s / (1 / self.block_s).sum()

    def least_s(self) -> float:
        """Return a lower bound on every pipeline of these ranks, for any schedule, cuts and splits.

        It is what all ranks take if the work is divided so that none waits. The first of a group's tables are those
        that charge least.
        """
        if self.ranks == 1:  # parameters that both ends read are there once
            only = StageRole(first=True, last=True, group=self.groups[0])
            return self._at(only.group)[0].least_s(only, self.places.blocks)

        def end(ranks: Sequence[int], *, last: bool) -> float:
            """Return the work of an end, in blocks of the rank that has it."""
            roles = [(r, StageRole(first=not last, last=last, group=self.groups[r])) for r in ranks]
            return min(self._at(role.group)[0].least_s(role, 0.0) / self.block_s[r] for r, role in roles)

        whole = self.places.blocks + end((0,), last=False) + end((0, -1), last=True)
        return float(whole / (1 / self.block_s).sum())

    def _at(self, group: int) -> list[StageTables]:
        return [t for t in self.tables if t.group == group]

    def splits(self, role: StageRole) -> list[StageSplit]:
        """Return ways to split a stage with all blocks of a rank: one for each of its tables at each price per byte."""
        if role not in self._splits:
            rank = self.groups.index(role.group)
            blocks, found = self.places.blocks * float(self.shares[rank]), list[StageSplit]()
            for t in self._at(role.group):
                for step in t.steps:
                    free = t.cheapest(role, blocks, step=step)
                    each = free.step_s(blocks, self.micro_batches) / self.limits[rank]
                    found += [
                        free,
                        *(t.cheapest(role, blocks, part * each, self.ranks, step) for part in PRICES if each),
                    ]
            self._splits[role] = found
        return self._splits[role]

    def schedules(self) -> Iterator[tuple[Discipline, int]]:
        """Yield the schedules to try with their stages per rank, the most stages first. A single rank has no choice."""
        if self.ranks == 1:
            yield SCHEDULES["1f1b"], 1
            return
        for d in sorted(disciplines(self.only), key=lambda d: -d.chunks[0]):
            for chunks in chunks_of(d, self.places.blocks, self.ranks):
                if (not d.lockstep or self._as_one(chunks)) and not d.refuses(
                    self.ranks, self.micro_batches, chunks
                ):
                    yield d, chunks

    def _as_one(self, chunks: int) -> bool:
        """Whether one program can run the stages.

        It needs one stage per rank, equal stages on equal devices, and micro-batches that the ranks divide.
        """
        divide = self.micro_batches % self.ranks == 0 and self.places.blocks % self.ranks == 0
        return chunks == 1 and divide and len(set(self.groups)) == 1

    def bounded(self, below: float) -> tuple[float, Staged | None]:
        """Return (a lower bound on every pipeline of these ranks under the schedules, within the limit; the best
        pipeline that takes less than ``below``, from the splits that the bound's searches found)."""
        hoisted = [t for t in self.tables if t.weights == "hoisted"]
        limited = np.isfinite(self.limits).any()
        self.bounds = StageBounds(
            tables=hoisted + [t.sent_each() for t in hoisted if limited],
            ranks=self.ranks,
            limit=self.limits,
            send_s=self.least_send_s(),
            groups=self.groups,
        )
        every = [
            (schedule(d.name, self.ranks, self.micro_batches, chunks), d, chunks)
            for d, chunks in self.schedules()
        ]
        prices = PRICES if limited else ()
        least = min((circular_bound_s(self, s, prices) for s, _, _ in every if s.lockstep), default=below)
        paced = [x for x in every if not x[0].lockstep]
        bounds = self.bounds.least_of([s for s, _, _ in paced], min(least, below))
        best, least = None, min([least, below, *bounds])
        for mine, (_, d, chunks) in sorted(zip(bounds, paced, strict=True), key=lambda x: x[0]):
            if mine < below * (1 - GAP):
                found, _ = self.staged(d, chunks, below)
                if found is not None:
                    best, below = found, found.step_s
        return min(least, below), best

    def least_send_s(self) -> tuple[float, float]:
        """Return the least seconds over all splits to send a micro-batch's activations to the next stage, and their
        gradients back."""
        ring = set(zip(self.groups, (*self.groups[1:], self.groups[0]), strict=True))
        of = self.least_bytes(self.places.crossing)
        there, back = (min(self.sent_s(a, b, x) for a, b in ring) for x in of)
        return there, back

    def least_bytes(self, crossing: Iterable[tuple[str, str]]) -> tuple[float, float]:
        """Return the least bytes over all splits of a micro-batch's activations on a device, and of their gradients."""
        space, out = self.tables[0].features.space, np.zeros(2)
        for name, tensor in crossing:
            n, t = self.graph.node[name], self.graph.tensors[tensor]
            cfg = space.configs[space.graph.nodes.index(n)]
            least = float(local_bytes(n, t, n.write_of(tensor)[1], cfg, self.mesh).min())
            out += least, least * t.needs_grad
        return float(out[0]), float(out[1])

    def sent_s(self, a: int, b: int, nbytes: float) -> float:
        """Return the seconds to send a device's bytes to the next rank, between these device groups."""
        if not nbytes:
            return 0.0
        if a == b:
            return send_s(self.models[a], self.groups.count(a), self.mesh.devices, nbytes)
        assert self.between is not None
        return send_s(self.between, 2, self.mesh.devices, nbytes)

    def staged(self, d: Discipline, chunks: int, below: float = np.inf) -> tuple[Staged | None, bool]:
        """Return (the best pipeline under a schedule, if it takes less than ``below``; whether any pipeline fits)."""
        found, fits = self._searched(d, chunks, below)
        if found is not None:
            self._found[d.name, chunks] = found
        return found, fits

    def first(self, d: Discipline, chunks: int) -> float:
        """Return the seconds of the step with the stages that are chosen first; infinite if none fit."""
        s = schedule(d.name, self.ranks, self.micro_batches, chunks)
        if s.lockstep:
            return 0.0  # the search itself is fast
        chosen = self._aligned(s)
        return np.inf if chosen is None else self._with_counts(s, chosen).step_s

    def compared(self, d: Discipline, chunks: int) -> Staged | None:
        """Return the best pipeline under a schedule that the search has met, if any fits."""
        if (d.name, chunks) not in self._found:
            s = schedule(d.name, self.ranks, self.micro_batches, chunks)
            if s.lockstep:
                return self.staged(d, chunks)[0]
            chosen = self._aligned(s)
            if chosen is None:
                return None
            self._found[d.name, chunks] = self._with_counts(s, chosen)
        return self._found[d.name, chunks]

    def _with_counts(self, s: Schedule, chosen: StageChoice, bound: float = 0.0) -> Staged:
        """Return the pipeline with the chosen numbers of blocks. bound: a lower bound for any other numbers."""
        problem = self.problem(s, chosen.splits)
        done = simulate(s, problem.times(chosen.counts))
        counts = tuple(map(int, chosen.counts))
        cuts = Cuts(counts=counts, simulated=done, bound=min(bound, done.step_s), simulations=1)
        return self.made(problem, cuts, chosen.splits)

    def _searched(self, d: Discipline, chunks: int, below: float) -> tuple[Staged | None, bool]:
        s = schedule(d.name, self.ranks, self.micro_batches, chunks)
        if s.lockstep:
            return self._one_program(s, below)
        chosen = self._aligned(s)
        if chosen is None:
            return None, False
        rough = self._with_counts(s, chosen)
        top = min(below, rough.step_s)
        cuts = best_cuts(rough.problem, top, SIMULATIONS, GAP, NODES, chosen.counts)
        self.spent.cells += cuts.cells
        if cuts.simulated is not None:
            return self.made(rough.problem, cuts, chosen.splits), True
        return (self._with_counts(s, chosen, cuts.bound) if rough.step_s < below else None), True

    def _aligned(self, s: Schedule) -> StageChoice | None:
        """Return a way and a number of blocks for each stage: the choice with the shortest step that was tried.

        None if none fits. It is computed again once the bound's searches have found more ways.
        """
        key = s, self.bounds is not None
        if key not in self._chosen:
            choices = [c for c in (self.chosen(s), self.even(s)) if c is not None]
            each = [aligned(c, lambda splits: self.problem(s, splits)) for c in choices]
            self._chosen[key] = min(each, key=lambda x: x[0])[1] if each else None
        return self._chosen[key]

    def made(self, problem: CutProblem, cuts: Cuts, splits: tuple[StageSplit, ...]) -> Staged:
        """Return the step of these stages."""
        return Staged(
            schedule=problem.schedule,
            problem=problem,
            cuts=cuts,
            splits=splits,
            mesh=self.mesh,
            micro_batches=self.micro_batches,
        )

    def _one_program(self, s: Schedule, below: float) -> tuple[Staged | None, bool]:
        """Return the same as ``staged``, for a schedule in lockstep."""
        found, fits = circular_staged(self, s, below, PRICES if np.isfinite(self.limits).any() else ())
        if found is None:
            return None, fits
        return self.made(found.problem, found.cuts, (found.split,) * s.stages), True

    def chosen(self, s: Schedule) -> StageChoice | None:
        """Return a way and a number of blocks for each stage, from the known ways; None if none of them fit."""
        return choose_stages(s, self.ways(s), self.shares, self.places.blocks, self.limits)

    def even(self, s: Schedule) -> StageChoice | None:
        """Return the same with equal stages, if ranks are equal and have several stages."""
        if s.stages == s.ranks or len(set(self.groups)) > 1:
            return None
        return even_stages(s, self.ways(s), self.places.blocks, self.limits)

    def ways(self, s: Schedule) -> list[list[StageSplit]]:
        """Return the ways of each stage: first those at a few prices per byte, then those of the bound's searches."""
        roles = roles_of(s, self.groups)
        of = {
            role: self.splits(role) + (self.bounds.ways(role) if self.bounds is not None else [])
            for role in dict.fromkeys(roles)
        }
        return [of[role] for role in roles]

    def problem(self, s: Schedule, splits: tuple[StageSplit, ...]) -> CutProblem:
        """Return the problem of how many blocks each stage gets, if the stages are split as given."""
        summed = np.stack([w.summed for w in splits], axis=-1)
        fixed, each = (dict(zip(SUMMED, x, strict=True)) for x in summed)
        waiting = np.array([w.waiting for w in splits]).T
        rank = np.array(s.rank_of)
        after = np.bincount(rank, fixed["after"], s.ranks) + self.tied_after(s, splits)
        chunks = s.stages // s.ranks
        most = np.zeros(s.ranks)  # a rank's ops run one after another, so only the largest counts
        np.maximum.at(most, rank, [w.buffers for w in splits])
        gathers, sums, *compute = _padded([w.overlap_rows for w in splits])
        return CutProblem(
            schedule=s,
            blocks=self.places.blocks,
            limit=self.limits,
            fixed=StageTimes(
                **{k: fixed[k] for k in _TIMES},
                send=np.array([self._handed_s(a, b) for a, b in pairwise(splits)]).reshape(-1, 2).T,
                before=np.zeros(s.ranks),
                after=after,
            ),
            each=StageTimes(
                send=np.zeros((2, s.stages - 1)),
                before=np.zeros(s.stages),
                **{k: each[k] for k in (*_TIMES, "after")},
            ),
            hoisted=HoistedCollectives(
                gathers=gathers,
                sums=sums,
                compute=np.stack(compute),
                slow=np.array([splits[s.rank_of.index(r)].slow for r in range(s.ranks)]),
            ),
            bytes_fixed=StageBytes(
                held=fixed["static"] + most[rank] / chunks, kept=fixed["kept"], for_weights=waiting[0]
            ),
            bytes_each=StageBytes(held=each["static"], kept=each["kept"], for_weights=waiting[1]),
        )

    def tied_after(self, s: Schedule, splits: Sequence[StageSplit]) -> np.ndarray:
        """Return the seconds per step in which each rank sums gradients of parameters that it shares with other ranks,
        float64 [ranks]."""
        out = np.zeros(s.ranks)
        if s.rank_of[0] != s.rank_of[-1]:
            nbytes = sum(self.gradient_bytes(splits[0], name) for name in self.places.tied)
            out[[s.rank_of[0], s.rank_of[-1]]] = self.sum_s(self.groups[0], self.groups[-1], nbytes)
        return out

    def gradient_bytes(self, split: StageSplit, name: str) -> float:
        """Return the bytes of a parameter's gradient on one device."""
        n = self.graph.node[name]
        a = n.ops[0].writes[0]
        tensor = self.graph.tensors[a.tensor]
        cfg = split.configs[name][None, :]
        return float(local_bytes(n, tensor, a, cfg, self.mesh)[0]) if tensor.needs_grad else 0.0

    def sum_s(self, one: int, other: int, nbytes: float) -> float:
        """Return the seconds to sum tied gradients between two ranks of these groups. nbytes: those of a device."""
        if one == other:
            return ends_sum_s(self.models[one], self.groups.count(one), self.mesh.devices, nbytes)
        assert self.between is not None
        return ends_sum_s(self.between, 2, self.mesh.devices, nbytes)

    def crossing(self, a: StageSplit) -> tuple[tuple[str, str], ...]:
        """Return (node, tensor) of what a stage passes on."""
        return self.places.crossing

    def _handed_s(self, a: StageSplit, b: StageSplit) -> tuple[float, float]:
        """Return ``_send_s``, computed once for each pair."""
        if (a, b) not in self._sends:
            self._sends[a, b] = self._send_s(a, b)
        return self._sends[a, b]

    def _send_s(self, a: StageSplit, b: StageSplit) -> tuple[float, float]:
        """Return the seconds to send one micro-batch's activations to the next stage, in the layout that it reads, and
        to send their gradients back, in the layout of this stage."""
        sent = np.zeros(2)
        for name, tensor in self.crossing(a):
            n, t = self.graph.node[name], self.graph.tensors[tensor]
            op, access = n.write_of(tensor)
            here, there = (
                forward_states(write_rule(n, op, access).states(w.configs[name][None, :], self.mesh))
                for w in (a, b)
            )
            sent[0] += self._reshard_s(here, there, t, self.models[b.role.group])
            if t.needs_grad:
                sent[1] += self._reshard_s(there, here, t, self.models[a.role.group])
        one, other = a.role.group, b.role.group
        return (
            float(sent[0]) + self.sent_s(one, other, self.sent_bytes(a)[0]),
            float(sent[1]) + self.sent_s(one, other, self.sent_bytes(b, a)[1]),
        )

    def _reshard_s(self, src: np.ndarray, dst: np.ndarray, t: Tensor, model: CostModel) -> float:
        """Return the seconds to reshard a tensor."""
        total = 0.0
        for step in reshard(src, dst, self.mesh):
            charge = Charge(
                kind=step.kind,
                axes=np.ravel(step.axes),
                nbytes=np.ravel(step.fraction) * float(t.nbytes),
                tensor=t.name,
                phase="forward",
                times=1.0,
            )
            total += float(np.ravel(charge_price(charge, model, self.mesh))[0])
        return total

    def sent_bytes(self, a: StageSplit, handed: StageSplit | None = None) -> tuple[float, float]:
        """Return the bytes of one micro-batch's activations on a device of a stage, and of their gradients.

        handed: the stage that passes them on, if it is not this one.
        """
        out = np.zeros(2)
        for name, tensor in self.crossing(a if handed is None else handed):
            n, t = self.graph.node[name], self.graph.tensors[tensor]
            cfg = a.configs[name][None, :]
            local = float(local_bytes(n, t, n.write_of(tensor)[1], cfg, self.mesh)[0])
            out += local, local * t.needs_grad
        return float(out[0]), float(out[1])


_TIMES = ("forward", "input", "weight", "recompute")


def _padded(by_unit: Sequence[np.ndarray]) -> np.ndarray:
    """Return ``StageSplit.overlap_rows`` of each stage, float64 [2 + kinds, units, stages], padded with zeros to the
    number of units of the largest stage."""
    most = max(x.shape[1] for x in by_unit)
    gaps = [np.zeros((len(x), most - x.shape[1])) for x in by_unit]
    same = [np.hstack([x[:, :-2], gap, x[:, -2:]]) for x, gap in zip(by_unit, gaps, strict=True)]
    return np.stack(same, axis=-1)


def disciplines(only: str = "auto") -> list[Discipline]:
    """Return the schedules to try: the named one, "every" one, or for "auto" all that run stage by stage."""
    return [d for d in SCHEDULES.values() if only in ("every", d.name) or (only == "auto" and not d.lockstep)]
