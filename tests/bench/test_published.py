"""The bench of published steps: any file is read or refused, any row is priced or has a reason; a few known rows."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.published import mlperf, simumax, steps
from bench.published.rows import PublishedRow, read
from bench.published.steps import configured, price_row, program_of, summary
from pase.errors import Infeasible, PaseError
from tests.needs import SHARED

GIVEN = SHARED / "published_steps" / "given.csv"
BASE = {
    "id": "ttn001",
    "model": "Llama-3 8B",
    "layers": "4",
    "hidden": "512",
    "heads": "8",
    "kv_heads": "4",
    "ffn": "1024",
    "vocab": "1024",
    "gpu": "H100-80GB",
    "gpus": "8",
    "global_batch": "16",
    "micro_batch": "2",
    "seq": "256",
    "dp": "8",
    "dp_type": "zero3",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "precision": "BF16",
    "act_ckpt": "selective",
    "step_s": "0.01",
    "notes": "eager",
}
odd = st.sampled_from(
    ["", "unknown", "0", "1", "2", "3", "8", "-1", "x", "1e400", "nan", "FP8", "zero1", "hsdp", "4.5"]
)


def row(**changed: str) -> PublishedRow:
    columns = BASE | changed
    return PublishedRow(id=columns["id"], columns=columns)


def test_a_vocabulary_that_only_the_notes_tell_is_taken():
    told = {"vocab": "", "notes": "MFU 0.7; global batch and a vocabulary near 128k reproduce it"}
    assert row(**told).vocab == 128_000 and row().vocab == 1024
    assert row(vocab="", notes="").vocab is None


@pytest.mark.parametrize(
    ("changed", "overlaps"),
    [
        ({}, True),
        ({"notes": "container 26.04"}, False),
        ({"notes": "container 26.08"}, True),
        ({"notes": ""}, False),
        ({"precision": "BF16"}, False),
        ({"gpu": "B300"}, False),
        ({"id": "ttn001"}, False),
        ({"model": "Qwen3 235B-A22B", "gpu": "H100-80GB", "precision": "BF16", "id": "mbr001"}, True),
        ({"model": "Qwen3 30B-A3B", "gpu": "H100-80GB", "precision": "BF16", "id": "mbr001"}, False),
    ],
)
def test_recipes_of_megatron_bridge_say_whether_tokens_are_sent_beside_compute(changed, overlaps):
    run = {"id": "bwl001", "model": "DeepSeek-V3 671B", "gpu": "GB300", "precision": "MXFP8"}
    run |= {"notes": "MoE load force-balanced; container 26.06"}
    assert program_of(row(**run | changed)).exchange_overlaps is overlaps


def test_aleph_alpha_s_runs_are_of_a_framework_of_its_own():
    """Its sums are all-reduces in float32, and every rank computes its loss from whole logits."""
    run = row(id="aal001", gpu="A100", dp_type="unknown", tp="2", dp="4", notes="")
    program = program_of(run)
    assert program.whole_logits and program.sums_whole and program.bytes.summed == 4
    found = price_row(run).priced
    assert found is not None and found.collectives_s["all_gather over model"] > 0


def test_tensor_parallelism_overlaps_where_the_notes_or_the_recipe_say_so():
    shape = {"gpus": "16", "tp": "2", "sp": "yes", "notes": ""}
    llama = {"id": "mbr001", "model": "Llama-3.1 405B", "dp_type": "unknown"} | shape
    for changed, told in (
        (llama, True),
        (llama | {"tp": "1", "dp": "16"}, False),
        (llama | {"model": "Qwen3 235B-A22B"}, False),
        (llama | {"id": "bwl001", "precision": "NVFP4"}, False),
        ({"id": "nem003", "model": "GPT-3 175B"} | shape, True),
        ({"id": "nem007", "model": "Llama-2 70B"} | shape, False),
        (
            {"id": "mlm003", "model": "GPT 16B"}
            | shape
            | {"notes": "DP, TP and PP communication overlapped"},
            True,
        ),
        (shape | {"notes": "vanilla TP, compile"}, False),
        (shape | {"notes": "AsyncTP, compile"}, True),
    ):
        r = row(**changed)
        assert configured(r, program_of(r))[0].asynchronous is told, changed


def test_a_precision_that_is_not_told_is_not_guessed_where_there_are_two():
    a = price_row(row(precision="unknown"))
    assert a.priced is None and "the precision is not told" in (a.why_not or "")
    old = row(precision="unknown", gpu="A100-80GB")
    assert configured(old, program_of(old))[0].precision == "bf16"


def test_a_row_is_priced_as_its_own_configuration():
    a = price_row(row())
    assert a.why_not is None and a.priced is not None
    assert str(a.priced.strategy) == "fsdp=8,micro=2,remat=selective" and a.priced.program == "eager"
    assert a.to_json().keys() == {"id", "step_s", "predicted_s", "error", "why_not"}
    s, batch = configured(row(tp="2", dp_type="hsdp", gpus="32", dp="16"), program_of(row()))
    assert (s.data, s.shard, s.tensor, s.zero, batch) == (2, 8, 2, 3, 16)


def test_maxtext_states_a_batch_for_each_chip_and_a_rate():
    """On 16 chips in groups of 4, 6 examples per chip are 24 at once per data-parallel rank, and a step of 96."""
    told = {"id": "mxt001", "model": "MaxText 1B", "gpu": "TPU-v4", "gpus": "16", "dp": "4", "tp": "4"}
    r = row(**told, micro_batch="6", global_batch="96", step_s="", tflops_per_gpu="50", notes="maxtext")
    s, batch = configured(r, program_of(r))
    assert (s.micro, s.tensor, batch) == (24, 4, 96)
    a = price_row(r)
    assert a.error is None and a.priced is not None and a.priced.micro_batches == 1
    weights = 4 * (2 * 512 * 128 * 12 + 3 * 512 * 1024) + 1024 * 512
    counted = 96 * 256 * (6 * weights + 12 * 4 * 256 * 128 * 8)
    assert a.rate_error == pytest.approx(counted / a.priced.step_s / 16 / 50e12 - 1)
    assert steps.digest([a])["by_rate"]["TPU-v4"]["rows"] == 1
    offloaded = price_row(row(**told, global_batch="96", notes="remat qkv_proj_offloaded"))
    assert "host" in (offloaded.why_not or "")


def test_what_a_row_parallel_product_keeps_is_its_sum():
    """With sequence parallelism, each of its readers holds a part of the sum's rows."""
    shared = {"gpu": "TPU-v5p", "micro_batch": "", "step_s": "", "dp_type": "zero3", "gpus": "8"}
    policy = {"id": "mxt013", "notes": 'remat "minimal"'}

    def held(**how: str) -> float:
        a = price_row(row(**shared, **policy, **how))
        assert a.priced is not None
        return a.priced.memory.activations

    assert held(dp="2", tp="4", sp="yes") == pytest.approx(held(dp="8", tp="1"), rel=0.15)


def test_a_page_that_counts_recomputation_ran_it():
    """Megatron's counter of 2021 times the step gives four passes or three, so its figures tell which."""
    shape = {
        "id": "mlm033",
        "model": "GPT-2 1B",
        "ffn": "2048",
        "kv_heads": "8",
        "gpu": "A100",
        "act_ckpt": "",
    }
    kinds = {"tflops_kind": "given", "step_kind": "given", "gpus": "8", "global_batch": "16"}
    passes = 16 * 256 * 4 * 512**2 * (1 + 256 / (6 * 512))
    head = 6 * 16 * 256 * 512 * 1024
    for layers, remat in ((96, "full"), (72, "none")):
        tflops = (layers * passes + head) / 8 / 0.01 / 1e12
        r = row(**shape, **kinds, tflops_per_gpu=str(tflops))
        assert configured(r, program_of(r))[0].remat == remat
    derived = row(**shape, **{**kinds, "step_kind": "derived"}, tflops_per_gpu=str(tflops))
    assert configured(derived, program_of(derived))[0].remat == "none"


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from([k for k in BASE if k != "id"]), odd, max_size=3))
def test_no_row_stops_the_bench(changed):
    a = price_row(row(**changed))
    assert (a.priced is None) == (a.why_not is not None)
    json.dumps(a.to_json())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tp": "", "pp": "", "dp": ""}, "the layout is not told"),
        ({"global_batch": "17"}, "does not divide by 8"),
        ({"gpu": "abacus"}, "no machine file for 'abacus'"),
        ({"model": "DeepSeek-V9"}, "latent attention are not known"),
        ({"model": "DeepSeek-V3"}, "the experts' shape is not told"),
        ({"layers": ""}, "layers is not told"),
        ({"hidden": "wide"}, "hidden is 'wide', no number"),
    ],
)
def test_what_cannot_be_priced_says_why(changed, says):
    assert says in (price_row(row(**changed)).why_not or "")


def test_files_that_are_no_such_files_are_refused(tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.csv"
    bad.write_text("id,step_s\na,1\n")
    with pytest.raises(PaseError, match="layers, hidden"):
        read(bad)
    with pytest.raises(PaseError, match=r"none\.csv"):
        read(tmp_path / "none.csv")
    good = tmp_path / "good.csv"
    good.write_text("\n".join([",".join(BASE), ",".join(BASE.values()), "short,row"]) + "\n")
    monkeypatch.setattr(sys, "argv", ["published_steps", str(good), "--json"])
    steps.main()
    record = json.loads(capsys.readouterr().out)
    assert set(record) == {"rows", "median_error", "tau"} and len(record["rows"]) == 2
    assert record["rows"][0]["predicted_s"] > 0 and record["rows"][1]["why_not"]


def test_error_and_order_are_of_what_is_known():
    answers = [price_row(row(id=f"ax{i}", step_s=s)) for i, s in enumerate(["1.0", "2.0", ""])]
    found = summary(answers)
    assert found["rows"] == 2 and found["median_error"] > 0
    assert summary(answers[2:])["median_error"] is None
    assert found["barred"] == 2 and found["inside"] == 0 and summary(answers[2:])["inside"] is None
    assert answers[0].priced is not None
    met = price_row(row(id="ax3", step_s=str(answers[0].priced.step_s)))
    assert summary([answers[0], met])["inside"] == 0.5


@pytest.mark.data("published_steps/given.csv")
def test_memory_of_llama_on_h100_is_within_a_tenth():
    rows = {r.id: r for r in read(GIVEN)}
    for name in ("ttn001", "ttn002", "ttn008", "ttn009"):
        a = price_row(rows[name])
        assert a.priced is not None and a.priced.fits
        assert a.priced.memory.total == pytest.approx(rows[name].memory_bytes, rel=0.1), name
        assert abs(a.error or 1.0) < 0.2, name


@pytest.mark.data("published_steps/given.csv")
def test_every_row_is_configured_or_says_why():
    for r in read(GIVEN):
        try:
            s, batch = configured(r, program_of(r))
        except Infeasible as e:
            assert any(why in str(e) for why in ("not told", "divide", "has no price")), r.id
        else:
            assert s.devices == r.whole("gpus") and batch % s.ranks == 0, r.id


MLPERF = """benchmark,config_trust,system,config,nodes,gpus_per_node,fp8,fp4,step_s,global_batch,tp,pp,vp,cp,micro,\
tp_overlap,round,submitter,example
llama31_8b,high,b200_n1,config_DGXB200_1x8.sh,1,8,False,True,0.44,16,1,1,null,1,2,False,v5.1,A,x
llama2_70b_lora,high,b200_n1,config_DGXB200_1x8.sh,1,8,True,False,1.5,8,1,1,,1,,,v5.1,A,x
llama31_8b,low,b200_n1,config_DGXB200_1x8.sh,1,8,False,True,0.44,16,1,1,null,1,2,False,v5.1,A,x
llama31_8b,high,theia_ngpu8,config_GB200_2x4.sh,2,4,False,True,0.34,16,1,1,null,1,2,False,v5.1,A,x
"""


def test_mlperf_s_rows_are_those_with_their_own_settings(tmp_path):
    table = tmp_path / "steps.csv"
    table.write_text(MLPERF)
    llama, adapters = mlperf.read(table)
    assert (llama.text("gpu"), llama.whole("gpus"), llama.text("precision")) == ("B200", 8, "NVFP4")
    assert llama.whole("vp") is None
    assert "adapters" in (price_row(adapters).why_not or "")
    (tmp_path / "none.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PaseError, match="no table of MLPerf"):
        mlperf.read(tmp_path / "none.csv")


def test_simumax_s_rows_say_their_degrees_in_their_names(tmp_path):
    table = tmp_path / "runs.md"
    head = (
        "| case | section | real ms | perf ms | rel err | real alloc GiB |\n|---|---|---:|---:|---:|---:|\n"
    )
    table.write_text(
        head + "| llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef | - | 1758.00 | 1 | 1 | 68.43 |\n"
    )
    (run,) = simumax.read(table)
    assert [run.whole(k) for k in ("tp", "cp", "pp", "seq", "layers", "global_batch")] == [
        2,
        4,
        1,
        32768,
        12,
        4,
    ]
    assert run.number("step_s") == pytest.approx(1.758) and run.memory_bytes == 68.43 * 2**30
    table.write_text(head)
    with pytest.raises(PaseError, match="no rows"):
        simumax.read(table)
