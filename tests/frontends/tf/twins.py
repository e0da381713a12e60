"""Models of the zoo rewritten in TensorFlow, with the same parameters by the same paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import tensorflow as tf

from pase import zoo

__all__ = ["TWINS", "twin"]


def twin(model: str) -> tuple[Any, list[Any], Any]:
    """A tf.function of the batch's leaves, the TensorSpecs of these leaves, and the model of the zoo."""
    m = zoo.reduced(model)
    made: dict[str, tf.Variable] = {}

    def variable(keys: Any, leaf: Any) -> tf.Variable:
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        made[path] = tf.Variable(tf.zeros(leaf.shape, str(leaf.dtype)), name=path)
        return made[path]

    params = jax.tree_util.tree_map_with_path(variable, m.params)
    names = list(m.batch)
    loss = TWINS[model.partition("?")[0]](params, m)

    @tf.function(autograph=False)
    def step(*leaves: Any) -> Any:
        return loss(dict(zip(names, leaves, strict=True)))

    specs = [tf.TensorSpec(m.batch[n].shape, str(m.batch[n].dtype), name=n) for n in names]
    return step, specs, m


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _mlp(p: Any, m: Any) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        x = batch["inputs"]
        for layer in p["hidden"]:
            x = tf.nn.relu(x @ layer["w"] + layer["b"])
        return _cross_entropy(x @ p["classifier"]["w"] + p["classifier"]["b"], batch["labels"])

    return loss


def _convolved(x: Any, p: Any, stride: int = 1, padding: str = "SAME") -> Any:
    return tf.nn.relu(tf.nn.conv2d(x, p["w"], stride, padding) + p["b"])


def _classified(x: Any, layers: Any, labels: Any) -> Any:
    first, second, last = layers
    x = tf.nn.relu(tf.einsum("bhwc,hwcn->bn", x, first["w"]) + first["b"])
    x = tf.nn.relu(x @ second["w"] + second["b"])
    return _cross_entropy(x @ last["w"] + last["b"], labels)


def _alexnet(p: Any, m: Any) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        c1, c2, *rest = p["conv"]
        x = tf.nn.max_pool2d(_convolved(batch["images"], c1, 4, "VALID"), 3, 2, "VALID")
        x = tf.nn.max_pool2d(_convolved(x, c2), 3, 2, "VALID")
        for c in rest:
            x = _convolved(x, c)
        return _classified(tf.nn.max_pool2d(x, 3, 2, "VALID"), p["fc"], batch["labels"])

    return loss


def _vgg(p: Any, m: Any) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        x = batch["images"]
        for stage in p["stages"]:
            for c in stage:
                x = _convolved(x, c)
            x = tf.nn.max_pool2d(x, 2, 2, "VALID")
        return _classified(x, p["fc"], batch["labels"])

    return loss


def _norm(x: Any, p: Any) -> Any:
    y = x - tf.reduce_mean(x, -1, keepdims=True)
    y = y * tf.math.rsqrt(tf.reduce_mean(y * y, -1, keepdims=True) + 1e-5)
    return y * p["scale"] + p["bias"]


def _attention(x: Any, p: Any) -> Any:
    q, k, v = (tf.einsum("bsd,dhk->bshk", x, p[f"w{n}"]) + p[f"b{n}"] for n in "qkv")
    scores = tf.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    n = scores.shape[-1]
    causal = tf.range(n)[:, None] >= tf.range(n)[None, :]
    weights = tf.nn.softmax(tf.where(causal, scores, -1e30))
    y = tf.einsum("bhqs,bshk->bqhk", weights, v)
    return tf.einsum("bshk,hkd->bsd", y, p["wo"]) + p["bo"]


def _gpt(p: Any, m: Any) -> Callable[[Any], Any]:
    def loss(batch: Any) -> Any:
        tokens = batch["tokens"]
        x = tf.gather(p["wte"], tokens) + p["wpe"][: tokens.shape[1]]
        for block in p["blocks"]:
            x = x + _attention(_norm(x, block["norm1"]), block["attention"])
            f = block["ff"]
            h = tf.einsum("bsd,df->bsf", _norm(x, block["norm2"]), f["w1"]) + f["b1"]
            x = x + (tf.einsum("bsf,fd->bsd", tf.nn.gelu(h, approximate=True), f["w2"]) + f["b2"])
        logits = tf.einsum("bsd,vd->bsv", _norm(x, p["norm"]), p["wte"])
        return _cross_entropy(logits, batch["labels"])

    return loss


def _rnnlm(p: Any, m: Any) -> Callable[[Any], Any]:
    def layer(x: Any, q: Any) -> Any:
        gates = tf.einsum("sbd,dgh->sbgh", x, q["wx"]) + q["b"]
        recurrent = tf.convert_to_tensor(q["wh"])
        zero = tf.zeros((x.shape[1], q["wh"].shape[0]))

        def step(state: Any, gates_x: Any) -> Any:
            h, c = state
            gates = gates_x + tf.einsum("bh,hgk->bgk", h, recurrent)
            enter, forget, cell, leave = (gates[:, n] for n in range(4))
            c = tf.sigmoid(forget) * c + tf.sigmoid(enter) * tf.tanh(cell)
            return tf.sigmoid(leave) * tf.tanh(c), c

        return tf.scan(step, gates, (zero, zero))[0]

    def loss(batch: Any) -> Any:
        x = tf.gather(p["embedding"], tf.transpose(batch["tokens"]))
        for q in p["lstm"]:
            x = layer(x, q)
        logits = tf.einsum("sbh,hv->bsv", x, p["classifier"]["w"]) + p["classifier"]["b"]
        return _cross_entropy(logits, batch["labels"])

    return loss


TWINS: dict[str, Callable[[Any, Any], Callable[[Any], Any]]] = {
    "mlp": _mlp,
    "alexnet": _alexnet,
    "vgg19": _vgg,
    "gpt2": _gpt,
    "rnnlm": _rnnlm,
}
