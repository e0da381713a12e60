"""The page of accuracy has the figures of the result files, and those of an earlier commit beside them."""

from __future__ import annotations

from bench.pages import accuracy


def test_the_page_has_the_figures_of_the_result_files():
    shown = accuracy.PAGE.read_text(encoding="utf-8")
    now = accuracy.results()
    assert set(now) == set(accuracy.SOURCES)
    for name, result in now.items():
        for f in accuracy.figures(name, result):
            assert f"| {f.what} | {f.rows:,} | {f.error:.1%} |" in shown, (
                "python -m bench pages.accuracy --since COMMIT"
            )


def test_what_was_before_stands_beside_it():
    def result(error):
        return {
            "groups": {"all": {"rows": 3, "median_error": error, "mean_error": -0.01}, "nem": {"rows": 1}}
        }

    text = accuracy.page({"mlperf": result(0.03)}, {"mlperf": result(0.05)}, "1234abcd")
    assert "| all | 3 | 3.0% | -1.0% | 5.0% |" in text and "1234abcd" in text and "nem" not in text
    assert "| all | 3 | 3.0% | -1.0% |  |" in accuracy.page({"mlperf": result(0.03)}, {}, "")
