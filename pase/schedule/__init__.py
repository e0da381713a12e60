"""Communication scheduling: which tensors travel together, in which order, on which link, and when they apply.

`ScheduleProblem` in, `BucketPlan` out, and one evaluator for all policies. Papers and figures: docs/schedule.md.
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

# What they were called before a compilation and a trace had problems of their own.
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
