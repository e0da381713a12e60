"""The collectives that XLA for TPU makes of gathers and scattered sums.

    /tmp/tpu/bin/python -m bench audit.tpu_forms        # in the environment of bench/audit/tpu.py; seconds per row
    /tmp/tpu/bin/python -m bench audit.tpu_forms --only 8192x2048

Each row is a program under ``shard_map``, compiled ahead of time and not run: a product whose partial result on every
device is scattered along one of its dims, or a weight that is gathered and read by a product. A scatter is "tiled"
(along the dim itself) or "apart" (along a dim of the parts in front of it, as ``backends/jax/spmd/collectives.py``
does). Mesh axes are joined in one collective ("ab") or follow one another ("a-b"). Writes bench/results/tpu_forms.json:
the collectives in each compiled program, with their larger local buffers.
"""

from __future__ import annotations

import importlib.metadata
import math
from dataclasses import asdict, dataclass
from typing import Any

from bench.runner import Benchmark

CONTRACTED = 64
"""The rows of each device over which the products sum."""


@dataclass(frozen=True, kw_only=True)
class AskedForm:
    """kind: the kind of collective. shape: that of the whole gradient or weight, in bfloat16. axes: those of a mesh
    with the topology's sides, or with the given sizes. dim: the dim that they split. form: tiled or apart."""

    kind: str
    topology: str
    shape: tuple[int, ...]
    axes: str
    dim: int = 0
    form: str = "apart"
    sizes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        shape = "x".join(map(str, self.shape))
        sizes = "" if not self.sizes else f" as {'x'.join(map(str, self.sizes))}"
        return f"{self.kind} {shape} dim {self.dim} over {self.axes} of {self.topology}{sizes}, {self.form}"


def _sums() -> list[AskedForm]:
    made = []
    cases: list[tuple[str, tuple[int, ...], int, str]] = [
        ("4x8", (3072, 768), 0, "ab"),
        ("4x8", (768, 12, 64), 0, "ab"),
        ("4x8", (50304, 768), 0, "ab"),
        ("4x8", (50304, 768), 1, "ab"),
        ("8x8", (1024, 1024), 1, "a"),
        ("8x8", (8192, 2048), 0, "a"),
        ("8x8", (8192, 2048), 0, "ab"),
        ("8x8", (8192, 2048), 0, "a-b"),
        ("8x8", (2048, 16, 128), 0, "a-b"),
    ]
    for form in ("tiled", "apart"):
        made += [
            AskedForm(kind="reduce_scatter", topology=t, shape=s, dim=d, axes=a, form=form)
            for t, s, d, a in cases
        ]
    small = [((512, 2048), "ab"), ((512, 2048), "a-b"), ((512, 8, 64), "ab"), ((8192, 2048), "ab")]
    made += [
        AskedForm(kind="reduce_scatter", topology=t, shape=s, axes=a)
        for t in ("4x4", "4x8")
        for s, a in small
    ]
    some = [((2, 4, 8), "bc"), ((4, 2, 2, 4), "ac")]
    return made + [
        AskedForm(kind="reduce_scatter", topology="8x8", shape=(2048, 8192), axes=axes, sizes=sizes)
        for sizes, axes in some
    ]


def _gathers() -> list[AskedForm]:
    cases: list[tuple[str, tuple[int, ...], str, tuple[int, ...]]] = [
        ("8x8", (2048, 8192), "ab", ()),
        ("8x8", (2048, 2048), "ab", ()),
        ("8x8", (2048, 2048), "bc", (2, 4, 8)),
        ("4x8", (768, 3072), "ab", ()),
    ]
    return [
        AskedForm(kind="all_gather", topology=t, shape=s, axes=a, sizes=sizes, form="tiled")
        for t, s, a, sizes in cases
    ]


ROWS = [(a.name, a) for a in (*_sums(), *_gathers())]


def compiled(asked: AskedForm) -> list[dict[str, Any]]:
    """Returns the collectives of the compiled program: kind and bytes of the larger local buffer."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from pase.hlo.collectives import collectives
    from pase.machine.jax_devices import as_linked

    chips = topologies.get_topology_desc(platform="tpu", topology_name=f"v5e:{asked.topology}").devices
    sizes = asked.sizes or tuple(map(int, asked.topology.split("x")))
    names = tuple("abcd"[: len(sizes)])
    mesh = jax.sharding.Mesh(np.array(as_linked(chips), dtype=object).reshape(sizes), names)
    stages = asked.axes.split("-")
    split: list[Any] = [None] * len(asked.shape)
    split[asked.dim] = tuple(a for stage in stages for a in stage)

    def scattered(x: Any, y: Any) -> Any:
        out = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))).reshape(asked.shape)
        for stage in stages:
            if asked.form == "apart":
                parts = math.prod(mesh.shape[a] for a in stage)
                n = out.shape[asked.dim]
                out = out.reshape(*out.shape[: asked.dim], parts, n // parts, *out.shape[asked.dim + 1 :])
            out = jax.lax.psum_scatter(
                out, tuple(stage), scatter_dimension=asked.dim, tiled=asked.form == "tiled"
            )
        return out

    def gathered(x: Any, y: Any) -> Any:
        return x @ jax.lax.all_gather(y, tuple(asked.axes), axis=asked.dim, tiled=True)

    def given(shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))

    rows = CONTRACTED * math.prod(sizes)
    left = given((rows, asked.shape[0]), P(names))
    if asked.kind == "all_gather":
        fn, right, ins, out = gathered, given(asked.shape, P(*split)), (P(names), P(*split)), P(names)
    else:
        fn, right = scattered, given((rows, math.prod(asked.shape[1:])), P(names))
        ins, out = (P(names), P(names)), P(*split)
    program = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False))
    found = collectives(program.lower(left, right).compile())
    return [{"kind": c.kind, "bytes": c.bytes, "devices": c.group_size} for c in found]


BENCH = Benchmark(
    "tpu_forms",
    dict(ROWS),
    lambda asked: asdict(asked) | {"compiled": compiled(asked)},
    named="{name}",
    head={p: importlib.metadata.version(p) for p in ("jax", "libtpu")},
    line=lambda name, r: f"{r['name']}: {r['compiled']}",
    environment={"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
)
