"""The roles of dims in a model: the residual stream, and the dims of tensor parallelism."""

from collections import Counter

import jax
import jax.numpy as jnp

from pase.baselines import baselines, roles
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from tests.baselines.helpers import H100, MODEL, collectives, split, weights

S = jax.ShapeDtypeStruct


def two_streams(joined):
    """An encoder of width 64, and a decoder of width 96 that reads the encoder's output. joined: whether a weight maps
    one width directly to the other, as if the two were consecutive layers."""
    wide, heads = (64, 96), 128

    def loss(p, x, y):
        for up, down in p["encoder"]:
            x = x + jnp.tanh(x @ up) @ down
        for up, down in p["decoder"]:
            y = y + jnp.tanh(y @ up) @ down
        met = x @ p["join"] if joined else jnp.tanh((x @ p["key"]) * (y @ p["query"])) @ p["out"]
        return (y + met).sum()

    def layers(width):
        return [(S((width, 4 * width), "float32"), S((4 * width, width), "float32"))] * 3

    across = {"key": S((wide[0], heads), "float32"), "query": S((wide[1], heads), "float32")}
    across |= {"out": S((heads, wide[1]), "float32")}
    p = {"encoder": layers(wide[0]), "decoder": layers(wide[1])}
    p |= {"join": S(wide, "float32")} if joined else across
    batch = [S((32, 16, w), "float32") for w in wide]
    return named(simplify(trace(loss, p, *batch).graph))


def test_an_encoder_and_a_decoder_have_a_stream_each():
    graph = two_streams(joined=False)
    r = roles(graph)
    assert len(r.model) == 2 and r.sizes(graph, r.model) == [64, 96]
    assert r.sizes(graph, r.tensor) == [128, 256, 384] and not r.ends
    (b,) = baselines(graph, 8, H100, MODEL, only=("megatron_2x4",))
    for name in weights(graph):
        (dim,) = split(graph, b, name).values()
        assert r.classes[name, dim] in r.tensor
    # The result of each of the 3 + 3 + 1 pairs of weights is reduced once in the forward pass.
    assert Counter(c.phase for c in collectives(graph, b) if "model" in c.axes)["forward"] == 7
    assert not roles(two_streams(joined=True)).model
