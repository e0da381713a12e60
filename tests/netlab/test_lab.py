"""The laboratory goes up and always comes down again; its summaries say what its rows say."""

import fcntl
import os
import subprocess
import sys

import pytest

from bench.netlab import levels, models, net, strategies
from bench.netlab.launch import on_every_host
from bench.netlab.net import LabError, Network, Topology
from bench.netlab.steps import Running, planned
from tests.needs import NEEDS

PROGRAM = """
import socket, sys
rank, peer = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    with socket.create_server(("", 4100)) as s:
        c, who = s.accept()
        print("heard", c.recv(9).decode(), "from", who[0])
else:
    for _ in range(100):
        try:
            socket.create_connection((peer, 4100), timeout=5).sendall(b"hello")
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.05)
if len(sys.argv) > 3:
    sys.exit("host %d gives up" % rank)
"""


SLOW = """
schema = "pase.machine/1"
name = "racks"

[device]
name = "a core"
memory_bytes = 4000000000
memory_bandwidth_bytes_per_s = 4e9
peak_flops = { float32 = 20e9 }

[[levels]]
name = "host"
ways = 2
latency_s = 5e-4
bandwidth_bytes_per_s = 1e8

[[levels]]
name = "rack"
ways = 0
latency_s = 1e-3
bandwidth_bytes_per_s = 1e7

[sources]
device = "made up"
levels = "made up"
"""


@pytest.mark.root
def test_up_and_down_again(tmp_path):
    """One test: the laboratory is one a machine, and tests run side by side."""
    with net.LOCK.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pytest.skip(f"{NEEDS['root'].reason} (another one is running)")
        with pytest.raises(LabError, match="another network laboratory is running"):
            Network(Topology(racks=(2,), host_mbit=10)).__enter__()
        # What a killed run leaves behind: a namespace, with a process in it.
        subprocess.run(["ip", "netns", "add", f"{net.PREFIX}h7"], check=True)
        left = subprocess.Popen(["ip", "netns", "exec", f"{net.PREFIX}h7", "sleep", "60"])
    with Network(Topology(racks=(1, 1), host_mbit=100, uplink_mbit=50)) as network:
        assert sorted(net._namespaces()) == [f"{net.PREFIX}{x}" for x in ("h0", "h1", "s0", "s1")]
        assert left.wait(timeout=10) != 0

        def argv(i, *more):
            return ["-c", PROGRAM, str(i), network.address(0), *more]

        on_every_host(network, argv, tmp_path, timeout_s=60)
        assert f"heard hello from {network.address(1)}" in (tmp_path / "host0.log").read_text()
        shown = net._inside(network.host(0), "tc", "qdisc", "show", "dev", "eth0")
        assert "tbf" in shown and "100Mbit" in shown
        network.limit(0.0)
        assert "tbf" not in net._inside(network.host(0), "tc", "qdisc", "show", "dev", "eth0")
        with pytest.raises(LabError, match=r"host \d ended with status 1:(?s:.*)gives up"):
            on_every_host(network, lambda i: argv(i, "fail"), tmp_path, timeout_s=60)
    assert not net._namespaces() and not list(net.ETC.glob(f"{net.PREFIX}*"))
    with pytest.raises(ZeroDivisionError), Network(Topology(racks=(2,), host_mbit=10)):
        raise ZeroDivisionError
    assert not net._namespaces()
    # Killed by a signal, as a scheduler would: still taken down.
    program = (
        "from bench.netlab.net import *\nimport time\n"
        "with interruptible(), Network(Topology(racks=(2,), host_mbit=10)):\n"
        "    print('up', flush=True)\n"
        # In small pieces: a signal that arrives just before one sleep begins is only seen when that sleep is over.
        "    for _ in range(600):\n        time.sleep(0.1)\n"
    )
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None and running.stdout.readline() == "up\n"
    running.terminate()
    assert running.wait(timeout=30) != 0
    assert not net._namespaces()


def row(strategy, predicted, measured, **more):
    about = {"network": "n", "model": "m", "batch": 8, "strategy": strategy, "same_as": None}
    times = {
        "predicted_s": predicted,
        "predicted_compute_s": predicted / 2,
        "measured_s": measured,
        "spread": 0.0,
    }
    return about | times | more


def test_a_summary_says_what_its_rows_say():
    rows = [
        row("ours", 1.0, 1.1),
        row("fsdp", 2.0, 1.0),
        row("data_parallel", 3.0, 3.0),
        row("zero2", 3.0, 3.0, same_as="data_parallel"),
        {**row("owt", 9.0, 0.0), "failed": "why"},
    ]
    del rows[-1]["measured_s"]
    s = strategies.summary(rows)
    assert (s["rows"], s["failed"], s["groups"]) == (3, 1, 1)
    assert (s["ours_fastest"], s["ours_fastest_or_within_noise"]) == (0, 0)
    assert s["ours_worst_regret"] == pytest.approx(0.1)
    assert s["kendall_tau_over_all"] == pytest.approx(1 / 3)
    assert s["median_error"] == pytest.approx(1 / 11) and s["errors_below_15_percent"] == pytest.approx(2 / 3)
    assert s["ours_without_communication"] == 0
    rows[0] |= {"spread": 0.3, "predicted_compute_s": rows[0]["predicted_s"]}
    again = strategies.summary(rows)
    assert (again["ours_fastest_or_within_noise"], again["ours_without_communication"]) == (1, 1)


def test_names_and_levels_of_networks():
    racks = Topology(racks=(2, 2), host_mbit=1000, uplink_mbit=100)
    assert racks.name == "2+2 hosts, 1000 Mbit, uplink 100 Mbit" and racks.levels == "host=2,rack=2"
    assert Topology(racks=(4,), host_mbit=200).slug == "4hosts_200Mbit"
    assert Topology(racks=(4,), host_mbit=0).name == "4 hosts, no limit"
    pairs = Topology(racks=(4,), host_mbit=200, hosts_a_core=2)
    assert pairs.slug == "4hosts_200Mbit_2acore"
    cores = sorted(os.sched_getaffinity(0))
    assert [Network(pairs).core(i) for i in range(4)] == [cores[i // 2 % len(cores)] for i in range(4)]
    assert Network(pairs).command(0, ["x"])[-8:-5] == ["taskset", "-c", str(cores[0])]


def test_lowerings_stand_beside_each_other():
    """Of each plan that was measured under both, manual over annotated; of noise, the larger spread."""

    def row(strategy, lowering, measured, spread=0.0):
        about = {
            "network": "n",
            "model": "m",
            "batch": 1,
            "strategy": strategy,
            "same_as": None,
            "spread": spread,
        }
        return about | {
            "lowering": lowering,
            "measured_s": measured,
            "predicted_s": 1,
            "predicted_compute_s": 1,
        }

    rows = [row("ours", "annotated", 1.0), row("ours", "manual", 0.5)]
    rows += [row("fsdp", "annotated", 2.0, 0.2), row("fsdp", "manual", 2.3), row("owt", "annotated", 3.0)]
    found = strategies.beside(rows)
    assert (found["pairs"], found["slower_beyond_noise"]) == (2, 0)
    assert found["manual_over_annotated"] == {"median": 0.825, "least": 0.5, "most": 1.15}
    rows[-2]["measured_s"] = 2.5
    assert strategies.beside(rows)["slower_beyond_noise"] == 1


def test_pipelines_stand_beside_the_fastest_that_has_no_stages():
    rows = [row("ours", 1.2, 1.0), row("data_parallel", 2.0, 0.9), row("no split", 3.0, 3.0)]
    rows += [row("pipeline 2", 1.0, 0.6), row("pipeline 4", 1.1, 0.5)]
    other = [{**r, "batch": 9} for r in rows[:3]] + [row("pipeline 2", 1.0, 1.2, batch=9)]
    found = strategies.staged([*rows, *other])
    first, second = found["cells"]
    # What is predicted to be the fastest pipeline counts, against what is measured to be the fastest without stages.
    assert (first["pipeline"], first["fastest_pipeline"], first["best_without"]) == (
        "pipeline 2",
        "pipeline 4",
        "data_parallel",
    )
    assert first["predicted_speed_over_best_without"] == pytest.approx(1.2)
    assert first["measured_speed_over_best_without"] == pytest.approx(1.5)
    assert first["as_predicted"] and not second["as_predicted"]
    assert (found["pipeline_predicted"], found["of_these_measured_faster"], found["as_predicted"]) == (
        2,
        1,
        1,
    )
    assert found["rows"] == 9 and "ours_fastest" not in found
    other[-1] |= {"measured_s": 0.92}
    assert strategies.staged(other)["as_predicted"] == 1  # within the noise


@pytest.mark.release
def test_the_model_with_a_loop_runs_in_stages_as_it_does_whole(tmp_path, monkeypatch):
    """As its layouts on disk say, on host devices; the prediction takes stages where links between hosts are slow."""
    monkeypatch.setitem(
        models.LOOPED, "gpt2_loop", models.LOOPED["gpt2_loop"] | dict(layers=4, d=64, seq=8, vocab=64)
    )
    machine = tmp_path / "racks.toml"
    machine.write_text(SLOW)
    cells = {c.strategy: c for c in planned("gpt2_loop", 16, 4, machine, tmp_path)}
    assert {"ours", "no split", "data_parallel", "pipeline 2", "pipeline 4"} <= set(cells)
    assert cells["pipeline 2"].mesh == (2, 2) and not cells["pipeline 4"].same_as
    losses = []
    for name in ("no split", "pipeline 2"):
        running = Running(cells[name])
        losses.append(float(running.step(*running.held, running.batch)[-1]))
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-3)


def test_two_levels_at_once_are_held_against_each_alone():
    times = {"host": 1.0, "rack": 3.0, levels.BOTH: 4.0, "as one group": 2.5}
    rows = [{"what": w, "nbytes": 8, "measured_s": t, "sent_bytes": [12.0, 11.0]} for w, t in times.items()]
    said = levels.summary(rows)["8"]
    assert said["both_over_their_sum"] == 1.0 and said["both_over_the_longer"] == pytest.approx(4 / 3)
    assert said["sent_over_message"] == 1.5
