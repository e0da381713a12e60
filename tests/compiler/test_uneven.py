"""Plans with padded dims: never worse than without padding, in text and file, and run on unpadded arguments."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pase
from pase import machine
from pase.backends.audit.xla import unsharded_step
from pase.commands.run import Runnable, step_against_unsharded
from pase.compiler.problem.variants import Variant, graph_of
from pase.errors import Infeasible, PaseError
from pase.frontends.blocks import as_padded
from pase.frontends.jax.frontend import trace
from pase.frontends.jax.padding.program import extents
from pase.frontends.registry import NotInParts
from pase.plan.layout import from_json, to_json
from pase.plan.parameter_reshard import parameter_reshards
from tests.command import reported


def slow():
    """A machine whose products take so long that even small models are split."""
    m = machine.load("h100x8")
    rates = {k: v / 1e6 for k, v in m.device.peak_flops.items()}
    return replace(m, device=replace(m.device, peak_flops=rates, products=None))


def loss(p, x, y):
    h = jax.nn.relu(x @ p["up"] + p["bias"])
    return -(jax.nn.log_softmax(h @ p["down"]) * jax.nn.one_hot(y, p["down"].shape[1])).sum(-1).mean()


def arguments(b, d, e):
    rng = np.random.default_rng(0)
    params = {
        "up": rng.normal(size=(d, e)) / 8,
        "bias": rng.normal(size=e),
        "down": rng.normal(size=(e, d)) / 8,
    }
    params = {k: jnp.asarray(w, jnp.float32) for k, w in params.items()}
    return params, jnp.asarray(rng.normal(size=(b, d)), jnp.float32), jnp.asarray(rng.integers(0, d, b))


def planned(args, **options):
    return pase.compile(loss, *args, devices=8, machine=slow(), memory_limit="none", **options)


def test_31_by_63_by_61_is_split():
    args = arguments(31, 63, 61)
    whole, plan = planned(args, idle="none"), planned(args, uneven="padded")
    assert plan.cost < whole.cost / 4
    assert plan.baselines["no_padding"] == whole.cost
    assert plan.padding[31] == 32
    assert plan.inputs["x"].unpadded == (31, 63)
    assert {n.name: n.split for n in plan.nodes}["up:dot"] == {"b": ("data",)}
    assert "padded 31 to 32 (+3.2%) in x, y" in str(plan)
    assert whole.padding == {}
    assert f"over the model as written and {plan.provenance['paddings']} padding" in str(plan)
    assert "paddings" not in whole.provenance
    assert plan.work == whole.work  # of what the user asks for


def test_steps_take_and_return_what_the_user_has():
    params, *batch = args = arguments(62, 31, 61)
    plan = planned(args, uneven="padded", accumulate=2)
    assert plan.padding
    assert plan.accumulate == 2
    optimizer = optax.adamw(1e-2, eps=1e-3)
    whole = unsharded_step(loss, optimizer, params, *batch)
    step, state = plan.jax.train_step(optimizer), plan.jax.init(optimizer, params)
    updated, state, value = step(params, state, *batch)
    assert float(value) == pytest.approx(whole.loss, rel=1e-5)
    assert any(w.shape != params[k].shape for k, w in updated.items())
    own = plan.jax.unpadded(updated)
    for k, w in own.items():
        assert w.shape == params[k].shape
        np.testing.assert_allclose(w, whole.parameters[k], atol=1e-5)
        rest = np.array(updated[k])
        rest[tuple(map(slice, w.shape))] = 0
        assert not rest.any(), "the padding is zeros after the update, too"
    step(updated, state, *batch)


def test_padded_micro_batches_take_the_mean_of_their_losses():
    def by_count(p, x, y):
        h, on = jax.nn.relu(x @ p["up"] + p["bias"]), (y % 2) * 1.0
        return (((h @ p["down"]) ** 2).sum(-1) * on).sum() / on.sum()

    args = arguments(62, 31, 61)
    pase.compile(by_count, *args, devices=1, accumulate=2)
    options = {"devices": 8, "machine": slow(), "memory_limit": "none", "uneven": "padded", "accumulate": 2}
    with pytest.raises(NotInParts, match="has only its own part"):
        pase.compile(by_count, *args, **options)


@pytest.mark.some(2)
@pytest.mark.parametrize("sizes", [(31, 7, 61), (16, 63, 24), (29, 61, 61)])
def test_no_other_padding_is_cheaper(sizes):
    """By brute force over all multiples of the numbers of shards."""
    args = arguments(*sizes)
    plan, found = planned(args, uneven="padded", mesh="2x4"), []
    traced = trace(loss, *args)
    some = sorted(extents(traced, 8))
    for wide in itertools.product(*({-(-n // w) * w for w in (1, 2, 4, 8)} for n in some)):
        made = as_padded(traced, {n: w for n, w in zip(some, wide, strict=True) if n != w})
        padded = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made.jaxpr.in_avals]
        given = jax.tree.unflatten(made.in_tree, padded)
        fn = getattr(made, "fn", loss)
        found.append(
            pase.compile(fn, *given, devices=8, machine=slow(), memory_limit="none", mesh="2x4").cost
        )
    assert plan.cost == pytest.approx(min(found), rel=1e-9)


def test_a_model_whose_dims_divide_is_searched_once_and_as_before():
    args = arguments(32, 64, 16)
    plans = [to_json(planned(args, uneven=how)) for how in ("whole", "padded")]
    for plan in plans:
        del plan["seconds"]
    assert plans[0] == plans[1]


def test_files_hold_the_padding_and_bind_to_the_model_as_written(tmp_path):
    args = arguments(31, 63, 61)
    plan = planned(args, uneven="padded")
    plan.save(tmp_path / "layout.json")
    data = json.loads((tmp_path / "layout.json").read_text())
    assert data["padding"]["31"] == 32
    assert data["inputs"]["x"]["unpadded"] == [31, 63]
    loaded = pase.load(tmp_path / "layout.json")
    assert loaded.padding == plan.padding
    assert to_json(from_json(to_json(plan))) == to_json(plan)
    assert loaded.bind(loss, *args).jax.unpadded(args[0])["up"].shape == (63, 61)


def test_the_vocabulary_of_gpt2_is_padded_where_that_is_cheaper():
    """50,257 columns are no multiple of 16 bytes, and 50,264 are: the last products take a third of the time."""
    whole, plan = (pase.compile("zoo:gpt2?batch=2", devices=8, uneven=how) for how in ("whole", "padded"))
    assert plan.padding == {50257: 50264}
    assert plan.parameters["wte"].shape == (50264, 768)
    assert plan.parameters["wte"].unpadded == (50257, 768)
    assert plan.cost < 0.96 * whole.cost


def test_padded_plans_reshard_to_plans_without_padding():
    """What devices receive, counted element by element; padding is not sent."""
    args = arguments(31, 63, 61)
    padded = planned(args, uneven="padded", mesh="8")
    wide = replace(
        padded.parameters["up"], shape=(64, 61), unpadded=(63, 61), storage=((padded.mesh.names[0],), ())
    )
    new = replace(padded, parameters={**padded.parameters, "up": wide})
    old = planned(args, mesh="8")
    assert old.parameters["up"].storage == ((), ())  # every device has it
    m = machine.load("h100x8")
    assert parameter_reshards(old, new, m) == []
    (found,) = parameter_reshards(new, old, m)
    # Seven devices hold eight of 63 rows each. The last one holds seven, and so receives 56.
    assert found.nbytes == 56 * 61 * 4


def test_pase_run_compares_a_padded_step_with_the_unsharded_one():
    params, *batch = arguments(62, 31, 61)

    def fn(p, pair):
        return loss(p, *pair)

    plan = pase.compile(
        fn, params, tuple(batch), devices=8, machine=slow(), memory_limit="none", uneven="padded"
    )
    assert plan.padding
    values = (params, tuple(batch))
    model = Runnable(name="padded", loss_fn=fn, init=lambda seed: values, shapes=values)
    result = step_against_unsharded(plan, model, seed=0)
    assert result["agrees"], result


def test_padded_plans_are_emitted_in_padded_shapes(tmp_path):
    plan = pase.compile("zoo:gpt2?batch=2", devices=8, uneven="padded", baselines=False)
    plan.save(tmp_path / "layout.json")
    reported("emit", str(tmp_path / "layout.json"), "--to", "names", "-o", str(tmp_path / "out.json"))
    assert "50264" in (tmp_path / "out.json").read_text()


def test_what_cannot_be_padded_says_why():
    args = arguments(31, 63, 61)
    with pytest.raises(PaseError, match="takes no stages"):
        planned(args, uneven="padded", pipeline=2)
    with pytest.raises(PaseError, match="passes values to its next call"):
        as_padded(trace(lambda p, s, x: (p, s), args[0], args[0], args[1], mode="step"), {31: 32})
    made = as_padded(trace(loss, *args), {31: 32})
    from pase.frontends.jax.blocks import batch_size

    with pytest.raises(PaseError, match="a batch of 31, padded to 32"):
        batch_size(made)


def added(p, x, y):
    """A sum over the batch."""
    return ((jax.nn.relu(x @ p["up"]) @ p["down"] - y) ** 2).sum()


def averaged(p, x, y):
    return added(p, x, y) / x.shape[0]


def limited(fn, args, nbytes, **options):
    m = machine.load("h100x8")
    small = replace(m, device=replace(m.device, memory_bytes=nbytes, reserved_bytes=0))
    return pase.compile(fn, *args, devices=8, machine=small, baselines=False, **options)


def with_targets(b, d, e):
    params, x, _ = arguments(b, d, e)
    return {k: params[k] for k in ("up", "down")}, x, -x


def test_a_sum_over_the_batch_is_not_padded_into_micro_batches():
    """Its mean over micro-batches would be too small, just as for the model as written."""
    args = with_targets(4096, 63, 61)
    plan = limited(added, args, 700_000, uneven="padded")
    assert plan.accumulate == 1
    with pytest.raises(PaseError, match="a sum over the batch"):
        limited(added, args, 700_000, uneven="padded", accumulate=2)
    traced = trace(added, *args)
    with pytest.raises(NotInParts, match="a sum over the batch"):
        graph_of(as_padded(traced, {63: 64}), Variant(accumulate=2))


def test_padded_micro_batches_give_the_numbers_of_the_whole_batch():
    params, *batch = args = with_targets(4096, 63, 61)
    plan = limited(averaged, args, 700_000, uneven="padded", accumulate=2)
    assert plan.padding
    whole = unsharded_step(averaged, optax.sgd(1e-2), params, *batch)
    step, state = plan.jax.train_step(optax.sgd(1e-2)), plan.jax.init(optax.sgd(1e-2), params)
    updated, state, value = step(params, state, *batch)
    assert float(value) == pytest.approx(whole.loss, rel=1e-5)
    for k, w in plan.jax.unpadded(updated).items():
        np.testing.assert_allclose(w, whole.parameters[k], atol=1e-5)


def test_padding_is_searched_where_it_alone_fits():
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1023, 1023), (1023, 1023), (64, 1023))]
    given = ({"up": args[0], "down": args[1]}, args[2], args[2])

    def at_most(nbytes, **options):
        options = {"devices": 8, "machine": "a100x8", "memory_limit": nbytes, **options}
        return pase.compile(averaged, *given, **options)

    with pytest.raises(Infeasible) as whole:
        at_most("30MB")
    plan = at_most("30MB", uneven="padded")
    assert plan.padding == {1023: 1024}
    assert plan.memory.total <= 30e6
    assert "no_padding" not in plan.baselines
    assert plan.work == at_most("1GB").work
    with pytest.raises(Infeasible) as neither:
        at_most("1kB", uneven="padded")
    with pytest.raises(Infeasible) as written:
        at_most("1kB")
    assert str(neither.value) == str(written.value) != str(whole.value)
