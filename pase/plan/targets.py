"""Which strategies the programs that pase writes for can express, as data.

Each emitter registers its ``PlanTarget`` in its own file. ``pase.compile(target=…)`` searches only what the target can
express, so that ``pase emit`` can write the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pase.registry import Registry

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["TARGETS", "AxisUse", "PlanTarget", "TargetAxis", "TargetForm", "form_of", "limited_to"]

AxisUse = Literal["replicate", "shard", "shard_state", "tensor", "tensor_sequence"]
"""What a mesh axis of a target is for.

replicate: it splits the batch, and parameters are whole on each device along it.
shard: it splits the batch and the storage of every parameter, one dim of each.
shard_state: it splits the batch, and gradients and optimizer state in the same way; parameters stay whole.
tensor: it splits heads, hidden units and vocabulary (Megatron).
tensor_sequence: the same, and positions between layers.
"""


@dataclass(frozen=True, kw_only=True)
class TargetAxis:
    """A mesh axis of a target.

    at_least: the fewest devices along it.
    model_dim: for "shard", whether it splits only the dim that most weights share, so that one rule holds for all of
        them; otherwise it splits a dim of each (``stored_apart``).
    weights_alone: for "shard", whether parameters that no product and no look-up reads, such as scales of norms, are
        whole along it.
    whole_logits: for tensor parallelism, whether logits are gathered before the loss.
    """

    name: str
    use: AxisUse
    at_least: int = 1
    model_dim: bool = False
    weights_alone: bool = False
    whole_logits: bool = False

    @property
    def splits_batch(self) -> bool:
        return self.use in ("replicate", "shard", "shard_state")


@dataclass(frozen=True, kw_only=True)
class TargetForm:
    """One form of strategy that a target can express.

    axes: the axes of its mesh, outermost first, of any sizes; empty if the search may use its axes for anything.
    one_axis_a_dim: whether each dim of a tensor may be split along at most one axis.
    state_as_stored: whether gradients and optimizer state must be laid out as the parameter is.
    """

    name: str = "any"
    axes: tuple[TargetAxis, ...] = ()
    one_axis_a_dim: bool = False
    state_as_stored: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanTarget:
    """A program for which plans are made.

    program: its name in sentences.
    says: what it can express, in a few words.
    forms: a plan has one of these.
    micro_batches: whether it runs a step in micro-batches.
    recomputes: whether it recomputes every repeated block in backward, if asked to.
    recomputes_some: whether it also recomputes some blocks and not others, or only the light work of a block.
    regathers: whether it gathers parameters again for backward, or not, as the plan says.
    """

    program: str
    says: str
    forms: tuple[TargetForm, ...]
    micro_batches: bool = False
    recomputes: bool = False
    recomputes_some: bool = False
    regathers: bool = False


TARGETS: Registry[PlanTarget] = Registry("target", package="pase.backends.emit")
"""``CompileOptions.target`` -> what that target can express. The names are those of ``pase emit --to``."""


def limited_to(plan: PlanData, target: str) -> bool:
    """Whether the plan comes from a search of only what the target can express."""
    return plan.provenance.get("target") == target


def form_of(target: str, form: str) -> TargetForm | None:
    """Return the form that a plan was limited to, by the names that the plan records; None without a target."""
    if not target:
        return None
    return next(f for f in TARGETS[target].forms if f.name == form)
