"""Files of other tools are refused by what they are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pase.errors import PaseError
from pase.replay.traces.ingest import load

V3 = b'"Kind","Agent_Id","Queue_Id","Kernel_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
V1 = b'"Index","KernelName","gpu-id","queue-id","BeginNs","EndNs","DurationNs"\n'


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("1234_results.db", b"SQLite format 3\x00....", "SQLite"),
        ("snapshot.pickle", pickle.dumps({"segments": []}), "pickle"),
        ("old.pickle", pickle.dumps({"segments": []}, protocol=2), "pickle"),
        ("7_kernel_trace.csv", V3, "rocprof"),
        ("results.csv", V1, "rocprof"),
    ],
)
@pytest.mark.parametrize("given", ["file", "folder"])
def test_a_file_of_another_tool_is_named(
    tmp_path: Path, name: str, content: bytes, what: str, given: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PaseError) as e:
        load(tmp_path / name if given == "file" else tmp_path)
    assert what in e.value.what and e.value.where == str(tmp_path / name) and e.value.fix
