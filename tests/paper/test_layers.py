"""The layers of a model, as the paper sees them: loops over layers and recurrences."""

from collections import Counter

from pase.paper import layers_of
from tests.baselines.helpers import graph_of


def test_stacked_layers_pass_their_state_on():
    """Twelve layers: the first reads the sum of the embeddings, eleven read the previous layer, and the last norm reads
    the last layer."""
    layers = layers_of(graph_of("gpt2"))
    kinds = {n.name: n.kind for n in layers.nodes}
    assert not {"copy", "carry", "parameter", "input"} & set(kinds.values())
    into = Counter()
    for f in layers.flows:
        if f.dst == "reduce@layer_norm":
            into[f.src] += f.times
    assert into == {"map@gpt.embed": 1, "map@feed_forward": 11}
    read = {f.dst: f.src for f in layers.flows}
    # Looked up, cast, summed.
    assert read["map@gpt.embed"] == "map@lookup" and read["map@lookup"] == "wte:take"
    assert [f.src for f in layers.flows if f.dst == "reduce@layer_norm~3"] == ["map@feed_forward"]


def test_recurrence_is_one_layer():
    layers = layers_of(graph_of("rnnlm"))
    lstm = next(n for n in layers.nodes if n.name == "lstm")
    assert {d.name: d.size for d in lstm.space} == dict(l=2, b=64, s=256, d=2048, e=2048, g=4, two=2)
    assert {(f.src, f.dst) for f in layers.flows if "lstm" in (f.src, f.dst)} == {
        ("embedding:take", "lstm"),
        ("lstm", "lstm"),
        ("lstm", "classifier.w:dot"),
    }
