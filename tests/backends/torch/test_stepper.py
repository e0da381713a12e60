"""A train step checks its gradients at the first call, and never again."""

from __future__ import annotations

from typing import Any

import pytest

from pase.backends.torch.stepper import TorchStep, checked
from pase.errors import PaseError

pytestmark = pytest.mark.torch


class Recorded:
    """A parallel module, its optimizer and a check's result, that note the calls."""

    def __init__(self, off: bool = False) -> None:
        self.calls: list[str] = []
        self.off = off

    def check(self, *batch: Any) -> Recorded:
        self.calls.append(f"check {batch}")
        return self

    def raise_if_off(self) -> None:
        if self.off:
            raise PaseError("a gradient is off")

    def backward(self, *batch: Any) -> float:
        self.calls.append(f"backward {batch}")
        return 0.5

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def step(self) -> None:
        self.calls.append("step")


UPDATE = ["zero_grad", "backward (1, 2)", "step"]


@pytest.mark.parametrize("check", [False, True])
def test_gradients_are_checked_before_the_first_update_only(check: bool) -> None:
    parallel: Any = Recorded()
    step = TorchStep(parallel=parallel, optimizer=parallel, check=check)
    assert [step(1, 2), step(1, 2)] == [0.5, 0.5]
    assert parallel.calls == ["check (1, 2)"] * check + 2 * UPDATE
    assert step.result is (parallel if check else None)


def test_nothing_is_updated_if_a_gradient_is_off() -> None:
    parallel: Any = Recorded(off=True)
    with pytest.raises(PaseError, match="off"):
        TorchStep(parallel=parallel, optimizer=parallel, check=True)(1, 2)
    assert parallel.calls == ["check (1, 2)"]
    with pytest.raises(PaseError, match="off"):
        checked(parallel, (3,))
