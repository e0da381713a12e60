"""A machine file's facts about its compiler: collectives without buckets, and gradients reduced per reader."""

from dataclasses import replace

import numpy as np
import pytest

import pase
from pase import costmodels
from pase.backends.audit.xla import compare
from pase.machine import Mesh, dumps, load, parse
from pase.tables.build import build, charge_price
from pase.tables.charges import Charge
from pase.zoo import reduced
from tests.ir.graphs import simple

HERE = load("h100x8")
CPU = replace(HERE, bucket_bytes=0.0, sums_readers=False, sources={**HERE.sources, "bucket_bytes": "test"})


def test_they_are_kept_in_the_file_and_priced_by() -> None:
    assert parse(dumps(CPU), "again") == CPU
    assert CPU.digest != HERE.digest
    # Files and layouts from before these fields existed keep their digests.
    assert replace(HERE, bucket_bytes=float(25 << 20)).digest == HERE.digest
    with pytest.raises(pase.errors.PaseError, match="sums_readers"):
        parse("sums_readers = 1\n" + dumps(HERE), "a file")


def test_without_buckets_a_small_collective_pays_its_own_latency() -> None:
    mesh = Mesh(names=("a",), sizes=(8,))
    small = Charge(
        kind="all_reduce",
        axes=np.array([1]),
        nbytes=np.array([4096.0]),
        tensor="w",
        phase="backward",
        times=3.0,
        bucketed=True,
    )
    models = [costmodels.get("analytic", m) for m in (HERE, CPU)]
    shared, alone = (float(charge_price(small, m, mesh)[0]) for m in models)
    assert alone == pytest.approx(3 * float(models[1].collective("all_reduce", mesh, [1], [4096.0])[0]))
    assert shared < alone / 5


def test_no_gradient_waits_for_another_reader() -> None:
    graph, mesh = simple("gpt2"), Mesh(names=("a", "b"), sizes=(2, 2))
    found = {}
    for machine in (HERE, CPU):
        _, space = build(graph, mesh, costmodels.get("analytic", machine))
        found[machine] = sum(
            int(np.isin(c, [i for i, d in enumerate(n.space) if d.kind == "pending"]).any(axis=1).sum())
            for n, c in zip(graph.nodes, space.configs, strict=True)
        )
    assert found[HERE] > 0 == found[CPU]


def test_the_plan_moves_what_the_compiler_will() -> None:
    """A tied table has two readers. The plan's bytes equal those that XLA's CPU pipeline sends."""
    m = reduced("gpt2")
    plans = {
        x: dict(pase.compare(m.loss_fn, m.params, m.batch, devices=4, machine=x, max_axes=1))
        for x in (HERE, CPU)
    }
    for machine, by in plans.items():
        rows = {r.kind: r for r in compare(by["data_parallel"], NOTHING)}
        all_reduce = rows["all_reduce"]
        assert (all_reduce.predicted == all_reduce.on_cpu) == (machine is CPU)


NOTHING = "HloModule nothing\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[] constant(0)\n}\n"
"""A compiled program without collectives, because the test compares only the plan's own columns."""
