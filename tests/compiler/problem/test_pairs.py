"""NAME=VALUE texts: those that people write, and those that are refused with the flag and what to write."""

from __future__ import annotations

import pytest

from pase.compiler.problem.pairs import parse_chances, parse_places, parse_sizes
from pase.errors import PaseError


def test_pairs_are_read_as_they_are_written() -> None:
    assert parse_sizes(["batch=64", " seq = 128"]) == {"batch": 64, "seq": 128}
    assert parse_places(["0=1", "2=1.batch_stats.0"]) == {0: (1,), 2: (1, "batch_stats", 0)}
    assert parse_chances(["cond0=0.9,0.1", "a=b=1"]) == {"cond0": (0.9, 0.1), "a=b": (1.0,)}
    assert parse_sizes(None) == parse_places(None) == parse_chances(()) == {}


@pytest.mark.parametrize(
    ("parse", "flag", "wrong"),
    [
        (
            parse_sizes,
            "--dim",
            ["batch", "=3", "batch=", "batch=-1", "batch=1.5", "batch=٣", "batch=" + "9" * 19],
        ),
        (parse_places, "--carry", ["1", "x=1", "-1=1", "=1", "1="]),
        (parse_chances, "--chance", ["cond0", "cond0=a,b", "cond0=,", "=0.5"]),
    ],
)
def test_what_is_no_pair_is_refused(parse, flag, wrong) -> None:  # type: ignore[no-untyped-def]
    for text in wrong:
        with pytest.raises(PaseError) as e:
            parse([text])
        assert e.value.where == flag and text in e.value.what and flag in e.value.fix
