"""Profiles of PipeDream are read as problems; bad ones are named with their line."""

from __future__ import annotations

import pytest

from bench.cases.schedules import link, profile
from pase.errors import PaseError
from pase.schedule.pipedream import read_pipedream
from tests.schedule.profiles import PROFILE

NET = (link("net", alpha_s=1e-4, beta=1e-9),)


def test_a_pipedream_profile() -> None:
    p = read_pipedream(PROFILE, NET, name="p")
    assert [b.seconds for b in p.blocks] == pytest.approx([2e-3, 1e-3, 1.5e-3, 1e-3, 2e-3, 3e-3])
    assert [(t.name, t.nbytes, t.ready_after, t.needed_before) for t in p.tensors] == [
        ("node1", 4_000_000, 5, 0),
        ("node3", 8_000_000, 3, 2),
    ]
    flow = read_pipedream(PROFILE, NET, name="p", dataflow=True)
    assert [b.after for b in flow.blocks] == [(), (0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize(
    ("old", "new", "where", "what"),
    [
        ("\tnode2 -- node3", "\tnode2 -- node9", "p, line 5", "'node9'"),
        ("\tnode2 -- node3", "\tnode3 -- node1", "p", "cycle"),
        ("parameter_size=8000000.000", "parameter_size=big", "p, line 3", "parameter_size"),
        ("forward_compute_time=2.000", "forward_compute_time=-2.000", "p, line 2", "-2.0"),
        ("node3 -- Linear", "node1 -- Linear", "p, line 3", "'node1'"),
        ("node2 -- ReLU(inplace) --", "hello", "p, line 1", "hello"),
    ],
)
def test_bad_profiles_are_named(old: str, new: str, where: str, what: str) -> None:
    text = PROFILE.replace(old, new)
    if new == "\tnode3 -- node1":
        text += "\tnode2 -- node3\n"
    with pytest.raises(PaseError) as e:
        read_pipedream(text, NET, name="p")
    assert e.value.where == where and what in e.value.what


@pytest.mark.data("traces/pipedream_profiles")
@pytest.mark.parametrize(
    ("name", "tensors", "megabytes"),
    [("resnet50", 107, 102), ("vgg16", 16, 553), ("gnmt", 11, 775), ("alexnet", 8, 244)],
)
def test_the_shared_profiles(name: str, tensors: int, megabytes: int) -> None:
    p = profile(name)
    assert len(p.tensors) == tensors
    assert round(p.nbytes / 1e6) == megabytes
    assert p.is_plain
    assert profile(name, dataflow=True).dataflow


def test_a_profile_cannot_command_the_terminal() -> None:
    with pytest.raises(PaseError, match="control character") as e:
        read_pipedream(PROFILE.replace("node3", "node3\x1b[2J", 1), (), name="p")
    assert e.value.where == "p, line 3"
