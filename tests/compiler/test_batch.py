"""The batch size with the highest throughput, for a made-up machine whose steps and bytes are known by batch size."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pase.compiler.batch import most_throughput
from pase.compiler.problem.options import CompileOptions
from pase.errors import Infeasible, PaseError
from pase.machine import load

H100 = load("h100x8")
GB = 1e9


def compiler(step_s: Callable[[int], float], nbytes: Callable[[int], float], asked: list[int]) -> Any:
    def compiled(model: str, params: object, batch: object, options: CompileOptions, say: object) -> Any:
        size = int(model.rpartition("batch=")[2])
        asked.append(size)
        limit = options.limit_bytes(H100)
        if limit is not None and options.memory_limit != "machine" and nbytes(size) > limit:
            raise Infeasible("too large")
        plan = SimpleNamespace(cost=step_s(size), memory=SimpleNamespace(total=nbytes(size)))
        return SimpleNamespace(plan=plan, problem=SimpleNamespace(machine=H100), options=options, size=size)

    return compiled


def best(model: str = "zoo:mlp", **options: Any) -> tuple[Any, list[int]]:
    asked = list[int]()
    step = options.pop("step", lambda n: 1 + n)
    held = options.pop("held", lambda n: n * GB)
    made = CompileOptions(devices=8, objective="throughput", **options)
    return most_throughput(compiler(step, held, asked), model, None, (), made, lambda _: None), asked


def test_the_largest_batch_that_fits_is_taken_where_it_is_the_fastest() -> None:
    found, asked = best("zoo:gpt2?layers=2", memory_limit=40 * GB)
    assert found.size == 32 and asked == [1, 2, 4, 8, 16, 32, 64, 32]
    assert found.options.baselines and found.options.objective == "latency"


def test_the_search_ends_where_throughput_falls() -> None:
    """Steps take 1 second up to a batch of 8, and grow with the square above it."""
    found, asked = best(step=lambda n: max(1.0, n * n / 64), held=lambda n: 1.0)
    assert found.size == 8 and asked == [1, 2, 4, 8, 16, 8]


def test_the_search_ends_where_twice_the_batch_gains_less_than_one_percent() -> None:
    """A batch of any size fits, in micro-batches, and the update of 1 second is spread over more and more examples."""
    found, asked = best(held=lambda n: 1.0)
    assert found.size == 64 and asked[-2:] == [128, 64]


def test_not_even_one_example_fits() -> None:
    with pytest.raises(Infeasible, match="not even a batch of one fits: too large"):
        best(memory_limit=1 * GB, held=lambda n: n * 2 * GB)
    with pytest.raises(Infeasible, match="not even a batch of one fits within"):
        best(held=lambda n: n * 100 * GB)


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("zoo:mlp", {"memory_limit": None}, "no memory limit"),
        ("zoo:mlp", {"cost_model": "paper"}, "costs in seconds"),
        ("zoo:gpt2?layers=2&batch=4", {}, "finds the batch size itself"),
    ],
)
def test_what_has_no_best_batch_is_refused(model: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PaseError, match=says) as e:
        best(model, **options)
    assert e.value.where == "objective='throughput'"
