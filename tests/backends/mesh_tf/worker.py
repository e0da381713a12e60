"""Runs our layouts and programs in Mesh-TensorFlow, and prints the results as one JSON object.

It is run as a process of its own, because TensorFlow's devices can be configured only once per process.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import numpy as np

RNG = np.random.default_rng(0)


def dims_text(dims: Any) -> str:
    return ";".join(f"{n}:{s}" for n, s in dims)


def rules(count: int = 400) -> list[dict[str, Any]]:
    """Random layouts and tensors: the errors that Mesh-TF and pase raise for each."""
    from pase.backends.mesh_tf.legality import check_layout, check_tensor
    from pase.backends.mesh_tf.shim import mesh_tensorflow
    from pase.errors import PaseError

    mtf, _ = mesh_tensorflow()
    out = []
    for _ in range(count):
        mesh = ";".join(f"{a}:{int(RNG.choice([2, 3, 4]))}" for a in "xyz"[: RNG.integers(1, 4)])
        axes = [p[0] for p in mesh.split(";")]
        pairs = ";".join(f"{d}:{RNG.choice(axes)}" for d in RNG.choice(list("abcd"), RNG.integers(0, 4)))
        dims = [
            (str(d), int(RNG.choice([4, 6, 12]))) for d in RNG.permutation(list("abcd"))[: RNG.integers(0, 5)]
        ]
        try:
            size, layout = check_layout(mesh, pairs)
            check_tensor("t", dims, size, layout)
            ours = ""
        except PaseError as e:
            ours = str(e)
        try:
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(
                mesh, pairs, [""] * mtf.convert_to_shape(mesh).size
            )
            impl.slice_shape(mtf.Shape([mtf.Dimension(*d) for d in dims]))
            theirs = ""
        except ValueError as e:
            theirs = str(e)
        out.append({"mesh": mesh, "layout": pairs, "dims": dims_text(dims), "ours": ours, "theirs": theirs})
    return out


def random_dims(shape: tuple[int, ...], axes: dict[str, int], prefix: str) -> Any:
    """A tensor's dims, each in one to three factors; each mesh axis splits one factor, or none."""
    from pase.backends.mesh_tf.names import MeshTfDim

    groups: list[list[MeshTfDim]] = []
    for i, extent in enumerate(shape):
        factors = []
        while extent > 1 and len(factors) < 2 and RNG.random() < 0.5:
            f = int(RNG.choice([d for d in range(2, extent + 1) if extent % d == 0]))
            factors.append(f)
            extent //= f
        factors += [extent] if extent > 1 else []
        groups.append([MeshTfDim(f"{prefix}{i}{k}", f) for k, f in enumerate(factors)])
    for axis, ways in axes.items():
        free = [
            (i, k)
            for i, g in enumerate(groups)
            for k, d in enumerate(g)
            if d.axis is None and d.size % ways == 0
        ]
        if free and RNG.random() < 0.8:
            i, k = free[RNG.integers(len(free))]
            groups[i][k] = MeshTfDim(groups[i][k].base, groups[i][k].size, axis)
    return tuple(tuple(g) for g in groups)


def moves(count: int = 14) -> list[dict[str, Any]]:
    """Reshards of tensors as the program would do them: the errors of the values, and of gradients in reverse."""
    from pase.backends.mesh_tf.names import flat
    from pase.backends.mesh_tf.reshapes import reshape_steps as steps
    from pase.backends.mesh_tf.shim import mesh_tensorflow

    mtf, tf = mesh_tensorflow()
    axes = {"x": 2, "y": 2, "z": 2}
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={"CPU": 8})) as session:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        layout: dict[str, str] = {}

        def shape(dims: Any) -> Any:
            made = []
            for d in dims:
                name = f"{d.base}_{d.axis or 'whole'}"
                if d.axis is not None:
                    layout[name] = d.axis
                made.append(mtf.Dimension(name, d.size))
            return mtf.Shape(made)

        cases = []
        for _ in range(count):
            extents = tuple(int(RNG.choice([1, 4, 8, 12])) for _ in range(RNG.integers(1, 4)))
            have, want = random_dims(extents, axes, "a"), random_dims(extents, axes, "b")
            path = steps(have, want, axes)
            value = RNG.standard_normal(extents).astype(np.float32)
            weight = RNG.standard_normal(extents).astype(np.float32)
            x = mtf.import_tf_tensor(
                mesh, tf.constant(value.reshape([d.size for d in flat(have)])), shape=shape(flat(have))
            )
            y = x
            for step in path:
                y = mtf.reshape(y, shape(step))
            if not path:
                want = have
            w = mtf.import_tf_tensor(
                mesh, tf.constant(weight.reshape([d.size for d in flat(want)])), shape=shape(flat(want))
            )
            (grad,) = mtf.gradients([mtf.reduce_sum(y * w, output_shape=[])], [x])
            cases.append((len(path), value, weight, mtf.identity(y), mtf.identity(grad)))
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            list(axes.items()), list(layout.items()), [f"/cpu:{i}" for i in range(8)]
        )
        lowering = mtf.Lowering(graph, {mesh: impl})
        made = session.run([[lowering.export_to_tf_tensor(t) for t in c[3:]] for c in cases])
    return [
        {
            "steps": n,
            "value": float(np.abs(y.reshape(value.shape) - value).max()),
            "gradient": float(np.abs(g.reshape(value.shape) - weight).max()),
        }
        for (n, value, weight, *_), (y, g) in zip(cases, made, strict=True)
    ]


def models() -> dict[str, Any]:
    """Small Keras models: name -> (loss, specs, model, batch)."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    layers = keras.layers

    def of(
        model: Any, shape: tuple[int, ...], classes: int, words: int = 0, labels: tuple[int, ...] = ()
    ) -> Any:
        x: Any = (
            RNG.integers(0, words, shape).astype("int32")
            if words
            else RNG.standard_normal(shape).astype("float32")
        )
        y = RNG.integers(0, classes, labels or shape[:1]).astype("int32")
        model(tf.constant(x))

        @tf.function
        def loss(x: Any, y: Any) -> Any:
            logits = model(x, training=False)
            return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))

        return loss, [tf.TensorSpec(a.shape, a.dtype, name=n) for n, a in (("x", x), ("y", y))], model, (x, y)

    tokens = keras.Input((8,), dtype="int32")
    h = layers.Embedding(32, 16)(tokens)
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(4, 4)(h, h, use_causal_mask=True))
    h = layers.LayerNormalization()(h + layers.Dense(16)(layers.Dense(32, activation="gelu")(h)))
    transformer = keras.Model(tokens, layers.Dense(32)(h))
    return {
        "mlp": of(
            keras.Sequential(
                [layers.Dense(32, activation="relu"), layers.Dense(16, activation="tanh"), layers.Dense(8)]
            ),
            (16, 16),
            8,
        ),
        "alexnet": of(
            keras.Sequential(
                [
                    layers.Conv2D(8, 11, 4, activation="relu"),
                    layers.MaxPool2D(3, 2),
                    layers.Conv2D(16, 5, padding="same", activation="relu"),
                    layers.MaxPool2D(3, 2),
                    layers.Conv2D(16, 3, padding="same", activation="relu"),
                    layers.AveragePooling2D(2, 2),
                    layers.Flatten(),
                    layers.Dense(32, activation="relu"),
                    layers.Dense(8),
                ]
            ),
            (8, 67, 67, 3),
            8,
        ),
        "rows": of(
            keras.Sequential(
                [
                    layers.Conv2D(4, 3, padding="same", activation="relu"),
                    layers.MaxPool2D(2, 2),
                    layers.Conv2D(4, 5, padding="same", activation="relu"),
                    layers.Conv2D(4, 3, 2, padding="same"),
                    layers.Flatten(),
                    layers.Dense(8),
                ]
            ),
            (4, 16, 16, 2),
            8,
        ),
        "lstm": of(
            keras.Sequential(
                [layers.Embedding(32, 16), layers.LSTM(16, return_sequences=True), layers.Dense(32)]
            ),
            (8, 3),
            32,
            32,
            (8, 3),
        ),
        "transformer": of(transformer, (8, 8), 32, 32, (8, 8)),
        "parts": of(keras.Sequential([layers.Dense(16), layers.Lambda(parts), layers.Dense(8)]), (8, 16), 8),
        "images": of(
            keras.Sequential(
                [
                    layers.Conv2D(4, (1, 3), padding="same"),
                    layers.AveragePooling2D(3, 2, padding="same"),
                    layers.Conv2D(8, 1, activation="relu"),
                    layers.Conv2D(4, 1, 2),
                    layers.Flatten(),
                    layers.Dense(8),
                ]
            ),
            (8, 12, 12, 1),
            8,
        ),
    }


def parts(x: Any) -> Any:
    """Takes, joins and pads parts of a tensor, in every way that has a rule."""
    import tensorflow as tf

    a, b = tf.split(x, 2, axis=1)
    rows = tf.unstack(a, axis=1)
    joined = tf.concat([b, tf.stack(rows[:3], axis=1), tf.gather(a, [3, 1, 1], axis=1)], 1)
    wide = tf.pad(joined[:, 2:12], [[0, 0], [2, 4]])
    shifted = tf.reshape(tf.reshape(wide, (8, 4, 4)), (8, 2, 8))[:, 1, :]
    classes = tf.one_hot(tf.cast(tf.math.floordiv(tf.abs(a[:, 0]), 0.5), tf.int32) % 4, 4)
    safe = tf.math.divide_no_nan(shifted, tf.nn.relu(tf.sign(b))) + tf.clip_by_value(b, -0.5, 0.5)
    more = tf.nn.leaky_relu(a) + tf.nn.softplus(b) + tf.nn.elu(a) + tf.nn.l2_loss(b) * 1e-2
    return tf.concat([wide, shifted + more, safe, classes, tf.math.squared_difference(a, b)], 1)


def trained(name: str, loss: Any, specs: Any, model: Any, batch: Any, strategy: str) -> dict[str, Any]:
    """A step of gradient descent by the generated program, compared with TensorFlow on one device."""
    import tensorflow as tf

    from bench.cases.plans import Case
    from pase.backends.emit import mesh_tf
    from pase.backends.mesh_tf.run import run
    from pase.compiler.problem.problem import SplitProblem
    from pase.frontends.tf import frontend as from_tf

    traced = from_tf.trace(loss, *specs)
    devices = int(np.prod([int(n) for n in strategy.partition("@")[2].split("x")]))
    problem = SplitProblem.of(traced.graph, devices, None, "analytic", "sgd")
    plan = Case(traced=traced, problem=problem).plan(strategy)  # type: ignore[arg-type]
    assert plan is not None
    text, layout = mesh_tf.program(plan)
    program = types.ModuleType("generated")
    exec(compile(text, f"{name}_mtf.py", "exec"), program.__dict__)
    variables = {v.path: v for v in model.trainable_variables}
    assert set(variables) == set(program.PARAMETERS)
    with tf.GradientTape() as tape:
        value = loss(*map(tf.constant, batch))
    gradients = dict(zip(variables, tape.gradient(value, list(variables.values())), strict=True))
    gradients = {k: tf.convert_to_tensor(g).numpy() for k, g in gradients.items()}
    values = {k: v.numpy() for k, v in variables.items()}
    step = run(program, dict(zip(program.INPUTS, batch, strict=True)), values, learning_rate=0.1)

    def apart(a: np.ndarray, b: np.ndarray, scale: np.ndarray) -> float:
        return float(np.abs(a - b).max() / max(float(np.abs(scale).max()), 1e-3))

    planned: dict[str, float] = {}
    for c in plan.collectives:
        planned[c.kind] = planned.get(c.kind, 0.0) + float(c.nbytes * c.times)
    lowered: dict[str, float] = {}
    for key, elements in step.counters.items():  # elements, summed over all devices
        kind = key.partition("/")[0]
        if kind.startswith("all"):
            lowered[kind] = lowered.get(kind, 0.0) + 4 * elements / devices
    return {
        "planned": planned,
        "lowered": lowered,
        "mesh": layout.mesh_shape,
        "rules": layout.layout_rules,
        "lines": len(text.splitlines()),
        "loss": float(value),
        "loss_error": abs(float(value) - step.losses[0]),
        "gradient_error": max(apart(gradients[k], step.gradients[k], gradients[k]) for k in gradients),
        "update_error": max(
            float(np.abs(values[k] - 0.1 * gradients[k] - step.parameters[k]).max()) for k in gradients
        ),
    }


def functions() -> dict[str, float]:
    """The error of each translated function of the graph's ops, on split tensors, against its definition in numpy."""
    from pase.backends.mesh_tf import runtime_ops
    from pase.backends.mesh_tf.lower import EXPRESSIONS, call
    from pase.backends.mesh_tf.shim import mesh_tensorflow
    from pase.ir.functions import FUNCTIONS
    from pase.local.functions import COMPUTED, NUMPY

    mtf, tf = mesh_tensorflow()
    least = dict.fromkeys(("log", "sqrt", "rsqrt", "pow", "log1p"), 0.1) | {"acosh": 1.0}
    wanted, made = {}, {}
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        graph = mtf.Graph()
        mesh, dim = mtf.Mesh(graph, "mesh"), mtf.Dimension("k", 64)
        for name, expression in EXPRESSIONS.items():
            if expression == "same":
                continue
            count = (FUNCTIONS[name].operands or (1, 1))[0]
            logical = expression.startswith("mtf.logical_")
            low = least.get(name, -0.9)
            xs = [RNG.uniform(low, low + 1.8, 64).astype("float32") for _ in range(count)]
            xs[-1][:8] = xs[0][:8]
            xs = [x > 0.0 for x in xs] if logical else xs
            given = {
                f"x{i}": mtf.import_tf_tensor(mesh, tf.constant(x), shape=mtf.Shape([dim]))
                for i, x in enumerate(xs)
            }
            code = call(expression, *given, dtype="bool" if FUNCTIONS[name].boolean else "")
            made[name] = mtf.identity(eval(code, {"mtf": mtf, "tf": tf, "ops": runtime_ops, **given}))
            numpy = {"and": np.logical_and, "or": np.logical_or, "not": np.logical_not}.get(name)
            computed = COMPUTED.get(name)
            wanted[name] = computed(NUMPY, *xs) if computed else (numpy or getattr(np, name))(*xs)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "k:x", ["/cpu:0", "/cpu:1"])
        lowering = mtf.Lowering(graph, {mesh: impl})
        values = session.run({name: lowering.export_to_tf_tensor(t) for name, t in made.items()})

    def error(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs((1.0 * a - 1.0 * b) / np.maximum(np.abs(1.0 * b), 1.0)).max())

    return {k: error(values[k], np.asarray(wanted[k])) for k in wanted}


def refused() -> dict[str, str]:
    """The errors for models that Mesh-TensorFlow cannot express."""
    import tensorflow as tf

    from bench.cases.plans import Case
    from pase.backends.emit import mesh_tf
    from pase.compiler.problem.problem import SplitProblem
    from pase.errors import PaseError
    from pase.frontends.tf import frontend as from_tf

    w = tf.Variable(tf.ones((8, 8)), name="w")
    spec = tf.TensorSpec((4, 8), tf.float32, name="x")

    @tf.function
    def cumulative(x: Any) -> Any:
        return tf.reduce_sum(tf.cumsum(x @ w, axis=1, name="running"))

    @tf.function
    def until(x: Any) -> Any:
        return tf.reduce_sum(
            tf.while_loop(lambda y: tf.reduce_sum(y) < 100.0, lambda y: [y @ w], [x], name="until")[0]
        )

    out = {}
    for name, fn in (("cumulative", cumulative), ("until", until)):
        traced = from_tf.trace(fn, spec)
        case = Case(traced=traced, problem=SplitProblem.of(traced.graph, 2, None, "analytic", "sgd"))  # type: ignore[arg-type]
        plan = case.plan("random0@2")
        assert plan is not None
        try:
            out[name] = mesh_tf.program(plan)[0]
        except PaseError as e:
            out[name] = str(e)
    return out


def scans() -> list[dict[str, Any]]:
    """JAX models with a loop under random splits: a step compared with JAX's."""
    import jax
    import jax.numpy as jnp

    from bench.cases.plans import case_of
    from pase.backends.emit import mesh_tf
    from pase.backends.mesh_tf.run import run

    sizes = {"w": (3, 8, 8), "b": (3, 8), "out": (8, 8)}
    values = {k: RNG.standard_normal(s).astype(np.float32) for k, s in sizes.items()}
    x = RNG.standard_normal((8, 8)).astype(np.float32)
    out = []
    for reverse in (False, True):

        def loss(params: Any, x: Any, reverse: bool = reverse) -> Any:
            def turn(carry: Any, layer: Any) -> Any:
                h, g, seen = carry
                w, b = layer
                new = jnp.tanh(h @ w + b) * jnp.expand_dims(
                    angles, 0
                )  # a constant from outside, read with an added dim
                return (g, new, seen + new), (
                    (new**2).mean(-1),
                    seen,
                )  # ``seen`` is a constant in the first iteration

            angles = jnp.cos(jnp.arange(8.0))
            layers, start = (params["w"], params["b"]), (x, x * 0.5, jnp.zeros_like(x))
            (h, g, _), (ys, seen) = jax.lax.scan(turn, start, layers, reverse=reverse)
            weights = jnp.arange(3.0)[:, None]
            return (h @ params["out"]).mean() + (g**2).mean() + (ys * weights).mean() + (seen**2).mean()

        shapes = {k: jax.ShapeDtypeStruct(s, "float32") for k, s in sizes.items()}
        case = case_of(loss, shapes, jax.ShapeDtypeStruct(x.shape, "float32"), devices=4)
        plan = case.plan("random1@2x2")
        assert plan is not None
        text, layout = mesh_tf.program(plan)
        module: Any = types.ModuleType("scan_mtf")
        exec(compile(text, "scan_mtf", "exec"), module.__dict__)
        done = run(module, dict.fromkeys(plan.inputs, x), values)
        wanted, gradients = jax.value_and_grad(loss)(values, x)
        errors = (np.abs(done.gradients[k] - g).max() / np.abs(g).max() for k, g in gradients.items())
        out.append(
            {
                "layout": layout.layout_rules,
                "loss": done.losses[0],
                "wanted": float(wanted),
                "gradient_error": float(max(errors)),
            }
        )
    return out


STRATEGIES = {
    "mlp": ["ours@4x2", "random1@2x2x2"],
    "alexnet": ["ours@2x2"],
    "rows": ["random0@2x2", "random17@2x2"],
    "lstm": ["ours@4"],
    "transformer": ["ours@2x2"],
    "parts": ["random0@2x2", "random5@2x2"],
    "images": ["ours@4", "ours@2x2"],
}
"""Model -> the strategies it is trained under: the first in every run, the others before a release."""


def main(wanted: list[str]) -> None:
    out: dict[str, Any] = {}
    if "rules" in wanted:
        out["rules"] = rules()
    if "moves" in wanted:
        out["moves"] = moves()
    if "functions" in wanted:
        out["functions"] = functions()
    if "refused" in wanted:
        out["refused"] = refused()
    if "scans" in wanted:
        out["scans"] = scans()
    asked = {n for n in wanted if n.partition("=")[0] in STRATEGIES}
    made = models() if asked else {}
    for each in sorted(asked):
        name, _, strategy = each.partition("=")
        for s in [strategy] if strategy else STRATEGIES[name][:1]:
            out[f"{name} {s}"] = trained(name, *made[name], s)
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
