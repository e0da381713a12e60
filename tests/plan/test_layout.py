"""layout.json: reading returns what was written, and errors name the place of a fault."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import pase
from pase.errors import PaseError
from pase.files.atomic import write_atomically
from pase.plan.layout import SCHEMA, _renewed, from_json, schema, to_json


@pytest.fixture(scope="module")
def plan():
    return pase.compile("zoo:gpt2?layers=2&batch=16", devices=8)


def test_saved_and_loaded_plans_are_equal(plan, tmp_path):
    path = tmp_path / "layout.json"
    plan.save(path)
    same = pase.load(path)
    assert same == plan
    assert same.diff(plan) == []
    assert str(same) == str(plan)


def test_the_schema_is_a_schema_and_the_file_obeys_it(plan):
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(to_json(plan), schema())


def test_a_loaded_zoo_plan_finds_its_model(plan, tmp_path):
    plan.save(tmp_path / "l.json")
    same = pase.load(tmp_path / "l.json")
    assert same.jax.specs == plan.jax.specs


def test_a_loaded_plan_refuses_another_model(plan, tmp_path):
    import jax

    plan.save(tmp_path / "l.json")
    weights = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    with pytest.raises(PaseError, match="'zoo:gpt2") as e:
        pase.load(tmp_path / "l.json").bind(lambda p, x: (x @ p["w"]).sum(), weights, weights["w"])
    assert "traced graph differs" in e.value.what and e.value.fix


def test_diff_names_what_differs():
    a, b = (pase.compile("zoo:mlp", devices=8, mesh=m, baselines=False) for m in ("data=8", "data=2,model=4"))
    assert "mesh: data=8 -> data=2  model=4" in a.diff(b)
    assert any(line.startswith("node ") for line in a.diff(b))
    assert a.diff(a) == []
    there = replace(
        a, machine="b200x8", machine_digest="of another machine", model="mine", graph_digest="of mine"
    )
    assert a.diff(there) == [f"model: {a.model} -> mine", f"machine: {a.machine} -> b200x8"]
    assert a.diff(replace(a, graph_digest="new"))[0].startswith("the model's graph has changed")


def broken(data, *path, value):
    """A copy of the object with one place changed."""
    data = json.loads(json.dumps(data))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), "pase.layout/99", "'pase.layout/99'"),
        (("devices",), "eight", "at devices: must be a whole number, got 'eight'"),
        (("mesh",), {"data": 3}, "is not 8 devices"),
        (("parameters", "wte", "storage"), [["nowhere"], []], "mesh axis 'nowhere' does not exist"),
        (("parameters", "wte", "storage"), [[]], "parameters/wte/storage: the layout has 1 dims"),
        (("collectives",), {}, "at collectives: must be a list, got {}"),
        (("parameters", "wte", "shape"), [50257, 0], "at parameters/wte/shape/1: must be at least 1, got 0"),
        (("cost", "optimal"), 1, "at cost/optimal: must be true or false, got 1"),
        (
            ("collectives", 0, "kind"),
            "gossip",
            "at collectives/0/kind: must be one of all_gather, all_reduce",
        ),
        (("memory",), {}, "at memory/parameters: is missing"),
    ],
)
def test_what_is_wrong_is_said(plan, path, value, message):
    with pytest.raises(PaseError, match=r"^layout: ") as e:
        from_json(broken(to_json(plan), *path, value=value))
    assert message in str(e.value)


def test_uneven_and_doubled_axes_are_refused(plan):
    data = to_json(plan)
    axis, size = next((a, s) for a, s in data["mesh"].items() if s > 1)
    odd = broken(data, "parameters", "wte", "storage", value=[[axis], []])  # 50257 is odd, its factors large
    assert 50257 % size
    stored, sent = "parameters/wte/storage", "collectives/0/axes"
    for place, word, spoiled in (
        (stored, "50257", odd),
        (stored, "twice", broken(data, "parameters", "wte", "storage", value=[[axis], [axis]])),
        (sent, "twice", broken(data, "collectives", 0, "axes", value=[axis, axis])),
        (sent, "at least one mesh axis", broken(data, "collectives", 0, "axes", value=[])),
    ):
        with pytest.raises(PaseError) as e:
            from_json(spoiled, "l.json")
        assert e.value.where == f"l.json: at {place}" and word in e.value.what


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON at line 1, .* cut off"),
        (b"\xff\xfe", "is not text"),
        (b"[]", f"schema is None.*{SCHEMA}"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_garbage_files(tmp_path, content, message):
    path = tmp_path / "l.json"
    path.write_bytes(content)
    with pytest.raises(PaseError, match=message):
        pase.load(path)


def test_missing_file_and_folder(tmp_path, plan):
    with pytest.raises(PaseError, match=r"nothing\.json: .*no such file"):
        pase.load(tmp_path / "nothing.json")
    with pytest.raises(PaseError, match=r"folder .*no.* does not exist"):
        plan.save(tmp_path / "no" / "folder.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "l.json"
    path.write_text("old")

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match=r"No space left on device: .*l\.json"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in Path(tmp_path).iterdir()] == ["l.json"]


def test_copies_are_said_and_in_files_of_before_known_by_their_names(plan):
    data = {**to_json(plan), "layouts": {**to_json(plan)["layouts"], "t27c1": [[[]]]}}
    data.pop("copies", None)
    assert from_json(data).copies["t27c1"] == "t27"
    assert from_json({**data, "copies": {"t27c1": "t3"}}).copies == {"t27c1": "t3"}


def test_keys_of_earlier_versions_are_read(plan):
    block = {"prefix": "3.", "start": 0, "stop": 9}
    now = {**to_json(plan), "overlap": 0.25, "remat": [{**block, "recompute": "light"}]}
    former = {**to_json(plan), "beside": 0.25, "remat": [{**block, "again": "light"}]}
    former.pop("overlap", None)
    now["strategy"] = [{**n, "kept_for_recompute": 3} for n in now["strategy"]]
    former["strategy"] = [{**n, "kept_again": 3} for n in former["strategy"]]
    now["remarks"], former["remarks"] = (
        [{"kind": kind, "what": "priced as one iteration", "where": "a.py:3"}]
        for kind in ("trip_count", "turns")
    )
    found = from_json(former)
    assert found == from_json(now)
    assert found.overlap == found.beside == 0.25 and found.remat[0].recompute == "light"
    assert all(n.kept_for_recompute == n.kept_again == 3 for n in found.nodes)
    assert found.noted[0].kind == "trip_count"


def test_pipelines_of_earlier_versions_are_read():
    stage, block = (
        {"rank": 0, "recompute_s": 1.0, "weights": "hoisted"},
        {"prefix": "3.", "recompute": "light"},
    )
    former_stage, former_block = (
        {"rank": 0, "again_s": 1.0, "weights": "once"},
        {"prefix": "3.", "again": "light"},
    )
    former = {"pipeline": {"stages": [former_stage], "again": [[former_block]], "narrow": True}}
    former["pipeline"]["replicas"] = [{"group": "h100", "pipeline": dict(former["pipeline"])}]
    now = {"stages": [stage], "recompute": [[block]], "cut_points": True}
    assert _renewed(former) == {"pipeline": {**now, "replicas": [{"group": "h100", "pipeline": now}]}}
    assert former["pipeline"]["stages"] == [former_stage], "the caller's object is as it was"


def test_a_layout_tells_nothing_of_its_maker(plan):
    """Layouts are shared, so they have no command line, and paths are relative to where files are imported from."""
    text = json.dumps(to_json(plan))
    assert "pase/zoo/attention.py:" in text
    assert str(Path(pase.__file__).parents[1]) not in text
    assert str(Path.home()) + "/" not in text
    assert "command" not in plan.provenance
