"""What a framework does in addition to products."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pase.stated.program import AroundAttention
from tests.stated.prices import AHEAD, H100, graph_of, price


def test_what_a_framework_does_besides_products_is_counted_once_each():
    """Metrics of the logits, copies around attention and waits of the device are priced at the memory's rate."""
    eager = AHEAD
    rate = H100.device.memory_bandwidth_bytes_per_s * H100.device.efficiency["memory"]
    tokens, layers, width, vocab = 16 * 512, 4, 4096, 128256
    step = price("micro=16", devices=1, program=eager).step_s
    logged = price("micro=16", devices=1, program=replace(eager, metrics_bytes=46.0)).step_s
    assert logged - step == pytest.approx(46 * tokens * vocab / rate, rel=1e-6)
    around = AroundAttention(forward=9.0, backward=17.0, waits=3000)
    more = price("micro=16", devices=1, program=replace(eager, around=around)).step_s
    once = 26 * tokens * width * 2 / rate + 3000 * 1e-7
    assert more - step == pytest.approx(layers * once, rel=1e-6)


def test_whole_logits_are_gathered_and_every_rank_computes_the_whole_loss():
    whole = replace(AHEAD, whole_logits=True, logits_in_parts=None)
    parts = replace(AHEAD, logits_in_parts=None)
    for text in ("tp=8", "tp=8,sp"):
        a, b = (price(text, program=p, graph=graph_of(vocab=1 << 18)) for p in (whole, parts))
        gathered = a.collectives_s["all_gather over model"] - b.collectives_s.get(
            "all_gather over model", 0.0
        )
        logits = 16 * 512 * (1 << 18) * 4
        assert gathered == pytest.approx(logits * 7 / 8 / (450e9 * 0.824), rel=0.2)
        assert a.seconds["compute"] > b.seconds["compute"]
        assert a.memory.logits > b.memory.logits
    one = price("dp=8", program=whole)
    assert one.step_s == price("dp=8", program=parts).step_s
