"""Each bench starts; before a release, each runs and writes its results, in its smallest setting and a copy of the
folder."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cases import SHARED
from bench.runner import benches
from tests import program

ROOT = Path(__file__).parents[2]
SMALLEST = {
    "published.amp": '--only "unequal micro=32"',
    "replay.calibrate_cpu": '--budget 1 --max-spread 1000 --rounds 1 --tries 1 --only "mlp 256"',
    "audit.check_rates": "--seeds 6 --zoo --faults 1 --moves 0 --lines 0",
    "audit.communication": "mlp",
    "composer": "--seeds 4",
    "search.depth": '--only "2 layers"',
    "published.dpro_memory": "--only VGG16",
    "search.every_mesh": '--only "mlp, 32"',
    "search.uneven": "--only layers",
    "gpu.jax_steps": "--only layers=1 --steps 1",
    "audit.lowerings": '--only "mlp data_parallel"',
    "search.memory": "--only mlp",
    "audit.memory": "mlp",
    "audit.mesh_tf": "mlp",
    "search.onnx_size": '--only "nodes 1080"',
    "published.pase_table1": "--repeats 1 --only alexnet",
    "published.pase_fig6": '--only "1080tix8 alexnet 4"',
    "search.pipelines": "--out pipelines.json",
    "programs": "*ntxent*",
    "published.megatron": "--only 22B",
    "published.megatron_golden": "--only gpt/gpt3_mcore_te_tp4_pp1_resume",
    "replay.degrees": '--only "device-bound: stages=2"',
    "fuzz.traces": "--count 3",
    "replay.gains": '--only "twice a small batch" --steps 3',
    "replay.profile": "--processes 1 --rounds 1",
    "replay.speed": "--megabytes 1",
    "replay.whatif": '--only "one of 2 ranks 5 ms late"',
    "replay.xla": f"--machine {ROOT / 'pase/machine/data/cpu_host.toml'} --only 'gpt2, 16' --turns 1",
    "audit.residuals": "composer --seeds 2",
    "schedule.policies": '--quick --only "random 6 0"',
    "schedule.training": '--steps 1 --only "ours, 2"',
    "search.densenet": "--seconds 1 --repeats 1 --solvers pase --only 121",
    "search.growth": '--repeats 1 --only "5 layers"',
    "search.public": f"--files {ROOT / 'examples'} --solvers pase --seconds 1",
    "search.sensitivity": "--only alexnet",
    "search.startup": "--runs 1",
    "audit.tf_applications": "MobileNet",
    "fuzz.xla": "--cases 0",
    "published.zero3_pipeline": "--out zero3_pipeline.json",
    "search.zoo": "--only mlp --devices 8",
}
"""Bench -> its smallest arguments."""
RECORDED = {
    "gpu.card": f"{SHARED / 'gpu_h100'} --steps 1 -o card.json",
    "kernels": f"{SHARED / 'gpu_h100' / 'ops.csv'} -o kernels.json",
    "links": f"{SHARED / 'measured/tracelens/mi300_llama_70b_fsdp__nccl_summary_implicit_sync.csv'} -o links.json",
    "published.ours": "--only ttn001 --minutes 1 -o published_ours.json",
    "published.steps": "--only ttn001 -o published_steps.json",
    "published.mlperf": "--only mlp111 -o mlperf.json",
    "published.simumax": "--only smx001 -o simumax.json",
    "replay.traces": "--only DLRM",
    "search.iopddl": "--only B --solvers pase --runs 0 --rounds 1",
    "search.pase": "--only alexnet --solvers pase --repeats 1",
    "published.vtrain": '--only "1024 wide, 1 tensor, 1 micro"',
}
"""Bench on recorded data -> its smallest arguments."""
WITH_TORCH = {
    "audit.check_rates_torch": "--seeds 4 --faults 1",
    "audit.torch_coverage": "--only GPT2LM",
    "search.torch_frontend": '--only "one mesh"',
    "audit.torch": "--only ConvNeXt",
    "gpu.torch_steps": '--only "tiny bert" --steps 1 --ways eager plan',
    "audit.torch_dispatch": '--only "GPT-2 one rank"',
    "audit.torch_memory": '--only "BERT data parallel 8"',
    "audit.torch_gathered_again": "--only GPT-2",
    "published.neusight": '--only "bert_large 2x512" -o neusight.json',
    "published.torch_h100": '--only "bert eager" -o torch_h100.json',
}
"""Bench that needs PyTorch -> its smallest arguments."""
ELSEWHERE = {
    "pages.first_hour": "installs from a registry; test_commands runs the commands of its page",
    "netlab": "needs root; tests/netlab runs a part of it where it can",
    "replay.tracelens": "needs TraceLens's traces",
    "replay.hta": "needs an environment with HolisticTraceAnalysis",
    "pages.accuracy": "writes a page that tests/bench/test_accuracy.py holds equal to the result files",
    "pages.schemas": "writes the schemas that tests/files holds equal to the types",
    "pages.screenshots": "needs a browser",
    "gpu.torch_streams": "needs two GPUs",
    "audit.gpu": "needs XLA's compiler for CUDA",
    "audit.gpu_buckets": "needs XLA's compiler for CUDA",
    "audit.tpu": "needs libtpu",
    "audit.tpu_forms": "needs libtpu",
}
"""Bench that no test runs -> the reason."""
NO_OPTIONS = ("audit.tpu_forms", "pages.schemas")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PASE_DATA": str(SHARED)}


def run(name: str, arguments: str, folder: Path) -> None:
    """Run a bench in a copy of its folder, so that it cannot replace the results and pages of the project."""
    shutil.copytree(ROOT / "bench", folder / "bench", ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
    words = ("python", "-m", "bench", name, *shlex.split(arguments))
    done = program.run(*words, folder=folder, environment=ENVIRONMENT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    written = [*(folder / "bench").rglob("results/*.json"), *folder.glob("*.json")]
    assert written, "no result file"
    assert all(f.stat().st_size > 2 for f in written)


def test_every_bench_is_listed_once():
    assert sorted([*SMALLEST, *RECORDED, *WITH_TORCH, *ELSEWHERE]) == sorted(benches())


@pytest.mark.minutes
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.torch] * (n in WITH_TORCH))
        for n in benches()
        if n not in NO_OPTIONS
    ],
)
def test_a_bench_says_what_its_options_are(name, tmp_path):
    """So all that it imports still exists; mypy checks what it calls."""
    done = program.run("python", "-m", "bench", name, "--help", folder=tmp_path, environment=ENVIRONMENT)
    assert done.returncode == 0 and done.stdout.startswith("usage"), (done.stdout + done.stderr)[-3000:]


@pytest.mark.release
@pytest.mark.parametrize("name", SMALLEST)
def test_a_bench_runs_in_its_smallest_setting(name, tmp_path):
    run(name, SMALLEST[name], tmp_path)


@pytest.mark.data
@pytest.mark.minutes
@pytest.mark.parametrize("name", RECORDED)
def test_a_bench_on_recorded_data_runs(name, tmp_path):
    run(name, RECORDED[name], tmp_path)


@pytest.mark.release
@pytest.mark.torch
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.data] * n.startswith("published.")) for n in WITH_TORCH]
)
def test_a_bench_of_pytorch_runs(name, tmp_path):
    run(name, WITH_TORCH[name], tmp_path)


def test_a_bench_that_is_run_as_a_module_says_how_it_is_run() -> None:
    words = [sys.executable, "-m", "bench.search.memory", "--only", "mlp"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and "python -m bench search.memory --only mlp" in done.stderr
