"""Measuring a machine: tasks, a timer, a journal, fits that refuse nonsense; ``pase calibrate`` runs them.

suite(...)      what to measure, coarse before fine
session(...)    measures it within a budget, through anything that answers ``Bench``
fit(...)        samples -> Machine, or Refused
"""

from __future__ import annotations

from pase.calibrate.fit import Fitted, Refused, fit
from pase.calibrate.journal import Journal
from pase.calibrate.session import Settings, session
from pase.calibrate.suite import Target, suite
from pase.calibrate.types import Bench, Level, Sample, Task

__all__ = [
    "Bench",
    "Fitted",
    "Journal",
    "Level",
    "Refused",
    "Sample",
    "Settings",
    "Target",
    "Task",
    "fit",
    "session",
    "suite",
]
