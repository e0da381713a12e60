"""The overhead of ``pase profile``, and the error of the replay.

    python -m bench replay.profile [--processes 2] [--rounds 3]

A data-parallel JAX program runs on CPU devices, one per process, joined by gloo, with and without ``pase profile`` in
turn. The overhead is the ratio of the median step times that the program itself measures. If the machine does other
work as well, the steps vary by tens of percent: compare the figures with the recorded load. Writes
bench/results/replay_profile.json.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.runner import option, parser, save

PROGRAM = """
import json, sys, time
rank, processes, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
mesh = jax.make_mesh((processes,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
x = jax.make_array_from_callback(
    (512, 512), NamedSharding(mesh, P("data")), lambda i: rng.standard_normal((512, 512)).astype(np.float32)[i])
w = [jax.device_put(jnp.full((512, 512), 1e-2), NamedSharding(mesh, P())) for _ in range(4)]
def loss(w, x):
    for p in w:
        x = jnp.tanh(x @ p)
    return (x ** 2).mean()
step = jax.jit(lambda w, x: [p - 0.1 * g for p, g in zip(w, jax.grad(loss)(w, x))])
seconds = []
for _ in range(40):
    begun = time.perf_counter()
    w = jax.block_until_ready(step(w, x))
    seconds.append(time.perf_counter() - begun)
if rank == 0:
    print(json.dumps(seconds[10:]))
"""

LAUNCHER = """
import subprocess, sys
program, processes, port = sys.argv[1:4]
ranks = [subprocess.Popen([sys.executable, program, str(r), processes, port]) for r in range(int(processes))]
sys.exit(max(abs(p.wait()) for p in ranks))
"""


def main() -> None:
    """Writes bench/results/replay_profile.json: seconds with and without tracing, and the error of the replay."""
    args = parser(
        __doc__,
        "replay_profile",
        option("--processes", type=int, default=2),
        option("--rounds", type=int, default=3),
    ).parse_args()
    from pase.replay.reports.report import replay_report

    plain, traced = [], []
    with tempfile.TemporaryDirectory() as folder:
        program, launcher, traces = (Path(folder) / n for n in ("program.py", "launcher.py", "traces"))
        program.write_text(PROGRAM)
        launcher.write_text(LAUNCHER)
        for _ in range(args.rounds):
            plain.append(run([sys.executable, str(launcher)], program, args.processes))
            profile = [str(Path(sys.executable).parent / "pase"), "profile", "-o", str(traces), "--"]
            traced.append(run([*profile, sys.executable, str(launcher)], program, args.processes))
        report = replay_report(traces)
    keep = ("rank", "measured_s", "replayed_s", "error", "communication_s", "compute_s", "waiting_s")
    out: dict[str, Any] = {
        "processes": args.processes,
        "median_step_s": {"plain": statistics.median(plain), "traced": statistics.median(traced)},
        "overhead": statistics.median(t / p for p, t in zip(plain, traced, strict=True)) - 1,
        "rounds": {"plain": plain, "traced": traced},
        "events": report["events"],
        "iterations": [i["measured_s"] for i in report["iterations"] if i["steady"]],
        "ranks": [{k: r[k] for k in keep} for r in report["ranks"]],
        "problems": report["problems"],
    }
    print(save(out, args.out).read_text())


def run(command: list[str], program: Path, processes: int) -> float:
    """Returns the median step time in seconds, as rank 0 measured it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    done = subprocess.run(
        [*command, str(program), str(processes), port], capture_output=True, text=True, check=True
    )
    line = next(x for x in done.stdout.splitlines() if x.startswith("[") and "Gloo" not in x)
    return statistics.median(json.loads(line))
