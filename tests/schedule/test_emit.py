"""Bucket plans as settings of other programs."""

from __future__ import annotations

import pytest

from bench.cases.schedules import vgg19
from pase.schedule import Options, get_policy
from pase.schedule.emit import ddp_caps_mb, pgle_text, xla_flags


def test_emitters() -> None:
    problem = vgg19()
    plan = get_policy("fifo").make(problem, Options())
    largest = max(t.nbytes for t in problem.tensors)
    assert xla_flags(problem, plan)[0] == f"--xla_gpu_all_reduce_combine_threshold_bytes={largest}"
    lines = pgle_text(problem, plan).splitlines()
    assert len(lines) == 6
    assert lines[0].startswith('costs { name: "all-reduce-start" cost_us: 8651.0')
    assert lines[1].startswith('costs { name: "all-reduce-start.1" cost_us: 31754.0')
    assert ddp_caps_mb(problem, plan)[0] == pytest.approx(problem.tensors[5].nbytes / 2**20, abs=1e-3)
