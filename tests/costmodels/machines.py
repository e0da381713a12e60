"""Small machines for the tests of cost models."""

from __future__ import annotations

from hypothesis import strategies as st

from pase.machine import Algorithm, CollectiveCurve, Curve, Device, LinkLevel, Machine, MatmulTable, Mesh

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast")


def device() -> Device:
    return Device(
        name="d",
        peak_flops={"float32": 1e13, "bfloat16": 1e14},
        memory_bytes=10**10,
        memory_bandwidth_bytes_per_s=1e12,
    )


def flat(*, latency_s: float = 2e-6, bandwidth: float = 1e11, algorithms: tuple[str, ...] = ()) -> Machine:
    """One switch for all devices. It has only these ``algorithms``, without launch cost."""
    return Machine(
        name="flat",
        device=device(),
        levels=(LinkLevel(name="s", ways=0, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth),),
        sources={},
        algorithms=tuple(
            Algorithm(
                algorithm=a,  # type: ignore[arg-type]
                protocol="p",
                launch_s=0.0,
                step_s=(latency_s,),
                kinds=("all_reduce",) if a == "one_shot" else (),
            )
            for a in algorithms
        ),
    )


def nested(
    node: int = 4, *, inner: float = 1e11, outer: float = 1e10, algorithms: tuple[Algorithm, ...] = ()
) -> Machine:
    """Nodes of ``node`` devices. The outer level is slower in bandwidth and latency."""
    return Machine(
        name="nested",
        device=device(),
        levels=(
            LinkLevel(name="in", ways=node, latency_s=1e-6, bandwidth_bytes_per_s=inner),
            LinkLevel(name="out", ways=0, latency_s=1e-5, bandwidth_bytes_per_s=outer),
        ),
        sources={},
        algorithms=algorithms,
    )


def torus(*, ways: int = 16, wrap_ways: int = 0, latency_s: float = 0.0) -> Machine:
    """Two torus dims of up to ``ways``, with 1e11 bytes/s per direction."""
    return Machine(
        name="torus",
        device=device(),
        levels=tuple(
            LinkLevel(
                name=f"t{i}",
                ways=ways,
                latency_s=latency_s,
                bandwidth_bytes_per_s=1e11,
                topology="torus",
                wrap_ways=wrap_ways,
            )
            for i in range(2)
        ),
        sources={},
    )


def axes(*sizes: int) -> Mesh:
    return Mesh(names=tuple("xyzwvu"[: len(sizes)]), sizes=sizes)


kinds = st.sampled_from(KINDS)
# 0, or anything from a byte to a terabyte.
sizes_of_buffers = st.one_of(st.just(0.0), st.floats(0, 12).map(lambda e: 10.0**e))

# Measured tables.
TABLE = MatmulTable(
    dtype="bfloat16",
    m=(128, 1024, 8192),
    n=(128, 1024),
    k=(64, 1024),
    flops_per_s=tuple(1e12 * x for x in (1, 3, 4, 9, 5, 12, 20, 40, 8, 20, 30, 60)),
)
CURVES = (
    CollectiveCurve(
        kind="all_reduce", ways=(4, 1), curve=Curve(nbytes=(1e3, 1e6, 1e9), seconds=(2e-5, 5e-5, 2e-2))
    ),
    CollectiveCurve(kind="all_gather", ways=(1, 4), curve=Curve(nbytes=(1e3, 1e9), seconds=(4e-5, 1e-1))),
)
