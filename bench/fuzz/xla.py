"""Compiles small random programs under random strategies with XLA.

    python -m bench fuzz.xla                        # 2,000 cases; rows in the result file are kept
    python -m bench fuzz.xla --cases 100-200        # these again
    python -m bench fuzz.xla --cases 17 --show      # one case: its program, its splits, how it ends
    python -m bench fuzz.xla --kinds conv           # only with convolutions
    python -m bench fuzz.xla --manual --cases 0-99  # the manual lowering; what it refuses is a row too

A failed check inside XLA ends the process, so a child process compiles the cases and announces each before it starts.
If the child dies, the parent records that case and continues with another child. Gradients are compiled too; nothing is
run. Writes bench/results/xla_fuzz.json (manual lowering: xla_fuzz_manual.json): how many cases ended how, and each case
that did not compile.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.processes import forks_of, rows_apart
from bench.runner import ROOT, Benchmark, numbers, option

if TYPE_CHECKING:
    import jax

    from pase.backends.jax.spmd.lower import Lowering

CASES = 2000
MESHES = ("2x4", "4x2", "2x2x2", "8")
PRELOADED = ("bench.cases.plans", "bench.fuzz.xla")
LIMIT_S = 120.0
"""The limit of CPU seconds for a case."""


@dataclass(frozen=True, kw_only=True)
class RandomProgram:
    """A loss over a pytree of parameters and one batch, and the names of its steps."""

    words: tuple[str, ...]
    loss: Callable[[dict[str, jax.Array], jax.Array], jax.Array]
    params: dict[str, Any]
    batch: Any


ProgramStep = tuple[str, dict[str, tuple[int, ...]], Callable[..., Any], tuple[int, ...]]
"""Name, shapes of the parameters, f(params, x), and shape of the result."""


def convolution(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> ProgramStep:
    """Draws a convolution with any groups, strides, dilations and padding; batch and channels are first or last."""
    import jax

    _, height, width, channels = shape
    groups = int(rng.choice([g for g in (1, 1, 2, 4, channels) if channels % g == 0]))
    out = groups * int(rng.choice([1, 2, 4, 8]))
    window, stride = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    dilation = int(rng.integers(1, 3)) if stride == 1 else 1
    widened = int(rng.choice([1, 1, 1, 2]))
    reach = (window - 1) * dilation
    before = int(rng.integers(reach + 1)) if min(height, width) > reach else reach
    padding = (
        [(before, reach - before)] * 2 if rng.integers(2) or min(height, width) <= reach else [(0, 0)] * 2
    )

    def apply(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            p[name],
            (stride, stride),
            padding,
            lhs_dilation=(widened, widened),
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    filters = (window, window, channels // groups, out)
    made = jax.eval_shape(
        apply, {name: jax.ShapeDtypeStruct(filters, "float32")}, jax.ShapeDtypeStruct(shape, "float32")
    )
    words = f"conv groups={groups} window={window} stride={stride} dilation={dilation}x{widened} padding={padding[0]}"
    return words, {name: filters}, apply, made.shape


def product(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> ProgramStep:
    """Draws a product of the last dim and a matrix, or of its groups and a matrix for each."""
    import jax.numpy as jnp

    *outer, inner = shape
    out = int(rng.choice([8, 16, 32]))
    groups = int(rng.choice([1, 1, 2, 4]))
    if groups > 1 and inner % groups == 0:

        def by_group(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
            parts = x.reshape(*outer, groups, inner // groups)
            return jnp.einsum("...gi,gio->...go", parts, p[name]).reshape(*outer, groups * out)

        return (
            f"product in {groups} groups",
            {name: (groups, inner // groups, out)},
            by_group,
            (*outer, groups * out),
        )
    return "product", {name: (inner, out)}, lambda p, x: x @ p[name], (*outer, out)


def attention(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> ProgramStep:
    """Draws self-attention with heads, over all dims but the first and the last."""
    import jax
    import jax.numpy as jnp

    batch, *middle, inner = shape
    length, heads = int(np.prod(middle)), int(rng.choice([2, 4]))
    if inner % heads:
        return product(rng, shape, name)

    def apply(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        flat = x.reshape(batch, length, inner)
        q, k, v = (flat @ p[f"{name}{i}"] for i in "qkv")
        q, k, v = (t.reshape(batch, length, heads, inner // heads) for t in (q, k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return mixed.reshape(shape)

    causal = bool(rng.integers(2))
    return (
        f"attention heads={heads} causal={causal}",
        {f"{name}{i}": (inner, inner) for i in "qkv"},
        apply,
        shape,
    )


def light(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> ProgramStep:
    """Draws a step without a product: norm, pooling, permutation, sort, cumulative sum, padding, slice or
    concatenation."""
    import jax
    import jax.numpy as jnp

    axis = int(rng.integers(1, len(shape)))
    window = (1, 2, 2, 1)[: len(shape)] if len(shape) == 4 else (1, 2, 1)
    pooled = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")  # noqa: E731
    choices: dict[str, Callable[[Any], Any]] = {
        "relu": jax.nn.relu,
        "softmax": lambda x: jax.nn.softmax(x, axis),
        "batch norm": lambda x: (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-3),
        "layer norm": lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1),
        "cumsum": lambda x: jnp.cumsum(x, axis),
        "sort": lambda x: jnp.sort(x, axis),
        "reverse": lambda x: jnp.flip(x, axis),
        "transpose": lambda x: jnp.swapaxes(x, 1, -1),
        "pad": lambda x: jnp.pad(x, [(0, 0), (1, 1), *[(0, 0)] * (x.ndim - 2)]),
        "slice": lambda x: x[:, : max(x.shape[1] // 2, 1)],
        "join": lambda x: jnp.concatenate([x, -x], axis),
        "max pooling": lambda x: pooled(x) if min(x.shape[1:-1], default=0) > 1 else x,
        "every second": lambda x: x[:, ::2],
        "roll": lambda x: jnp.roll(x, 1, axis),
    }
    word = str(rng.choice(list(choices)))
    made = jax.eval_shape(choices[word], jax.ShapeDtypeStruct(shape, "float32"))
    return f"{word} {axis}", {}, lambda p, x: choices[word](x), made.shape


def repeated(rng: np.random.Generator, shape: tuple[int, ...], name: str) -> ProgramStep:
    """Draws a scan over layers of square matrices, with or without rematerialization."""
    import jax
    import jax.numpy as jnp

    inner, remat = shape[-1], bool(rng.integers(2))

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def apply(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(body) if remat else body, x, p[name])[0]

    return f"scan remat={remat}", {name: (3, inner, inner)}, apply, shape


KINDS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, ...], str], ProgramStep], float]] = {
    "conv": (convolution, 4.0),
    "product": (product, 2.0),
    "attention": (attention, 1.0),
    "light": (light, 3.0),
    "scan": (repeated, 1.0),
}
"""Name -> (function that draws a step of the kind, its relative frequency)."""


def program(case: int, kinds: list[str]) -> RandomProgram:
    """Returns the program of a case: one to four steps, with the mean of squares as the loss."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(case)
    image = "conv" in kinds and (kinds == ["conv"] or rng.random() < 0.7)
    shape: tuple[int, ...] = (8, 8, 8, int(rng.choice([4, 8, 16]))) if image else (8, 16, 16)
    first, words, steps = shape, [], []
    params: dict[str, Any] = {}
    for k in range(int(rng.integers(1, 5))):
        fitting = [n for n in kinds if n != "conv" or len(shape) == 4]
        if not fitting:
            break
        odds = np.array([KINDS[n][1] for n in fitting])
        kind = str(rng.choice(fitting, p=odds / odds.sum()))
        said, added, step, shape = KINDS[kind][0](rng, shape, f"w{k}")
        words.append(said)
        params |= {n: jax.ShapeDtypeStruct(s, "float32") for n, s in added.items()}
        steps.append(step)
        if not all(shape) or np.prod(shape) > 1 << 16:
            break
    if not params:
        params["scale"] = jax.ShapeDtypeStruct((first[-1],), "float32")

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        if "scale" in p:
            x = x * p["scale"]
        for step in steps:
            x = step(p, x)
        return jnp.mean(x**2)

    return RandomProgram(
        words=tuple(words), loss=loss, params=params, batch=jax.ShapeDtypeStruct(first, "float32")
    )


def compile_case(case: int, kinds: list[str], show: bool = False, lowering: Lowering = "annotated") -> None:
    """Compiles loss and gradients of one case for 8 host devices, in the layouts of its plan."""
    import jax

    from bench.cases.plans import case_of
    from pase.backends.jax.one_program import OneProgramPlan

    p = program(case, kinds)
    mesh = MESHES[case % len(MESHES)]
    plan = case_of(p.loss, p.params, p.batch, name=f"case {case}").plan(f"random{case}@{mesh}")
    assert plan is not None and isinstance(plan.jax, OneProgramPlan)
    if show:
        print(" -> ".join(p.words), plan, plan.strategy, sep="\n", file=sys.stderr)
    graded, shardings = plan.jax.value_and_grad(lowering=lowering), plan.jax.in_shardings()
    given = jax.tree.map(
        lambda s, h: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=h), (p.params, p.batch), shardings
    )
    jax.jit(graded).lower(*given).compile()


def ended(case: int, kinds: list[str], lowering: Lowering) -> dict[str, Any]:
    """Returns how a case ends."""
    try:
        compile_case(case, kinds, lowering=lowering)
    except Exception as e:  # this bench looks for any
        return {"end": type(e).__name__, "message": str(e).replace(f"{ROOT}/", "")[:300]}
    return {"end": "compiled"}


def rows(cases: list[int], kinds: list[str], lowering: Lowering = "annotated") -> Iterator[tuple[int, Any]]:
    """Yields each case and how it ends, with the words of its program; the cases are compiled in child processes."""
    arguments = [(case, kinds, lowering) for case in cases]
    for (case, *_), row in rows_apart(forks_of(PRELOADED), ended, arguments, cpu_s=LIMIT_S):
        yield case, {"words": program(case, kinds).words, **row}


def cases(given: Namespace) -> dict[str, int]:
    """Returns the cases; their programs differ by kinds."""
    of = "mixed" if given.kinds == ",".join(KINDS) else given.kinds.replace(",", "+")
    given.resume &= not given.cases
    return {f"{of} {case}": case for case in given.cases or range(CASES)}


def compiled(chosen: dict[str, int], given: Namespace) -> Iterator[tuple[str, Any]]:
    """Yields how each case ends: "compiled", or a row."""
    names = {case: name for name, case in chosen.items()}
    for case, row in rows(list(names), given.kinds.split(","), _lowering(given)):
        yield names[case], "compiled" if row["end"] == "compiled" else row


def shown(given: Namespace) -> bool:
    """Compiles the cases in this process, for ``--show``."""
    for case in given.cases if given.show else ():
        compile_case(case, given.kinds.split(","), show=True, lowering=_lowering(given))
    return given.show


def _lowering(given: Namespace) -> Lowering:
    return "manual" if given.manual else "annotated"


def ends(found: dict[str, Any]) -> dict[str, Any]:
    """Returns how many cases ended how."""
    counts = Counter(row if isinstance(row, str) else row["end"] for row in found.values())
    return {"of": len(found), "ends": dict(counts)}


BENCH = Benchmark(
    result=lambda given: "xla_fuzz_manual" if given.manual else "xla_fuzz",
    rows=cases,
    stream=compiled,
    at="cases",
    head=ends,
    order=lambda name, _: (name.split()[0], int(name.split()[1])),
    line=lambda name, row: f"{name}: {row}",
    options=[
        option("--cases", type=numbers, help="these again, as in 3,7-9; default: all that are missing"),
        option("--kinds", default=",".join(KINDS)),
        option("--show", action="store_true", help="print each program and its splits; save no rows"),
        option("--manual", action="store_true", help="lowered as manual: xla_fuzz_manual.json"),
    ],
    environment={
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    },
    instead=shown,
    resumes=True,
)
