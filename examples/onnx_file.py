"""Plan an ONNX file for 32 devices, and write it again with the plan as ONNX's own annotations.

python examples/onnx_file.py [FOLDER]

On the command line: pase compile model.onnx --dim batch=4096 -o layout.json, then
pase emit layout.json --to onnx -o annotated.onnx
"""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
from make_onnx import classifier

import pase
from pase.backends.registry import emit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".", type=Path)
    folder = parser.parse_args().folder

    model, annotated = folder / "model.onnx", folder / "annotated.onnx"
    onnx.save(classifier(), model)
    plan = pase.compile(model, devices=32, dims={"batch": 4096})
    print(plan)
    print()
    print(emit(plan, "onnx", annotated, model=model))
    for node in onnx.load(annotated).graph.node:
        held = [s for c in node.device_configurations for s in c.sharding_spec]
        print(f"{node.op_type:<8} {len(held)} of its tensors have a sharding")


if __name__ == "__main__":
    main()
