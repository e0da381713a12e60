"""Options are defined once: the API's signature and help, and the command's flags, come from CompileOptions."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import pase
from pase.cli import PACKAGE, _loaded
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.machine import load
from pase.questions.sensitivity import sensitivity


@pytest.mark.parametrize("function", [pase.compile, pase.compare, sensitivity])
def test_the_api_takes_every_option_and_says_so(function):
    taken = inspect.signature(function).parameters
    for f in fields(CompileOptions):
        assert taken[f.name].default == (inspect.Parameter.empty if f.name == "devices" else f.default)
        assert f"{f.name}: {f.metadata['help'][:40]}" in " ".join(function.__doc__.split())
    assert "options" not in taken


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, r"compile\(\): missing a required argument: 'devices'"),
        ({"devices": 2, "colour": 1}, r"compile\(\) has no option 'colour'"),
        ({"device": 2}, r"compile\(\) has no option 'device' \(did you mean devices\?\)"),
    ],
)
def test_a_call_that_does_not_fit_is_a_type_error(keywords, message):
    with pytest.raises(TypeError, match=message):
        pase.compile("zoo:mlp", **keywords)


def test_the_command_line_has_each_option_with_its_help_and_default():
    command = {p.name: p for p in _loaded(PACKAGE, "compile").params}
    for f in fields(CompileOptions):
        flag = f.metadata["flag"]
        assert (f.name in command) == bool(flag.names)
        if flag.names:
            assert set(flag.names) == set(command[f.name].opts)
            assert command[f.name].help.startswith(f.metadata["help"])
    compared = {p.name for p in _loaded(PACKAGE, "compare").params}
    assert {
        f.name for f in fields(CompileOptions) if f.metadata["flag"].names
    } <= compared  # all that compile takes


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ({"accumulate": 0}, "positive"),
        ({"remat": "some"}, "'auto', 'none', 'attention', 'light' or 'all'"),
        ({"overlap": True}, "'none', 'parameters' or 'machine'"),
        ({"devices": True}, "positive"),
    ],
)
def test_what_makes_no_sense_is_refused(option, known):
    """The error names the option and the value, and says what is allowed."""
    ((name, value),) = option.items()
    with pytest.raises(PaseError) as e:
        CompileOptions(**{"devices": 2} | option)
    assert e.value.where == name
    assert known in e.value.what and e.value.what.endswith(f"got {value!r}")


def test_bytes_are_read_as_people_write_them():
    def limit(text, machine="h100x8"):
        return CompileOptions(devices=1, memory_limit=text).limit_bytes(load(machine))

    assert limit("80GiB") == 80 * 2**30
    assert limit("1.5 gb") == 1.5e9
    assert limit(2**30) == limit("1GiB")
    assert limit("machine", "v100x8") < limit("machine", "h200x8")
    assert limit("none") is limit(None) is None
    assert limit("machine") == load("h100x8").device.usable_bytes < load("h100x8").device.memory_bytes
    for text in ("much", "-3GiB", "nan", "inf", "0", "3 PB", ""):
        with pytest.raises(PaseError) as e:
            limit(text)
        assert e.value.where == "memory limit" and f"'{text}'" in e.value.what
    with pytest.raises(PaseError) as e:
        limit("80")
    assert e.value.fix == "write a unit: 80GiB"
