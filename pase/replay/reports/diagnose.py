"""Why a run is slow: findings in plain words, each with what it costs, what to change, and where to see it.

What happened is read off the trace (``breakdown``). What a cause costs is the replayed iteration minus the replayed
iteration without the cause, where the replay is to be believed; costs of different findings overlap and do not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from pase.pages.parts import in_notebook
from pase.replay.measurement.breakdown import Breakdown, breakdowns
from pase.replay.measurement.model import Measured
from pase.replay.measurement.stragglers import Straggler, stragglers
from pase.replay.reports.findings import LOOKS, Evidence, Finding, Scene, remarks
from pase.replay.reports.trust import Run

__all__ = ["Diagnosis", "Evidence", "Finding", "diagnose_run"]

_WORTH = 0.005
"""Findings that concern less than this share of the iteration are left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Diagnosis:
    """All findings of a run, most expensive first, with the replay and the measurements that they rest on."""

    run: Run
    findings: tuple[Finding, ...]
    breakdowns: tuple[Breakdown, ...] = field(default=())
    stragglers: tuple[Straggler, ...] = field(default=())

    @property
    def iteration_ns(self) -> float:
        """The replayed iteration, which costs are differences to."""
        return self.run.replayed_ns

    def _repr_html_(self) -> str:
        """For notebooks: the findings with what they cost."""
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


def diagnose_run(m: Measured) -> Diagnosis:
    """Findings about the steady iterations of a measured run."""
    run = Run(measured=m)
    parts = tuple(breakdowns(m))
    late = tuple(stragglers(m, run.iterations))
    scene = Scene(run=run, parts=parts, late=late)
    found = [f for look in LOOKS for f in look(scene)]
    found = [f for f in found if max(f.cost_ns, f.measured_ns) >= _WORTH * run.measured_ns]
    found.sort(key=lambda f: (-f.cost_ns, -f.measured_ns))
    found.extend(remarks(run))
    return Diagnosis(run=run, findings=tuple(found), breakdowns=parts, stragglers=late)
