"""The comparison of a plan with a trace, as text and HTML."""

from pase.replay.reports.against import against_lines, against_section

REPORT = {
    "predicted_s": 0.010,
    "measured_s": 0.012,
    "ranks": (0, 1),
    "stages": [
        {
            "rank": rank,
            "stages": (rank, 3 - rank),
            "traced": (rank,),
            "predicted_s": predicted,
            "measured_s": 0.004,
            "predicted_idle_s": predicted,
            "measured_idle_s": 0.008,
        }
        for rank, predicted in ((0, 0.003), (1, None))
    ],
    "matched_by": "source line",
    "notes": ["the plan is <for> another machine"],
    "assumptions": [
        {"name": "idle", "difference_s": 0.003, "what": "the device is idle " * 9},
        {"name": "overlap", "difference_s": -0.001, "what": "more is hidden"},
        {"name": "rate", "difference_s": 1e-6, "what": "nothing much"},
    ],
    "rows": [
        {
            "group": group,
            "where": where,
            "predicted": predicted,
            "measured": measured,
            "predicted_s": 0.001,
            "measured_s": 0.002,
            "predicted_calls": 1.0,
            "measured_calls": 2.0,
        }
        for group, where, predicted, measured in (
            ("products", "model.py:3", ("a" * 99,), ("dot",)),
            ("light", "", ("x", "y"), ("z",)),
            ("collectives", "1 MiB", (), ("all_reduce",)),
        )
    ],
}


def test_the_lines_fit_and_say_which_side_lacks_the_work() -> None:
    lines = list(against_lines(REPORT))
    assert all(len(line) <= 80 for line in lines)
    text = "\n".join(lines)
    assert "+20.0%" in lines[0] and "+3.000  idle" in text and "light ops of other lines" in text
    assert "1 MiB all_reduce (trace only)" in text and "below 0.1% each" in text
    stages = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert stages == [["0", "0,3", "3.000", "4.000", "3.000", "8.000"], ["1", "1,2", "4.000", "8.000"]]
    assert not any("idle or waits" in line for line in against_lines({**REPORT, "stages": []}))
    assert "and 2 more" in list(against_lines(REPORT, most=1))[-1]


def test_the_page_escapes_names() -> None:
    assert "&lt;for&gt;" in against_section(REPORT) and "<for>" not in against_section(REPORT)
