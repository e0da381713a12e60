"""Rows in child processes: one that dies costs its own row alone."""

from __future__ import annotations

from bench.processes import forks_of, row_apart, rows_apart

DIES = "__import__('os').abort()"


def test_the_cases_after_one_that_aborts_run_in_another_child():
    cases = [("1 + 1",), (DIES,), (DIES,), ("2 + 2",)]
    found = list(rows_apart(forks_of([]), eval, cases, cpu_s=60))
    assert [case for case, _ in found] == cases
    assert [row if isinstance(row, int) else row["end"] for _, row in found] == [2, "aborted", "aborted", 4]
    assert "exit -6" in found[1][1]["message"]


def test_a_case_that_takes_too_long_is_ended():
    (_, row), (_, last) = rows_apart(forks_of([]), eval, [("[0 for x in iter(int, 1)]",), ("3",)], cpu_s=0.5)
    assert row["end"] == "too long" and last == 3


def test_a_row_of_its_own_process_has_its_cpu_seconds_or_an_error():
    assert row_apart(forks_of([]), eval, "{'a': 1}", cpu_s=60).keys() == {"a", "cpu_s"}
    assert row_apart(forks_of([]), eval, DIES, cpu_s=60)["aborted"] == -6
