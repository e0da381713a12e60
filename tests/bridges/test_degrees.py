"""Replays at other degrees of pipeline, tensor and data parallelism agree with independent simulations of such runs."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cases.timelines import ImaginedRun
from bench.cases.timelines import simulate as simulate_data_parallel
from bench.cases.timelines import write as write_data_parallel
from bench.cases.transformers import ImaginedTransformer, simulate, write
from pase.bridges.degrees import _Pair, by_stages, by_tensor, kernel_times
from pase.errors import Infeasible
from pase.replay import align, load, measure
from pase.replay.changes.whatif import apply
from pase.replay.reports.report import replay_report
from pase.replay.reports.trust import Run
from pase.replay.simulation import chance
from pase.replay.simulation.chance import mean_iteration_ns, spreads
from pase.replay.simulation.sections import StepPhase, sections
from pase.replay.simulation.steady import evaluate
from pase.replay.traces.timeline_io import from_json, to_json
from pase.tables.itemize import LocalWork
from tests.command import run as command

MODEL = "zoo:gpt2?batch=2&seq=128&layers=4&vocab=1021&context=128&dtype=float32"
BASE: dict[str, Any] = {"layers": 4, "micro_batches": 4, "data": 2, "iterations": 3}


def traced(folder: Path, **shape: Any) -> Run:
    return Run(measured=measure(align(load(write(simulate(ImaginedTransformer(**BASE | shape)), folder)))))


def truth_ns(**shape: Any) -> float:
    return simulate(ImaginedTransformer(**BASE | shape)).iteration_us[-1] * 1e3


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return traced(tmp_path_factory.mktemp("plain"))


def test_micro_batches_and_layers_are_found_without_names(plain: Run) -> None:
    s = sections(plain.measured.timeline, plain.graph)
    assert (s.micro_batches, s.layers) == (4, 4)
    where = {(int(s.phase[i]), int(s.micro[i])) for i in s.product}
    assert where == {(p, k) for p in (StepPhase.FORWARD, StepPhase.BACKWARD) for k in range(4)}
    for i in s.product:
        name = plain.graph.task_name(i)
        assert (s.phase[i] == StepPhase.BACKWARD) == name.endswith(("_dx", "_dw"))
    # Every layer has six products in forward, and the last one also has the logits.
    for layer in range(4):
        of = [i for i in s.product if (s.phase[i], s.micro[i], s.layer[i]) == (StepPhase.FORWARD, 2, layer)]
        assert len(of) == 6 + (layer == 3)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("host", ["device-bound", "launch-bound"])
def test_stages_meet_the_run_that_has_them(plain: Run, tmp_path: Path, stages: int, host: str) -> None:
    shape = {"between_us": 30.0} if host == "launch-bound" else {}
    run = traced(tmp_path, **shape) if shape else plain
    made = by_stages(stages)(run.measured.timeline, run.graph)
    graph = made.graph
    assert max(evaluate(graph).values()) == pytest.approx(truth_ns(stages=stages, **shape), rel=0.01)
    assert len(graph.ranks) == stages and "4 micro-batches" in made.note
    # All measured tasks of forward and backward are still there. (Each stage has its own launches of the update.)
    work = run.graph.duration_ns[sections(run.measured.timeline, run.graph).phase < StepPhase.UPDATE]
    assert len(graph) >= len(work)


def test_tensor_parallelism_by_measured_shapes_and_by_the_roofline(plain: Run, tmp_path: Path) -> None:
    """A short run at the other degree has the needed kernel shapes. Without it, times are scaled by the roofline, and
    the report says so."""
    other = traced(tmp_path, tensor=2, layers=2, micro_batches=1)
    measured = kernel_times([(other.measured.timeline, other.graph)])
    made = by_tensor(2, model=MODEL, measured=measured)(plain.measured.timeline, plain.graph)
    graph = made.graph
    want = truth_ns(tensor=2)
    assert made.detail["scaled_by_roofline"] == 0 and "all are measured at their new shape" in made.note
    assert max(evaluate(graph).values()) == pytest.approx(want, rel=0.03)
    names = [graph.task_name(i) for i in range(len(graph))]
    assert names.count("all_reduce between products") == 4 * 4 * 4
    made = by_tensor(2, model=MODEL)(plain.measured.timeline, plain.graph)
    assert made.detail["scaled_by_roofline"] > 0.9 and "never measured" in made.note
    # In the other direction, the collectives between products vanish, and the products are those of the first run.
    split = traced(tmp_path / "split", tensor=2)
    known = kernel_times([(plain.measured.timeline, plain.graph)])
    back = by_tensor(1, model=MODEL, ran="tp=2", measured=known)
    graph = back(split.measured.timeline, split.graph).graph
    assert max(evaluate(graph).values()) == pytest.approx(truth_ns(), rel=0.03)


def test_a_model_that_did_not_run_is_refused(plain: Run) -> None:
    other = MODEL.replace("seq=128", "seq=64")
    with pytest.raises(Infeasible, match="forward products") as e:
        by_tensor(2, model=other)(plain.measured.timeline, plain.graph)
    assert e.value.where == "--model" and "tp=1" in e.value.what


def test_what_the_trace_does_not_show_is_refused(plain: Run, tmp_path: Path) -> None:
    t, g = plain.measured.timeline, plain.graph
    with pytest.raises(Infeasible, match="only 4 layers") as e:
        by_stages(8)(t, g)
    assert "stages=8" in e.value.where
    bare = simulate(ImaginedTransformer(**BASE))
    for e in bare.events:
        e["args"].pop("Input Dims", None)
    folder = write(bare, tmp_path / "bare")
    code, _, err = command("replay", folder, "--what-if", "stages=2")
    assert code == 1 and "record_shapes=True" in " ".join(err.split())
    for text in ("tensor=2", "stages=x", "stages=0", "data=1.5"):
        code, _, err = command("replay", folder, "--what-if", text)
        assert code == 2 and text.partition("=")[0] in err, (text, err)


def test_by_name_on_the_command_line(tmp_path: Path) -> None:
    folder = write(simulate(ImaginedTransformer(**BASE)), tmp_path / "x")
    code, out, err = command("replay", folder, "--what-if", "stages=2", "--what-if", "bandwidth=2")
    assert code == 0, err
    assert "what if stages=2" in out and "4 layers as 2+2" in " ".join(out.split())


def test_shapes_outlive_a_file(plain: Run) -> None:
    t = plain.measured.timeline
    again = from_json(to_json(t))
    assert again.shapes == t.shapes and (again["shape"] == t["shape"]).all() and (t["shape"] >= 0).any()
    old = to_json(t)
    del old["shapes"], old["columns"]["shape"]
    assert (from_json(old)["shape"] == -1).all()


def test_more_ranks_wait_for_a_later_one(tmp_path: Path) -> None:
    """Hosts are late at random. The mean of the slowest rank is right, and medians are at least a tenth too short."""
    late: dict[str, Any] = {
        "noise": 0.02,
        "chance_us": 500.0,
        "kernel_us": 200.0,
        "between_us": 4.0,
        "layers": 6,
    }
    four = simulate_data_parallel(ImaginedRun(ranks=4, iterations=40, **late))
    run = Run(measured=measure(align(load(write_data_parallel(four, tmp_path)))))
    spread = spreads(run.measured, run.medians, run.measured.whole())
    slower: dict[str, Any] = {
        "collective_us": 20.0 * 15 / 3,
        "bandwidth_bytes_per_us": 60_000.0 * (3 / 4) / (15 / 16),
    }
    many = simulate_data_parallel(ImaginedRun(ranks=16, iterations=40, seed=3, **late | slower))
    want = 1e3 * statistics.mean(max(x) for x in list(zip(*many.iteration_us, strict=True))[1:])
    graph = apply(run.medians, "ranks=16")
    got = mean_iteration_ns(graph, spread, 16)
    assert got == pytest.approx(want, rel=0.04)
    assert max(evaluate(graph).values()) < 0.9 * want
    assert mean_iteration_ns(graph, spread, 16) == got  # the seed is fixed


def test_changes_together_have_the_measure_of_each_alone(tmp_path: Path) -> None:
    """A change of the number of ranks reports mean times, and so do changes combined with it. A null change is 1×."""
    late: dict[str, Any] = {"noise": 0.02, "chance_us": 500.0, "layers": 3}
    folder = write_data_parallel(
        simulate_data_parallel(ImaginedRun(ranks=2, iterations=10, **late)), tmp_path
    )
    rows = replay_report(folder, what_if=["ranks=4", "bandwidth=1"], force=True)["what_if"]
    alone, nothing, both = rows
    assert both["knob"] == "ranks=4 and bandwidth=1" and nothing["speedup"] == 1.0
    assert alone["iteration_s"] == alone["mean_s"] > alone["base_s"]
    assert {k: both[k] for k in alone if k != "knob"} == {k: alone[k] for k in alone if k != "knob"}


def test_more_ranks_than_can_be_replayed_are_not_made(plain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chance, "with_ranks", lambda *_: pytest.fail("made"))
    spread = spreads(plain.measured, plain.graph, plain.measured.whole())
    assert mean_iteration_ns(plain.graph, spread, 10**9) is None


def test_the_products_of_an_attention_are_those_of_its_heads() -> None:
    now = LocalWork(
        phase="forward",
        kind="attention",
        dtype="float32",
        flops=8e6,
        nbytes=0,
        times=1,
        cost=2.0,
        mnk=(32, 32, 24),
    )
    half = replace(now, flops=4e6, cost=1.0)
    p = _Pair(node="attend", now=now, then=half, heads=256)
    assert p.key(now) == (256 * 32 * 24, 256 * 32 * 24, 256 * 32 * 32)
    assert p.key(half) == (128 * 32 * 24, 128 * 32 * 24, 128 * 32 * 32) and p.roofline == 0.5
