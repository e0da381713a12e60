"""Access maps: their text, the dims that they walk, and what windows reach beyond a shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.ir import AccessMap, Window


@given(st.text(max_size=60) | st.text(st.sampled_from("ab1@/() 23"), max_size=20))
def test_maps_parse_or_say_why(text: str) -> None:
    try:
        m = AccessMap.parse(text)
    except PaseError as e:
        assert "access map" in str(e)
    else:
        assert AccessMap.parse(str(m)) == m


@given(st.integers(1, 9), st.integers(1, 5), st.integers(-4, 4), st.integers(1, 6))
def test_border_is_what_a_shards_windows_reach_beyond_it(
    extent: int, stride: int, before: int, count: int
) -> None:
    """Against the elements that the windows of a shard read, counted one by one."""
    window = Window(extent=extent, stride=stride, before=before)
    read = {k * stride - before + i for k in range(count) for i in range(extent)}
    own = range(count * stride)
    assert window.border == (own[0] - min(read), max(read) - own[-1])
    assert window.halo == sum(max(n, 0) for n in window.border)


def test_dims_of_a_map_are_in_the_order_of_the_walks() -> None:
    m = AccessMap.of("b", ("h", "k"), ())
    assert str(m) == "b (h k) 1" and m.dims == ("b", "h", "k")
    assert AccessMap.parse(".") == AccessMap(()) and str(AccessMap(())) == "."
