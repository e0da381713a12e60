"""Any layout is reached by reshapes that Mesh-TensorFlow lowers, and values and gradients are kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pase.backends.mesh_tf.names import MeshTfDim, flat
from pase.backends.mesh_tf.reshapes import direct, reshape_steps
from tests.backends.mesh_tf.results import needs_mesh_tf, worker

AXES = {"x": 2, "y": 3}


@st.composite
def layouts(draw):
    """Two layouts of one tensor: factors of its dims, and the factor that each axis splits."""
    extents = draw(st.lists(st.sampled_from([1, 2, 6, 12, 36]), min_size=1, max_size=3))

    def one(prefix):
        groups = []
        for i, extent in enumerate(extents):
            group = []
            while extent > 1 and draw(st.booleans()):
                f = draw(st.sampled_from([d for d in range(2, extent + 1) if extent % d == 0]))
                group.append(MeshTfDim(f"{prefix}{i}{len(group)}", f))
                extent //= f
            groups.append([*group, *([MeshTfDim(f"{prefix}{i}{len(group)}", extent)] if extent > 1 else [])])
        for axis, ways in AXES.items():
            free = [
                (i, k)
                for i, g in enumerate(groups)
                for k, d in enumerate(g)
                if not d.axis and d.size % ways == 0
            ]
            if free and draw(st.booleans()):
                i, k = draw(st.sampled_from(free))
                groups[i][k] = MeshTfDim(groups[i][k].base, groups[i][k].size, axis)
        return tuple(map(tuple, groups))

    return one("a"), one("b")


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_moves_end_where_they_should_by_steps_that_lower_both_ways(pair):
    have, want = pair
    steps = reshape_steps(have, want, AXES)
    assert (steps[-1] if steps else flat(have)) == flat(want)
    at = flat(have)
    for step in steps:
        assert direct(at, step, AXES), f"{at} -> {step}"
        at = step


def test_two_axes_do_not_trade_places_in_one_reshape():
    a, b = MeshTfDim("a", 6, "x"), MeshTfDim("b", 6, "y")
    steps = reshape_steps(((a,), (b,)), ((MeshTfDim("a", 6, "y"),), (MeshTfDim("b", 6, "x"),)), AXES)
    assert len(steps) > 1


@needs_mesh_tf
def test_moves_keep_the_values_and_the_gradients():
    cases = worker()["moves"]
    assert max(c["steps"] for c in cases) > 2
    assert all(c["value"] == 0 and c["gradient"] == 0 for c in cases)
