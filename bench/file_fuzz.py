"""Mutated files of every kind that pase reads: an answer, or one clear error; no traceback, no hang.

    .venv/bin/python -m bench.file_fuzz [--count 100000] [--seed 0] [--only layout] [-o FILE]

Good files of each kind are made here; each case changes one of them one to four times: values replaced by what is too
large, too deep, too long, of another type or no number; keys lost, doubled, swapped; bytes turned, cut, repeated. Then
it is read, and used as its command uses it. What may come of it: an answer, a PaseError or an OSError,
within 20 s of CPU time. Traces have a bench of their own (replay_fuzz). Writes bench/results/file_fuzz.json: outcomes
by kind, and the faults with the case that makes each again.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pase
from bench.arguments import parser, wanted
from bench.cases.schedules import random_problem
from bench.provenance import save
from pase.backends.to_names import emit as write_names
from pase.backends.to_names import load as load_names
from pase.errors import PaseError
from pase.ir.text import from_text, to_text
from pase.machine import dumps
from pase.machine import load as load_machine
from pase.plan.buckets import problem_of
from pase.replay.timeline_io import load_timeline, save_timeline
from pase.schedule import Options, ScheduleProblem, evaluate, get_policy
from pase.schedule.io import problem_to_json
from pase.schedule.load import load_problem
from pase.search import solve
from pase.search.readers import read_instance

LIMIT_S = 20.0
EXAMPLES = Path(pase.__file__).resolve().parents[1] / "examples"
MODEL = "zoo:mlp?batch=8192&layers=1&features=512&hidden=1024&classes=16"
EXTREMES: tuple[Any, ...] = (
    -1e308,
    1e308,
    float("inf"),
    float("nan"),
    -1,
    0,
    1,
    1 << 31,
    1 << 62,
    10**30,
    0.5,
    "",
    "x",
    "\x1b[2J",
    "../../x",
    "nan",
    "a" * 10_000,
    None,
    True,
    [],
    {},
    [[]],
    [[[[1]]]],
    {"a": {"a": {}}},
    [1e308, -1e308],
    "1" * 50,
)


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """A kind of file. make: writes a good one; use: reads one and does with it what its command does."""

    suffix: str
    make: Callable[[Path], None]
    use: Callable[[Path], object]


class _TookTooLong(Exception):
    pass


# --- the kinds


def _layout(path: Path) -> None:
    pase.compile(MODEL, devices=4, baselines=False).save(path)


def _use_layout(path: Path) -> object:
    plan = pase.load(path)
    return str(plan), plan.diff(plan), evaluated(problem_of(plan))


def _names(path: Path) -> None:
    write_names(pase.compile(MODEL, devices=4, baselines=False), path, model=None)


def _problem(path: Path) -> None:
    path.write_text(json.dumps(problem_to_json(random_problem(6, 3, links=2))))


def evaluated(problem: ScheduleProblem) -> object:
    """By two policies that need no search."""
    return [evaluate(problem, get_policy(p).make(problem, Options())) for p in ("ddp", "tac")]


def _graph(path: Path) -> None:
    path.write_text(to_text(pase.compile(MODEL, devices=4, baselines=False).graph))


def _timeline(path: Path) -> None:
    from bench.cases.timelines import ImaginedRun, simulate, write
    from pase.replay import align, load

    with tempfile.TemporaryDirectory() as folder:
        run = simulate(ImaginedRun(iterations=3, layers=2, bucket_layers=2))
        save_timeline(align(load(write(run, Path(folder)))), path)


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


def _use_onnx(path: Path) -> object:
    return pase.compile(str(path), devices=4, dims={"n": 8}, baselines=False)


KINDS: dict[str, FileKind] = {
    "layout": FileKind(suffix=".json", make=_layout, use=_use_layout),
    "names": FileKind(suffix=".json", make=_names, use=load_names),
    "machine": FileKind(
        suffix=".toml",
        make=lambda p: p.write_text(dumps(load_machine("h100x8"))) and None,
        use=lambda p: load_machine(p),
    ),
    "problem": FileKind(suffix=".json", make=_problem, use=lambda p: evaluated(load_problem(p))),
    "profile": FileKind(
        suffix=".txt",
        make=lambda p: p.write_text((EXAMPLES / "profile.txt").read_text()) and None,
        use=lambda p: evaluated(load_problem(p)),
    ),
    "instance": FileKind(
        suffix=".json",
        make=lambda p: p.write_text((EXAMPLES / "instance.json").read_text()) and None,
        use=lambda p: solve(read_instance(p)[0]),
    ),
    "graph": FileKind(suffix=".txt", make=_graph, use=lambda p: from_text(p.read_text(errors="replace"))),
    "timeline": FileKind(suffix=".json", make=_timeline, use=lambda p: load_timeline(p)),
    "onnx": FileKind(suffix=".onnx", make=_onnx, use=_use_onnx),
}


# --- mutations


def _places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*at, key))


def _holder(tree: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        tree = tree[key]
    return tree


def change_tree(text: str, rng: np.random.Generator) -> bytes:
    """One value of a JSON file replaced, lost, doubled, put elsewhere, or nested too deep."""
    tree = json.loads(text)
    places = list(_places(tree))
    place = places[rng.integers(len(places))]
    holder, key = _holder(tree, place), place[-1]
    match int(rng.integers(6)):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.extend(copy.deepcopy(holder[: int(rng.integers(1, 4))]))
        case 2:
            other = places[rng.integers(len(places))]
            holder[key] = copy.deepcopy(_holder(tree, other)[other[-1]])
        case 3 if rng.random() < 0.2:
            holder[key] = "DEEP"
            deep = "[" * 50_000 + "]" * 50_000
            return json.dumps(tree).replace('"DEEP"', deep).encode()
        case _:
            holder[key] = EXTREMES[rng.integers(len(EXTREMES))]
    return json.dumps(tree).encode()


def change_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Bytes turned, cut off, repeated, or numbers in them made extreme."""
    if not data:
        return b"\0"
    at = int(rng.integers(len(data)))
    match int(rng.integers(5)):
        case 0:
            return data[:at] + bytes([int(rng.integers(256))]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[max(0, at - 50) :]
        case 3:
            return data[:at] + data[at + int(rng.integers(1, 100)) :]
        case _:
            digits = [i for i in range(len(data)) if 48 <= data[i] < 58]
            i = digits[rng.integers(len(digits))] if digits else at
            word = [b"1e308", b"-1", b"9" * 30, b"0", b"inf", b"nan", b"9" * 5000, b"\x1b[2J"][
                rng.integers(8)
            ]
            return data[:i] + word + data[i + 1 :]


def mutated(good: bytes, kind: FileKind, rng: np.random.Generator) -> bytes:
    """One to four changes of a good file."""
    for _ in range(min(int(rng.geometric(0.6)), 4)):
        if kind.suffix == ".json" and rng.random() < 0.8:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                good = change_tree(good.decode(), rng)
                continue
        good = change_bytes(good, rng)
    return good


# --- verdicts


def _alarm(*_: Any) -> None:
    raise _TookTooLong


def verdict(kind: FileKind, path: Path) -> str:
    """What comes of a file: "answered", "refused", or what must not be, beginning with "fault"."""
    signal.signal(signal.SIGVTALRM, _alarm)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), np.errstate(all="ignore"):
            kind.use(path)
    except (PaseError, OSError) as e:
        return _clean(str(e))
    except _TookTooLong:
        return f"fault: above {LIMIT_S:g} s"
    except Exception as e:  # whatever else is raised here is what is looked for
        last = traceback.extract_tb(e.__traceback__)[-1]
        return f"fault: {type(e).__name__}: {str(e)[:100]} at {Path(last.filename).name}:{last.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "answered"


def _clean(message: str) -> str:
    """A message says something, and carries nothing that commands a terminal."""
    if not message or "\x1b" in message:
        return f"fault: the message is {message[:60]!r}"
    return f"refused: {message}"


def fuzz(
    kinds: dict[str, FileKind], count: int, seed: int
) -> tuple[dict[str, Counter[str]], list[dict[str, Any]]]:
    """Outcomes by kind of ``count`` cases in all, and the faults."""
    found = {name: Counter[str]() for name in kinds}
    faults = []
    with tempfile.TemporaryDirectory() as folder:
        good = {}
        for name, kind in kinds.items():
            path = Path(folder) / f"good{kind.suffix}"
            kind.make(path)
            assert (said := verdict(kind, path)) == "answered", f"the good file of kind {name}: {said}"
            good[name] = path.read_bytes()
        names = list(kinds)
        for k in range(count):
            name = names[k % len(names)]
            path = Path(folder) / f"case{kinds[name].suffix}"
            path.write_bytes(mutated(good[name], kinds[name], np.random.default_rng([seed, k])))
            said = verdict(kinds[name], path)
            found[name][said.partition(":")[0]] += 1
            if said.startswith("fault"):
                faults.append({"k": k, "kind": name, "what": said})
    return found, faults


def main() -> None:
    """Writes bench/results/file_fuzz.json: how the mutated files ended, by kind, and the faults."""
    options = parser(__doc__, "file_fuzz")
    options.add_argument("--count", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    kinds = dict(wanted([(name, (name, kind)) for name, kind in KINDS.items()], given.only))
    found, faults = fuzz(kinds, given.count, given.seed)
    for f in faults[:40]:
        print(f)
    out = {"count": given.count, "seed": given.seed, "faults": faults[:50], "all_faults": len(faults)}
    save(out | {"outcomes": {name: dict(c) for name, c in found.items()}}, given.o)


if __name__ == "__main__":
    main()
