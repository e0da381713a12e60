"""Arrays that are already sharded over a mesh: the plan keeps their layouts, and the search decides the rest."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pase
from pase.compiler.compilation import compile_model
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.ir import FixedLayout, FixedMesh
from pase.search.check import cost_of

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"down": jax.random.normal(KEYS[0], (64, 16)), "up": jax.random.normal(KEYS[1], (16, 64))}
X = jax.random.normal(KEYS[2], (8, 16))
OPTIMIZER = optax.sgd(0.1)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def mesh(kind: AxisType = AxisType.Auto, shape: tuple[int, ...] = (2, 4)) -> jax.sharding.Mesh:
    """A mesh over the devices in reverse order, which the plan must keep."""
    devices = np.array(jax.devices()[:8][::-1]).reshape(shape)
    return jax.sharding.Mesh(devices, ("data", "model")[: len(shape)], axis_types=(kind,) * len(shape))


def on(m: Any, *entries: Any) -> NamedSharding:
    return NamedSharding(m, P(*entries))


def shape(x: jax.Array, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def compiled(params: Any, x: Any, **options: Any) -> pase.Plan:
    return pase.compile(loss, params, x, devices=8, baselines=options.pop("baselines", False), **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_stay_where_they_are_and_the_step_is_the_same(kind: AxisType) -> None:
    m = mesh(kind)
    # Layouts that no search would choose.
    layouts = {"up": on(m, "model", "data"), "down": on(m, None, "data")}
    params = {k: jax.device_put(PARAMS[k], layouts[k]) for k in PARAMS}
    x = jax.device_put(X, on(m, None, ("data", "model")))
    plan = compiled(params, x)
    (noted,) = [r.what for r in plan.noted if "data=2, model=4" in r.what]
    assert all(f"'{name}'" in noted for name in ("down", "up", "x"))
    where = plan.jax._in_shardings()
    assert list(plan.jax.mesh().devices.flat) == list(m.devices.flat)
    assert where[1].is_equivalent_to(x.sharding, 2)
    for k in PARAMS:
        assert where[0][k].is_equivalent_to(params[k].sharding, 2)
        assert plan.jax.device_put(params, x)[0][k].sharding.is_equivalent_to(params[k].sharding, 2)
    wanted, grads = jax.value_and_grad(loss)(PARAMS, X)
    new, _, value = plan.jax.train_step(OPTIMIZER, donate=False)(params, plan.jax.init(OPTIMIZER, params), x)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    for k in PARAMS:
        np.testing.assert_allclose(np.asarray(new[k]), PARAMS[k] - 0.1 * grads[k], atol=1e-5)
        assert new[k].sharding.is_equivalent_to(params[k].sharding, 2), "the step keeps the layout"


FREE = P.UNCONSTRAINED
SPECS: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = (
    (("data",), ("model", "data")),
    ((None, ("data", "model")), (None, None)),
    ((), (FREE, "model")),
    ((FREE,), ("data", FREE)),
)


@pytest.mark.parametrize("x_spec,w_spec", SPECS)
def test_the_search_is_exact_under_them(x_spec: tuple[Any, ...], w_spec: tuple[Any, ...]) -> None:
    """The cost is that of the cheapest strategy of the unconstrained tables that keeps the layouts, by enumeration."""
    abstract = AbstractMesh((2, 2), ("data", "model"))

    def product(w: Any, x: Any) -> jax.Array:
        return jnp.sum(x @ w)

    w, x = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16, 64), "float32")
    options = CompileOptions(devices=4, baselines=False, overlap="none", memory_limit=None)
    fixed = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on(abstract, *spec))
        for s, spec in ((w, w_spec), (x, x_spec))
    ]
    found = compile_model(product, fixed[0], fixed[1:], options)
    free = compile_model(product, w, [x], options).problem
    tables, space = free.tables(found.plan.mesh)
    assert found.plan.mesh.sizes == (2, 2) and found.plan.optimal

    def keeps(name: str, spec: tuple[Any, ...], config: np.ndarray) -> bool:
        """Whether a config matches what the user wrote. On this mesh, each tensor dim has one iteration dim."""
        node = next(n for n in free.graph.nodes if n.name == name)
        dims = [d for walk in node.ops[0].writes[0].map.walks for d in walk.dims]
        split = {
            d: tuple(
                ("data", "model")[a]
                for a in range(2)
                if node.space.dims[config[a]].name == d and config[a] >= 0
            )
            for d in dims
        }
        entries = (*spec, *[None] * (2 - len(spec)))
        as_axes = [() if e is None else (e,) if isinstance(e, str) else e for e in entries]
        return all(e is FREE or split[d] == tuple(e) for d, e in zip(dims, as_axes, strict=True))

    names = {n.name for n in free.graph.nodes if n.kind in ("parameter", "input")}
    assert names == {"params", "in.x"}
    best = np.inf
    indices = [range(len(c)) for c in space.configs]
    at = {n.name: v for v, n in enumerate(free.graph.nodes)}
    for name, spec in (("params", w_spec), ("in.x", x_spec)):
        indices[at[name]] = [i for i in indices[at[name]] if keeps(name, spec, space.configs[at[name]][i])]  # type: ignore[call-overload]
    for choice in itertools.product(*indices):
        best = min(best, cost_of(tables, np.array(choice)))
    assert found.plan.cost == pytest.approx(best, rel=1e-12)


def test_meshes_that_divide_the_users_axes_are_searched() -> None:
    plan = compiled(PARAMS, shape(X, on(mesh(shape=(8,)), "data")), machine="h100x8")
    assert {t.mesh for t in plan.tried} == {(8,), (2, 4), (4, 2), (2, 2, 2)}
    fixed = [axes for axes in plan.inputs["x"].storage if axes]
    assert len(fixed) == 1 and len(fixed[0]) == len(plan.mesh.sizes)
    every = compiled(PARAMS, shape(X, on(mesh(), "data", "model")), baselines=True)
    assert {t.mesh for t in every.tried} == {(2, 4), (2, 2, 2)}
    assert "P('data', 'model')" in every.skipped["data_parallel"]


def test_a_layout_of_one_device_fixes_nothing() -> None:
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), "d")
    plan = compiled(PARAMS, jax.device_put(X, on(one, "d")))
    assert not any("'x'" in r.what for r in plan.noted) and "fixed" not in plan.provenance


def test_the_layouts_hold_in_micro_batches_and_in_explanations(tmp_path: Any) -> None:
    from pase.questions.explain import explain

    x = shape(X, on(mesh(), "data"))
    plan = compiled(shape_tree(on(mesh(), "model")), x, accumulate=2)
    assert plan.accumulate == 2 and plan.inputs["x"].storage == (("data",), ())
    path = tmp_path / "layout.json"
    plan.save(path)
    again = pase.load(path).bind(loss, PARAMS, X)
    problem = explain(again).problem
    assert problem is not None
    stored = {layout.path: layout.dims for layout in problem.graph.fixed.values()}
    assert stored == {"x": (("data",), ()), "up": (("model",), ()), "down": (("model",), ())}


def shape_tree(sharding: Any) -> Any:
    return {k: shape(v, sharding) for k, v in PARAMS.items()}


OTHERS = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


@pytest.mark.parametrize(
    "x,options,says",
    [
        (
            lambda: on(mesh(shape=(8,)), "data"),
            {},
            "data=8",
        ),
        (lambda: on(OTHERS), {}, "order"),
        (
            lambda: on(mesh(), ("model", "data")),
            {},
            r"P\(\('data', 'model'\)",
        ),
        (
            lambda: None,
            {"mesh": "4x2"},
            "data=2,model=4",
        ),
        (lambda: None, {"uneven": "padded"}, "uneven"),
        (lambda: None, {"pipeline": 2}, "stages"),
        (lambda: on(mesh(), "data"), {"accumulate": 8}, "8 micro-batches"),
    ],
)
def test_what_no_plan_can_keep_is_an_error(x: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PaseError, match=says):
        compiled(shape_tree(on(mesh(), "model")), shape(X, x()), **options)


def test_another_number_of_devices_is_an_error() -> None:
    with pytest.raises(PaseError, match="devices=8") as e:
        pase.compile(loss, shape_tree(on(mesh(), "model")), X, devices=4)
    assert e.value.where and e.value.fix.startswith("give devices=8, or ")


def test_a_sharding_without_a_mesh_is_an_error() -> None:
    """The argument has a sharding like JAX's own GSPMDSharding, which is not public."""
    x = SimpleNamespace(shape=X.shape, dtype=X.dtype, sharding=SimpleNamespace(num_devices=8))
    with pytest.raises(PaseError, match="8 devices as SimpleNamespace") as e:
        compiled(PARAMS, x)
    assert e.value.where == "argument 'x'"


def test_sizes_that_do_not_divide_are_an_error() -> None:
    """Only a shape can have such a sharding, because JAX refuses to make such an array."""
    x = jax.ShapeDtypeStruct(
        (6, 16), "float32", sharding=on(AbstractMesh((2, 4), ("data", "model")), "model")
    )
    with pytest.raises(PaseError, match="6 elements"):
        compiled(PARAMS, x)


def test_how_a_layout_is_written() -> None:
    layout = FixedLayout(
        path="w", mesh=FixedMesh(names=("a", "b"), sizes=(2, 4)), dims=(("a", "b"), (), None, ("a",))
    )
    assert str(layout) == "P(('a', 'b'), None, UNCONSTRAINED, 'a') on the mesh a=2, b=4"
