"""Names, settings and their errors; nothing here imports JAX before a model is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pase import zoo
from pase.errors import PaseError

CONTRACT = {
    *("alexnet", "inception_v3", "rnnlm", "transformer", "resnet101", "vgg19", "densenet121", "bert_base"),
    *("gpt2", "gpt2_xl", "gpt_1_3b", "llama3_8b", "llama3_70b", "llama3_405b", "mixtral_8x7b", "vit_l16"),
}


def test_names_are_a_contract() -> None:
    assert set(zoo.names()) >= CONTRACT


def test_settings_in_the_name_and_as_keywords() -> None:
    model = zoo.get("gpt2?batch=16&seq=256", layers=3)
    assert model.batch["tokens"].shape == (16, 256)
    assert model.params["blocks"]["norm1"]["scale"].shape == (3, 768)
    assert model.settings["vocab"] == 50257
    assert zoo.get("zoo:gpt2?batch=16").settings["batch"] == 16
    assert zoo.reduced("gpt2?seq=32").batch["labels"].shape == (8, 32)
    assert zoo.get("gpt2", scan=False).settings["scan"] == 0


def test_longer_sequences_have_more_positions_and_shorter_ones_do_not_have_fewer() -> None:
    assert zoo.get("gpt2?seq=2048").params["wpe"].shape == (2048, 768)
    assert zoo.get("gpt2?seq=512").params["wpe"].shape == (1024, 768)


@pytest.mark.some(8)
@pytest.mark.parametrize("name", zoo.names())
def test_every_setting_takes_effect(name: str) -> None:
    """Changing any setting changes the shapes or the traced program."""
    import jax

    def program(**settings: zoo.registry.Setting) -> str:
        model = zoo.reduced(name, **settings)
        return str(jax.make_jaxpr(model.loss_fn)(model.params, model.batch))

    before = zoo.reduced(name).settings
    same = program()
    for key, value in before.items():
        if key == "dtype":
            other: zoo.registry.Setting = "bfloat16"
        elif key == "attention":
            other = "plain" if value == "fused" else "fused"
        elif key in ("scan", "remat"):
            other = 0
        elif key == "task":
            other = "prefill"
        elif key == "context":  # in training only GPTs use it, as the size of their table of positions
            assert program(task="prefill", context=2 * int(value)) != program(task="prefill")
            continue
        elif key == "tokens":  # the weight of decode against prefill: tests/backends/jax/test_generation.py
            continue
        else:
            other = 2 * int(value)
        assert program(**{key: other}) != same, key


@pytest.mark.parametrize(
    ("model", "where", "what", "fix"),
    [
        ("gtp2", "zoo", "'gpt2'?", ", ".join(zoo.names())),
        ("qqq", "zoo", "'qqq'", ", ".join(zoo.names())),
        ("gpt2?bacth=3", "zoo:gpt2", "'batch'?", "batch=128, "),
        ("gpt2?batch=0", "zoo:gpt2: batch=0", "range", "1 to 2147483647"),
        ("gpt2?seq=-1", "zoo:gpt2: seq=-1", "range", "1 to 2147483647"),
        ("gpt2?seq=1.5", "zoo:gpt2: seq=1.5", "integer", "integer"),
        ("gpt2?seq=", "zoo:gpt2: seq=", "integer", "integer"),
        ("gpt2?seq", "'gpt2?seq'", "'seq'", "gpt2?key=value"),
        ("gpt2?seq=1&seq=2", "'gpt2?seq=1&seq=2'", "'seq'", "once"),
        ("gpt2?scan=2", "zoo:gpt2: scan=2", "range", "0 to 1"),
        ("gpt2?dtype=int8", "zoo:gpt2: dtype=int8", "unknown", "bfloat16, float16, float32"),
        ("inception_v3?image=74", "zoo:inception_v3: image=74", "range", "75 to "),
        ("vit_l16?image=100", "image=100", "16 pixels", "multiple of 16"),
    ],
)
def test_bad_requests(model: str, where: str, what: str, fix: str) -> None:
    with pytest.raises(PaseError) as e:
        zoo.get(model)
    assert e.value.where == where and what in e.value.what and fix in e.value.fix


@pytest.mark.parametrize("value", [1.0, None, [1], "one"])
def test_settings_are_integers(value: object) -> None:
    with pytest.raises(PaseError, match=r"gpt2: batch=.*integer"):
        zoo.get("gpt2", batch=value)  # type: ignore[arg-type]


def test_a_setting_given_twice() -> None:
    with pytest.raises(PaseError) as e:
        zoo.get("gpt2?batch=3", batch=4)
    assert e.value.where == "'gpt2?batch=3'" and "'batch'" in e.value.what


@pytest.mark.parametrize("name", ["alexnet", "inception_v3", "vgg19", "densenet121"])
def test_the_smallest_image_still_traces(name: str) -> None:
    import jax

    model = zoo.get(name, image=zoo.entry(name).minimum["image"], batch=2)
    jax.make_jaxpr(model.loss_fn)(model.params, model.batch)
    assert all(min(leaf.shape, default=1) > 0 for leaf in jax.tree.leaves(model.params))


def test_models_are_frozen() -> None:
    model = zoo.get("mlp")
    with pytest.raises(AttributeError):
        model.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        model.settings["batch"] = 1  # type: ignore[index]


def test_the_catalogue_does_not_import_jax() -> None:
    program = (
        "import sys; from pase import zoo; from pase.commands.zoo import zoo as command; "
        "command(json=True); zoo.entry('gpt2'); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
