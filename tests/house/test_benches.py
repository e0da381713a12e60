"""Each bench starts, and writes what it says: its smallest setting is run in a copy of the folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases import SHARED

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "amp": '--only "unequal micro=32"',
    "answers": "write answers.json --parts search --data .",
    "calibrate_cpu": '--budget 1 --max-spread 1000 --only "mlp 256"',
    "check_rates": "--seeds 6 --zoo --faults 1 --moves 0 --lines 0",
    "comm_audit": "mlp",
    "composer": "--seeds 4",
    "depth": '--only "2 layers"',
    "dpro_memory": "--only VGG16",
    "every_mesh": '--only "mlp, 32"',
    "uneven": "--only layers",
    "file_fuzz": "--count 45 --only in",
    "lowerings": '--only "mlp data_parallel"',
    "memory_search": "--only mlp",
    "memory_audit": "mlp",
    "mesh_tf": "--models mlp",
    "onnx_size": '--only "nodes 1000"',
    "paper_table1": "--repeats 1 --only alexnet",
    "pase_fig6": '--only "1080tix8 alexnet 4"',
    "pipelines": "--out pipelines.json",
    "programs": "*ntxent*",
    "published": "--only 22B",
    "replay_degrees": '--only "device-bound: stages=2"',
    "replay_fuzz": "--count 3",
    "replay_profile": "--processes 1 --rounds 1",
    "replay_speed": "--megabytes 1",
    "replay_whatif": '--only "one of 2 ranks 5 ms late"',
    "replay_xla": f"--machine {ROOT / 'pase/machine/data/cpu_host.toml'} --only 'gpt2 16'",
    "residual_audit": "composer --seeds 2",
    "schedule_policies": '--quick --only "random 6 0"',
    "schedule_training": '--steps 1 --only "ours, 2"',
    "search_densenet": "--seconds 1 --repeats 1 --solvers pase --only 121",
    "search_growth": '--repeats 1 --only "5 layers"',
    "search_public": f"--files {ROOT / 'examples'} --solvers pase --seconds 1",
    "sensitivity": "--only alexnet",
    "startup": "--runs 1",
    "tables": '--repeats 1 --only "gpt2 32"',
    "tf_applications": "MobileNet",
    "xla_fuzz": "--cases 0",
    "xla_ops": "--ops sort --seeds 1",
    "zero3_pipeline": "--out zero3_pipeline.json",
    "zoo_compile": "mlp --devices 8",
}
"""Bench -> its smallest arguments."""
RECORDED = {
    "published_ours": "--only ttn001 --minutes 1 -o published_ours.json",
    "published_steps": "--only ttn001 -o published_steps.json",
    "replay_traces": "--only DLRM",
    "search_iopddl": "--only B --solvers pase --runs 0 --rounds 1",
    "search_pase": "--only alexnet --solvers pase --repeats 1",
    "vtrain": '--only "1024 wide, 1 tensor, 1 micro"',
}
"""The same, of benches on recorded data."""
WITH_TORCH = {
    "check_rates_torch": "--seeds 4 --faults 1",
    "torch_coverage": "--only GPT2LM",
    "torch_speed": '--only "one mesh"',
    "torch_audit": "--only ConvNeXt",
}
"""The same, of benches that need PyTorch."""
ELSEWHERE = {
    "first_hour": "installs from a registry; test_commands runs the commands of its page",
    "netlab": "needs root; tests/netlab runs a part of it where it can",
    "netlab/worker": "a process that netlab starts",
    "replay_hta": "needs an environment with HolisticTraceAnalysis",
    "schemas": "writes the schemas that tests/files holds equal to the types",
    "screenshots": "needs a browser",
    "tpu_aot": "needs libtpu",
    "tpu_forms": "needs libtpu",
}
"""Benches that no test starts, and why."""
PROGRAMS = {
    f.parent.name if f.name == "__main__.py" else f.relative_to(ROOT / "bench").with_suffix("").as_posix()
    for f in (ROOT / "bench").rglob("*.py")
    if 'if __name__ == "__main__"' in f.read_text()
}


def run(name: str, arguments: str, folder: Path) -> None:
    """A bench in a copy of its folder, where its result files and pages cannot replace the project's."""
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
    command = [sys.executable, "-m", f"bench.{name}", *shlex.split(arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PASE_DATA": str(SHARED)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    written = [*(folder / "bench").rglob("results/*.json"), *folder.glob("*.json")]
    assert written, "no result file"
    assert all(f.stat().st_size > 2 for f in written)


def test_every_bench_is_listed_once():
    assert sorted([*SMALLEST, *RECORDED, *WITH_TORCH, *ELSEWHERE]) == sorted(PROGRAMS)


@pytest.mark.minutes
@pytest.mark.parametrize("name", SMALLEST)
def test_a_bench_runs_in_its_smallest_setting(name, tmp_path):
    run(name, SMALLEST[name], tmp_path)


@pytest.mark.data
@pytest.mark.parametrize("name", RECORDED)
def test_a_bench_on_recorded_data_runs(name, tmp_path):
    run(name, RECORDED[name], tmp_path)


@pytest.mark.torch
@pytest.mark.parametrize("name", WITH_TORCH)
def test_a_bench_of_pytorch_runs(name, tmp_path):
    run(name, WITH_TORCH[name], tmp_path)
