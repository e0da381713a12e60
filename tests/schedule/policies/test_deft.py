"""DeFT: the paper's figures, and the Solver's four cases."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from bench.cases.schedules import BETA, chain, link, random_problem, vgg19
from pase.errors import Infeasible
from pase.schedule import Options, ScheduleProblem, compare_policies, evaluate, get_policy
from pase.schedule.policies.deft import profile, solve, to_plan

PARTITION = 26_000_000
NCCL = link("nccl", beta=BETA)
GLOO = link("gloo", beta=BETA * 1.65)


@pytest.mark.parametrize(("links", "updates"), [((NCCL,), 28), ((NCCL, GLOO), 44)])
@pytest.mark.parametrize("release_aware", [False, True])
def test_updates_in_60_iterations_of_vgg19(links: tuple, updates: int, release_aware: bool) -> None:  # type: ignore[type-arg]
    """From the paper: 28 updates on one link (effective coverage 1.98), 44 on two (1.23)."""
    p = profile(vgg19(*links), PARTITION)
    assert solve(p, release_aware=release_aware, iterations=60, stop=False).updates == updates


def test_partition_fits_the_least_knapsack() -> None:
    p = profile(vgg19(NCCL, GLOO), PARTITION)
    assert p.seconds.max() < p.forward_s
    assert sum(x.nbytes for b in p.pieces for x in b) == vgg19().nbytes
    assert (np.diff(p.ready_s) >= 0).all()


def test_vgg19_with_delayed_updates_is_compute_bound() -> None:
    """The paper's +115% over DDP implies 137 ms. Without the overheads of a real run, only compute is left."""
    for links in ((NCCL,), (NCCL, GLOO)):
        problem = vgg19(*links)
        plan = get_policy("deft").make(problem, Options(staleness=4))
        assert evaluate(problem, plan).iteration_s == pytest.approx(problem.compute_s)
        assert 295.05 / (evaluate(problem, plan).iteration_s * 1e3) - 1 > 1.15


@pytest.mark.parametrize(
    ("times_ms", "parameters", "least", "most"),
    [((59, 118, 242), 44_654_504, 0.33, 0.80), ((169, 381, 546.4), 81_894_144, 0.05, 0.62)],
    ids=["ResNet-101", "GPT-2"],
)
def test_speedups_from_table_1(
    times_ms: tuple[float, float, float], parameters: int, least: float, most: float
) -> None:
    """Table I gives totals, so this test uses 13 equal buckets. The paper has +33..73% for ResNet-101 and +29..62% for
    GPT-2, whose buckets are unequal."""
    f, b, c = (x * 1e-3 for x in times_ms)
    n, beta = 13, c / (4 * parameters)
    nccl, gloo = link("nccl", beta=beta), link("gloo", beta=1.65 * beta)

    def made(*links) -> ScheduleProblem:  # type: ignore[no-untyped-def]
        return chain([f / n] * n, [b / n] * n, [4 * parameters // n] * n, *links)

    both = made(nccl, gloo)
    late = evaluate(both, get_policy("deft").make(both, Options(staleness=4))).iteration_s
    assert late == pytest.approx(f + b)
    for policy in ("ddp", "bytescheduler", "us_byte"):
        plain = made(nccl)
        gain = evaluate(plain, get_policy(policy).make(plain, Options())).iteration_s / late - 1
        assert least <= gain <= most


@pytest.mark.parametrize("head", [0.0, 0.48])
def test_gpt2_by_its_shapes(head: float) -> None:
    """The paper's 81,894,144 parameters are a GPT-2 of six layers. Its tied embedding is nearly half of them. The
    embedding's gradient is made last and needed first, so no order without delays hides it.

    head: the fraction of compute in the output layer. The paper's +29..62% is between this test (the embedding in one
    bucket) and 13 equal buckets.
    """
    d, vocabulary, context, layers = 768, 50257, 1024, 6
    layer, embedding = 12 * d * d + 13 * d, (vocabulary + context) * d
    total = layers * layer + embedding + 2 * d
    assert total == pytest.approx(81_894_144, rel=3e-4)
    f, b, beta = 0.169, 0.381, 0.5464 / (4 * total)
    each = (1 - head) / layers
    seconds = [0.0, *[each] * layers, head]
    sizes = [4 * embedding, *[4 * layer] * layers, 1]

    def made(*links) -> ScheduleProblem:  # type: ignore[no-untyped-def]
        return chain([f * s for s in seconds], [b * s for s in seconds], sizes, *links)

    plain, both = made(link("nccl", beta=beta)), made(link("nccl", beta=beta), link("gloo", beta=1.65 * beta))
    late = evaluate(both, get_policy("deft").make(both, Options(staleness=4))).iteration_s
    assert late == pytest.approx(f + b)
    gains = {
        policy: evaluate(plain, get_policy(policy).make(plain, Options())).iteration_s / late - 1
        for policy in ("ddp", "bytescheduler", "us_byte", "ours")
    }
    # The gradients of the embedding and the first layer are made last and needed first: no compute overlaps them.
    alone = 4 * (embedding + layer) * beta / (f + b)
    assert all(alone * (1 - 1e-6) <= g <= 0.75 for g in gains.values())
    assert gains["ours"] == pytest.approx(alone, rel=1e-2) and gains["ddp"] >= gains["us_byte"] * (1 - 1e-3)


def test_gpt2_with_the_bucket_that_the_paper_speaks_of() -> None:
    """The paper's claims about GPT-2 hold if the first bucket has 29% of the bytes.

    The time that cannot overlap (the first bucket on the network and the last bucket's backward) is then about 25% of
    the iteration, and ByteScheduler and US-Byte are 29% behind.
    """
    n, f, b, c, share = 13, 0.169, 0.381, 0.5464, 0.291
    sizes = [int(1e9 * share), *[int(1e9 * (1 - share) / (n - 1))] * (n - 1)]
    beta = c / sum(sizes)
    problem = chain([f / n] * n, [b / n] * n, sizes, link("nccl", beta=beta))
    took = {
        p: evaluate(problem, get_policy(p).make(problem, Options())).iteration_s for p in ("us_byte", "ddp")
    }
    assert (b / n + sizes[0] * beta) / took["us_byte"] == pytest.approx(0.25, abs=0.02)
    assert took["us_byte"] / (f + b) - 1 == pytest.approx(0.29, abs=0.005)
    assert 0.33 < took["ddp"] / (f + b) - 1 < 0.37


def test_release_times_keep_sends_within_backward() -> None:
    """The printed Algorithm 1 overruns backward; the release-aware form never does."""
    overran = 0
    for seed in range(8):
        problem = random_problem(12, seed, startup=0.0)
        p = profile(problem, 4 * max(t.nbytes for t in problem.tensors))
        for aware in (True, False):
            s = solve(p, release_aware=aware, iterations=1)
            end = 0.0
            for send in s.sends:
                end = max(end, p.ready_s[send.bucket]) + p.seconds[send.bucket, 0]
            if aware:
                assert end <= p.backward_s * (1 + 1e-9)
            else:
                overran += end > p.backward_s * (1 + 1e-9)
    assert overran > 0


def test_plan_repeats_the_solver() -> None:
    problem = vgg19(NCCL)
    p = profile(problem, PARTITION)
    s = solve(p)
    plan = to_plan(p, s)
    assert s.period is not None
    assert plan.period == s.period[1] - s.period[0]
    assert sum(u.batches for u in plan.updates) == plan.period


def test_staleness_is_a_limit() -> None:
    problem = vgg19(NCCL)
    for allowed in (1, 2, 3):
        plan = get_policy("deft").make(problem, Options(staleness=allowed))
        assert plan.staleness <= allowed
        assert plan.detail["retries"] > 0
    with pytest.raises(Infeasible, match="--staleness"):
        compare_policies(problem, ["deft"], Options())


def test_a_solver_that_finds_no_period_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message does not ask for staleness, which would not help."""
    monkeypatch.setattr("pase.schedule.policies.deft.solve", partial(solve, iterations=1))
    with pytest.raises(Infeasible, match="does not repeat") as e:
        get_policy("deft").make(vgg19(NCCL), Options(staleness=4))
    assert "VGG-19" in e.value.where and "--staleness" not in str(e.value)


def test_no_part_small_enough_is_said() -> None:
    problem = chain([1.0, 1.0], [1.0, 1.0], [50, 50], link(alpha_s=5.0))
    with pytest.raises(Infeasible) as e:
        get_policy("deft").make(problem, Options(staleness=2))
    assert any(f"'{t.name}'" in e.value.what for t in problem.tensors)
