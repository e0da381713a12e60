"""Table II of the paper (p = 32, 1080Ti), searched with its formulas, with each deviation and its cause.

Costs are those of the released prototype (tests/paper/test_prototype.py checks them against its exported tables).
``docs/evidence/pase-paper.md`` describes the same in prose. Configs are compared by what they split; dims that are not
split are left out.
"""

from dataclasses import replace
from functools import cache

import pytest

from pase.paper import PROTOTYPE, SOUND, build, complete
from pase.search import solve
from tests.baselines.helpers import graph_of
from tests.paper.table2 import STRATEGIES, bcn, convolutions, data_parallel, full, product_dims

P = 32


@cache
def searched(model, rules=PROTOTYPE):
    tables, space = build(graph_of(model), P, rules)
    found = solve(tables)
    assert found.optimal
    splits = {
        layer: {d: c for d, c in counts.items() if c > 1}
        for layer, counts in space.counts(found.choice).items()
    }
    return tables, space, found.cost, splits


def table2(model):
    _, space, _, _ = searched(model)
    return STRATEGIES[model.partition("?")[0]](space.layers)


def ratio(model, strategy, rules=PROTOTYPE):
    """Cost of the best completion of a strategy over the optimum."""
    tables, space, cost, _ = searched(model, rules)
    return complete(tables, space, strategy)[0].cost / cost


def test_table_ii_alexnet():
    """All layers are as printed except conv 4, whose in-channels the formulas split as well: (16, 2) for it saves more
    weight-gradient all-reduce than it costs in transfers. With this one change, the printed strategy is the optimum. No
    fault of the prototype explains the deviation (without the im2col volume, conv 3 is split as well). The released
    prototype splits in-channels of conv 2 to 5 at p = 64."""
    _, space, _, ours = searched("alexnet")
    printed = table2("alexnet")
    convs = convolutions(space.layers)
    assert {layer for layer in printed if ours[layer] != printed[layer]} == {convs[3].name}
    assert ours[convs[3].name] == bcn(convs[3], 16, 2, 1)
    assert 1 < ratio("alexnet", printed) < 1.1
    assert ratio("alexnet", printed | {convs[3].name: bcn(convs[3], 16, 2, 1)}) == pytest.approx(1, rel=1e-12)
    no_im2col = searched("alexnet", replace(PROTOTYPE, im2col_gradient=False))[3]
    assert [layer for layer in printed if no_im2col[layer] != printed[layer]] == [
        convs[2].name,
        convs[3].name,
    ]


def test_table_ii_alexnet_alternates_the_fully_connected_layers():
    """Section IV: the alternating pattern removes all transfers between the fully-connected layers."""
    tables, space, _, _ = searched("alexnet")
    choice = solve(tables).choice
    names = {n.name for n in full(space.layers)}
    between = [
        e.cost[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]]
        for e in tables.edges
        if tables.names[e.src] in names and tables.names[e.dst] in names
    ]
    assert len(between) == 2 and not any(between)


def test_table_ii_inception():
    """Modules A to C are data parallel as printed, and D except for its last two convolutions. Module E is hybrid: 16
    or fewer by batch, channels by the rest.

    The table gives modules, not layers ("for simplicity"). Taken literally, with every convolution of E split by
    out-channels, it costs about a tenth more than the optimum. Our strategy alternates out- and in-channels in E, like
    FC 1 to 3 in AlexNet. The last layer is (1, 4, 8) instead of (1, 2, 16), which makes hardly any difference."""
    _, space, _, ours = searched("inception_v3")
    for n in convolutions(space.layers):
        split = ours[n.name]
        if n.name.startswith(("stem", "mixed5", "reduce6", "mixed6")):
            assert split == {"b": 32}, n.name
    late = [n for n in convolutions(space.layers) if n.name.startswith("mixed7")]
    hybrid = [n for n in late if ours[n.name].get("b", 1) < 32 and len(ours[n.name]) > 1]
    assert len(hybrid) >= len(late) // 2
    for n in hybrid:
        channels = [d for _, *groups in [product_dims(n)] for group in groups for d in group]
        assert ours[n.name]["b"] <= 16 and set(ours[n.name]) - {"b"} <= set(channels)
    in_d = [n.name for n in convolutions(space.layers) if n.name.startswith("reduce7")]
    assert len([n for n in in_d if ours[n] == {"b": 32}]) == len(in_d) - 2
    assert 1.05 < ratio("inception_v3", table2("inception_v3")) < 1.2
    (fc,) = full(space.layers)
    assert ours[fc.name] == bcn(fc, 1, 8, 4)
    assert ratio("inception_v3", {fc.name: bcn(fc, 1, 16, 2)}) < 1.001


def test_inception_batch_norm_is_a_fault():
    """Over half of the optimum is traffic of batch norms that a correct batch norm does not have."""
    tables, _, cost, _ = searched("inception_v3")
    choice = solve(tables).choice
    true = build(graph_of("inception_v3"), P, replace(PROTOTYPE, norm_over_batch=False))[0]
    fictitious = sum(a[k] - b[k] for a, b, k in zip(tables.node_costs, true.node_costs, choice, strict=True))
    assert fictitious / cost > 0.5


def test_table_ii_rnnlm():
    """The LSTM is (2, ·, ·, 2, 2) with batch × sequence in 4, as printed. (Batch and sequence appear only as their
    product, so splitting either of them is a tie.)

    The embedding and the projection are split 16 and 8 ways by vocabulary, and the rest by batch or sequence, where
    the table has 32. At the prototype's sequence length of 256, the table's choice costs over a fifth more for any r,
    because all of it is traffic. The paper does not state its sequence length; the next test finds it."""
    ours = searched("rnnlm")[3]
    lstm = ours["lstm"]
    assert {d: c for d, c in lstm.items() if d not in "bs"} == {"l": 2, "d": 2, "e": 2}
    assert lstm.get("b", 1) * lstm.get("s", 1) == 4
    assert ratio("rnnlm", {"lstm": table2("rnnlm")["lstm"]}) == pytest.approx(1, abs=1e-3)
    assert 1.2 < ratio("rnnlm", table2("rnnlm")) < 1.4
    words = [layer for layer in table2("rnnlm") if layer != "lstm"]
    assert [max(ours[layer].values()) for layer in words[:2]] == [16, 8]
    for flop_per_word in (50.0, 500_000.0):
        r = searched("rnnlm", replace(PROTOTYPE, flop_per_word=flop_per_word))[3]
        assert all(r[layer] != table2("rnnlm")[layer] for layer in words[:2])


def test_table_ii_rnnlm_at_sequence_64():
    """With 64 steps, the embedding, the projection and the softmax are the table's (1, 1, 1, 32), (1, 1, 32, 1) and
    (1, 1, 32). With fewer rows, all-reducing them over all devices is cheaper than splitting the table less."""
    ours = searched("rnnlm?seq=64")[3]
    printed = table2("rnnlm?seq=64")
    assert all(ours[layer] == printed[layer] for layer in printed if layer != "lstm")


def test_rnnlm_embedding_is_a_fault():
    """A look-up is not a product. Priced as one, it is over a fifth of the optimum (notes: 21%), and split by
    vocabulary. Priced as a look-up, it is split by width, which needs no all-reduce at all."""
    _, _, cost, ours = searched("rnnlm")
    as_lookup = searched("rnnlm", replace(PROTOTYPE, dense_lookup=False))
    lookup = next(layer for layer in ours if layer.startswith("embedding"))
    assert (cost - as_lookup[2]) / cost > 0.2
    width = next(
        d.name for n in as_lookup[1].layers.nodes if n.name == lookup for d in n.space if d.size == 2048
    )
    assert set(as_lookup[3][lookup]) == {width}


def test_table_ii_transformer():
    """Feed-forward (16, 1, 1, 2) and attention's batch in 16 are as printed; heads in 2 are not.

    At the prototype's sequence length of 256, the table's heads in 2 cost more in all-reduces of the input gradients
    than they save in those of the weights. The optimum leaves half of the devices idle there, and so does the
    prototype's (notes). Our separate products for q, k and v pay that all-reduce three times, where the prototype has
    one product. The vocabulary's dims are as in RNNLM."""
    _, space, cost, ours = searched("transformer")
    printed = table2("transformer")
    products = [n.name for n in full(space.layers) if n.name in printed and "table" not in n.name]
    wide = [n for n in products if ours[n] == printed[n]]
    assert {n.split(":")[0].split(".", 1)[1] for n in wide} == {"ff.w1", "ff.w2"}
    rest = set(products) - set(wide)
    assert len(rest) == 12 and all(ours[n] == {"b": 16} for n in rest)
    heads = {n: printed[n] for n in rest}
    assert 1 < ratio("transformer", heads) < 1.2
    assert cost < ratio("transformer", data_parallel(space.layers, P)) * cost


def test_table_ii_transformer_at_sequence_96():
    """With 96 words per sentence, all is as printed: attention (16, 1, 2, 1, 1), feed-forward (16, 1, 1, 2), embedding,
    projection and softmax 16 ways by vocabulary. The two ways that the table leaves idle there split rows."""
    ours = searched("transformer?seq=96")[3]
    printed = table2("transformer?seq=96")
    for layer, split in printed.items():
        if 16 in split.values() and "b" not in split:
            (vocabulary,) = split
            assert ours[layer][vocabulary] == 16 and sorted(ours[layer].values()) == [2, 16], layer
        else:
            assert ours[layer] == split, layer


@pytest.mark.parametrize("model", ["alexnet", "rnnlm"])
@pytest.mark.parametrize("rules", [PROTOTYPE, SOUND], ids=["prototype", "sound"])
def test_never_worse_than_the_table_or_data_parallelism(model, rules):
    space = searched(model, rules)[1]
    assert 1 <= ratio(model, table2(model), rules) <= ratio(model, data_parallel(space.layers, P), rules)
