"""A machine file of a table of ops: it recovers the constants of the machine that made it, and refuses what is none."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pase.calibrate.op_table import read_table, with_table
from pase.costmodels.analytic import Analytic
from pase.errors import PaseError
from pase.machine import dumps, load, mesh_from, parse


def made_table(file, machine):
    """Writes the prices of a machine as measurements."""
    model, lines = Analytic(machine), ["op,dtype,shape,seconds"]
    for m, n, k in product((1024, 4096, 16384), (2048, 8192), (1024, 8192)):
        nbytes = 2.0 * (m * k + k * n + m * n)
        s = float(model.compute("matmul", "bfloat16", 2.0 * m * n * k, nbytes, mnk=(m, n, k)))
        lines.append(f"product,bfloat16,1x{m}x{n}x{k},{s!r}")
    flops = 2 * 64 * 32768.0**2 * 128
    for op, times, part in (("attention", 1.0, 0.5), ("attention backward", 2.5, 0.4)):
        s = times * flops / (part * machine.device.peak("bfloat16"))
        lines.append(f"{op},bfloat16,64x32768x128,{s!r}")
        lines.append(f"{op},bfloat16,1x1024x128,1e-4")  # mostly the host's time
    file.write_text("\n".join(lines) + "\n")


def test_the_machine_that_made_a_table_is_recovered(tmp_path):
    base = load("b200x8")
    kernels = base.device.products
    assert kernels is not None
    slow = replace(kernels, rate={d: 0.5 for d in kernels.rate}, steady=1.0)
    truth = replace(base, device=replace(base.device, products=slow))
    made_table(tmp_path / "ops.csv", truth)
    machine, told = with_table(base, read_table(tmp_path / "ops.csv"), "ours", "ops.csv", Analytic)
    assert machine.device.reached("matmul", "bfloat16") == pytest.approx(0.5, rel=0.03)
    # Dtypes that the table does not have stay as they are.
    assert machine.device.reached("matmul", "float32") == base.device.reached("matmul", "float32")
    assert told["median_error"] < 0.03
    kernel = next(k for k in machine.device.attention_kernels if k.name == "cudnn")
    both = [float(kernel.at(np.array([32768.0]), backward=b)[0]) for b in (False, True)]
    assert both == pytest.approx([0.5, 0.4]) and 1024 not in kernel.keys
    again = parse(dumps(machine), "ours.toml")
    assert again.digest == machine.digest and "ops.csv" in again.sources["device.products"]


def test_collectives_and_copies_of_a_table_are_the_machine_s(tmp_path):
    """Kinds and sizes that the table does not have stay as they are."""
    base = load("b200x8")
    made_table(tmp_path / "ops.csv", base)
    with (tmp_path / "ops.csv").open("a") as f:
        f.write(
            "all_gather,bfloat16,4x1e6,1e-4\nall_gather,bfloat16,4x1e8,2e-4\nall_reduce,bfloat16,8x1e6,1\n"
        )
        f.write(f"copy,bfloat16,1e9,{1e9 / (0.7 * base.device.memory_bandwidth_bytes_per_s)!r}\n")
    machine, _ = with_table(base, read_table(tmp_path / "ops.csv"), "ours", "ops.csv", Analytic)
    assert machine.device.efficiency["memory"] == pytest.approx(0.7)
    mesh = mesh_from("data=2,model=4", 8)
    new, old = (Analytic(m) for m in (machine, base))
    assert float(new.collective("all_gather", mesh, 2, 1e8)) == pytest.approx(2e-4)
    for kind, axes in (("all_reduce", 3), ("reduce_scatter", 2)):
        assert new.collective(kind, mesh, axes, 1e8) == old.collective(kind, mesh, axes, 1e8)
    assert parse(dumps(machine), "ours.toml").digest == machine.digest


def test_simumax_s_system_file_is_such_a_table(tmp_path):
    key = "b=1, m=4096, k=8192, n=10240, layout=NT, accumulate=True, out_dtype=fp32"
    ops = {
        "matmul": {"tflops": 2250.0, "accurate_efficient_factor": {key: 0.5}},
        "sdp_fwd": {"accurate_efficient_factor": {}},
        "sdp_bwd": {"accurate_efficient_factor": {}},
    }
    (tmp_path / "system.json").write_text(json.dumps({"accelerator": {"op": ops}}))
    (row,) = read_table(tmp_path / "system.json")
    sends = {"scale": 1, "offset": -1, "efficient_factor": 0.5, "latency_us": 2.0, "fixed_latency_us": 10.0}
    sends["fixed_latency_us_by_comm_num"] = {"2": 30.0}
    link = {
        "bandwidth": {"gbps": 100.0},
        "op": dict.fromkeys(("all_gather", "reduce_scatter", "all2all"), sends),
    }
    link["op"]["all_reduce"] = {**sends, "scale": 2}
    copies = {"default": {"gbps": 8.0, "efficient_factor": 0.5}}
    told = {"accelerator": {"op": ops, "bandwidth": copies}, "networks": {"high_intra_node": link}}
    (tmp_path / "links.json").write_text(json.dumps(told | {"num_per_node": 8}))
    found = {(r.op, *r.shape): r.seconds for r in read_table(tmp_path / "links.json")}
    whole = 2.0**26 / (50 * 2**30)
    assert found["all_gather", 8, 2.0**26] == pytest.approx(1e-6 * (2 * 7 + 10) + 7 / 8 * whole)
    assert found["all_reduce", 2, 2.0**26] == pytest.approx(1e-6 * (2 * 2 * 1 + 30) + whole)
    assert found["copy", 2.0**30] == pytest.approx(1 / 4)
    assert row.op == "accumulated product" and row.shape == (1, 4096, 10240, 8192)
    assert row.seconds == pytest.approx(2 * 4096 * 10240 * 8192 / (0.5 * 2250e12))
    with pytest.raises(PaseError, match="1 products in bfloat16"):
        with_table(load("b200x8"), [row], "ours", "system.json", Analytic)
    with pytest.raises(PaseError, match=r"device\.products"):
        with_table(load("v100x8"), [row] * 9, "ours", "system.json", Analytic)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '{"accelerator": 3}', "op,dtype,shape,seconds\nproduct,bfloat16,1x2x3,1\n"]
    + [
        f"op,dtype,shape,seconds\nproduct,bfloat16,1x2x3x{k},{s}\n"
        for k, s in ((4, 0), (4, "nan"), ("x", 1), (-4, 1))
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "ops.csv").write_text(text)
    with pytest.raises(PaseError) as e:
        read_table(tmp_path / "ops.csv")
    assert "ops.csv" in (e.value.where or "")
