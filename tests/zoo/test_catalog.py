"""The zoo's models are the published ones: parameter counts, multiply-adds; and they trace on shapes alone."""

from __future__ import annotations

import math

import jax
import jax.export
import pytest
from jax.extend import core

from pase import zoo
from tests.zoo.jaxprs import array, equations, shape, size

from .helpers import DISTINCT

# Each number from the place named, and none from the code under test.
PUBLISHED = {
    "mlp": (41_956_352, "by hand: 1024·4096+4096 + 2·(4096·4096+4096) + 4096·1024+1024"),
    "alexnet": (62_378_344, "learnopencv.com/number-of-parameters-and-tensor-sizes-in-convolutional-…"),
    "inception_v3": (23_834_568, "paperswithcode/torchvision: 23834568 without the auxiliary classifier"),
    "rnnlm": (476_825_248, "by hand: 204,800,000 + 2·33,562,624 + 204,900,000"),
    "transformer": (69_701_632, "by hand: 25,600,000 + 6·3,150,336 + 6·4,199,936"),
    "resnet101": (44_549_160, "torchvision ResNet101_Weights, num_params"),
    "vgg19": (143_667_240, "torchvision VGG19_Weights, num_params"),
    "densenet121": (7_978_856, "torchvision DenseNet121_Weights, num_params"),
    "bert_base": (109_482_240, "transformers BertModel, bert-base-uncased"),
    "gpt2": (124_439_808, "the released checkpoint 124M"),
    "gpt2_medium": (354_823_168, "the released checkpoint 355M"),
    "gpt2_large": (774_030_080, "the released checkpoint 774M"),
    "gpt2_xl": (1_557_611_200, "the released checkpoint 1558M"),
    "gpt_1_3b": (1_315_575_808 + 24 * 3 * 2048, "GPT-Neo 1.3B, and the q, k, v biases which that leaves out"),
    "llama3_8b": (8_030_261_248, "the released checkpoint"),
    "llama3_70b": (70_553_706_496, "the released checkpoint"),
    "llama3_405b": (405_853_388_800, "the released checkpoint, 8 key-value heads"),
    "mixtral_8x7b": (46_702_792_704, "the released checkpoint"),
    "vit_l16": (304_326_632, "torchvision ViT_L_16_Weights, num_params"),
}


def test_every_model_has_a_published_count() -> None:
    assert set(PUBLISHED) == set(zoo.names())


@pytest.mark.parametrize("name", zoo.names())
def test_parameter_count(name: str) -> None:
    model = zoo.get(name)
    beyond = sum(size(model.params[key]) for key in model.beyond_published)
    assert model.parameters - beyond == model.published_parameters == PUBLISHED[name][0]


@pytest.mark.parametrize("name", [name for name in zoo.names() if "scan" in zoo.entry(name).settings])
def test_unrolled_models_have_the_same_parameters(name: str) -> None:
    assert zoo.get(name, scan=0).parameters == zoo.get(name).parameters


@pytest.mark.parametrize("name", zoo.names())
def test_traces_on_shapes_alone(name: str) -> None:
    model = zoo.get(name)
    (loss,) = jax.make_jaxpr(model.loss_fn)(model.params, model.batch).out_avals
    assert loss.shape == () and loss.dtype == "float32"


@pytest.mark.parametrize("name", ["llama3_405b", "gpt2", "mixtral_8x7b", "vit_l16", "transformer", "rnnlm"])
def test_gradients_trace_on_shapes_alone(name: str) -> None:
    model = zoo.get(name)
    gradients = jax.eval_shape(jax.grad(model.loss_fn), model.params, model.batch)
    assert jax.tree.map(lambda g: g.shape, gradients) == jax.tree.map(lambda p: p.shape, model.params)


@pytest.mark.parametrize("name", [name for name in DISTINCT if name != "densenet121"])
def test_traces_on_symbolic_batch_and_sequence(name: str) -> None:
    """No builder writes batch sizes into the program, so one trace works for every batch and sequence length."""
    model = zoo.get(name)
    context = (model.settings | zoo.entry(name).architecture).get("context", 2**20)
    b, s = jax.export.symbolic_shape("b,s", constraints=[f"s<={context}"])

    def symbolic(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rest = (s, *leaf.shape[2:]) if "seq" in model.settings and len(leaf.shape) > 1 else leaf.shape[1:]
        return jax.ShapeDtypeStruct((b, *rest), leaf.dtype)

    (loss,) = jax.make_jaxpr(model.loss_fn)(model.params, jax.tree.map(symbolic, model.batch)).out_avals
    assert loss.shape == ()


@pytest.mark.parametrize("name", zoo.names())
def test_products_are_in_the_compute_dtype(name: str) -> None:
    """Parameters are stored in float32 and cast where they are used, in all products but the router's."""
    model = zoo.get(name, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}
    jaxpr = jax.make_jaxpr(model.loss_fn)(model.params, model.batch).jaxpr
    products = [eqn for eqn in equations(jaxpr) if multiply_adds(eqn)]
    exact = [eqn for eqn in products if {array(var).dtype.name for var in eqn.invars} != {"bfloat16"}]
    assert [shape(eqn.invars[1]) for eqn in exact] == ([(4096, 8)] if name == "mixtral_8x7b" else [])


# Forward multiply-adds of one image at the published size, in units of 1e9, as torchvision's pages state them
# under "GFLOPS"; AlexNet's from the table of osmr/imgclsmob, which counts the ungrouped model.
MULTIPLY_ADDS = {
    "alexnet": 1.132,
    "inception_v3": 5.71,
    "resnet101": 7.80,
    "vgg19": 19.63,
    "densenet121": 2.83,
    "vit_l16": 61.55,
}


@pytest.mark.parametrize("name", MULTIPLY_ADDS)
def test_multiply_adds(name: str) -> None:
    settings = {"scan": 0, "remat": 0} if name == "vit_l16" else {}
    model = zoo.get(name, batch=1, **settings)
    jaxpr = jax.make_jaxpr(model.loss_fn)(model.params, model.batch).jaxpr
    assert sum(map(multiply_adds, equations(jaxpr))) / 1e9 == pytest.approx(MULTIPLY_ADDS[name], rel=0.005)


def multiply_adds(eqn: core.JaxprEqn) -> int:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        summed = [shape(eqn.invars[0])[i] for i in contracted]
        return math.prod(shape(eqn.outvars[0])) * math.prod(summed)
    if eqn.primitive.name == "conv_general_dilated":
        *window, channels, _ = shape(eqn.invars[1])
        return math.prod(shape(eqn.outvars[0])) * math.prod(window) * channels
    return 0
