"""The calibrate command, on this host's CPU, with one process and with two."""

import json
import os
import socket
from pathlib import Path

import pytest

from pase import machine
from pase.calibrate.types import COLLECTIVE_OPS
from tests import program
from tests.command import reported, run

ROOT = Path(__file__).parents[2]
# The tests check the procedure, not the measured values, because busy test machines give samples with a wide spread.
QUICK = ["--budget", "1s", "--max-spread", "1000", "--dtypes", "float32"]


def calibrate(*words):
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": program.COMPILED_QUICKLY}
    return program.start("pase", "calibrate", *words, folder=ROOT, environment=env)


def finished(*started):
    ended = [p.ended(300) for p in started]
    return [(p.returncode, p.stdout, p.stderr) for p in ended]


def written_or_refused(code, out, err, path):
    """Checks that the command wrote a machine file or explained its refusal. Both are correct on a busy host."""
    if code == 1:
        assert "the measurements make no sense" in err and "Nothing was written" in err
        assert not path.exists()
        return None
    assert code == 0, err[-3000:]
    report = json.loads(out)
    found = machine.load(path)
    assert report["machine"]["digest"] == found.digest and not err.strip().startswith("[")
    return report, found


def test_this_host_and_taking_up_again(tmp_path):
    path = tmp_path / "cpu.toml"
    ((code, out, err),) = finished(calibrate("-o", str(path), "-n", "2", "--json", *QUICK))
    result = written_or_refused(code, out, err, path)
    if result:
        report, found = result
        assert {c.kind for c in found.collectives} == set(COLLECTIVE_OPS)
        assert {c.ways for c in found.collectives} == {(2,)}
        assert found.device.matmul_tables and found.device.memory_curve and found.device.vector_flops
        assert "jax" in found.provenance["framework"] and found.provenance["date"]
        assert report["measured"] > 20
    # The journal belongs to other devices.
    ((code, _, err),) = finished(calibrate("-o", str(path), "-n", "3", *QUICK))
    assert code == 2 and "its devices is 2" in err and "--fresh" in err


def free_port():
    with socket.socket() as s:
        try:
            s.bind(("127.0.0.1", 0))
        except OSError as e:
            pytest.skip(f"no port on localhost can be bound: {e}")
        return s.getsockname()[1]


def test_two_processes(tmp_path):
    path, address = tmp_path / "two.toml", f"127.0.0.1:{free_port()}"
    team = ["--coordinator", address, "--processes", "2", "--json", *QUICK, "--process-id"]
    (code, out, err), (other, nothing, last) = finished(
        *(calibrate("-o", str(path), *team, str(i)) for i in range(2))
    )
    assert nothing == "" and other == 0, last[-2000:]
    result = written_or_refused(code, out, "\n".join(l for l in err.splitlines() if "[Gloo]" not in l), path)
    if result:
        _, found = result
        assert [l.name for l in found.levels] == ["process"]
        assert {(c.kind, c.ways) for c in found.collectives} == {(k, (2,)) for k in COLLECTIVE_OPS}


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--budget", "soon"], "--budget: 'soon'"),
        (["--from", "nowhere"], "--base NAME"),
        (["--from-table", "nowhere.csv", "--base", "b200x8"], "nowhere.csv: "),
        (["--base", "h100x8"], "--base: "),
        (["--coordinator", "a:1"], "--process-id"),
        (["--dtypes", "int3"], "--dtypes: "),
        (["--levels", "a=2,b=2", "-n", "2"], "--levels: 'a=2,b=2' is for 4 devices"),
    ],
)
def test_bad_usage_is_said(args, what, tmp_path):
    ((code, _, err),) = finished(calibrate("-o", str(tmp_path / "m.toml"), *args))
    assert code == 2 and what in err
    assert not list(tmp_path.iterdir())


def test_a_known_gpu_is_fitted_to_a_few_dozen_ops(tmp_path, monkeypatch):
    """The devices are this host's, under a GPU's name; its kernels are those of the model, a fifth slower."""
    from dataclasses import replace

    from pase.calibrate import card_ops, here
    from pase.calibrate.figures import prices
    from pase.costmodels.analytic import Analytic
    from pase.machine import load

    h100, found = load("h100x8"), here.find()
    gpu = replace(found, platform="gpu", device_name="NVIDIA H100 80GB HBM3")
    model = Analytic(h100, steady=False)
    monkeypatch.setattr(here, "start", lambda **_: None)
    monkeypatch.setattr(here, "find", lambda levels=None: gpu)
    monkeypatch.setattr(
        card_ops.ProfiledKernels,
        "seconds",
        lambda self, ops: (1.2 * prices(model, [op.work for op in ops], 1.4e-6)).tolist(),
    )
    file = tmp_path / "mine.toml"
    told = reported("calibrate", "-o", file)
    assert told["card"]["not_fitted"]["ops"] > 5 and told["card"]["not_fitted"]["median_error"] < 0.03
    mine = load(str(file))
    assert mine.device.products.rate["bfloat16"] < h100.device.products.rate["bfloat16"]
    assert mine.device.memory_bytes == h100.device.memory_bytes and mine.levels == h100.levels
    code, out, _ = run("calibrate", "-o", file)
    assert code == 0 and "were not fitted, and are" in " ".join(out.split())
    for option in (["--dtypes", "bfloat16"], ["--levels", "device=8"]):
        code, _, said = run("calibrate", "-o", file, *option)
        assert code == 2 and option[0] in said and "--grid" in said
    code, _, said = run("calibrate", "-o", tmp_path / "mine.toml" / "x.toml")
    assert code == 2 and "Error" in said
