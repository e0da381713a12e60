"""A plan as text: numbers with their units, and warnings."""

import pase


def test_a_model_that_does_not_fit_says_so():
    plan = pase.compile("zoo:llama3_8b", devices=8, machine="1080tix8")
    assert not plan.fits
    assert "WARNING it does not fit" in str(plan)
