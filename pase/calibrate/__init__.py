"""Measures a machine and fits the tables of its machine file. ``pase calibrate`` is the command.

suite(...)      returns the tasks to measure, coarse before fine
session(...)    measures them within a time budget, through an implementation of ``Bench``
fit(...)        fits the samples to a Machine, or raises Refused if they are implausible
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
