"""The annotated ONNX model: valid by our validator, otherwise unchanged, and read back as the plan's layouts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import numpy_helper  # noqa: E402

import pase  # noqa: E402
from pase.backends import registry  # noqa: E402
from pase.backends.emit import onnx as to_onnx  # noqa: E402
from pase.backends.emit.onnx_sharding import check, from_spec, restated, to_spec  # noqa: E402
from pase.errors import PaseError  # noqa: E402
from pase.machine import Mesh  # noqa: E402
from tests.command import printed, reported, run  # noqa: E402
from tests.frontends.onnx.cases import light, model_of  # noqa: E402

MESH = Mesh(names=("x", "y", "z"), sizes=(2, 3, 2))


def element_owners(shape: tuple[int, ...], digits: Any, mesh: Mesh) -> np.ndarray:
    """Which devices hold which elements, by the definition of a digit: bool [devices, *shape]."""
    out = np.ones((mesh.devices, *shape), bool)
    for device, at in enumerate(itertools.product(*map(range, mesh.sizes))):
        for a, d in enumerate(digits):
            if d is not None:
                dim, blocks = d
                index = np.arange(shape[dim]) * blocks // shape[dim] % mesh.sizes[a]
                view = [1] * len(shape)
                view[dim] = -1
                out[device] &= (index == at[a]).reshape(view)
    return out


def owners_of_spec(spec: Any, shape: tuple[int, ...], devices: int) -> np.ndarray:
    """Which devices hold which elements, read from the annotation alone."""
    groups = {e.key: list(e.value) for e in spec.index_to_device_group_map}
    factors = [(d.axis, s.dim_value, s.num_shards) for d in spec.sharded_dim for s in d.simple_sharding]
    out = np.zeros((devices, *shape), bool)
    for k, coordinates in enumerate(itertools.product(*(range(n) for _, _, n in factors))):
        mine = np.ones(shape, bool)
        for dim in {d for d, _, _ in factors}:
            index = np.arange(shape[dim])
            inner = shape[dim]
            keep = np.ones(shape[dim], bool)
            for (axis, extent, n), at in zip(factors, coordinates, strict=True):
                if axis == dim:
                    inner //= extent
                    keep &= (index // inner % extent) * n // extent == at
            view = [1] * len(shape)
            view[dim] = -1
            mine &= keep.reshape(view)
        entry = spec.device[k]
        for device in groups.get(entry, [entry]):
            out[device] |= mine
    return out


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], Any]:
    """A shape and a layout of it on MESH: some axes split some dims, with unsplit factors between them."""
    rank = draw(st.integers(1, 3))
    cut = [1] * rank
    digits: list[Any] = [None] * 3
    for a in draw(st.permutations(range(3))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            cut[dim] *= draw(st.sampled_from([1, 1, 2, 3])) * MESH.sizes[a]
            digits[a] = (dim, cut[dim])
    return tuple(c * draw(st.integers(1, 3)) for c in cut), tuple(digits)


@given(layouts())
@settings(max_examples=150, deadline=None)
def test_a_spec_says_where_every_element_is(case: Any) -> None:
    shape, digits = case
    spec = to_spec("t", shape, digits, MESH)
    assert (owners_of_spec(spec, shape, MESH.devices) == element_owners(shape, digits, MESH)).all()
    again = from_spec(spec, MESH)
    assert (element_owners(shape, again, MESH) == element_owners(shape, digits, MESH)).all()
    flat = (int(np.prod(shape)),)
    moved = restated(digits, shape, flat, MESH)
    assert moved is not None
    wanted = element_owners(shape, digits, MESH).reshape(MESH.devices, -1)
    assert (element_owners(flat, moved, MESH) == wanted).all()
    back = restated(moved, flat, shape, MESH)
    assert (
        back is not None and (element_owners(shape, back, MESH) == element_owners(shape, digits, MESH)).all()
    )


def small() -> Any:
    """Two layers with a fused bias, sizes divisible by 8 devices, and a symbolic batch."""
    node = onnx.helper.make_node
    nodes = [
        node("Gemm", ["x", "w", "b"], ["h"], name="first"),
        node("Relu", ["h"], ["r"]),
        node("MatMul", ["r", "v"], ["y"], name="second"),
        node("Softmax", ["y"], ["p"], axis=-1),
    ]
    rng = np.random.default_rng(0)
    shapes = {"w": (512, 4096), "b": (4096,), "v": (4096, 1024)}
    weights = {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    return model_of(nodes, {"x": ("batch", 512)}, {"p": ("batch", 1024)}, weights=weights)


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


def broken(change: Any) -> Any:
    """A validly annotated model with one change."""
    model = small()
    model.ir_version = 11
    model.configuration.add(name="c", num_devices=12)
    conf = model.graph.node[0].device_configurations.add(configuration_id="c")
    conf.sharding_spec.append(to_spec("w", (512, 4096), ((0, 2), None, (1, 2)), MESH))
    check(model)
    change(model, conf, conf.sharding_spec[0])
    return model


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m, c, s: setattr(m, "ir_version", 10), "need IR version 11"),
        (lambda m, c, s: setattr(c, "configuration_id", "d"), "no device configuration 'd'"),
        (lambda m, c, s: setattr(s, "tensor_name", "q"), "'q' is neither an input nor an output"),
        (
            lambda m, c, s: setattr(s.sharded_dim[0], "axis", 5),
            "axis 5 is out of range",
        ),
        (lambda m, c, s: setattr(s.sharded_dim[1], "axis", -2), "axis 0 is sharded twice"),
        (
            lambda m, c, s: setattr(s.sharded_dim[0].simple_sharding[0], "num_shards", 3),
            "512 elements .* into 3 shards",
        ),
        (lambda m, c, s: setattr(s.sharded_dim[0].simple_sharding[0], "dim_value", 64), "has 512 elements"),
        (lambda m, c, s: s.device.pop(), "4 shards do not match 3 devices"),
        (
            lambda m, c, s: s.index_to_device_group_map[0].value.append(99),
            "no device 99 among 12",
        ),
        (lambda m, c, s: s.index_to_device_group_map[0].value.append(11), "a device holds two shards"),
        (lambda m, c, s: c.sharding_spec.append(s), "sharded twice in one configuration"),
        (lambda m, c, s: m.configuration.add(name="c", num_devices=1), "name is missing or already used"),
    ],
)
def test_the_validator_sees_what_the_checker_does_not(change: Any, match: str) -> None:
    with pytest.raises(PaseError, match=match):
        check(broken(change))
