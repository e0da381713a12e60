"""The annotated ONNX model: valid by our validator, otherwise unchanged, and read back as the plan's layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")

from onnx import numpy_helper  # noqa: E402

import pase  # noqa: E402
from pase.backends import registry  # noqa: E402
from pase.backends.emit import onnx as to_onnx  # noqa: E402
from pase.backends.emit.onnx_sharding import check  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from tests.backends.emit.onnx_models import small  # noqa: E402
from tests.command import printed, reported, run  # noqa: E402
from tests.frontends.onnx.cases import light  # noqa: E402


def annotated(tmp_path: Path, source: Path, **options: Any) -> tuple[Any, Path]:
    plan = pase.compile(str(source), **options)
    plan.save(tmp_path / "layout.json")
    out = tmp_path / "annotated.onnx"
    loaded = pase.load(tmp_path / "layout.json")
    assert "shardings on" in registry.emit(loaded, "onnx", out)
    return plan, out


def test_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "m.onnx"
    onnx.save(small(), source)
    plan, out = annotated(tmp_path, source, devices=8, dims={"batch": 64}, mesh="data=2,model=4")
    before, after = onnx.load(source), onnx.load(out)
    onnx.checker.check_model(after)
    assert after.ir_version >= 11 and after.configuration[0].num_devices == 8
    found = to_onnx.read(out)
    assert found.layouts == {k: v[1] for k, v in to_onnx.layouts(plan).items()}
    assert found.stored == {k: t.storage for k, t in (*plan.parameters.items(), *plan.inputs.items())}
    assert (found.mesh.names, found.mesh.sizes) == (plan.mesh.names, plan.mesh.sizes)
    # Every input and output of every node has a sharding, and at least one is split.
    assert set(found.layouts) == {
        (i, x) for i, n in enumerate(after.graph.node) for x in (*n.input, *n.output)
    }
    assert any(any(digits) for digits in found.layouts.values())
    # Nothing else has changed.
    for n in after.graph.node:
        n.ClearField("device_configurations")
    assert after.graph == before.graph
    assert numpy_helper.to_array(after.graph.initializer[0]).any()
    # An annotated model is still a model. Annotating it again replaces the annotations.
    again = pase.compile(str(out), devices=8, dims={"batch": 64}, mesh="data=2,model=4")
    assert again.cost == plan.cost
    twice = tmp_path / "twice.onnx"
    registry.emit(again, "onnx", twice)
    assert len(onnx.load(twice).configuration) == 1 and to_onnx.read(twice).layouts == found.layouts


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["light_vgg19", "light_shufflenet"])
def test_light_models(name: str, tmp_path: Path) -> None:
    source = next(p for p in light() if p.stem == name)
    plan, out = annotated(tmp_path, source, devices=8, baselines=False)
    found = to_onnx.read(out)
    assert found.layouts == {k: v[1] for k, v in to_onnx.layouts(plan).items()}
    convs = [i for i, n in enumerate(onnx.load(out).graph.node) if n.op_type == "Conv"]
    assert {i for i, _ in found.layouts} >= set(convs)


def test_from_the_command_line(tmp_path: Path) -> None:
    source, layout, out = tmp_path / "m.onnx", tmp_path / "layout.json", tmp_path / "a.onnx"
    onnx.save(small(), source)
    printed("compile", source, "--devices", 8, "--dim", "batch=64", "-o", layout)
    assert reported("emit", layout, "--to", "onnx", "-o", out)["file"] == str(out)
    check(onnx.load(out))
    code, _, err = run("compile", source, "--devices", 8)
    assert code == 2 and "--dim 'batch=64'" in err


def test_what_cannot_be_annotated(tmp_path: Path) -> None:
    source, other = tmp_path / "m.onnx", tmp_path / "other.onnx"
    onnx.save(small(), source)
    model = small()
    del model.graph.node[3]
    model.graph.output[0].name = "y"  # the softmax is gone
    onnx.save(model, other)
    plan, _ = annotated(tmp_path, source, devices=8, dims={"batch": 64}, baselines=False, mesh="8")
    loaded = pase.load(tmp_path / "layout.json")
    with pytest.raises(PaseError, match="model"):
        registry.emit(loaded, "onnx", tmp_path / "x.onnx", str(other))
    with pytest.raises(PaseError) as e:
        registry.emit(loaded, "onnx", source)
    assert e.value.where == str(source) and "another output file" in e.value.fix
    with pytest.raises(PaseError, match=r"the folder .* does not exist"):
        registry.emit(loaded, "onnx", tmp_path / "no" / "x.onnx")
    with pytest.raises(PaseError, match="'paper'"):
        registry.emit(plan, "paper", tmp_path / "x")
    with pytest.raises(PaseError, match="onnx frontend"):
        plan.jax  # noqa: B018
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "annotated.onnx",
        "layout.json",
        "m.onnx",
        "other.onnx",
    ]
