"""The sizes of BERT and GPT against published ones."""

from __future__ import annotations

from pase import zoo
from tests.zoo.jaxprs import size


def test_bert_heads_beyond_the_published_count() -> None:
    """BertForPreTraining: a 768² transform, a norm, a bias a word; two classes. The word table is tied."""
    model = zoo.get("bert_base")
    assert model.beyond_published == ("masked", "next")
    assert size(model.params["masked"]) == 768 * 768 + 768 + 2 * 768 + 30522
    assert size(model.params["next"]) == 768 * 2 + 2
    assert model.parameters == 110_106_428  # transformers BertForPreTraining, bert-base-uncased


def test_opt_1_3b_is_the_same_shape_as_gpt_1_3b() -> None:
    """Another 24 × 2048 model with all biases: 50272 words and 2050 positions make 1,315,758,080."""
    model = zoo.get("gpt_1_3b?vocab=50272")
    assert model.parameters + 2 * 2048 == 1_315_758_080
