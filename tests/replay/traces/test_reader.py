"""Untrusted files: nesting, bombs and giant values are refused before they take memory."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.replay.traces.chrome import read_chrome
from pase.replay.traces.ingest import load
from pase.replay.traces.reader import Limits, open_stream
from tests.replay.traces.files import kernel


def _peak_mib(work) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize("nest", [b"[" * 3_000_000, b"[ " * 3_000_000, b'{"a":' * 2_000_000])
def test_deep_nesting(tmp_path: Path, nest: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'{"traceEvents": [' + json.dumps(kernel(1)).encode() + b', {"args": ' + nest)

    def read() -> None:
        try:
            t = load(path)
        except PaseError as e:
            assert "deep" in str(e)
        else:
            assert any("cut or damaged" in str(p) for p in t.problems)

    assert _peak_mib(read) < 512


def test_a_zip_bomb_in_gzip(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as f:
        f.write(b'{"traceEvents": [')
        for _ in range(200):
            f.write(b" " * (1 << 20))
        f.write(b"]}")
    with pytest.raises(PaseError, match=r"bomb|without an event"):
        load(path)


def test_one_event_repeated_past_the_ratio(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    block = (json.dumps(kernel(1)) + ",").encode() * 8000
    with gzip.open(path, "wb", compresslevel=9) as f:
        f.write(b'{"traceEvents": [')
        for _ in range(12):
            f.write(block)
        f.write(b"{}]}")
    with pytest.raises(PaseError, match=r"more than 4 MiB|zip bomb"):
        read_chrome(path, limits=Limits(file_bytes=4 << 20))


@pytest.mark.parametrize("more", [b"", gzip.compress(b" ")], ids=["one member", "a small member after it"])
def test_a_bomb_is_refused_before_its_events_are_read(tmp_path: Path, more: bytes) -> None:
    """Parsing the decompressed data would take many seconds."""
    block = (json.dumps(kernel(1)) + ",").encode() * 8000
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + block * 150, 9) + more)
    with pytest.raises(PaseError, match="zip bomb") as e:
        open_stream(path)
    assert e.value.where == str(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + block, 9) + more)
    with open_stream(path) as stream:
        assert stream.read().startswith(b'{"traceEvents": [')


def test_a_giant_string(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"traceEvents": [' + json.dumps(kernel(1)).encode() + b', {"name": "' + b"x" * (12 << 20) + b'"}]}'
    )
    with pytest.raises(PaseError, match="without an event"):
        load(path)


def test_zstd_is_read_cut_and_bounded(tmp_path: Path) -> None:
    import pyarrow as pa

    def packed(data: bytes) -> Path:
        path = tmp_path / "x.json.zst"
        path.write_bytes(bytes(pa.compress(data, codec="zstd", asbytes=True)))
        return path

    def read(path: Path) -> tuple[bytes, str]:
        with open_stream(path) as stream:
            return b"".join(iter(stream.read, b"")), stream.broken

    data = json.dumps({"traceEvents": list(range(100_000))}).encode()
    path = packed(data)
    assert read(path) == (data, "")
    path.write_bytes(path.read_bytes()[:-2000])
    part, _ = read(path)
    assert data.startswith(part) and len(part) < len(data)
    with pytest.raises(PaseError):
        read(packed(bytes(1 << 27)))
