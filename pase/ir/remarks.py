"""Remarks for readers of a plan: what its cost assumes, and what makes the cost doubtful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Remark", "RemarkKind"]

RemarkKind = Literal[
    "assumed", "trip_count", "opaque", "unknown", "empty", "activations", "step", "communication", "state"
]
"""What a remark is about.

assumed: how the program runs, as stated by the user (which branch is taken) or decided by an executor.
The other kinds are doubts:
trip_count: the trip count of a loop is not known. opaque: an op is not split. unknown: some work is not priced.
empty: there are no parameters, no gradients or no FLOPs. activations: more activations than the program writes.
step: the step is shorter than the machine allows. communication: sums over devices that nothing sends.
state: the program computes a next value of a state and drops it.
"""


@dataclass(frozen=True)
class Remark:
    """One remark. what: a sentence. where: the op and the user's line that it is about, if there is one.

    >>> str(Remark("trip_count", "the loop is priced as one iteration", "train.py:3"))
    'the loop is priced as one iteration (train.py:3)'
    >>> Remark("assumed", "the first branch is priced").doubtful, Remark("empty", "no parameters").doubtful
    (False, True)
    """

    kind: RemarkKind
    what: str
    where: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RemarkKind):
            raise ValueError(
                f"'{self.kind}' is not a kind of remark; the kinds are {', '.join(get_args(RemarkKind))}"
            )

    def __str__(self) -> str:
        return self.what if not self.where or self.where in self.what else f"{self.what} ({self.where})"

    @property
    def doubtful(self) -> bool:
        """Whether the remark makes the cost doubtful rather than states an assumption."""
        return self.kind != "assumed"

    def to_json(self) -> dict[str, str]:
        """The remark as commands print it with ``--json``."""
        return {"kind": self.kind, "what": self.what, "where": self.where}
