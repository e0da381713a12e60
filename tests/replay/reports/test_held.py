"""Who holds the memory, as text and HTML."""

from pase.replay.reports.held import held_lines, held_page, held_report
from pase.replay.traces.memory_profile import DeviceMemory, Holder

HOLDERS = tuple(Holder(where=f"<b>.py:{i} f", what="", nbytes=1 << 30, count=i) for i in range(14))
DEVICE = DeviceMemory(
    device="cuda:0",
    peak=True,
    events=9,
    nbytes=14 << 30,
    at_end_bytes=1 << 30,
    reserved_bytes=15 << 30,
    holders=HOLDERS,
)


def test_the_peak_stands_beside_the_plan() -> None:
    report = held_report("s.pickle", [DEVICE], {"parameters": 4 << 30, "activations": 3 << 30})
    assert report["plan"]["total"] == 7 << 30
    lines = list(held_lines(report))
    assert all(len(line) <= 80 for line in lines)
    assert "14 GiB at the peak" in lines[0] and "200% of it" in lines[2]
    assert any("2 more" in line for line in lines) and any("4 GiB  parameters" in line for line in lines)
    text = held_page(report)
    assert "&lt;b&gt;.py" in text and "<b>.py" not in text and "parameters" in text
