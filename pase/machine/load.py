"""Machine files: TOML in, ``Machine`` out, with errors that name the file, the place and the remedy."""

from __future__ import annotations

import math
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from pase.errors import PaseError
from pase.machine.tables import check_attention, check_curve, check_matmul
from pase.machine.types import (
    BUCKET_BYTES,
    COLLECTIVES,
    Algorithm,
    AttentionCurve,
    CollectiveCurve,
    Curve,
    Device,
    Host,
    LinkLevel,
    Machine,
    MatmulTable,
    PaperFigures,
    Tile,
)

__all__ = ["DEFAULT", "SCHEMA", "load", "names", "parse"]

SCHEMA = "pase.machine/1"
DEFAULT = "h100x8"
_ALGORITHMS = ("ring", "tree", "one_shot", "direct", "in_network")
_EFFICIENCIES = ("matmul", "conv", "memory")


class _Reader:
    """Reads one TOML table: each key once, by type and range; what is left over is an unknown key."""

    def __init__(self, where: str, path: str, table: object) -> None:
        self.where, self.path = where, path
        if not isinstance(table, dict):
            raise self.error("", f"must be a table, got {table!r}")
        self.table: dict[str, Any] = dict(table)

    def at(self, key: str) -> str:
        return ".".join(p for p in (self.path, key) if p)

    def error(self, key: str, what: str) -> PaseError:
        return PaseError(f"{self.where}: {self.at(key) or 'the file'} {what}")

    def take(self, key: str, *default: Any) -> Any:
        if key in self.table:
            return self.table.pop(key)
        if not default:
            raise self.error(key, "is missing")
        return default[0]

    def number(
        self, key: str, *default: Any, low: float = 0.0, high: float = math.inf, open_: bool = True
    ) -> float:
        """A finite number above ``low`` (``open_=False``: at least ``low``) and at most ``high``."""
        value = self.take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, got {value!r}")
        if not math.isfinite(value):
            raise self.error(key, f"must be finite, got {value}")
        if value < low or (open_ and value == low) or value > high:
            least = f"above {low:g}" if open_ else f"at least {low:g}"
            raise self.error(
                key, f"must be {least}{f' and at most {high:g}' if high < math.inf else ''}, got {value:g}"
            )
        return float(value)

    def integer(self, key: str, *default: Any, low: int = 0) -> int:
        value = self.take(key, *default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be a whole number, got {value!r}")
        if value < low:
            raise self.error(key, f"must be at least {low}, got {value}")
        return value

    def truth(self, key: str, *default: Any) -> bool:
        value = self.take(key, *default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def text(self, key: str, *default: Any, one_of: tuple[str, ...] = ()) -> str:
        value = self.take(key, *default)
        if not isinstance(value, str) or (one_of and value not in one_of):
            raise self.error(
                key, f"must be {'one of ' + ', '.join(one_of) if one_of else 'text'}, got {value!r}"
            )
        return value

    def numbers(self, key: str, *default: Any, whole: bool = False, low: float = 0.0) -> tuple[Any, ...]:
        """A list of finite numbers, each at least ``low``."""
        value = self.take(key, *default)
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list of numbers, got {value!r}")
        for i, v in enumerate(value):
            kind = int if whole else (int, float)
            if isinstance(v, bool) or not isinstance(v, kind):
                raise self.error(f"{key}[{i}]", f"must be a {'whole ' if whole else ''}number, got {v!r}")
            if not math.isfinite(v) or v < low:
                raise self.error(f"{key}[{i}]", f"must be finite and at least {low:g}, got {v}")
        return tuple(value if whole else map(float, value))

    def sub(self, key: str) -> _Reader:
        return _Reader(self.where, self.at(key), self.take(key, {}))

    def subs(self, key: str) -> list[_Reader]:
        value = self.take(key, [])
        if not isinstance(value, list):
            raise self.error(key, f"must be an array of tables ([[{self.at(key)}]]), got {value!r}")
        return [_Reader(self.where, f"{self.at(key)}[{i}]", v) for i, v in enumerate(value)]

    def texts(self) -> dict[str, str]:
        """All that is left, as text by key."""
        return {key: self.text(key) for key in list(self.table)}

    def done(self, known: str) -> None:
        if self.table:
            key = next(iter(self.table))
            raise self.error(key, f"is not known; {self.path or 'the top level'} takes: {known}")


def _keys(cls: type, *more: str) -> str:
    return ", ".join([*more, *(f for f in cls.__dataclass_fields__)])  # type: ignore[attr-defined]


def _curve(r: _Reader) -> Curve:
    curve = Curve(nbytes=r.numbers("nbytes"), seconds=r.numbers("seconds"))
    problem = check_curve(curve)
    if problem:
        raise r.error("", problem)
    return curve


def _attention(r: _Reader) -> AttentionCurve:
    curve = AttentionCurve(keys=r.numbers("keys", whole=True, low=1), efficiency=r.numbers("efficiency"))
    r.done(_keys(AttentionCurve))
    problem = check_attention(curve)
    if problem:
        raise r.error("", problem)
    return curve


def _matmul(r: _Reader) -> MatmulTable:
    table = MatmulTable(
        dtype=r.text("dtype"),
        m=r.numbers("m", whole=True, low=1),
        n=r.numbers("n", whole=True, low=1),
        k=r.numbers("k", whole=True, low=1),
        flops_per_s=r.numbers("flops_per_s"),
    )
    r.done(_keys(MatmulTable))
    problem = check_matmul(table)
    if problem:
        raise r.error("", problem)
    return table


def _device(r: _Reader) -> Device:
    peaks = r.sub("peak_flops")
    peak_flops = {key: peaks.number(key) for key in list(peaks.table)}
    if not peak_flops:
        raise r.error("peak_flops", "needs at least one dtype, e.g. bfloat16 = 989e12")
    eff = r.sub("efficiency")
    efficiency = {
        key: eff.number(key, high=8.0 if key == "conv" else 1.0) for key in _EFFICIENCIES if key in eff.table
    }
    eff.done(", ".join(_EFFICIENCIES))
    tiles = []
    for t in r.subs("tiles"):
        m, n, k = t.integer("m", low=1), t.integer("n", low=1), t.integer("k", 1, low=1)
        rate, overhead_s = t.number("rate", high=1.0), t.number("overhead_s", 0.0, open_=False)
        tiles.append(Tile(m=m, n=n, k=k, rate=rate, overhead_s=overhead_s))
        t.done(_keys(Tile))
    curve = None
    if "memory_curve" in r.table:
        c = r.sub("memory_curve")
        curve = _curve(c)
        c.done(_keys(Curve))
    attention = _attention(r.sub("attention")) if "attention" in r.table else None
    device = Device(
        name=r.text("name"),
        peak_flops=peak_flops,
        memory_bytes=r.integer("memory_bytes", low=1),
        memory_bandwidth_bytes_per_s=r.number("memory_bandwidth_bytes_per_s"),
        efficiency=efficiency,
        vector_flops=r.number("vector_flops") if "vector_flops" in r.table else None,
        launch_s=r.number("launch_s", 0.0, open_=False),
        compute_units=r.integer("compute_units", 0),
        tiles=tuple(tiles),
        matmul_tables=tuple(_matmul(t) for t in r.subs("matmul_tables")),
        memory_curve=curve,
        attention=attention,
        memory_tile=r.numbers("memory_tile", (), whole=True, low=1),
    )
    if len(device.memory_tile) not in (0, 2):
        raise r.error("memory_tile", f"is rows and columns, got {list(device.memory_tile)}")
    r.done(_keys(Device))
    return device


def _at_ways(r: _Reader) -> dict[int, float]:
    for key in r.table:
        if not key.isdigit() or int(key) < 2:
            raise r.error(key, "must be a number of ways, 2 or more")
    return {int(key): r.number(key) for key in list(r.table)}


def _level(r: _Reader, last: bool) -> LinkLevel:
    level = LinkLevel(
        name=r.text("name"),
        ways=r.integer("ways", 0),
        latency_s=r.number("latency_s", open_=False),
        bandwidth_bytes_per_s=r.number("bandwidth_bytes_per_s"),
        efficiency=r.number("efficiency", 1.0, high=1.0),
        topology=r.text("topology", "switch", one_of=("switch", "torus")),  # type: ignore[arg-type]
        wrap_ways=r.integer("wrap_ways", 0),
        bandwidth_at_ways=_at_ways(r.sub("bandwidth_at_ways")),
    )
    r.done(_keys(LinkLevel))
    if level.ways == 0 and not last:
        raise r.error("ways", "may be 0 (as many as are asked for) at the last level alone")
    return level


def _algorithm(r: _Reader, levels: int) -> Algorithm:
    kinds = r.take("kinds", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in COLLECTIVES:
            raise r.error("kinds", f"must be a list of {', '.join(sorted(COLLECTIVES))}; got {kind!r}")
    algorithm = Algorithm(
        algorithm=r.text("algorithm", one_of=_ALGORITHMS),  # type: ignore[arg-type]
        protocol=r.text("protocol"),
        launch_s=r.number("launch_s", open_=False),
        step_s=r.numbers("step_s"),
        bandwidth_fraction=r.number("bandwidth_fraction", 1.0, high=1.0),
        kinds=tuple(kinds),
        peers_at_once=r.integer("peers_at_once", 1, low=1),
        chain_levels=r.integer("chain_levels", 0),
    )
    r.done(_keys(Algorithm))
    if len(algorithm.step_s) != levels:
        raise r.error("step_s", f"needs one number per link level ({levels}), got {len(algorithm.step_s)}")
    return algorithm


def _collective(r: _Reader, levels: int) -> CollectiveCurve:
    out = CollectiveCurve(
        kind=r.text("kind", one_of=tuple(sorted(COLLECTIVES))),  # type: ignore[arg-type]
        ways=r.numbers("ways", whole=True, low=1),
        curve=_curve(r),
    )
    r.done("kind, ways, nbytes, seconds")
    if len(out.ways) != levels or max(out.ways, default=1) < 2:
        raise r.error(
            "ways", f"needs one number per link level ({levels}), one of them 2 or more; got {list(out.ways)}"
        )
    return out


def _host(r: _Reader) -> Host:
    host = Host(program_s=r.number("program_s"), op_s=r.number("op_s"))
    r.done(_keys(Host))
    return host


def _shapes(r: _Reader, levels: int) -> dict[int, tuple[int, ...]]:
    out = {}
    for key in list(r.table):
        if not key.isdigit() or int(key) < 1:
            raise r.error(key, "must be a number of devices")
        ways = r.numbers(key, whole=True, low=1)
        if len(ways) != levels or math.prod(ways) != int(key):
            raise r.error(
                key,
                f"needs one number of ways per link level ({levels}) with product {key}, got {list(ways)}",
            )
        out[int(key)] = ways
    return out


def _sourced(table: object, path: str, where: str, sources: dict[str, str]) -> set[str]:
    """Every number must have a source, at its own path or at a table above it. Returns those used."""
    used: set[str] = set()
    if isinstance(table, dict):
        for key, value in table.items():
            used |= _sourced(value, f"{path}.{key}" if path else key, where, sources)
    elif isinstance(table, list):
        for i, value in enumerate(table):
            used |= _sourced(value, f"{path}.{i}", where, sources)
    elif isinstance(table, int | float) and not isinstance(table, bool):
        parts = path.split(".")
        prefixes = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        # [[levels]] entries may be sourced as a whole: levels.latency_s stands for levels.0.latency_s.
        prefixes |= {re.sub(r"\.\d+(?=\.|$)", "", p) for p in prefixes}
        used = prefixes & sources.keys()
        if not used:
            raise PaseError(
                f'{where}: {path} has no source; add it to [sources], e.g. "{path}" = "vendor datasheet, '
                f'figure" (or "assumed: why")'
            )
    return used


def parse(text: str, where: str) -> Machine:
    """Reads a machine file's text. ``where`` names it in errors (PaseError)."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise PaseError(f"{where}: not TOML: {e}") from e
    r = _Reader(where, "", raw)
    schema = r.text("schema")
    if schema != SCHEMA:
        raise r.error("schema", f"is '{schema}', this version reads '{SCHEMA}'")
    if not isinstance(raw.get("device"), dict):
        raise r.error("device", "is missing: a machine file needs a [device] table")
    sources = r.sub("sources").texts()
    provenance = r.sub("provenance").texts()
    level_tables = r.subs("levels")
    n = len(level_tables)
    if not n:
        raise r.error("levels", "is missing: give at least one [[levels]] table, innermost first")
    paper = None
    if "paper" in r.table:
        p = r.sub("paper")
        paper = PaperFigures(
            flops=p.number("flops"),
            bandwidth_bytes_per_s=p.number("bandwidth_bytes_per_s"),
            word_bytes=p.integer("word_bytes", low=1),
        )
        p.done(_keys(PaperFigures))
    machine = Machine(
        name=r.text("name"),
        title=r.text("title", ""),
        device=_device(r.sub("device")),
        levels=tuple(_level(t, i == n - 1) for i, t in enumerate(level_tables)),
        algorithms=tuple(_algorithm(t, n) for t in r.subs("algorithms")),
        shapes=_shapes(r.sub("shapes"), n),
        collectives=tuple(_collective(t, n) for t in r.subs("collectives")),
        paper=paper,
        bucket_bytes=r.number("bucket_bytes", BUCKET_BYTES, open_=False),
        sums_readers=r.truth("sums_readers", True),
        fuses_products=r.truth("fuses_products", False),
        host=_host(r.sub("host")) if "host" in raw else None,
        sources=sources,
        provenance=provenance,
    )
    r.done(_keys(Machine, "schema"))
    seen = [(c.kind, c.ways) for c in machine.collectives]
    for pair in seen:
        if seen.count(pair) > 1:
            raise PaseError(f"{where}: collectives gives {pair[0]} over ways {list(pair[1])} twice; keep one")
    numbers = {k: v for k, v in raw.items() if k not in ("sources", "provenance")}
    idle = sorted(sources.keys() - _sourced(numbers, "", where, sources))
    if idle:
        raise PaseError(f"{where}: sources.{idle[0]} is the source of no number in the file")
    return machine


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def names() -> list[str]:
    """The machines that come with the package.

    >>> "h100x8" in names()
    True
    """
    folder = resources.files("pase.machine") / "data"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(name_or_path: str | Path = DEFAULT) -> Machine:
    """A machine by name ("h100x8", also written h100_x8) or by the path of its TOML file.

    Raises PaseError: no such machine, or the file is not sound (see ``parse``).

    >>> load("H100_x8").device.memory_bytes
    80000000000
    """
    text = str(name_or_path)
    if not isinstance(name_or_path, Path) and not text.endswith(".toml") and "/" not in text:
        known = {_plain(n): n for n in names()}
        if _plain(text) not in known:
            raise PaseError(
                f"no machine named '{text}'; known: {', '.join(names())}; or give the path of a .toml file"
            )
        name = known[_plain(text)]
        file = resources.files("pase.machine") / "data" / f"{name}.toml"
        return parse(file.read_text(encoding="utf-8"), f"machine {name}")
    try:
        content = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise PaseError(f"cannot read machine file {text}: {e}") from e
    return parse(content, text)
