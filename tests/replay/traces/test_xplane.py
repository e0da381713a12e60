"""Profiler planes of XLA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pase.hlo.protos import parse
from pase.replay.collect.profiling import profile
from pase.replay.traces.ingest import load
from pase.replay.types import on_stream


@pytest.mark.parametrize("width", [32, 64])
def test_of_programs_with_one_name_the_one_that_ran_is_read(tmp_path: Path, width: int) -> None:
    """The profiler records all programs that the process compiled, so the first one of that name may not have run."""
    jax = pytest.importorskip("jax")

    def step(w: Any) -> Any:
        return w @ w

    made = {n: jax.jit(step).lower(jax.numpy.ones((n, n))).compile() for n in (32, 64)}
    w = jax.numpy.ones((width, width))
    with profile(tmp_path) as run:
        for _ in range(3):
            with run.step():
                jax.block_until_ready(made[width](w))
    (product,) = [op.product for op in load(tmp_path).compiled.values() if op.product]
    assert product == ((width, width),) * 3


def test_ops_of_one_name_in_two_programs_are_told_apart(tmp_path: Path) -> None:
    """XLA numbers ops within a program: the ops of an update have the names of other ops of the gradient."""
    jax = pytest.importorskip("jax")

    def first(w: Any) -> Any:
        return jax.numpy.tanh(w @ w)

    def second(w: Any) -> Any:
        return jax.numpy.exp(w @ w.T) @ w

    small, large = jax.numpy.ones((32, 32)), jax.numpy.ones((96, 96))
    made = [(jax.jit(f).lower(x).compile(), x) for f, x in ((first, small), (second, large))]
    with profile(tmp_path) as run:
        for _ in range(3):
            with run.step():
                for program, x in made:
                    jax.block_until_ready(program(x))
    t = load(tmp_path)
    ran = {t.names[n] for n in t["name"][on_stream(t["kind"])].tolist()}
    products = {n: t.compiled[n].product for n in ran if n in t.compiled and t.compiled[n].product}
    assert sorted(products.values()) == [((32, 32),) * 3, ((96, 96),) * 3, ((96, 96),) * 3]
    per_step = {n: int((t["name"][on_stream(t["kind"])] == t.names.index(n)).sum()) for n in products}
    assert set(per_step.values()) == {3}


def test_a_program_from_a_compilation_cache_is_found_under_another_number(tmp_path: Path) -> None:
    """Its executions then have a number that none of the profile's programs has."""
    jax = pytest.importorskip("jax")

    def step(w: Any) -> Any:
        return w @ w

    made = {n: jax.jit(step).lower(jax.numpy.ones((n, n))).compile() for n in (48, 80)}
    with profile(tmp_path) as run:
        for _ in range(2):
            with run.step():
                jax.block_until_ready(made[48](jax.numpy.ones((48, 48))))
    (path,) = tmp_path.rglob("*.xplane.pb")
    space = parse("XSpace", path.read_bytes(), str(path))
    held = next(p for p in space.planes if p.name == "/host:metadata")
    ours = [m for m in held.event_metadata.values() if m.name.startswith("jit_step(")]
    assert len(ours) >= 2
    keys = [k for k, m in held.event_metadata.items() if m.name.startswith("jit_step(")]

    def products(*kept: int) -> tuple[list[Any], list[str]]:
        for key in keys:
            held.event_metadata[key].name = f"jit_step({9000 + key})" if key in kept else "jit_other(1)"
        path.write_bytes(space.SerializeToString())
        t = load(tmp_path)
        return [op.product for op in t.compiled.values() if op.product], [str(p) for p in t.problems]

    alone = [products(key)[0] for key in keys]
    assert [((48, 48),) * 3] in alone
    found, said = products(*keys)
    assert not found and any("compilation cache" in s for s in said)
