"""What Megatron's functional tests keep, by hand and as they recorded it."""

from __future__ import annotations

import pytest

from bench.published.megatron_golden import peak_bytes, recorded, workspace_bytes
from bench.published.megatron_gpt import gpt
from pase.costmodels.analytic import Analytic
from pase.errors import Infeasible, PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.machine import load
from pase.stated.price import price_strategy
from pase.stated.program import PROGRAMS
from pase.stated.strategy import Strategy
from tests.needs import SHARED

SHAPE = {"batch": 4, "seq": 256, "d": 128, "heads": 8, "vocab": 1024, "dtype": "bfloat16"}


def kept(layers: int, strategy: Strategy, micro_batches: int = 1, **how: object) -> float:
    """The activations on the last rank of a GPT in Megatron."""
    graph = named(simplify(trace(*gpt(layers=layers, seeded=True, **SHAPE, **how)).graph))  # type: ignore[arg-type]
    examples = 4 * micro_batches
    priced = price_strategy(graph, strategy, PROGRAMS["megatron"], Analytic(load("a100x8")), examples)
    return priced.stage_memory[-1].activations


@pytest.mark.parametrize(
    ("attention", "drops", "each"),
    [
        (
            "unfused",
            True,
            34 + 5 * 8 * 256 / 128,
        ),  # sbh (34 + 5 a s / h): Korthikanti et al. 2022, equation 2
        (
            "fused",
            True,
            34 + 4 * 8 / (2 * 128) * 2,
        ),  # no scores, but the softmax's logarithm of sums in float32
        ("fused", False, 32 + 4 * 8 / (2 * 128) * 2),  # no masks
    ],
)
def test_a_layer_keeps_the_published_bytes(attention: str, drops: bool, each: float) -> None:
    one, two = (kept(n, Strategy(micro=4, remat="none"), attention=attention, drops=drops) for n in (2, 4))
    assert (two - one) / 2 / (4 * 256 * 128) == pytest.approx(each, rel=0.01)


def test_the_last_rank_holds_several_micro_batches_of_interleaved_stages() -> None:
    """(chunks - 1) x stages + 1 chunks of layers are in flight there, and one without chunks."""
    plain = Strategy(pipeline=2, micro=4, remat="none")
    chunked = Strategy(pipeline=2, chunks=2, micro=4, remat="none", schedule="interleaved")
    one, three = (kept(4, s, 8) for s in (plain, chunked))
    layer = (kept(8, plain, 8) - one) / 2
    assert three - one == pytest.approx(layer * (3 - 2), rel=0.01)


def test_workspaces_are_those_of_two_threads_and_transformer_engine() -> None:
    mib = 1 << 20
    assert workspace_bytes("a100x8", deterministic=True, te=True) == (2 * 32 + 4) * mib
    assert workspace_bytes("h100x8", deterministic=True, te=True) == 3 * 32 * mib
    assert workspace_bytes("h100x8", deterministic=False, te=False) == 2 * 32 * mib


def test_what_cannot_be_priced_says_why(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "golden.csv").write_text("case,platform\na,b\n")
    with pytest.raises(PaseError, match="no table of Megatron's peaks"):
        recorded(tmp_path / "golden.csv")
    with pytest.raises(Infeasible, match="another model"):
        peak_bytes({"case": "t5/t5_220m"})


@pytest.mark.data("measured/megatron_golden/golden.csv")
def test_recorded_peaks_are_predicted() -> None:
    """One case of each kind: fused and unfused attention, stages, chunks, tensor parallelism, recomputation."""
    cases = {
        "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer",
        "gpt/gpt3_mcore_te_tp1_pp4_vp1",
        "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist",
        "gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute",
        "gpt/gpt3_mcore_tp4_pp1_resume_torch_dist",
    }
    rows = [r for r in recorded(SHARED / "measured" / "megatron_golden" / "golden.csv") if r["case"] in cases]
    assert {r["case"] for r in rows} == cases
    for r in rows:
        assert peak_bytes(r) == pytest.approx(float(r["max_alloc_bytes"]), rel=0.05), (
            r["case"],
            r["platform"],
        )
