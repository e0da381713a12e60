"""Frontends, which turn a framework's model into a graph: one folder per framework, and what they share."""

from pase.former import former_names

former_names(
    __name__,
    {
        "from_jax": "jax.frontend",
        "from_onnx": "onnx.frontend",
        "from_tf": "tf.frontend",
        "from_torch": "torch.frontend",
        "jax_rules": "jax.rules",
    },
)
