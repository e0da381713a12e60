"""Strategies as text: parsed, printed and refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.stated.strategy import Strategy, parse

ways = st.sampled_from([1, 2, 3, 8])


@given(
    data=ways,
    shard=ways,
    tensor=ways,
    context=ways,
    pipeline=ways,
    chunks=ways,
    zero=st.integers(0, 3),
    sp=st.booleans(),
    micro=st.none() | st.integers(1, 9),
    remat=st.sampled_from([None, "none", "selective", "full"]),
    precision=st.sampled_from(["bf16", "fp8"]),
)
def test_what_is_written_is_read_again(
    data, shard, tensor, context, pipeline, chunks, zero, sp, micro, remat, precision
):
    zero = zero if shard > 1 else 0
    s = Strategy(
        data=data,
        shard=shard,
        zero=zero,
        tensor=tensor,
        sequence=sp,
        context=context,
        pipeline=pipeline,
        chunks=chunks if pipeline > 1 else 1,
        micro=micro,
        remat=remat,
        precision=precision,
    )
    assert parse(str(s), s.devices) == s


def test_what_is_left_is_data_parallel():
    assert parse("tp=8", 64) == Strategy(data=8, tensor=8)
    assert parse("", 4) == Strategy(data=4)
    assert parse("tp=2,zero=2", 8) == Strategy(shard=4, zero=2, tensor=2)
    assert parse("dp=4,zero=1", 4) == Strategy(shard=4, zero=1)
    assert parse("dp=2,fsdp=4", 8) == Strategy(data=2, shard=4, zero=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tp=3", "do not divide 8"),
        ("dp=4,tp=4", "is for 16 devices, not 8"),
        ("tq=2", "'tq=2': 'tq' is not known"),
        ("fdsp=8", "did you mean 'fsdp'"),
        ("tp", "needs a whole number; write it like tp=8"),
        ("tp=0", "out of range"),
        ("tp=2,tp=4", "'tp' occurs twice"),
        ("remat=some", "one of none, selective, full"),
        ("sp=3", "'sp' takes no value"),
        ("vp=2", "needs pp=N"),
        ("pp=2,vp=2,schedule=gpipe", "interleaved"),
        ("ep=3", "does not divide the 8"),
        ("zero=4", "out of range"),
    ],
)
def test_what_is_unsound_is_refused(text, says):
    with pytest.raises(PaseError, match=says):
        parse(text, 8)


def test_context_parallel_ranks_shard_an_optimizer_among_them() -> None:
    """Megatron's distributed optimizer shards over data and context parallelism together."""
    for zero in (1, 3):
        s = parse(f"cp=8,zero={zero}", 8)
        assert (s.shard, s.context, s.zero) == (1, 8, zero) and parse(str(s), 8) == s
    with pytest.raises(PaseError, match="needs ranks to split over"):
        parse("dp=4,fsdp=1,zero=1", 4)
