"""Scheduling problems that tests and benches share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from bench.cases import SHARED
from pase.schedule.pipedream import Layer, problem_from_layers, read_pipedream
from pase.schedule.types import Link, ScheduleProblem, SendTime

PROFILES = SHARED / "traces" / "pipedream_profiles"

# DeFT's Table II, microseconds. Bucket 1's communication is printed 1,968; the stated total needs 11,968.
FORWARD_US = (1238, 28799, 4801, 1899, 326, 103)
BACKWARD_US = (72496, 12786, 4872, 2319, 484, 162)
COMMUNICATION_US = (11968, 11262, 15447, 178643, 31754, 8651)
VGG19_BYTES = 143_652_544 * 4
BETA = sum(COMMUNICATION_US) * 1e-6 / VGG19_BYTES


def link(name: str = "net", *, alpha_s: float = 0.0, beta: float = 1.0) -> Link:
    """Returns a link on which a message takes alpha_s seconds plus beta seconds per byte."""
    return Link(name=name, curve=SendTime.alpha_beta(alpha_s=alpha_s, beta_s_per_byte=beta))


def vgg19(*links: Link) -> ScheduleProblem:
    """Returns the problem of DeFT's six buckets; the default link takes exactly the table's times."""
    rows = zip(FORWARD_US, BACKWARD_US, COMMUNICATION_US, strict=True)
    layers = [
        Layer(
            name=f"bucket {i}",
            forward_s=f * 1e-6,
            backward_s=b * 1e-6,
            parameters=((f"bucket {i}", round(c * 1e-6 / BETA)),),
        )
        for i, (f, b, c) in enumerate(rows, 1)
    ]
    return problem_from_layers(layers, links or (link("nccl", beta=BETA),), name="VGG-19, DeFT Table II")


def chain(
    forward: list[float], backward: list[float], nbytes: list[int], *links: Link, name: str = "chain"
) -> ScheduleProblem:
    """Returns the problem of a chain of layers with one parameter each: seconds forward and backward, bytes to send."""
    layers = [
        Layer(name=f"l{i}", forward_s=f, backward_s=b, parameters=((f"w{i}", n),))
        for i, (f, b, n) in enumerate(zip(forward, backward, nbytes, strict=True))
    ]
    return problem_from_layers(layers, links or (link(),), name=name)


def random_problem(n: int, seed: int, *, links: int = 1, startup: float | None = None) -> ScheduleProblem:
    """Returns a problem with lognormal layers, communication of 0.5 to 4 times compute, and startups of 0 to 0.2 of the
    mean message."""
    g = np.random.default_rng(seed)
    ratio = float(g.choice([0.5, 0.9, 1.2, 2.0, 4.0]))
    f = g.lognormal(0, 1, n)
    b = f * g.uniform(1, 3, n)
    c = g.lognormal(0, 1.3, n)
    c *= ratio * (f.sum() + b.sum()) / c.sum()
    nbytes = np.maximum(1, c * 1e6).astype(int)
    alpha = (float(g.choice([0.0, 0.02, 0.2])) if startup is None else startup) * float(c.mean()) * 1e-3
    made = tuple(link(f"link {k}", alpha_s=alpha * (1 + k), beta=1e-9 * (1 + 0.65 * k)) for k in range(links))
    return chain((f * 1e-3).tolist(), (b * 1e-3).tolist(), nbytes.tolist(), *made, name=f"random {n} {seed}")


@st.composite
def small_problems(draw: st.DrawFn, most: int = 6, links: int = 1) -> ScheduleProblem:
    """Draws chains with integer times, so that sums are exact."""
    n = draw(st.integers(1, most))
    times = st.integers(0, 9)
    f = [float(draw(times)) for _ in range(n)]
    b = [float(draw(times)) for _ in range(n)]
    nbytes = [draw(st.integers(1, 20)) for _ in range(n)]
    made = tuple(
        link(f"link {k}", alpha_s=float(draw(st.integers(0, 4))), beta=1.0 + k) for k in range(links)
    )
    return chain(f, b, nbytes, *made)


def profile(name: str, *links: Link, dataflow: bool = False) -> ScheduleProblem:
    """Returns the problem of a measured PipeDream profile, by default on a link of 50 µs and 5 GB/s."""
    path = PROFILES / f"{name}.graph.txt"
    net = links or (link("net", alpha_s=50e-6, beta=2e-10),)
    return read_pipedream(path.read_text(), net, name=name, dataflow=dataflow)
