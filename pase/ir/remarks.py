"""Remarks: what a price assumes, and what speaks against it, for readers of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Remark", "RemarkKind"]

RemarkKind = Literal[
    "assumed", "turns", "opaque", "unknown", "empty", "activations", "step", "communication", "state"
]
"""What a remark is about.

assumed: how the program runs, as a user may state it (which branch is taken) or an executor does it. The others are
doubts: turns: how often a loop turns is not known. opaque: an op that is not split. unknown: work that is not priced.
empty: no parameters, no gradients or no FLOPs. activations: more than the program writes. step: shorter than the
machine allows. communication: sums over devices that nothing sends. state: a next value that the program computes and
drops.
"""


@dataclass(frozen=True)
class Remark:
    """One remark. what: a sentence. where: the op and the user's line that it is about, if it is about one.

    >>> str(Remark("turns", "the loop is priced as one turn", "train.py:3"))
    'the loop is priced as one turn (train.py:3)'
    >>> Remark("assumed", "the first branch is priced").doubtful, Remark("empty", "no parameters").doubtful
    (False, True)
    """

    kind: RemarkKind
    what: str
    where: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RemarkKind):
            raise ValueError(f"no kind of remark '{self.kind}': one of {', '.join(get_args(RemarkKind))}")

    def __str__(self) -> str:
        return self.what if not self.where or self.where in self.what else f"{self.what} ({self.where})"

    @property
    def doubtful(self) -> bool:
        """Does it speak against the plan, rather than state what is assumed?"""
        return self.kind != "assumed"

    def to_json(self) -> dict[str, str]:
        """As commands print it with --json."""
        return {"kind": self.kind, "what": self.what, "where": self.where}
