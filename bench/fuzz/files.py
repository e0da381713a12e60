"""Mutated files of every kind that pase reads.

    python -m bench.fuzz.files [--count 100000] [--seed 0] [--only layout] [--resume] [--jobs 2] [-o FILE]
    python -m bench.fuzz.files --again

Each case takes a good file of some kind (``bench/cases/files.py``) and mutates it one to four times: values that are
too large, too deep, too long, of another type or not a number; keys that are removed, doubled or swapped; bytes that
are flipped, cut or repeated. Archives are also mutated inside, or replaced by bombs. The file is then read and used as
its command uses it. The outcome must be an answer, a PaseError or an OSError, within 20 s of CPU time and 6 GiB. The
cases run in a separate process: if it dies, or no signal stops it, that is a fault, and the next case runs in a new
process. (``bench.fuzz.traces`` mutates the events of traces.)

Writes bench/results/file_fuzz.json every thousand cases: outcomes by kind, and the faults with what reproduces them.
``--resume`` continues from there. ``--again`` runs the faults again and records how they end now; the commit, command
and date of the first run are then under ``first``.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import io
import json
import multiprocessing
import queue
import resource
import shutil
import signal
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases.files import GZIP, KINDS, FileKind
from bench.processes import cpu_of
from bench.runner import option, parser, save, wanted
from pase.errors import PaseError

MOST_BYTES = 6 << 30
SAVED_EVERY = 1000
KEPT_BYTES = 4000
"""The result has the file of a fault if it is not larger than this, compressed."""
LIMIT_S = 20.0
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


class _TookTooLong(Exception):
    pass


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
    """Replaces, removes, doubles, or moves a value of a JSON file, or nests it too deep."""
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
    """Flips, cuts or repeats bytes, or makes numbers in them extreme."""
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


@cache
def bomb() -> bytes:
    """Returns a gzip file of 300 KB that unpacks to 300 MB."""
    return gzip.compress(bytes(300 << 20), 9)


def mutated(good: bytes, kind: FileKind, rng: np.random.Generator) -> bytes:
    """Returns a good file with one to four changes; in an archive, mostly inside."""
    if kind.packing is not None and rng.random() < 0.6:
        return kind.packing.put(good, changed(kind.packing.taken(good), kind.json, rng))
    if kind.packing is GZIP and rng.random() < 0.05:
        return bomb()
    return changed(good, kind.json and kind.packing is None, rng)


def changed(good: bytes, is_json: bool, rng: np.random.Generator) -> bytes:
    """Returns the data with one to four changes, in JSON mostly to its tree."""
    for _ in range(min(int(rng.geometric(0.6)), 4)):
        if is_json and rng.random() < 0.8:
            with contextlib.suppress(ValueError, RecursionError, AttributeError):
                good = change_tree(good.decode(), rng)
                continue
        good = change_bytes(good, rng)
    return good


# --- verdicts


def _alarm(*_: Any) -> None:
    raise _TookTooLong


def verdict(kind: FileKind, path: Path) -> str:
    """Reads and uses a file; returns "answered", "refused", or a text that begins with "fault"."""
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
    except Exception as e:  # any other exception is a fault
        last = traceback.extract_tb(e.__traceback__)[-1]
        return f"fault: {type(e).__name__}: {str(e)[:100]} at {Path(last.filename).name}:{last.lineno}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return "answered"


def _clean(message: str) -> str:
    """Returns whether a message has text and no control characters for a terminal."""
    if not message or "\x1b" in message:
        return f"fault: the message is {message[:60]!r}"
    return f"refused: {message}"


# --- cases


def order(kinds: Mapping[str, FileKind]) -> list[str]:
    """Returns the kinds of successive cases, each with its share, spread evenly."""
    most = sum(kind.share for kind in kinds.values())
    turns = [((i + 0.5) / kind.share, name) for name, kind in kinds.items() for i in range(kind.share)]
    assert len(turns) == most
    return [name for _, name in sorted(turns)]


def _work(names: list[str], folder: Path, seed: int, pipe: Connection) -> None:
    """Runs in the child process: receives (number, file or None) through the pipe, and sends the outcome of that case
    back."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    turns = order({name: KINDS[name] for name in names})
    good = {name: (folder / name / KINDS[name].name).read_bytes() for name in names}
    while (asked := pipe.recv()) is not None:
        k, data = asked
        name = turns[k % len(turns)]
        path = folder / name / KINDS[name].name
        data = data or mutated(good[name], KINDS[name], np.random.default_rng([seed, k]))
        path.write_bytes(data)
        said = verdict(KINDS[name], path)
        path.write_bytes(good[name])
        packed = base64.b64encode(zlib.compress(data)).decode() if said.startswith("fault") else ""
        pipe.send((name, said, packed if len(packed) <= KEPT_BYTES else ""))


class FuzzWorker:
    """The process that runs the cases, and a new one after it died or was stopped."""

    def __init__(self, names: list[str], folder: Path, seed: int) -> None:
        self.given = names, folder, seed
        self.start()

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_work, args=(*self.given, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def case(self, k: int, data: bytes = b"") -> tuple[str, str, str]:
        """Runs a case; returns (kind, verdict, the file if it is a small fault). data: the file, if it is known."""
        names = self.given[0]
        turns = order({name: KINDS[name] for name in names})
        kind = turns[k % len(turns)]
        pid = self.process.pid
        assert pid is not None
        try:
            begun = cpu_of(pid)
            self.pipe.send((k, data))
            while not self.pipe.poll(5.0):
                if cpu_of(pid) - begun > 4 * LIMIT_S:
                    self.process.kill()
                    self.process.join()
                    self.start()
                    return kind, f"fault: above {4 * LIMIT_S:g} s, and no signal stops it", ""
            found: tuple[str, str, str] = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            status = self.process.exitcode
            self.start()
            return kind, f"fault: the process died with status {status}", ""
        return found

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def make_good(names: list[str], folder: Path) -> None:
    """Writes a good file of each kind into a folder of its name. Raises AssertionError if one is not answered."""
    for name in names:
        path = folder / name / KINDS[name].name
        path.parent.mkdir(parents=True)
        KINDS[name].make(path)
        said = verdict(KINDS[name], path)
        assert said == "answered", f"the good file of kind {name}: {said}"


def fuzz(
    names: list[str], first: int, count: int, seed: int, jobs: int = 1
) -> Iterator[tuple[int, str, str, str]]:
    """Yields (case, kind, verdict, file) of the cases from ``first`` on. jobs: the number of parallel processes."""
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(jobs) as pool:
        make_good(names, Path(made) / "good")
        free: queue.SimpleQueue[FuzzWorker] = queue.SimpleQueue()
        for i in range(jobs):
            shutil.copytree(Path(made) / "good", Path(made) / str(i))
            free.put(FuzzWorker(names, Path(made) / str(i), seed))

        def one(k: int) -> tuple[int, str, str, str]:
            worker = free.get()
            try:
                return k, *worker.case(k)
            finally:
                free.put(worker)

        for start in range(first, count, SAVED_EVERY):
            yield from pool.map(one, range(start, min(start + SAVED_EVERY, count)))
        for _ in range(jobs):
            free.get().end()


def again(names: list[str], faults: list[dict[str, Any]], seed: int) -> Iterator[str]:
    """Runs each fault again, stores its present outcome in it, and yields a line about it. A file that was too large to
    store is made again from the present good file."""
    with tempfile.TemporaryDirectory() as made:
        make_good(names, Path(made))
        worker = FuzzWorker(names, Path(made), seed)
        for fault in faults:
            data = zlib.decompress(base64.b64decode(fault["file"])) if fault["file"] else b""
            fault["now"] = worker.case(fault["k"], data)[1]
            yield f"case {fault['k']}, {fault['kind']}: {fault['now']}"
        worker.end()


def run_again(file: Path) -> None:
    """Runs the faults of a result file again and stores the outcomes. SystemExit 1 if one still is a fault."""
    so_far = json.loads(file.read_text())
    for line in again(so_far["kinds"], so_far["faults"], so_far["seed"]):
        print(line, flush=True)
    left = sum(f["now"].startswith("fault") for f in so_far["faults"])
    first = {key: so_far[key] for key in ("commit", "command", "date")}
    save(so_far | {"first": so_far.get("first", first), "faults_now": left}, file)
    raise SystemExit(left > 0)


def main() -> None:
    """Writes bench/results/file_fuzz.json: how the mutated files ended, by kind, and the faults."""
    given = parser(
        __doc__,
        "file_fuzz",
        option("--count", type=int, default=100_000),
        option("--seed", type=int, default=0),
        option("--only", action="append", metavar="TEXT", help="the kinds with this in their name"),
        option("--resume", action="store_true", help="go on from the result file's last case"),
        option("--jobs", type=int, default=1, help="processes in parallel"),
        option("--again", action="store_true", help="only run the result file's faults again"),
    ).parse_args()
    if given.again:
        run_again(given.out)
    names = wanted(KINDS, given.only or ())
    so_far: dict[str, Any] = {"cases": 0, "faults": [], "all_faults": 0, "outcomes": {}}
    if given.resume and given.out.exists():
        so_far = json.loads(given.out.read_text())
        assert so_far["seed"] == given.seed and so_far["kinds"] == names, "another seed, or other kinds"
    found = {name: Counter[str](so_far["outcomes"].get(name, {})) for name in names}
    for k, name, said, data in fuzz(names, so_far["cases"], given.count, given.seed, given.jobs):
        found[name][said.partition(":")[0]] += 1
        if said.startswith("fault"):
            print(f"case {k}, {name}: {said}", flush=True)
            so_far["all_faults"] += 1
            so_far["faults"] = [*so_far["faults"], {"k": k, "kind": name, "what": said, "file": data}][:50]
        if (k + 1) % SAVED_EVERY == 0 or k + 1 == given.count:
            so_far |= {"cases": k + 1, "seed": given.seed, "kinds": names}
            save(so_far | {"outcomes": {n: dict(c) for n, c in found.items()}}, given.out)
    print(f"{so_far['cases']} cases, {so_far['all_faults']} faults")


if __name__ == "__main__":
    main()
