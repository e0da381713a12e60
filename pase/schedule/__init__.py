"""Communication scheduling: which tensors share a message, in which order and on which link messages are sent, and when
updates are applied.

A policy takes a `ScheduleProblem` and returns a `BucketPlan`; one evaluator judges all policies.
docs/explanation/bucket-plans.md has the papers, and docs/evidence/bucket-plans.md the figures.
"""

from pase.schedule.bound import lower_bound_s
from pase.schedule.compare import PolicyResult, compare_policies
from pase.schedule.plan import BucketPlan, Message, Piece, Update, check_plan, whole
from pase.schedule.registry import Options, all_policies, get_policy
from pase.schedule.simulate import Evaluation, as_sequence, evaluate
from pase.schedule.types import (
    AxisGroup,
    ComputeBlock,
    Link,
    ScheduleProblem,
    SendTime,
    Transfer,
    problem_from_times,
)

# Former names of these types, kept for existing programs.
Problem, Tensor = ScheduleProblem, Transfer

__all__ = [
    "AxisGroup",
    "BucketPlan",
    "ComputeBlock",
    "Evaluation",
    "Link",
    "Message",
    "Options",
    "Piece",
    "PolicyResult",
    "Problem",
    "ScheduleProblem",
    "SendTime",
    "Tensor",
    "Transfer",
    "Update",
    "all_policies",
    "as_sequence",
    "check_plan",
    "compare_policies",
    "evaluate",
    "get_policy",
    "lower_bound_s",
    "problem_from_times",
    "whole",
]
