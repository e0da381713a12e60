"""Write model.onnx: a small image classifier with a symbolic batch, to be compiled by `pase compile model.onnx`.

python examples/make_onnx.py [-o model.onnx]

Weights are zeros: pase reads shapes alone.
"""

from __future__ import annotations

import argparse

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def classifier(classes: int = 10) -> onnx.ModelProto:
    """Two convolutions and two products, over images [batch, 3, 32, 32]."""
    weights = {
        "conv1": (32, 3, 3, 3),
        "conv2": (64, 32, 3, 3),
        "up": (64 * 8 * 8, 256),
        "head": (256, classes),
    }
    nodes = [
        helper.make_node("Conv", ["image", "conv1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "conv2"], ["c2"], pads=[1, 1, 1, 1], strides=[4, 4]),
        helper.make_node("Relu", ["c2"], ["r2"]),
        helper.make_node("Flatten", ["r2"], ["flat"]),
        helper.make_node("MatMul", ["flat", "up"], ["u"]),
        helper.make_node("Relu", ["u"], ["r3"]),
        helper.make_node("MatMul", ["r3", "head"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", classes])],
        [numpy_helper.from_array(np.zeros(s, np.float32), n) for n, s in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    onnx.checker.check_model(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", default="model.onnx")
    onnx.save(classifier(), parser.parse_args().o)


if __name__ == "__main__":
    main()
