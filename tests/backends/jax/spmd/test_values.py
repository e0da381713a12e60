"""Values on one device and the errors of a walk: what is a fault of pase, and what goes on as it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pase.backends.jax.spmd.values import (
    Arrivals,
    DeviceValue,
    LoweringFault,
    NotManual,
    besides_equations,
    faults_at,
    packed,
    unpacked,
)
from pase.errors import PaseError
from pase.tables.axis_layout import AxisLayout


def test_an_exception_becomes_a_fault_at_its_place() -> None:
    with pytest.raises(LoweringFault) as e, faults_at(lambda _: "'sin' at model.py:3"):
        raise KeyError("t99")
    assert e.value.where == "'sin' at model.py:3" and "KeyError: 't99'" in e.value.what
    assert isinstance(e.value.__cause__, KeyError)
    assert e.value.left.endswith("the whole program is left to XLA") and "report" in e.value.left


@pytest.mark.parametrize(
    "error",
    [
        PaseError("it is wrong"),
        NotManual("it cannot"),
        MemoryError(),
        KeyboardInterrupt(),
        RuntimeError("RESOURCE_EXHAUSTED: of 8 GB"),
    ],
)
def test_what_is_no_fault_of_pase_goes_on_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as e, faults_at(lambda _: "here"):
        raise error
    assert e.value is error


def test_a_reason_without_a_place_begins_with_the_reason() -> None:
    assert NotManual("it prints").why == "it prints"
    assert NotManual("it prints", where="'debug_print'").why == "'debug_print': it prints"


def test_an_error_outside_of_all_equations_names_the_arguments() -> None:
    assert besides_equations(ValueError("x")) == "the step's arguments and results"


def test_values_are_packed_and_unpacked_with_their_carriers() -> None:
    arrays = [np.full(2, float(k)) for k in range(4)]
    values = [
        DeviceValue(array=arrays[0], tensor="t0", layout=AxisLayout([None])),
        DeviceValue(array=arrays[1], tensor="t1", layout=AxisLayout([(0, 2)]), gradient_carrier=arrays[2]),
    ]
    assert packed(values) == [(arrays[0], None), (arrays[1], arrays[2])]
    assert unpacked(values, packed(values)) == values
    moved = unpacked(values, [(arrays[3], None), (arrays[0], arrays[1])])
    assert [v.tensor for v in moved] == ["t0", "t1"] and moved[0].array is arrays[3]
    assert moved[1].gradient_carrier is arrays[1] and moved[1].layout == ((0, 2),)


def gathering(arrivals: Arrivals, backward: Any = ()) -> list[int]:
    """How often a transfer is gathered by two readers, as a list with an entry for each time."""
    made: list[int] = []

    def make() -> str:
        made.append(1)
        return "gathered"

    transfer: Any = SimpleNamespace(tensor="w", backward=backward)
    value = DeviceValue(array="stored", tensor="w", gradient_carrier="carrier")  # type: ignore[arg-type]
    for _ in range(2):
        assert arrivals.of("3", transfer, "float32", make, value) == "gathered"
    return made


def test_a_parameter_is_gathered_by_the_first_of_its_readers() -> None:
    first = Arrivals()
    assert gathering(first) == [1] and first.found == {"3": "gathered"} and first.wide == {"3": "float32"}
    with_begins = Arrivals(begins=True)
    assert gathering(with_begins, backward=None) == [1]
    assert with_begins.found == {"3": ("gathered", "carrier", "stored")} and with_begins.wide == {"3": ""}
    assert gathering(Arrivals(given={"3": "gathered"})) == []


def test_a_parameter_that_is_read_where_nothing_can_be_hoisted_is_refused() -> None:
    with pytest.raises(PaseError, match="'w'") as e:
        gathering(Arrivals(barred="a while loop"))
    assert e.value.where == "a while loop" and "once='none'" in e.value.fix


def test_arrivals_of_a_loop_are_kept_under_its_path() -> None:
    outer = Arrivals()
    inner = outer.iteration({})
    gathering(inner)
    outer.leave("2.", inner, {"3": "stacked"})
    assert outer.found == {"2.": {"3": "stacked"}} and outer.wide == {"2.": {"3": "float32"}}
    given = Arrivals(given=outer.found)
    assert given.stacked("2.") == {"3": "stacked"} and given.stacked("4.") == {}
    assert given.iteration({"3": "one"}).given == {"3": "one"} and outer.iteration({"3": "one"}).given is None
