"""An option is stated once: the API's signature and help, and the program's flags, come from CompileOptions."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import pase
from pase.cli import PACKAGE, _loaded
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
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
        ({"devices": 2, "colour": 1}, r"compile\(\): got an unexpected keyword argument 'colour'"),
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
    ("option", "message"),
    [
        ({"accumulate": 0}, "accumulate must be a positive number of micro-batches, got 0"),
        ({"remat": "some"}, "remat is 'auto', 'none', 'attention', 'light' or 'all', not 'some'"),
        ({"overlap": True}, "overlap is 'none', 'parameters' or 'machine', not True"),
        ({"devices": True}, "devices must be a positive whole number, got True"),
    ],
)
def test_what_makes_no_sense_is_refused(option, message):
    with pytest.raises(PaseError) as e:
        CompileOptions(**{"devices": 2} | option)
    assert str(e.value) == message
