"""A stated strategy as the search prices it: the row of ``pase compare`` that splits the model in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pase.compiler.compilation import compare_model
from pase.errors import Infeasible
from pase.plan.types import PlanData
from pase.pytree import Tree
from pase.stated.strategy import Strategy

if TYPE_CHECKING:
    from pase.compiler.problem.options import CompileOptions
    from pase.compiler.problem.problem import Progress

__all__ = ["baseline_of", "price_like_search"]


def baseline_of(s: Strategy) -> str | None:
    """Return the name of the baseline that splits a model as the strategy does; None if there is none.

    >>> baseline_of(Strategy(shard=64, zero=3)), baseline_of(Strategy(data=4, shard=8, zero=3))
    ('fsdp', 'hsdp_4x8')
    >>> baseline_of(Strategy(shard=16, zero=3, tensor=2, sequence=True)), baseline_of(Strategy(pipeline=2))
    ('megatron_sp_fsdp_16x2', None)
    """
    if s.pipeline > 1 or s.precision != "bf16" or s.asynchronous or s.heads:
        return None
    stored = {0: "", 2: "zero2", 3: "fsdp"}.get(s.zero if s.shard > 1 else 0)
    only = [n for n in (s.tensor, s.context, s.expert) if n > 1]
    if stored is None or len(only) > 1 or (s.data > 1 and s.shard > 1 and (only or stored != "fsdp")):
        return None
    if s.tensor > 1:
        kind = "_".join(filter(None, ("megatron", "sp" if s.sequence else "", stored)))
        return f"{kind}_{s.ranks}x{s.tensor}" if s.sequence or not stored else None
    if s.context > 1:
        return f"context_{s.ranks}x{s.context}" if stored == "fsdp" else None
    if s.expert > 1:
        return None
    if s.data > 1 and s.shard > 1:
        return f"hsdp_{s.data}x{s.shard}"
    return stored or "data_parallel"


def price_like_search(
    model: Tree,
    params: Tree,
    batch: Sequence[Tree],
    options: CompileOptions,
    s: Strategy,
    progress: Progress | None = None,
) -> tuple[str, PlanData]:
    """Return the baseline of this strategy, by its name, with the price that ``pase compare`` gives it.

    This includes a search, because its micro-batches and recomputation are those of the best plan. Raises Infeasible if
    no baseline splits the model so.
    """
    name = baseline_of(s)
    plans = {} if name is None else dict(compare_model(model, params, batch, options, progress))
    if name is None or name not in plans:
        rows = (
            ", ".join(k for k in plans if k != "pase")
            or "data parallelism, ZeRO-2, FSDP, HSDP, Megatron, context"
        )
        raise Infeasible(
            "'pase compare' has no row that splits the model in this way",
            where=str(s),
            fix=f"leave out --like-search, or state one of its rows: {rows}",
        )
    return name, plans[name]
