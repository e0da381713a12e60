"""The ops of one micro-batch: tensor parallelism divides products, and replicas and stages are refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pase.errors import Infeasible, PaseError
from pase.stated.ops import StatedOps, stated_ops
from pase.tables.itemize import LocalWork

MODEL = "zoo:llama3_8b?batch=2&seq=64&layers=2&vocab=1024&remat=0"


def products(ops: StatedOps) -> Mapping[str, float]:
    """Return node -> FLOP of its products on one device."""

    def flops(work: tuple[LocalWork, ...]) -> float:
        return sum(w.flops * w.times for w in work if w.kind == "matmul")

    return {name: flops(work) for name, work in ops.work.items() if flops(work)}


def test_two_ranks_have_half_of_every_product() -> None:
    one, two = stated_ops(MODEL, "tp=1", "h100x8"), stated_ops(MODEL, "tp=2", "h100x8")
    assert one.between == () and {c.axes for c in two.between} == {("model",)}
    whole, half = products(one), products(two)
    assert whole.keys() == half.keys() and len(whole) > 5
    assert all(half[n] == pytest.approx(whole[n] / 2) for n in whole)
    assert one.parameters == two.parameters
    assert one.nbytes(of_parameters=True, phase="update") > two.nbytes(of_parameters=True, phase="update") > 0
    assert one.nbytes(of_parameters=False, phase="update") == 0


@pytest.mark.parametrize("strategy", ["dp=2", "fsdp=2", "pp=2", "tp=2,pp=2"])
def test_replicas_and_stages_are_refused(strategy: str) -> None:
    with pytest.raises(PaseError) as e:
        stated_ops(MODEL, strategy)
    assert strategy in str(e.value)


def test_heads_that_do_not_divide_are_infeasible() -> None:
    with pytest.raises(Infeasible, match="heads, hidden units"):
        stated_ops(MODEL, "tp=11")
