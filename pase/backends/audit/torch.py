"""Records the collectives of a PyTorch step while it runs, for comparison with the plan's list.

The step may run on fake tensors over a process group that sends nothing, for example as one rank of 32 on one machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from pase.backends.torch.code import groups_of_one
from pase.backends.torch.imagined import imagined_batch, imagined_step
from pase.backends.torch.plan import TorchPlan
from pase.backends.torch.spmd.gathered_again import again_messages
from pase.backends.torch.spmd.gathers import gather_messages
from pase.backends.torch.spmd.messages import gradient_messages, joined_chunks
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.local.account import program_collectives
from pase.local.types import LocalMessage, LocalProgram, LocalReshardStep
from pase.machine import Mesh
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._python_dispatch import TorchDispatchMode

    from pase.frontends.torch.values import TorchOperand

__all__ = [
    "SentCounts",
    "planned",
    "planned_in_step",
    "recorded",
    "sent_by_one_rank",
    "sent_by_rank",
]

SentCounts = Counter[tuple[str, tuple[str, ...], int]]
"""(kind, mesh axes, bytes of the larger local buffer) -> the number of times in a step."""

_KINDS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def planned(
    program: LocalProgram,
    gradients: Sequence[LocalMessage] = (),
    gathers: Sequence[Sequence[int]] = (),
    whole: LocalProgram | None = None,
) -> SentCounts:
    """The plan's collectives, without mesh axes of size 1, along which nothing is sent.

    gradients, gathers: the messages in which gradients of parameters are joined (``gradient_messages``), and those in
    which parameters are gathered (``gather_messages``); what backward gathers again is in messages, too
    (``again_messages``). The bytes are the same. whole: the program whose messages they
    are, if ``program`` is a part of it.
    """
    sends = whole or program
    out: SentCounts = Counter()
    for c in program_collectives(program):
        if axes := _wide(c.axes, program.mesh):
            out[c.kind, axes, c.nbytes] += c.times

    def joined(like: LocalReshardStep, steps: Sequence[LocalReshardStep], nbytes: int, times: float) -> None:
        if axes := _wide(like.axes, program.mesh):
            out[like.kind, axes, nbytes] += round(times)
            for step in steps:
                out[step.kind, axes, step.nbytes] -= round(times)

    for chunks in (some for m in gradients for some in joined_chunks(sends, m)):
        steps = [sends.stages(c.transfer, "back")[c.stage] for c in chunks]
        begun = [step for c, step in zip(chunks, steps, strict=True) if c.begin == 0]
        joined(steps[0], begun, sum(c.nbytes for c in chunks), sends.runs(chunks[0].transfer, "back"))
    again = again_messages(sends, gathers)
    twice = {n for numbers in again for n in numbers}
    for numbers in (*gathers, *again):
        steps = [sends.transfers[n].forward[0] for n in numbers]
        times = sends.runs(numbers[0], "there") / (2 if numbers[0] in twice else 1)
        joined(steps[0], steps, sum(s.nbytes for s in steps), times)
    return +out


def planned_in_step(plan: TorchPlan) -> SentCounts:
    """The collectives of a step whose forward and backward run together: the plan's, with gradients and gathers of
    parameters joined."""
    program, nbytes = plan.program, plan.bucket_bytes
    return planned(program, gradient_messages(program, nbytes), gather_messages(program, nbytes))


def _wide(axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    return tuple(a for a in axes if mesh.sizes[mesh.names.index(a)] > 1)


@cache
def _recorder() -> type[TorchDispatchMode]:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self, groups: AxisGroups) -> None:
            super().__init__()
            self.sent: SentCounts = Counter()
            self._kinds = groups.kinds
            self._axes = {name: axes for axes, name in groups.names.items()}

        def __torch_dispatch__(
            self,
            func: OpOverload,
            types: object,
            args: tuple[TorchOperand, ...] = (),
            kwargs: dict[str, TorchOperand] | None = None,
        ) -> Tree:
            made = func(*args, **(kwargs or {}))
            name = func._schema.name.rpartition("::")[2]
            if func.namespace == "_c10d_functional" and name in _KINDS:
                kind, axes = _KINDS[name], self._axes[args[-1]]
                if self._kinds:
                    kind = self._kinds[-1]
                elif kind == "all_to_all" and sum(1 for n in args[1] if n) <= 1:
                    kind = "permute"
                # Each tensor of one message is a collective of the plan.
                several = zip(args[0], made, strict=True) if isinstance(made, list) else [(args[0], made)]
                for both in several:
                    self.sent[kind, axes, max(t.numel() * t.element_size() for t in both)] += 1
            return made

    return Recorder


def recorded(groups: AxisGroups) -> TorchDispatchMode:
    """A context manager that records collectives: ``with recorded(groups) as found: …``.

    Afterwards ``found.sent`` has the collectives that ran over these groups.
    """
    return _recorder()(groups)


def sent_by_one_rank(plan: TorchPlan) -> SentCounts:
    """The collectives of a step on this rank of ``torch.distributed``, run on fake tensors.

    The backend of the process group may be "fake".
    """
    return _sent(plan, plan.groups("cpu"))


def sent_by_rank(plan: TorchPlan, rank: int) -> SentCounts:
    """The collectives of a step on any rank, run on fake tensors. It needs no process group."""
    return _sent(plan, groups_of_one(plan, rank))


def _sent(plan: TorchPlan, groups: AxisGroups) -> SentCounts:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), recorded(groups) as found:
        imagined_step(plan, groups).backward(*imagined_batch(plan))
    return SentCounts(found.sent)
