"""Diagnoses why a run is slow. Each finding has a cost, advice on what to change, and evidence in the trace.

What happened is measured in the trace (``breakdown``). The cost of a cause is the replayed iteration minus the replayed
iteration without the cause, if the replay can be trusted. Costs of different findings overlap and do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from pase.pages.parts import in_notebook
from pase.replay.measurement.breakdown import Breakdown, breakdowns
from pase.replay.measurement.model import Measured
from pase.replay.measurement.spending import Spending, spendings
from pase.replay.measurement.stragglers import Straggler, stragglers
from pase.replay.measurement.transfers import CollectiveCalls, transfers
from pase.replay.reports.advice import advice
from pase.replay.reports.findings import LOOKS, Evidence, Finding, Scene, remarks
from pase.replay.reports.trust import Run

__all__ = ["Diagnosis", "Evidence", "Finding", "MoreAdvice", "diagnose_run"]

_SAME = 0.95
"""The part of the gain of free collectives from which hiding those of one kind is the same finding."""
_WORTH = 0.005
"""Findings that concern less than this fraction of the iteration are left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """All findings of a run, most expensive first, with the replay and the measurements on which they are based."""

    run: Run
    findings: tuple[Finding, ...]
    breakdowns: tuple[Breakdown, ...] = field(default=())
    stragglers: tuple[Straggler, ...] = field(default=())
    spent: tuple[Spending, ...] = field(default=())
    transfers: tuple[CollectiveCalls, ...] = field(default=())

    @property
    def iteration_ns(self) -> float:
        """The replayed iteration, from which costs are computed."""
        return self.run.replayed_ns

    def _repr_html_(self) -> str:
        """Returns a table of the findings with their costs, for notebooks."""
        rows = (
            (
                escape(f.title),
                f"{f.cost_ns / 1e6:.2f}" if f.cost_ns else "",
                f"{f.measured_ns / 1e6:.2f}" if f.measured_ns else "",
                escape(f.detail),
            )
            for f in self.findings
        )
        line = f"An iteration takes {self.run.measured_ns / 1e6:.2f} ms; replayed {self.iteration_ns / 1e6:.2f} ms"
        return in_notebook(line, ["finding", "costs ms>", "of measured ms>", "what to do"], rows)


MoreAdvice = Callable[[Scene, Sequence[Spending]], list[Finding]]
"""Finds what to change in a run, and what that saves."""


def _of_communication_once(found: list[Finding]) -> list[Finding]:
    """The findings; what to do about the one kind of collective that is exposed joins the finding about all of them,
    because both are of the same time."""
    apart = [f for f in found if f.kind == "overlap"]
    whole = next((f for f in found if f.kind == "exposed-communication"), None)
    if whole is None or len(apart) != 1 or apart[0].cost_ns < _SAME * whole.cost_ns:
        return found
    joined = replace(whole, detail=f"{whole.detail} {apart[0].detail}")
    return [joined if f is whole else f for f in found if f is not apart[0]]


def diagnose_run(m: Measured, looks: Sequence[MoreAdvice] = ()) -> Diagnosis:
    """Returns the findings about the steady iterations of a measured run.

    looks: find more, such as other splits of the run (``pase.bridges.restrategy``).
    """
    run = Run(measured=m)
    parts = tuple(breakdowns(m))
    late = tuple(stragglers(m, run.iterations))
    spent = tuple(spendings(m))
    scene = Scene(run=run, parts=parts, late=late)
    found = [f for look in LOOKS for f in look(scene)] + advice(scene, spent)
    found += [f for look in looks for f in look(scene, spent)]
    found = _of_communication_once(found)
    # A cause cannot cost more than the time that it takes.
    found = [replace(f, cost_ns=min(f.cost_ns, f.measured_ns)) if f.measured_ns else f for f in found]
    found = [f for f in found if max(f.cost_ns, f.measured_ns) >= _WORTH * run.measured_ns]
    found.sort(key=lambda f: (-f.cost_ns, -f.measured_ns))
    found.extend(remarks(run))
    return Diagnosis(
        run=run,
        findings=tuple(found),
        breakdowns=parts,
        stragglers=late,
        spent=spent,
        transfers=tuple(transfers(m, run.iterations)),
    )
