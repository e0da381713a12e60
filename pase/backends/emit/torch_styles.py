"""Expresses a plan as one of PyTorch's own parallel styles, or raises an error that says why that is not possible.

The styles are data parallelism, with or without sharding, and tensor parallelism. They are derived from the plan alone:
which axes split the batch, how parameters and their state are stored, and what is sent. A plan has a style if it sends
next to nothing beyond what that style sends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pase.backends.registry import NotExpressed
from pase.plan.answer import meanings

if TYPE_CHECKING:
    from pase.ir.blocks import RecomputeKind
    from pase.plan.types import NodePlan, PlanData
    from pase.tables.axis_layout import Placement
    from pase.tables.itemize import Collective

__all__ = [
    "DataStyle",
    "TensorStyle",
    "batch_axes",
    "data_style",
    "gathers_per_run",
    "is_small",
    "recomputed_units",
    "runs_of_units",
    "tensor_style",
    "units_of",
]

_FEW = 8
"""The size in bytes of a single number, such as a loss or a count of labels, which every style may sum."""
_SMALL = 0.01
"""The fraction of all parameters' bytes that may be replicated, such as norm scales, if the others are sharded, and the
fraction of the bytes sent that need not be of parameters and gradients."""

TensorStyle = Literal["colwise", "colwise_gather_output", "rowwise", "embedding_rowwise"]
"""colwise: a linear layer split by its outputs. colwise_gather_output: the same, with its result gathered. rowwise:
split by its inputs. embedding_rowwise: an embedding split by its rows. The names are those of transformers
(``transformers.integrations.tensor_parallel``)."""


@dataclass(frozen=True, kw_only=True)
class DataStyle:
    """Data parallelism: the batch is split over some axes, and parameters over some of these.

    replicate: the axes over which parameters are replicated.
    shard: the axes over which parameters, or only their state, are sharded.
    dims: path -> the dim that is sharded.
    whole: small parameters that the plan replicates.
    stored: the parameters that are stored sharded and gathered for each use; of the others, only the state is sharded.
    """

    replicate: tuple[str, ...]
    shard: tuple[str, ...]
    dims: Mapping[str, int]
    whole: tuple[str, ...]
    stored: frozenset[str]

    def ways(self, plan: PlanData, axes: tuple[str, ...]) -> int:
        """The number of devices along these axes together."""
        out = 1
        for a in axes:
            out *= plan.mesh.sizes[plan.mesh.names.index(a)]
        return out


def data_style(
    plan: PlanData,
    target: str,
    *,
    other_axes: tuple[str, ...] = (),
    limited: bool = False,
    mixed: bool = False,
) -> DataStyle:
    """The plan's data-parallel style.

    other_axes: axes that another style uses.
    limited: whether the search was limited to this style. What the plan sends is then part of it, such as the sum of
        the gradient of a slice of a parameter, which the target sums as part of the parameter's gradient.
    mixed: whether the target may store some parameters sharded, and shard only the state of others.

    Raises PaseError if the plan is not data parallel; the message names the layer and the reason.
    """
    batch = _batch_axes(plan, target, other_axes)
    others = [c for c in plan.collectives if set(c.axes) & set(batch) and not _of_parameter(plan, c)]
    others = [c for c in others if c.nbytes > _FEW]
    most = max(others, key=lambda c: c.nbytes * c.times, default=None)
    # The losses of all examples may be gathered, because they are few bytes. The style computes each rank's own loss.
    if most is not None and not limited and _sent(others) > _SMALL * _sent(plan.collectives):
        raise NotExpressed(
            f"this plan is not {target}: '{most.node}' sends a {most.kind} of activations over {', '.join(most.axes)}, "
            f"but data parallelism sends only parameters and gradients",
            where=f"the plan for '{plan.model}'",
            fix=_INSTEAD,
        )
    kept = {path: _placed(t.state or t.storage, batch) for path, t in plan.parameters.items()}
    shard = tuple(a for a in batch if any(a in axes for axes, _ in kept.values()))
    dims, whole = {}, []
    for path, (axes, dim) in kept.items():
        if not axes:
            whole.append(path)
        elif axes != shard or dim is None:
            raise NotExpressed(
                f"this plan is not {target}: '{path}' is split over {', '.join(axes)} or over several dims, but others "
                f"over {', '.join(shard)}",
                where=f"the plan for '{plan.model}'",
                fix=_INSTEAD,
            )
        else:
            dims[path] = dim
    if shard and not limited:
        _check_small(plan, target, whole)
    stored = frozenset(path for path, t in plan.parameters.items() if _placed(t.storage, batch)[0])
    if stored and stored != set(dims) and not mixed:
        raise NotExpressed(
            f"this plan is not {target}: '{min(set(dims) - stored)}' is replicated and only its state is sharded, but "
            f"other parameters are sharded",
            where=f"the plan for '{plan.model}'",
            fix=_INSTEAD,
        )
    replicate = tuple(a for a in batch if a not in shard)
    return DataStyle(replicate=replicate, shard=shard, dims=dims, whole=tuple(whole), stored=stored)


def _sent(collectives: Iterable[Collective]) -> float:
    """Bytes."""
    return sum(c.nbytes * c.times for c in collectives)


_INSTEAD = "run it with plan.torch, or write its layouts with emit --to names"


def batch_axes(plan: PlanData) -> frozenset[str]:
    """The mesh axes that split the batch in most of the compute. Inputs themselves, such as labels, may be whole."""
    return frozenset(a for a, meaning in meanings(plan).items() if meaning == "data")


def _batch_axes(plan: PlanData, target: str, other_axes: tuple[str, ...]) -> tuple[str, ...]:
    found = batch_axes(plan)
    idle = [
        a
        for a, size in zip(plan.mesh.names, plan.mesh.sizes, strict=True)
        if size > 1 and a not in found and a not in other_axes
    ]
    if idle:
        raise NotExpressed(
            f"this plan is not {target}: the axis {idle[0]} of its mesh does not split the batch",
            where=f"the plan for '{plan.model}'",
            fix=_INSTEAD,
        )
    return tuple(a for a in plan.mesh.names if a in found)


def _placed(placement: Placement, axes: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
    """(those of these axes that split a tensor, the dim that they split; None if they split no dim or several)."""
    split = {dim: tuple(a for a in held if a in axes) for dim, held in enumerate(placement)}
    split = {dim: held for dim, held in split.items() if held}
    every = tuple(a for a in axes if any(a in held for held in split.values()))
    return every, next(iter(split)) if len(split) == 1 else None


def is_small(plan: PlanData, paths: Sequence[str]) -> bool:
    """Whether these are few of the parameters' elements, such as scales of norms."""
    return sum(plan.parameters[p].elements for p in paths) <= _SMALL * sum(
        t.elements for t in plan.parameters.values()
    )


def _check_small(plan: PlanData, target: str, whole: list[str]) -> None:
    if not is_small(plan, whole):
        most = max(whole, key=lambda p: plan.parameters[p].elements)
        raise NotExpressed(
            f"this plan is not {target}: it replicates '{most}' but shards other parameters",
            where=f"the plan for '{plan.model}'",
            fix=_INSTEAD,
        )


def _of_parameter(plan: PlanData, c: Collective) -> bool:
    """Whether the collective sends a parameter or its gradient."""
    return c.source.partition(":copy")[0] in plan.parameters


def tensor_style(plan: PlanData, target: str, axis: str, *, sequence: bool) -> dict[str, TensorStyle]:
    """Path of a module -> how its weight is split over an axis. Modules that are not split are left out.

    sequence: whether activations between layers are split by position.

    Raises PaseError if the plan is not split in this way.
    """
    styles: dict[str, TensorStyle] = {}
    for node in plan.nodes:
        path, _, verb = node.name.partition(":")
        if path in plan.parameters and verb and (style := _style(plan, node, path, verb, axis)) is not None:
            styles[path.rpartition(".")[0]] = style
    for c in plan.collectives:
        if axis not in c.axes or c.nbytes <= _FEW:
            continue
        made_of = c.source.partition(":")[0]
        maker = made_of.rpartition(".")[0] if made_of in plan.parameters else made_of
        if _of_parameter(plan, c):
            if (
                c.kind != "all_reduce" or not sequence
            ):  # with split positions, gradients are partial and summed
                raise NotExpressed(
                    f"this plan is not {target}: it sends '{c.source}' in a {c.kind} over {axis}",
                    where=f"the plan for '{plan.model}'",
                    fix=_INSTEAD,
                )
        elif c.kind == "all_gather" and styles.get(maker) == "colwise" and not sequence:
            styles[maker] = "colwise_gather_output"
        elif not _expected(c, styles.get(maker), sequence):
            raise NotExpressed(
                f"this plan is not {target}: '{c.node}' sends a {c.kind} over {axis}, which this style does not send",
                where=f"the plan for '{plan.model}'",
                fix=_INSTEAD,
            )
    return styles


def _expected(c: Collective, style: TensorStyle | None, sequence: bool) -> bool:
    """Whether tensor parallelism sends this: gathers and scatters of positions if they are split, else sums."""
    if sequence:
        return c.kind in ("all_gather", "reduce_scatter") or style is None
    return c.kind == "all_reduce" and (c.phase == "backward" or style in ("rowwise", "embedding_rowwise"))


def _style(plan: PlanData, node: NodePlan, path: str, verb: str, axis: str) -> TensorStyle | None:
    """How a layer's weight is split, derived from the dims of its product."""
    split = next((d for d, axes in node.split.items() if axis in axes), None)
    held = next((i for i, axes in enumerate(plan.parameters[path].storage) if axis in axes), None)
    result = node.einsum.rpartition("->")[2].split()
    if held is None or split is None:
        return None
    if verb.startswith("take"):
        return "embedding_rowwise" if held == 0 else None
    return "colwise" if any(split in walk for walk in result) else "rowwise"


def gathers_per_run(plan: PlanData) -> dict[str, float]:
    """Path of a parameter -> how often the plan gathers it while what reads it runs once: 1 if it stays gathered for
    backward, 2 if backward gathers it again, less than 1 if it stays gathered for several micro-batches or iterations.
    Parameters that are not gathered are left out."""
    runs = {n.name: n.times for n in plan.nodes}
    out: dict[str, float] = {}
    for c in plan.collectives:
        if c.kind == "all_gather" and _of_parameter(plan, c):
            path = c.source.partition(":copy")[0]
            out[path] = max(out.get(path, 0.0), c.times / runs[c.node])
    return out


def runs_of_units(plan: PlanData) -> dict[str, int]:
    """Numbered module -> how often the step calls it: as often as any of its weights is multiplied. Layers that share
    their weights (ALBERT's) are one module that is called for each."""
    products = Counter(m[1] for n in plan.nodes if (m := re.match(r"(.+):dot(~\d+)?$", n.name)))
    return {
        u: max((n for path, n in products.items() if path.startswith(f"{u}.")), default=1)
        for u in units_of(plan)
    }


def recomputed_units(plan: PlanData, target: str) -> dict[str, RecomputeKind]:
    """Numbered module -> what backward recomputes of it. Raises NotExpressed if a block is not such a module."""

    def refused(what: str) -> NotExpressed:
        return NotExpressed(
            f"this plan is not {target}: {what}", where=f"the plan for '{plan.model}'", fix=_INSTEAD
        )

    if not plan.remat:
        return {}
    if any(b.recompute == "attention" for b in plan.remat):
        raise refused("it recomputes the attention of blocks and keeps the rest of them")
    blocks = sorted(plan.remat, key=lambda b: (b.prefix, b.start))
    inside: dict[int, set[str]] = {}
    units = re.compile("(?:^|@)(" + "|".join(map(re.escape, units_of(plan))) + r")(?![^.:~])")
    for n in plan.nodes:
        if n.recomputed_in:
            found = units.search(n.name)
            inside.setdefault(n.recomputed_in, set()).add(found[1] if found else n.name)
    if len(inside) != len(blocks) or any(len(names) > 1 for names in inside.values()):
        raise refused(f"the {len(blocks)} blocks that it recomputes are not numbered modules of the model")
    out = {min(inside[k]): b.recompute for k, b in zip(sorted(inside), blocks, strict=True)}
    if len(out) < len(blocks) or not out.keys() <= {*units_of(plan)}:
        raise refused(f"the {len(blocks)} blocks that it recomputes are not numbered modules of the model")
    return out


def units_of(plan: PlanData) -> tuple[str, ...]:
    """The numbered modules that occur several times: the blocks that are gathered one at a time."""

    def numbered() -> Iterator[str]:
        for path in plan.parameters:
            if m := re.match(r"(.*?\.\d+)\.", f".{path}"):
                yield m[1].removeprefix(".")

    return tuple(dict.fromkeys(numbered()))
