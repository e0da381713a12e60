"""Memory profiles of JAX and PyTorch."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from pase.errors import PaseError
from pase.replay.traces.memory_profile import read_memory


def _held_by_me() -> Any:
    import jax.numpy as jnp

    return jnp.ones((256, 1024), "float32")


def test_jax_says_who_holds_what(tmp_path: Path) -> None:
    import jax

    kept = jax.block_until_ready(_held_by_me())
    jax.profiler.save_device_memory_profile(str(tmp_path / "memory.prof"))
    found = read_memory(tmp_path / "memory.prof")
    mine = [h for d in found for h in d.holders if "_held_by_me" in h.where]
    assert sum(h.nbytes for h in mine if h.what == "buffer") == kept.nbytes
    for d in found:
        assert d.nbytes == sum(h.nbytes for h in d.holders) and not d.peak
    # Two arrays may have one buffer, such as an array and its only shard.
    every = {
        x.unsafe_buffer_pointer(): x.nbytes
        for x in jax.live_arrays()
        if len(x.devices()) == 1 and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    assert sum(h.nbytes for d in found for h in d.holders if h.what == "buffer") >= sum(every.values())


FRAMES = {
    "loss": [("/usr/lib/torch/nn/linear.py", "forward", 9), ("/home/me/model.py", "loss", 3)],
    "adam": [("/x/torch/optim/adam.py", "step", 5), ("/home/me/train.py", "main", 8)],
    "grad": [("??", "torch::autograd::Engine::evaluate_function", 0)],
}


def _frames(which: str) -> list[dict[str, Any]]:
    return [{"filename": f, "name": n, "line": i} for f, n, i in FRAMES[which]]


def history(seed: int, early: int) -> tuple[dict[str, Any], int, dict[str, int]]:
    """A snapshot of random allocations, with the peak and who holds it, counted forwards. early: blocks from before."""
    rng = random.Random(seed)
    live = {i * 4096: (rng.randrange(1, 4000), "") for i in range(early)}
    events: list[dict[str, Any]] = []

    def held() -> dict[str, int]:
        out: dict[str, int] = {}
        for n, who in live.values():
            out[who] = out.get(who, 0) + n
        return out

    peak, at_peak = sum(n for n, _ in live.values()), held()
    for _ in range(200):
        if live and rng.random() < 0.48:
            address = rng.choice(list(live))
            size, _ = live.pop(address)
            events += [
                {"action": a, "addr": address, "size": size, "frames": [], "stream": 0}
                for a in ("free_requested", "free_completed")
            ]
            continue
        address = next(a for a in range(0, 1 << 30, 4096) if a not in live)
        size, who = rng.randrange(1, 4000), rng.choice(list(FRAMES))
        live[address] = size, who
        events.append({"action": "alloc", "addr": address, "size": size, "frames": _frames(who), "stream": 0})
        if (total := sum(n for n, _ in live.values())) > peak:
            peak, at_peak = total, held()
    blocks = [
        {"address": a, "size": n, "state": "active_allocated", "frames": _frames(who) if who else []}
        for a, (n, who) in live.items()
    ]
    blocks.append({"address": 1 << 40, "size": 512, "state": "inactive", "frames": []})
    segment = {"device": 0, "address": 0, "total_size": 1 << 20, "blocks": blocks}
    return {"segments": [segment], "device_traces": [events]}, peak, at_peak


@pytest.mark.parametrize("seed", range(8))
def test_the_peak_of_a_history_is_found(tmp_path: Path, seed: int) -> None:
    snapshot, peak, at_peak = history(seed, early=seed % 4)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (d,) = read_memory(path)
    assert (d.device, d.peak, d.nbytes, d.reserved_bytes) == ("cuda:0", True, peak, 1 << 20)
    names = {"": "allocated before the record began", "loss": "model.py:3 loss", "adam": "train.py:8 main"}
    found = {h.where: h.nbytes for h in d.holders}
    for who, nbytes in at_peak.items():
        assert found[names.get(who, FRAMES["grad"][0][1])] == nbytes
    assert {h.what for h in d.holders} <= {"", "optimizer", "backward"}


def test_a_snapshot_without_history_is_what_is_held(tmp_path: Path) -> None:
    snapshot, _, _ = history(1, early=2)
    snapshot["device_traces"] = [[]]
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(snapshot))
    (d,) = read_memory(tmp_path / "s.pickle")
    blocks = snapshot["segments"][0]["blocks"]
    assert not d.peak and d.nbytes == sum(b["size"] for b in blocks if b["state"] == "active_allocated")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.prof", b"\x0a\xff\xff"),
        ("x.prof", b""),
        ("x.prof", b"\x1f\x8b\x08\x00cut"),
        ("x.pickle", pickle.dumps({"a": 1})),
        ("x.pickle", pickle.dumps({"segments": [{"device": 0}]})),
        ("x.pickle", pickle.dumps({"segments": [{"total_size": -1, "address": 0, "blocks": []}]})),
        ("x.pickle", pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc"}]]})),
        ("x.pickle", pickle.dumps({"segments": []})),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PaseError) as e:
        read_memory(tmp_path / name)
    assert e.value.where == str(tmp_path / name)
