"""What targets can express, as data."""

from __future__ import annotations

from pase.backends.registry import BACKENDS
from pase.plan.targets import TARGETS, form_of


def test_a_target_is_a_format_and_its_forms_are_found_again_by_name() -> None:
    assert set(TARGETS) <= set(BACKENDS)
    for name, target in TARGETS.items():
        assert [form_of(name, f.name) for f in target.forms] == list(target.forms)
        for form in target.forms:
            assert len({a.name for a in form.axes}) == len(form.axes)
            # Axes that pase names itself have names of one letter; those of a target keep theirs.
            assert all(len(a.name) > 1 for a in form.axes)
    assert form_of("", "any") is None
