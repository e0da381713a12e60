"""Makes a good file of each kind that pase reads, and uses it as its command does, for ``bench/fuzz/files.py``."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pase
from bench.cases.schedules import random_problem
from pase.backends.emit.shardings_json import emit as write_names
from pase.backends.emit.shardings_json import load as load_names
from pase.ir.text import from_text, to_text
from pase.machine import dumps
from pase.machine import load as load_machine
from pase.plan.buckets import problem_of
from pase.replay import align, load, measure
from pase.replay.traces.hlo import read_hlo
from pase.replay.traces.timeline_io import load_timeline, save_timeline
from pase.schedule import Options, ScheduleProblem, evaluate, get_policy
from pase.schedule.io import problem_to_json
from pase.schedule.load import load_problem
from pase.search import solve
from pase.search.instances.readers import read_instance

__all__ = ["KINDS", "FileKind", "Packing"]

EXAMPLES = Path(pase.__file__).resolve().parents[1] / "examples"
MODEL = "zoo:mlp?batch=8192&layers=1&features=512&hidden=1024&classes=16"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How to get the text inside of a file that is worth mutating, and how to put it back."""

    taken: Callable[[bytes], bytes]
    put: Callable[[bytes, bytes], bytes]
    """(the good file, the changed text) -> the new file."""


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file. name: the file's name, in its own folder, to which ``make`` writes a good file and its
    companions. use: reads the file and uses it as its command does. json: whether it, or its packed contents, is JSON.
    share: the relative number of cases of this kind."""

    name: str
    make: Callable[[Path], object]
    use: Callable[[Path], object]
    json: bool = False
    packing: Packing | None = None
    share: int = 10


GZIP = Packing(taken=gzip.decompress, put=lambda _, text: gzip.compress(text, 1))


def in_zip(member: str) -> Packing:
    """Returns the packing of a member of a zip archive."""

    def taken(data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read(member)

    def put(good: bytes, text: bytes) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(out, "w") as new:
            for name in old.namelist():
                new.writestr(name, text if name == member else old.read(name))
        return out.getvalue()

    return Packing(taken=taken, put=put)


# --- plans


def _plan() -> Any:
    return pase.compile(MODEL, devices=4, baselines=False)


def _use_layout(path: Path) -> object:
    plan = pase.load(path)
    return str(plan), plan.diff(plan), _evaluated(problem_of(plan))


def _evaluated(problem: ScheduleProblem) -> object:
    """Evaluates two policies that need no search."""
    return [evaluate(problem, get_policy(p).make(problem, Options())) for p in ("ddp", "tac")]


# --- traces


def _trace(path: Path) -> None:
    from bench.cases.timelines import ImaginedRun, simulate, trace

    run = simulate(ImaginedRun(iterations=3, layers=2, bucket_layers=2))
    text = json.dumps(trace(run, 0)).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)


def _timeline(path: Path) -> None:
    from bench.cases.timelines import ImaginedRun, simulate, write

    with tempfile.TemporaryDirectory() as folder:
        run = simulate(ImaginedRun(iterations=3, layers=2, bucket_layers=2))
        save_timeline(align(load(write(run, Path(folder)))), path)


def _planes(path: Path) -> None:
    import jax

    step = jax.jit(lambda x: (x @ x).sum())
    x = np.ones((8, 8), np.float32)
    step(x).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for i in range(3):
                with jax.profiler.StepTraceAnnotation("step", step_num=i):
                    step(x).block_until_ready()
        (made,) = Path(folder).rglob("*.xplane.pb")
        path.write_bytes(made.read_bytes())


def _hlo(path: Path) -> None:
    import jax

    program = jax.jit(lambda x, w: jax.lax.fori_loop(0, 3, lambda _, h: jax.numpy.tanh(h @ w), x).sum())
    compiled = program.lower(np.ones((4, 8)), np.ones((8, 8))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    data = module.as_serialized_hlo_module_proto()
    size = bytearray()
    n = len(data)
    while n >= 0x80:
        size.append(n & 0x7F | 0x80)
        n >>= 7
    path.write_bytes(b"\x0a" + bytes([*size, n]) + data)


# --- models


def _onnx(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    def tensor(name: str, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Reshape", ["r", "shape"], ["y"]),
    ]
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, (8, 4), np.ones(32)),
        helper.make_tensor("shape", TensorProto.INT64, (3,), [-1, 2, 2]),
    ]
    graph = helper.make_graph(nodes, "g", [tensor("x", "n", 8)], [tensor("y", "n", 2, 2)], weights)
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())


def _keras_model() -> Any:
    import keras

    inputs = keras.Input((16,), name="x")
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(4)(hidden))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="adam")
    return model


def _saved_model(path: Path) -> None:
    _keras_model().export(path.parent, verbose=False)


def _frozen(path: Path) -> None:
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    model = _keras_model()
    call = tf.function(lambda x: model(x)).get_concrete_function(tf.TensorSpec((8, 16), tf.float32, name="x"))
    path.write_bytes(convert_variables_to_constants_v2(call).graph.as_graph_def().SerializeToString())


def _compiled(path: Path, **dims: int) -> object:
    return pase.compile(str(path), devices=4, dims=dims or None, baselines=False)


# --- instances


def _arrays(path: Path) -> None:
    rows = {"a": np.array([0.0, 1.0]), "b": np.array([2.0, 0.0, 1.0]), "m": np.arange(6.0).reshape(2, 3)}
    np.savez_compressed(path, **rows)  # type: ignore[arg-type]
    index = {"nodes": [{"costs": "a"}, {"costs": "b"}], "edges": [{"src": 0, "dst": 1, "costs": "m"}]}
    path.with_suffix(".json").write_text(json.dumps(index))


def _example(name: str) -> Callable[[Path], object]:
    return lambda path: path.write_bytes((EXAMPLES / name).read_bytes())


KINDS: dict[str, FileKind] = {
    "layout": FileKind(name="l.json", make=lambda p: _plan().save(p), use=_use_layout, json=True),
    "names": FileKind(
        name="n.json", make=lambda p: write_names(_plan(), p, model=None), use=load_names, json=True
    ),
    "machine": FileKind(
        name="m.toml",
        make=lambda p: p.write_text(dumps(load_machine("h100x8"))),
        use=lambda p: load_machine(p),
    ),
    "problem": FileKind(
        name="p.json",
        make=lambda p: p.write_text(json.dumps(problem_to_json(random_problem(6, 3, links=2)))),
        use=lambda p: _evaluated(load_problem(p)),
        json=True,
    ),
    "profile": FileKind(
        name="p.txt", make=_example("profile.txt"), use=lambda p: _evaluated(load_problem(p))
    ),
    "instance": FileKind(
        name="i.json", make=_example("instance.json"), use=lambda p: solve(read_instance(p)[0]), json=True
    ),
    "instance, gzipped": FileKind(
        name="i.json.gz",
        make=lambda p: p.write_bytes(gzip.compress((EXAMPLES / "instance.json").read_bytes())),
        use=lambda p: solve(read_instance(p)[0]),
        json=True,
        packing=GZIP,
    ),
    "instance's arrays": FileKind(
        name="i.npz", make=_arrays, use=lambda p: solve(read_instance(p.with_suffix(".json"))[0])
    ),
    "graph": FileKind(
        name="g.txt",
        make=lambda p: p.write_text(to_text(_plan().graph)),
        use=lambda p: from_text(p.read_text(errors="replace")),
    ),
    "timeline": FileKind(name="t.json", make=_timeline, use=load_timeline, json=True),
    "trace": FileKind(name="rank0.json", make=_trace, use=lambda p: measure(align(load(p))), json=True),
    "trace, gzipped": FileKind(
        name="rank0.json.gz",
        make=_trace,
        use=lambda p: measure(align(load(p))),
        json=True,
        packing=GZIP,
        share=4,
    ),
    "planes": FileKind(name="rank0.xplane.pb", make=_planes, use=load, share=4),
    "hlo": FileKind(name="h.pb", make=_hlo, use=lambda p: read_hlo(p.read_bytes(), str(p))),
    "onnx": FileKind(name="m.onnx", make=_onnx, use=lambda p: _compiled(p, n=8)),
    "saved model": FileKind(
        name="saved_model.pb",
        make=_saved_model,
        use=lambda p: _compiled(p.parent, batch=8),
        share=3,
    ),
    "frozen graph": FileKind(name="f.pb", make=_frozen, use=_compiled, share=3),
    "keras": FileKind(
        name="m.keras",
        make=lambda p: _keras_model().save(p),
        use=lambda p: _compiled(p, batch=8),
        json=True,
        packing=in_zip("config.json"),
        share=1,
    ),
}
