"""Puts a plan's predictions beside what PyTorch itself keeps and sends in a rank's step (``pase verify``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pase.backends.audit.torch import SentCounts, planned, planned_in_step, sent_by_rank
from pase.backends.torch.memory import TorchMemory
from pase.backends.torch.plan import torch_plan
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.machine import Machine
from pase.plan.types import PlanData

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["SentKind", "VerifiedTorch", "verify_torch"]


@dataclass(frozen=True, kw_only=True)
class SentKind:
    """Collectives of one kind in a step of one rank. nbytes: of the larger local buffers, all together.

    listed: how many the plan lists. planned: how many messages they are joined in. sent: how many were dispatched.
    """

    listed: int
    listed_bytes: int
    planned: int
    sent: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class VerifiedTorch:
    """A rank's step as PyTorch runs it op by op, and as the plan predicts it.

    target: the machine. memory: the peak by kind, predicted and tracked, without ``workspace_bytes`` for the library of
    matrix products, which fake tensors do not have. usable_bytes: what a device has for both. collectives: kind -> how
    many were listed and sent. exact: whether each message has the kind, the mesh axes and the bytes that the plan says.
    """

    target: str
    memory: TorchMemory
    workspace_bytes: int
    usable_bytes: int
    collectives: Mapping[str, SentKind]
    exact: bool
    text: str = dataclasses.field(default="", repr=False)
    """The rank's program of a micro-batch, as Python code."""

    @property
    def bytes_equal(self) -> bool:
        """Whether the step sends what the plan lists, by kind."""
        return all(s.sent_bytes == s.listed_bytes for s in self.collectives.values())

    @property
    def fits(self) -> bool:
        """Whether the tracked peak fits into a device."""
        return self.memory.total + self.workspace_bytes <= self.usable_bytes

    def to_json(self) -> JsonObject:
        """What ``pase verify --json`` prints."""
        own: JsonObject = {
            "target": self.target,
            "workspace_bytes": self.workspace_bytes,
            "usable_bytes": self.usable_bytes,
            "exact": self.exact,
        }
        sent = {kind: dataclasses.asdict(s) for kind, s in self.collectives.items()}
        said = {"bytes_equal": self.bytes_equal, "fits": self.fits}
        return own | {"memory": self.memory.to_json(), "collectives": sent} | said

    def __str__(self) -> str:
        from pase.files.terminal import text_of

        return text_of(self.report())

    def report(self) -> list[RichTable | str]:
        """Tables and lines for people."""
        from rich.table import Table

        table = Table(title="collectives of a step")
        for name in ("", "listed", "in messages", "sent", "bytes listed", "bytes sent"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        for kind, s in self.collectives.items():
            counts = (str(n) for n in (s.listed, s.planned, s.sent))
            table.add_row(kind, *counts, bytes_text(s.listed_bytes), bytes_text(s.sent_bytes))
        messages = "those of the plan" if self.exact else "NOT those of the plan"
        return [
            self.memory.table(),
            *([table] if self.collectives else []),
            f"{'fits' if self.fits else 'DOES NOT FIT'}: {bytes_text(self.memory.total)}, and a workspace of "
            f"{bytes_text(self.workspace_bytes)} for products, of {bytes_text(self.usable_bytes)} on {self.target}",
            f"messages are {messages}",
            "the step ran op by op on fake tensors; nothing was computed or sent",
        ]


def verify_torch(plan: PlanData, machine: Machine, rank: int = 0) -> VerifiedTorch:
    """Run a rank's step of a plan on fake tensors, and compare.

    plan: priced on the machine, with its model attached.

    Raises PaseError if the plan is pipelined, if there is no such rank, or if the model has branches that depend on
    data.
    """
    if plan.pipeline is not None:
        raise PaseError(
            "it is pipelined, and only the step of a plan without stages is followed",
            where=f"the plan for '{plan.model}'",
            fix="compile the model without stages",
        )
    run = torch_plan(plan)
    listed, messages, sent = planned(run.program), planned_in_step(run), sent_by_rank(run, rank)
    memory, workspace = run.memory(rank), machine.device.workspace_bytes
    if (account := memory.predicted) is not None:
        memory = replace(memory, predicted=replace(account, buffers=account.buffers - workspace))
    return VerifiedTorch(
        target=machine.name,
        memory=memory,
        workspace_bytes=workspace,
        usable_bytes=machine.device.usable_bytes,
        collectives=_kinds(listed, messages, sent),
        exact=sent == messages,
        text=run.code(rank),
    )


def _kinds(listed: SentCounts, messages: SentCounts, sent: SentCounts) -> dict[str, SentKind]:
    def many(counts: SentCounts, kind: str) -> tuple[int, int]:
        some = [(n, times) for (k, _, n), times in counts.items() if k == kind]
        return sum(times for _, times in some), sum(n * times for n, times in some)

    made = {}
    for kind in sorted({k for counts in (listed, sent) for k, *_ in counts}):
        (a, nbytes), (b, _), (c, sent_bytes) = (many(x, kind) for x in (listed, messages, sent))
        made[kind] = SentKind(listed=a, listed_bytes=nbytes, planned=b, sent=c, sent_bytes=sent_bytes)
    return made
