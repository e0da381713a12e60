"""Reads Chrome-format traces of PyTorch (Kineto) and the JAX/XLA profiler, as a stream in bounded memory."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from pase.errors import PaseError, needed
from pase.files.json_values import JsonObject
from pase.files.terminal import printable
from pase.replay.kernels import collective_operation, operation_of
from pase.replay.traces.builder import Builder, is_sound, split_devices, without_overruns
from pase.replay.traces.events import Args, TraceEvent, events
from pase.replay.traces.gloo import tie_gloo
from pase.replay.traces.launches import in_graph
from pase.replay.traces.programs import of_program, told_apart
from pase.replay.traces.reader import LIMITS, BoundedReader, Limits, open_stream
from pase.replay.traces.stated_flops import stated_flops
from pase.replay.traces.xla import Executions, untangle
from pase.replay.types import COLLECTIVE, KINDS, Mark, Problem, Timeline

__all__ = [
    "CPU_LINE",
    "DEVICE_LINES",
    "collective_operation",
    "hlo_collective",
    "read_chrome",
    "step_marks",
    "xla_lane",
]

_K = {k: i for i, k in enumerate(KINDS)}
_CATEGORIES = {
    "kernel": _K["kernel"],
    "gpu_memcpy": _K["memcpy"],
    "memcpy": _K["memcpy"],
    "gpu_memset": _K["memset"],
    "memset": _K["memset"],
    "runtime": _K["runtime"],
    "mtia_ccp_events": _K["kernel"],
    "hpu_op": _K["kernel"],
    "cpu_op": _K["host"],
    "operator": _K["host"],
    "python_function": _K["annotation"],
    "user_annotation": _K["annotation"],
}
_MTIA_KINDS = {"dma_request": _K["memcpy"], "event_wait": _K["annotation"], "event_record": _K["annotation"]}
"""The events of an MTIA queue that are not kernels, by name. A queue that waits does no work."""
_SKIPPED = {"gpu_user_annotation", "Trace", "ac2g", "async_cpu_to_gpu", "fwdbwd", "overhead"}
_DTYPE_BYTES = {
    **dict.fromkeys(("float", "float32", "int", "int32", "uint32", "c10::float32", "f32", "s32"), 4),
    **dict.fromkeys(("double", "float64", "long", "int64", "long int", "uint64"), 8),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16", "short", "bf16", "f16"), 2),
    **dict.fromkeys(("byte", "char", "int8", "uint8", "bool", "signed char", "unsigned char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
}
_OPERANDS = 64
"""Ops with more operands (such as all tensors of a model) are not matrix products, so their shapes are dropped."""
_STEP = re.compile(r"^ProfilerStep\s?#(\d+)$")
_ON_DEVICE = (_K["kernel"], _K["memcpy"], _K["memset"])
_NO_ARGS = Args()
_FAR = 1 << 60
"""Larger correlations are renumbered from here."""
_RANKS = re.compile(r"^\s*\[([\d,\s]*)\]\s*$")


def _kind_of(category: object, name: str) -> int:
    """Returns the index in KINDS for a category of Kineto; −1 for other categories.

    Driver calls have a "_runtime" and a "_driver" category for each kind of device: "cuda_runtime", "xpu_driver",
    "mtia_runtime", "privateuse1_runtime" and so on. PyTorch before 1.10 wrote "Kernel", "Memcpy" and "Operator", and
    steps as operators.
    """
    if not isinstance(category, str):
        return -1
    category = category.lower()
    if category == "operator" and _STEP.match(name):
        return _K["annotation"]
    if category.endswith(("_runtime", "_driver")):
        return _K["runtime"]
    if category == "mtia_ccp_events" and name in _MTIA_KINDS:
        return _MTIA_KINDS[name]
    return _CATEGORIES.get(category, -1)


def read_chrome(path: Path, rank: int | None = None, limits: Limits = LIMITS) -> Timeline:
    """Reads one rank's events from a Chrome-format trace (.json, .json.gz).

    rank: overrides the rank in the file; if neither is known, the rank is 0.

    A truncated file gives the events before the cut, and a Problem. Raises PaseError if no event is usable.
    """
    header = _header(path, limits)
    info = header.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    if rank is None:
        rank = _whole(info.get("rank"), 0)
    b = Builder(str(path), rank, limits)
    for pg in info.get("pg_config") or ():
        if isinstance(pg, dict) and isinstance(pg.get("ranks"), list):
            b.groups[str(pg.get("pg_name"))] = tuple(int(r) for r in pg["ranks"] if isinstance(r, int))
    feed = _Feed(b, world=_whole(info.get("world_size"), 0))
    with open_stream(path, limits) as stream:
        cut = _pump(stream, header["prefix"], feed)
    problems = []
    if stream.broken or cut:
        what = (
            f"the file is cut or damaged after {len(b)} events ({stream.broken or cut}); the rest is missing"
        )
        problems.append(Problem(where=str(path), what=what, is_cut=True))
    problems += [Problem(where=str(path), what=what) for what in stream.repairs()]
    if not len(b):
        why = str(problems[0]) if problems else "; ".join(b.left_out) or "traceEvents is empty"
        raise PaseError(f"no usable event ({printable(why)})", where=str(path))
    feed.finish(bool(stream.broken or cut))
    t = b.finish()
    devices = header.get("deviceProperties") or _devices_after(stream.recent)
    named = {d["name"] for d in devices if isinstance(d, dict) and isinstance(d.get("name"), str)}
    if len(named) == 1:
        t = replace(t, devices={b.rank: named.pop()[:100]})
    t = replace(t, problems=(*t.problems, *problems))
    if feed.executions.spans:
        t = split_devices(t, feed.executions.marks(b.rank))
        return untangle(told_apart(t, {}, feed.executions.main(), {})[0])
    return tie_gloo(without_overruns(t))


def _whole(x: object, default: int) -> int:
    return x if isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 1 << 31 else default


def _integer(x: object, default: int = -1) -> int:
    """Returns an integer, or the default. Some writers put numbers into strings.

    >>> _integer(3), _integer("3"), _integer(3.0), _integer(None), _integer(True), _integer("3a")
    (3, 3, 3, -1, -1, -1)
    """
    if isinstance(x, bool):
        return default
    if isinstance(x, str) and len(x) < 20:
        x = int(x) if x.isdecimal() else default
    if isinstance(x, float) and x.is_integer() and abs(x) < 2**53:
        x = int(x)
    return x if isinstance(x, int) else default


_HEADERS = {"distributedInfo": "end_map", "deviceProperties": "end_array"}
"""The values that are read, and what ends them."""


def _devices_after(end: bytes) -> list[JsonObject]:
    """Returns the devices from the end of a file whose events come before them."""
    found = re.search(rb'"deviceProperties"\s*:\s*\[([^\]]*)\]', end)
    names = re.findall(rb'"name"\s*:\s*"([^"\\]*)"', found[1]) if found else []
    return [{"name": n.decode(errors="replace")} for n in names]


def _header(path: Path, limits: Limits) -> JsonObject:
    """Returns the top-level values before the events, and the ijson prefix of the events."""
    with open_stream(path, limits) as stream:
        return _read_header(stream, path)


def _read_header(stream: BoundedReader, path: Path) -> JsonObject:
    ijson = needed("ijson", str(path))
    out: JsonObject = {}
    builder: Any = None
    try:
        for prefix, event, value in ijson.parse(stream, use_float=True):
            if event == "start_array" and prefix == "":
                return {"prefix": "item"}
            if event == "start_array" and prefix == "traceEvents":
                return {**out, "prefix": "traceEvents.item"}
            if prefix == "" and event == "map_key":
                key, builder = value, ijson.ObjectBuilder()
            elif builder is not None and prefix.split(".", 1)[0] == key and key in _HEADERS:
                builder.event(event, value)
                if prefix == key and event == _HEADERS[key]:
                    out[key], builder = builder.value, None
    except ijson.JSONError as e:
        if not stream.total:
            what = f"the file is empty or not readable ({stream.broken or 'no bytes'})"
            raise PaseError(what, where=str(path)) from e
        raise PaseError(f"not a JSON trace: {stream.broken or _short(e)}", where=str(path)) from e
    raise PaseError(
        'it has no "traceEvents", so it is not a Chrome-format trace',
        where=str(path),
        fix="give a trace of torch.profiler or jax.profiler",
    )


def _short(e: Exception) -> str:
    text = e.args[0] if e.args else ""
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return printable(" ".join(text.split()))[:160]


def _pump(stream: BoundedReader, prefix: str, feed: _Feed) -> str:
    """Passes every event to ``feed``. Returns the reason if the JSON ends early, else an empty string."""
    ijson = needed("ijson", stream.where)
    try:
        for some in events(stream, prefix):
            for e in some:
                feed.take(e)
    except (ijson.JSONError, UnicodeDecodeError, ValueError, OverflowError) as e:
        if isinstance(e, PaseError):
            raise
        return _short(e)
    return ""


class _Feed:
    """Converts trace events to columns. It has the state that is needed across events."""

    def __init__(self, b: Builder, world: int) -> None:
        self.b = b
        self.default_group = tuple(range(world)) if 1 < world <= 1 << 16 else ()
        self.steps: list[tuple[int, int, int]] = []
        self.thread_names: dict[tuple[object, object], str] = {}
        self.process_names: dict[object, str] = {}
        self.executions = Executions()
        self.places: dict[tuple[int, int, bool, int], int] = {}
        self.far: dict[int, int] = {}
        self.kinds: dict[tuple[str, str], tuple[int, int]] = {}
        self.open: dict[int, list[tuple[int, int, int]]] = {}

    def take(self, e: TraceEvent | None) -> None:
        if e is None:
            self.b.left_out["entries that are not events"] += 1
            return
        ph = e.ph
        if ph == "X":
            if not (isinstance(e.cat, str) and e.cat in _SKIPPED):
                self._span(e)
        elif ph == "M":
            self._metadata(e)
        elif ph == "B" or ph == "E":
            self._begin_end(e, ph)
        elif ph == "i" and e.name == "[memory]":
            self._memory(e)

    def _span(self, e: TraceEvent) -> None:
        b, args = self.b, e.args or _NO_ARGS
        if e.dur is UNSET:
            b.noted["complete events without a duration, read as instants"] += 1
        start, duration = _ns(e.ts), 0 if e.dur is UNSET else _ns(e.dur)
        if start is None or duration is None:
            b.left_out["events whose time is not a finite number"] += 1
            return
        text = e.name if isinstance(e.name, str) else str(e.name)[:80]
        kind, sent = self._kind(e.cat, text)
        device = kind in _ON_DEVICE
        if kind < 0:
            kind, device = self._jax_kind(e, args)
        lane = self._lane(e, args, device)
        correlation = -1 if args.correlation is None else self._correlation(args.correlation)
        nbytes, operation, group, shape = -1, 0, -1, -1
        if kind == _K["host"] and args.input_dims is not UNSET:
            shape = self._shape(text, args.input_dims, args.input_type, args.concrete_inputs)
        if device or kind == _K["host"]:
            if device and sent:
                kind = COLLECTIVE
                operation = collective_operation(str(args.collective_name or "")) or sent
                nbytes, group = self._collective(args)
            elif args.hlo_op is not UNSET:
                kernel = text
                # In a CUDA graph, the profiler knows only the graph, so its ops are known by their kernels.
                text = kernel if in_graph(str(args.hlo_op)) else str(args.hlo_op)
                operation = hlo_collective(text)
                if operation:
                    kind, group = COLLECTIVE, b.group("", self.default_group)
                correlation = _whole(args.correlation_id, -1)
                ordinal = "0" if args.device_ordinal is UNSET else str(args.device_ordinal)
                module = str(args.hlo_module)[:200]
                number = int(ordinal) if ordinal.isdigit() and len(ordinal) < 9 else 0
                run, program = str(args.run_id)[:40], _integer(args.program_id)
                module += f"({program})" if module and program >= 0 else ""
                self.executions.add(number, module, run, start, start + duration, str(lane), kernel)
                text = of_program(text, module)
            stated = args.bytes
            if stated is UNSET:
                stated = args.size if e.cat == "mtia_ccp_events" else None
            nbytes = nbytes if stated is None else _integer(stated, nbytes)
        elif kind == _K["annotation"]:
            if text.startswith("gloo:"):
                # gloo's worker threads correspond to NCCL's device streams.
                operation, nbytes = collective_operation(text.split(":", 1)[1]), _dims_bytes(args)
                kind, group = COLLECTIVE, b.group("", self.default_group)
                lane = b.lane(_key(("gloo", e.pid, e.tid)), True, f"gloo of thread {e.tid}")
            elif text.startswith("nccl:") or text.startswith("c10d::"):
                operation, nbytes = collective_operation(text.split(":", 1)[1]), _dims_bytes(args)
            else:
                m = _STEP.match(text)
                number = int(m.group(1)) if m else _step_number(args)
                if number >= 0 and is_sound(start, duration):
                    self.steps.append((start, start + duration, number))
        b.add(lane, kind, b.name(text), start, duration, correlation, nbytes, operation, group, shape=shape)

    def _kind(self, category: object, text: str) -> tuple[int, int]:
        """Returns ``_kind_of`` and ``operation_of``, which many events share."""
        known = self.kinds.get((category, text)) if isinstance(category, str) else None
        if known is None:
            known = _kind_of(category, text), operation_of(text)
            if isinstance(category, str) and len(self.kinds) < self.b.limits.names:
                self.kinds[category, text] = known
        return known

    def _correlation(self, stated: object) -> int:
        number = _integer(stated)
        if number >= 1 << 63:
            number -= 1 << 64  # as ``BoundedReader.read`` gives it
        if number < -1 or number >= _FAR:  # an unsigned 64-bit number
            return self.far.setdefault(number, _FAR + len(self.far))
        return number

    def _shape(self, op: str, dims: Any, types: Any, stated: Any) -> int:
        """Returns the index of an op's operand shapes; −1 if no operand is a tensor."""
        if not isinstance(dims, list) or len(dims) > _OPERANDS:
            return -1
        operands = tuple(
            tuple(d) if isinstance(d, list) and all(type(x) is int and x >= 0 for x in d) else ()
            for d in dims
        )
        if not any(operands):
            return -1
        known = isinstance(types, list) and len(types) == len(operands)
        return self.b.shape(
            operands,
            tuple(_DTYPE_BYTES.get(str(x).lower(), 0) for x in types) if known else (),
            stated_flops(op, operands, stated) if isinstance(stated, list) else 0,
        )

    def _jax_kind(self, e: TraceEvent, args: Args) -> tuple[int, bool]:
        """Returns the kind of an event without a Kineto category, and whether it runs on a device, as XLA ops do."""
        process = self.process_names.get(_key(e.pid), "")
        if process.startswith("/device:"):
            thread = self.thread_names.get((_key(e.pid), _key(e.tid)), "")
            runs = thread.startswith(DEVICE_LINES)
            return (_K["kernel"], True) if runs else (_K["annotation"], False)
        # On the CPU backend, a thunk runs on some thread of a pool, so its device is its queue.
        return (_K["kernel"], True) if args.hlo_op is not UNSET else (_K["annotation"], False)

    def _lane(self, e: TraceEvent, args: Args, device: bool) -> int:
        """Returns the lane of an event, from a cache if its ids are integers."""
        pid, tid = e.pid, args.stream if device else e.tid
        if type(pid) is not int or type(tid) is not int:
            return self._new_lane(e, args, device)
        number = args.device
        place = (pid, tid, device, number if isinstance(number, int) else -1)
        known = self.places.get(place)
        if known is None:
            known = self._new_lane(e, args, device)
            if len(self.places) < self.b.limits.lanes:
                self.places[place] = known
        return known

    def _new_lane(self, e: TraceEvent, args: Args, device: bool) -> int:
        if device and args.stream is UNSET:
            label = self.thread_names.get((_key(e.pid), _key(e.tid)), "")
            name, ordinal = xla_lane(self.process_names.get(_key(e.pid), ""), label, args.device_ordinal)
            if name:
                return self.b.lane((name, ordinal), True, f"{ordinal}:{name}")
        if device:
            stream = e.tid if args.stream is UNSET else args.stream
            key = (e.pid if args.device is UNSET else args.device, stream)
            return self.b.lane(_key(key), True, str(stream))
        return self.b.lane(_key((e.pid, e.tid)), False, str(e.tid))

    def _collective(self, args: Args) -> tuple[int, int]:
        count = max(_integer(args.in_elements), _integer(args.out_elements))
        width = _DTYPE_BYTES.get(str(args.dtype).lower(), 0)
        name = str(args.group_id if args.group_name is UNSET else args.group_name)
        m = _RANKS.match(str(args.group_ranks))
        ranks = (
            tuple(int(r) for r in m.group(1).split(",") if r.strip()) if m else self.b.groups.get(name, ())
        )
        if not name and not ranks:
            ranks = self.default_group
        return (count * width if count >= 0 and width else -1), self.b.group(name[:100], ranks)

    def _metadata(self, e: TraceEvent) -> None:
        label = e.args.name if e.args is not None else None
        if not isinstance(label, str) or len(self.thread_names) > self.b.limits.lanes:
            return
        if e.name == "process_name":
            self.process_names[_key(e.pid)] = label[:100]
        elif e.name == "thread_name":
            self.thread_names[(_key(e.pid), _key(e.tid))] = label[:100]

    def _begin_end(self, e: TraceEvent, ph: str) -> None:
        start = _ns(e.ts)
        lane = self._lane(e, _NO_ARGS, False)
        if start is None or lane < 0:
            self.b.left_out["events whose time is not a finite number"] += 1
            return
        stack = self.open.setdefault(lane, [])
        if ph == "B":
            if len(stack) < 10_000:
                stack.append((start, self.b.name(str(e.name)), _K["host"]))
        elif stack:
            begun, name, kind = stack.pop()
            self.b.add(lane, kind, name, begun, start - begun)
        else:
            self.b.left_out["ends without a begin"] += 1

    def _memory(self, e: TraceEvent) -> None:
        args, start = e.args or _NO_ARGS, _ns(e.ts)
        if args.device_type == 1 and start is not None:
            lane = self.b.lane("memory", False, "memory")
            total = args.total_allocated if isinstance(args.total_allocated, int) else -1
            self.b.add(lane, _K["memory"], self.b.name("[memory]"), start, 0, nbytes=total)

    def finish(self, cut: bool) -> None:
        unclosed = sum(len(stack) for stack in self.open.values())
        if unclosed:
            self.b.left_out["begins without an end"] += unclosed
        self.b.marks.extend(step_marks(self.steps, self.b.rank, cut))


def step_marks(steps: list[tuple[int, int, int]], rank: int, cut: bool) -> list[Mark]:
    """Returns marks from (start, end, number) of steps.

    A step lasts until the start of the next number, if that follows, or else until its own end.
    """
    steps = sorted(set(steps))
    out = []
    for i, (start, end, number) in enumerate(steps):
        last = i + 1 == len(steps)
        follows = not last and steps[i + 1][2] == number + 1
        end = steps[i + 1][0] if follows else end
        out.append(Mark(rank=rank, iteration=number, start_ns=start, end_ns=end, complete=not (cut and last)))
    return out


def _key(x: object) -> object:
    """Returns a hashable value for an id, which may be any value in a faulty trace."""
    if isinstance(x, tuple):
        return tuple(_key(y) for y in x)
    return x if isinstance(x, (int, str, float, type(None))) else str(x)[:80]


CPU_LINE = "XLA ops"
"""The stream of the ops that XLA runs on threads of the host."""
DEVICE_LINES = ("Stream", "XLA Ops", "XLA Async Ops")
"""Names of the lines of a device's plane that have the ops. Other lines repeat them by module or by name."""


def hlo_collective(op: str) -> int:
    """Returns the index in OPERATIONS of an HLO op by its name ("all-gather.3", or JAX's "all_gather.3").

    It is 0 for other ops, and for done ops, which send nothing.
    """
    base = op.partition(".")[0].replace("_", "-")
    prefixes = (
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-",
        "ragged-all-to-all",
    )
    return collective_operation(base) if base.startswith(prefixes) and not base.endswith("-done") else 0


def xla_lane(process: str, line: str, ordinal: Any) -> tuple[str, int]:
    """Returns the stream name and the device number of an XLA op; the name is empty if the trace does not have it."""
    if process.startswith("/device:"):
        number = process.rpartition(":")[2]
        return line.partition("(")[0].strip() or "stream", int(number) if number.isdigit() else 0
    if str(ordinal).isdigit():
        return CPU_LINE, int(ordinal)
    return "", 0


def _step_number(args: Args) -> int:
    """Returns the step number of a jax.profiler.StepTraceAnnotation; −1 if there is none."""
    text = (args.root and args.step) if args.step_num is UNSET else args.step_num
    return int(text) if isinstance(text, (int, str)) and str(text).isdigit() and len(str(text)) < 12 else -1


def _dims_bytes(args: Args) -> int:
    """Returns the bytes of the operands of a collective's annotation; −1 if the trace does not have them."""
    dims, types = args.input_dims, args.input_type
    if not isinstance(dims, list) or not isinstance(types, list):
        return -1
    total = 0
    for d, t in zip(dims, types, strict=False):
        width = _DTYPE_BYTES.get(str(t).lower(), 0)
        if isinstance(d, list) and width and all(isinstance(x, int) and x >= 0 for x in d):
            total += width * math.prod(d)
    return total or -1


def _ns(us: object) -> int | None:
    """Converts microseconds to integer nanoseconds, without the rounding error of float·1000 at 10¹⁵ µs."""
    if type(us) is float:
        if not -1e17 < us < 1e17:
            return None if us != us or us in (math.inf, -math.inf) else int(us) * 1000
        whole = int(us)
        return whole * 1000 + round((us - whole) * 1000)
    if isinstance(us, int):
        return us * 1000
    if isinstance(us, str) and len(us) < 40:
        try:
            return _ns(float(us))
        except ValueError:
            return None
    return None
