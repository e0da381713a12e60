"""Helper: a plan and its page, which tests of several files read."""

from __future__ import annotations

from functools import cache

import pase
from pase.api import Plan
from pase.questions.explain import explain
from pase.questions.report import report_page


@cache
def gpt2_plan() -> Plan:
    return pase.compile("zoo:gpt2?layers=2&batch=16", devices=8, mesh="2x4", baselines=False)


@cache
def gpt2_page() -> str:
    return report_page(explain(gpt2_plan(), time_limit=0))
