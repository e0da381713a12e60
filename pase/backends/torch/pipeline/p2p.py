"""Messages between the stages of a pipeline. Each rank sends to the rank with the same place in another stage's mesh.

A channel carries one kind of message from one rank to another. It has its own process group, so that a library that
sends in order never waits for messages of other channels. The messages of a channel arrive in the order in which they
are sent, and are kept until they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from pase.backends.torch.spmd.process_groups import STAGE, AxisGroups
from pase.pipeline.types import Kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    from pase.backends.torch.pipeline.plan import TorchPipeline

__all__ = ["Letter", "StageLinks"]

Errand = Literal["there", "back", "weight", "sum"]
"""there: activations to the next stage. back: their gradients to the previous stage. weight: a parameter to a stage
that reads it but does not store it. sum: the gradient of such a parameter, to the stage that stores it."""
Channel = tuple[Errand, int, int]
"""(errand, sending rank, receiving rank)."""


class Letter(NamedTuple):
    """A message from stage src to stage dst. what: the number of a micro-batch, or the tensor of a parameter."""

    errand: Errand
    src: int
    dst: int
    what: int | str


@dataclass(kw_only=True)
class StageLinks:
    """The messages of this rank.

    rank: the pipeline rank that it belongs to.
    inner: its row-major number in the mesh of a stage.
    channels: the channels that it sends or receives on.
    """

    plan: TorchPipeline
    groups: AxisGroups
    device: torch.device
    rank: int
    inner: int
    channels: dict[Channel, ProcessGroup]
    coming: dict[Channel, Iterator[Letter]] = field(default_factory=dict)
    arrived: dict[Letter, Sequence[Tensor]] = field(default_factory=dict)
    under_way: list[tuple[Work | None, Tensor]] = field(default_factory=list)

    @staticmethod
    def of(plan: TorchPipeline, groups: AxisGroups, device: torch.device) -> StageLinks:
        """Create the groups of all channels. Every rank must call it."""
        import torch.distributed as dist

        rank_of, size = plan.schedule.rank_of, groups.mesh.devices
        needed: set[Channel] = set()
        for k in range(len(rank_of) - 1):
            needed |= {("there", rank_of[k], rank_of[k + 1]), ("back", rank_of[k + 1], rank_of[k])}
        for t, k in plan.borrowed:
            owner = rank_of[plan.stage_of_parameter[t]]
            needed |= {("weight", owner, rank_of[k]), ("sum", rank_of[k], owner)}
        rank, inner = divmod(dist.get_rank(), size)
        channels = {}
        for errand, a, b in sorted(needed):
            for at in range(size) if a != b else ():
                group = dist.new_group([a * size + at, b * size + at])
                if at == inner and rank in (a, b):
                    channels[errand, a, b] = group
        made = StageLinks(plan=plan, groups=groups, device=device, rank=rank, inner=inner, channels=channels)
        made._connect()
        return made

    def _connect(self) -> None:
        """Send a number along every channel, in the same order on all ranks. A library may connect two ranks at their
        first message and block both until then, which the order of a schedule does not allow for."""
        import torch

        for errand, a, b in self.channels:
            x = torch.zeros(1, device=self.device)
            if self.rank == a:
                self._sent(x, (errand, a, b))
            else:
                self._receive(x, (errand, a, b))
        self.end()

    def _sent(self, x: Tensor, channel: Channel) -> None:
        import torch.distributed as dist

        to = channel[2] * self.groups.mesh.devices + self.inner
        self.under_way.append((dist.isend(x, to, group=self.channels[channel]), x))

    def _receive(self, x: Tensor, channel: Channel) -> None:
        import torch.distributed as dist

        dist.recv(x, channel[1] * self.groups.mesh.devices + self.inner, group=self.channels[channel])

    def begin(self) -> None:
        """Prepare for a step."""
        self.coming = {c: self._letters(*c) for c in self.channels if c[2] == self.rank}

    def end(self) -> None:
        """Finish a step: wait until all messages are sent."""
        for work, _ in self.under_way:
            if work is not None:
                work.wait()
        self.under_way.clear()

    def _letters(self, errand: Errand, a: int, b: int) -> Iterator[Letter]:
        """The messages of a channel, in the order in which they are sent."""
        plan, rank_of = self.plan, self.plan.schedule.rank_of
        if errand in ("weight", "sum"):
            for t, k in plan.borrowed:
                src, dst = (
                    (plan.stage_of_parameter[t], k) if errand == "weight" else (k, plan.stage_of_parameter[t])
                )
                if (rank_of[src], rank_of[dst]) == (a, b) and (errand == "weight" or plan.trains(t)):
                    yield Letter(errand, src, dst, t)
            return
        for action in plan.schedule.orders[a]:
            dst = action.stage + (1 if errand == "there" else -1)
            wanted = (Kind.FORWARD,) if errand == "there" else (Kind.BACKWARD, Kind.INPUT)
            if action.kind in wanted and 0 <= dst < len(rank_of) and rank_of[dst] == b:
                yield Letter(errand, action.stage, dst, action.micro)

    def send(self, letter: Letter, tensors: Sequence[Tensor]) -> None:
        """Send a message from a stage that this rank has."""
        a, b = (self.plan.schedule.rank_of[k] for k in (letter.src, letter.dst))
        if a == b:
            self.arrived[letter] = tensors
            return
        self.under_way = [(w, x) for w, x in self.under_way if w is not None and not w.is_completed()]
        for x in tensors:
            self._sent(x.contiguous(), (letter.errand, a, b))

    def receive(self, letter: Letter) -> Sequence[Tensor]:
        """The contents of a message to a stage that this rank has. Earlier messages of the same channel are kept."""
        a, b = (self.plan.schedule.rank_of[k] for k in (letter.src, letter.dst))
        while letter not in self.arrived:
            received = next(self.coming[letter.errand, a, b])
            tensors = self.blank(received)
            for x in tensors:
                self._receive(x, (letter.errand, a, b))
            self.arrived[received] = tensors
        return self.arrived.pop(letter)

    def blank(self, letter: Letter) -> list[Tensor]:
        """Empty tensors for the contents of a message."""
        import torch

        plan = self.plan
        if letter.errand == "there":
            results = [plan.stage_result(letter.src, t) for t in plan.stages[letter.src].leaves]
        elif letter.errand == "back":
            results = [
                plan.stage_result(letter.src, t) for t in plan.stages[letter.src].enters if plan.comes_back(t)
            ]
        else:
            owner = letter.src if letter.errand == "weight" else letter.dst
            results = [plan.stage_result(owner, str(letter.what))]
        out = []
        for r in results:
            dtype = getattr(torch, plan.traced.graph.tensors[r.tensor].dtype)
            layout = r.layout if letter.errand in ("there", "back") else r.gradient
            shape = layout.local_shape(r.shape, self.groups.mesh)
            out.append(torch.empty(shape, dtype=dtype, device=self.device))
        return out

    def of_all_stages(self, x: Tensor) -> Tensor:
        """Gather a number from each pipeline rank, on all of them."""
        import torch
        import torch.distributed as dist

        every = [torch.empty_like(x, device=self.device) for _ in range(self.plan.schedule.ranks)]
        assert self.groups.everywhere is not None
        dist.all_gather(every, x.to(self.device), group=self.groups.everywhere[STAGE].get_group())
        return torch.stack(every)

    def from_last(self, loss: Tensor | None) -> Tensor:
        """The loss on every rank. Only the rank of the last stage has it before."""
        import torch
        import torch.distributed as dist

        rank = self.plan.schedule.rank_of[-1]
        (value,) = self.plan.traced.program.losses
        if loss is None:
            like = next(n for n in self.plan.traced.scope.nodes if n.name == value).meta["val"]
            loss = torch.empty((), dtype=like.dtype, device=self.device)
        assert self.groups.everywhere is not None
        group = self.groups.everywhere[STAGE].get_group()
        dist.broadcast(loss, rank * self.groups.mesh.devices + self.inner, group=group)
        return loss
