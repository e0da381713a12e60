"""A pipelined plan run stage by stage gives the unsharded step's loss, gradients and parameters, in float64."""

from __future__ import annotations

import jax
import pytest

from pase.backends.audit.xla import worst_difference
from pase.backends.jax.pipeline.arrays import StackCut
from tests.backends.jax.pipeline.staged import chained, planned, staged
from tests.pipeline.small import MICRO, OPTIMIZER, arguments, reference

pytestmark = pytest.mark.usefixtures("double")

CASES = [
    ("1f1b", 1, (1, 3), True, "none", None),
    ("zb-h1", 1, (3, 1), True, "light", 1),
    ("zb-v", 2, (1, 1, 1, 1), False, "all", 3),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "chunks", "cuts", "scan", "remat", "seed"), CASES)
def test_step_equals_unsharded(name, chunks, cuts, scan, remat, seed):
    plan = staged(planned(scan, remat), name, chunks, cuts, seed)
    params, batch = arguments(scan)
    jp, whole = plan.jax, reference(scan)
    placed, there = jp.device_put(params, batch)
    _, grads = jp.value_and_grad()(placed, there)
    state = jp.init(OPTIMIZER, placed)
    step = jp.train_step(OPTIMIZER)
    updated, state, loss = step(placed, state, there)
    assert abs(float(loss) - whole.loss) < 1e-12
    assert worst_difference(whole.gradients, jp.gathered(grads)) < 1e-12
    assert worst_difference(whole.parameters, jp.gathered(updated)) < 1e-12
    assert jax.tree.structure(updated) == jax.tree.structure(placed)
    *_, second = step(updated, state, there)
    assert float(second) < float(loss)
    assert (
        isinstance(placed["blocks"]["up"], StackCut)
        if scan
        else placed["blocks"][0]["up"].sharding.num_devices == 4
    )
    assert updated["wte"].sharding.num_devices == (4 if name == "zb-v" else 8)  # zb-v: both ends on one rank


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("gpipe", 1), ("eager-1f1b", 1), ("zb-h2", 1), ("interleaved", 2), ("dualpipev", 2)],
)
def test_every_schedule_runs_its_own_list(name, chunks):
    """The schedules that the test above leaves out, on a small chain. The function's aux is stacked."""
    plan, w, x, ((loss, _), grads) = chained()
    jp = staged(plan, name, chunks, (1,) * 4 if chunks == 2 else (2, 2)).jax
    (got, aux), mine = jp.value_and_grad()(w, x)
    assert abs(float(got - loss)) < 1e-14 and aux["x"].shape == (MICRO,)
    assert worst_difference(grads, jp.gathered(mine)) < 1e-14
    assert abs(float(jp.loss()(w, x)[0] - loss)) < 1e-14
    if name == "dualpipev":  # the second rank's two stages do the same with other layers
        programs = jp.on(None).programs
        assert programs[1] is programs[2] and len({id(p) for p in programs}) == 3
