"""``pase calibrate``: measures the devices of this machine and writes a machine file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import JsonOption, print_json, progress
from pase.files.atomic import write_atomically
from pase.files.formats import written_as
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from collections.abc import Callable

    from pase.calibrate import Bench, Fitted, Journal, Refused, Settings, Task
    from pase.calibrate.here import Here
    from pase.calibrate.session import SessionResult
    from pase.machine import Machine

__all__ = ["calibrate"]

PURPOSE = "Price what you have"
USES_DEVICES = True

_PROGRAM_S = 0.01
"""How long a measured program should take at least: an op is repeated in it, so that its launch does not matter."""
_CARD_S = 100.0
"""No ops of a GPU are begun after this time."""
_ROUNDS = 4
"""Number of fits. After each fit except the last, doubtful samples are measured again."""


def calibrate(
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="The machine file to write, for --machine of other commands.",
            metavar="FILE",
            callback=written_as("a machine file"),
        ),
    ] = Path("machine.toml"),
    budget: Annotated[
        str,
        typer.Option(
            help="Time for the measurements: 60s, 5m, 1h. Coarse tables are measured first, finer ones later."
        ),
    ] = "5m",
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="Dtypes of the matmuls, most important first. Default: float32,bfloat16 on CPUs, else reversed."
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            help="Link levels, innermost first: gpu=8,node=2. Default: the devices of a process, then the processes."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-n", help="For CPUs: the number of host devices per process.", min=1),
    ] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="For several processes: HOST:PORT of process 0.", metavar="HOST:PORT")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="For several processes: their number.", min=1)] = None,
    process_id: Annotated[
        int | None, typer.Option(help="For several processes: the index of this one, from 0.", min=0)
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Ignore an existing journal and start from the beginning.")
    ] = False,
    max_spread: Annotated[
        float,
        typer.Option(
            help="Refuse measurements whose interquartile range exceeds this fraction of the median. Above 0.5, times "
            "of neighbouring sizes may disagree by as much, too.",
            min=0.0,
        ),
    ] = 0.5,
    name: Annotated[str | None, typer.Option(help="The machine's name. Default: the file's.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Measure nothing. Correct --base by the traces of a run: its collectives, products and light ops.",
            metavar="TRACES",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="With --from and --from-table: the machine to correct, a name or a .toml file."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            "--from-table",
            help="Measure nothing. Correct --base by a table of measured ops: op,dtype,shape,seconds.",
            metavar="FILE",
        ),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="On a known GPU too: measure a grid of products, and collectives. Takes minutes."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Measure this machine and write a machine file.

    On a GPU that a machine file has (see pase machines), some sixty ops are timed by the profiler, and the figures of
    that file are fitted to them. This takes about two minutes. The links are those of the file. With --grid, and on all
    other devices, it measures matmuls by m, n, k and dtype, in the three forms that training needs; memory-bound ops
    and collectives by size; launch overhead; and convolutions. All devices work at the same time, as in training, so
    the figures include contention for shared resources. Every sample is a median of repeats with its spread.

    Each sample is written to FILE.journal immediately. After a stop (Ctrl-C), the same command continues from there,
    and a larger --budget refines the existing measurements.

    The machine file is written only if the measurements are plausible. A sample that varies too much, a table that is
    not monotone, or a physically impossible rate is an error that names it. Then the command prints the measured rates
    of matmuls, memory, links and collectives.

    \b
    Examples:
      pase calibrate -o machine.toml                   the devices of this process
      pase calibrate -o cpu.toml -n 4 --budget 60s     four host devices on a CPU
      pase calibrate -o net.toml --levels host=2,rack=2 --coordinator ...
      pase calibrate --from traces/ --base h100x8 -o ours.toml
      pase calibrate --from-table ops.csv --base b200x8 -o ours.toml
      pase compile zoo:gpt2 --devices 4 --machine machine.toml

    \b
    Two processes, on hosts a and b (on b, with --process-id 1):
      pase calibrate -o pair.toml --coordinator a:1234 --processes 2 \\
                     --process-id 0

    \b
    Exit status: 0 written; 1 implausible measurements, nothing written;
    2 bad usage; 130 stopped.
    """
    from pase.errors import PaseError

    result: JsonObject | None
    if traces is not None and table is not None:
        raise PaseError(
            "both name a source of measurements", where="--from, --from-table", fix="give one of them"
        )
    if table is not None:
        result = _from_table(table, base, output, name)
    elif traces is not None:
        result = _from_traces(traces, base, output, name)
    elif base is not None:
        raise PaseError(
            "it is only for --from and --from-table, because a calibration measures everything itself",
            where="--base",
            fix="give --from or --from-table, or leave out --base",
        )
    else:
        budget_s, wanted = _seconds(budget), _dtypes(dtypes)
        from pase.calibrate.here import start

        console(err=True).print(
            f"measuring for about {budget_s:.0f} s, in addition to compiling; after Ctrl-C, the same command continues",
        )
        with _quiet_output():
            start(host_devices=devices, coordinator=coordinator, processes=processes, process_id=process_id)
            card = None if grid else _known_gpu(wanted, levels)
            result = (
                _measured(output, budget_s, wanted, levels, fresh, max_spread, name)
                if card is None
                else _card(*card, output, budget_s, name)
            )
    if result is None:
        return
    if json:
        print_json(result)
    else:
        _print(result)


def _seconds(text: str) -> float:
    """The value of --budget in seconds."""
    from pase.errors import PaseError

    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    number = text[:-1] if scale else text
    try:
        value = float(number) * (scale or 1.0)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise PaseError(f"'{text}' is not a time", where="--budget", fix="write 60s, 5m or 1h")
    return value


def _known_gpu(dtypes: tuple[str, ...], levels: str | None) -> tuple[Here, str] | None:
    """This GPU and the machine file that has its card; None if no file has it, or if it is no GPU.

    Raises PaseError for options that only the grid has.
    """
    from pase.calibrate.here import find
    from pase.errors import PaseError
    from pase.machine.recognize import machine_named

    here = find(levels)
    known = machine_named(here.device_name) if here.platform in ("gpu", "cuda") else None
    if known is None:
        return None
    for option, given in (("--dtypes", dtypes), ("--levels", levels)):
        if given:
            raise PaseError(
                f"the figures of {known} are fitted to ops of all its dtypes, and its links are not measured",
                where=option,
                fix=f"leave out {option}, or add --grid",
            )
    return here, known


def _card(here: Here, known: str, output: Path, budget_s: float, name: str | None) -> JsonObject | None:
    """Fit the file of this GPU to a few dozen ops. Returns None on every process except the first."""
    from functools import partial

    from pase.calibrate.card import calibrate_card, card_facts, card_file
    from pase.calibrate.card_ops import ProfiledKernels
    from pase.costmodels.analytic import Analytic
    from pase.machine import dumps, load

    base = load(known)
    if here.process == 0:
        _check_writable(output)
    with progress() as say:
        fit = calibrate_card(
            base,
            ProfiledKernels(),
            partial(Analytic, steady=False),
            min(budget_s, _CARD_S),
            lambda what, done, of: say(f"[{done}/{of}] {what}"),
        )
    if here.process:
        return None
    machine = card_file(base, fit, name or output.stem, here.provenance)
    write_atomically(output, dumps(machine))
    notes = [
        f"the links are those of {base.name}: calibrate --from TRACES corrects them, --grid measures them",
        "the part of the products' rate that is left at the power limit, and attention kernels, are those of "
        f"{base.name}",
    ]
    return {"output": str(output), "machine": _outline(machine), "card": card_facts(fit), "notes": notes}


def _check_writable(output: Path) -> None:
    """An output that cannot be written is an error before the measurements, not after hours of them."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if not output.exists():
        output.touch()
        output.unlink()


def _measured(
    output: Path,
    budget_s: float,
    dtypes: tuple[str, ...],
    levels: str | None,
    fresh: bool,
    max_spread: float,
    name: str | None,
) -> JsonObject | None:
    """Measure, and write the file on the first process. Returns None on the other processes."""
    from pase.calibrate import Journal, Settings, suite
    from pase.calibrate.device import Devices
    from pase.calibrate.here import find
    from pase.calibrate.suite import budgeted
    from pase.errors import Infeasible
    from pase.machine import dumps

    here = find(levels)
    first = here.process == 0
    settings = Settings(budget_s=budget_s, max_spread=max_spread, program_s=min(_PROGRAM_S, budget_s / 2000))
    wanted = dtypes or ("float32", "bfloat16")[:: 1 if here.platform == "cpu" else -1]
    path = output.with_name(output.name + ".journal")
    if first:
        _check_writable(output)
    journal = Journal(path if first else None, here.fingerprint, fresh=fresh)
    bench = Devices(here)
    try:
        with progress() as say:

            def report(what: str, done: int, of: int) -> None:
                say(f"[{done}/{of}] {what}")

            target = budgeted(bench, journal, settings, here.levels, wanted, here.memory_bytes)
            outcome, fitted = _in_rounds(
                here, suite(target), bench, journal, settings, name or output.stem, report
            )
    except KeyboardInterrupt:
        if first:
            console(err=True).print(
                f"{len(journal.samples)} measurements are in {path}; the same command continues from there",
            )
        raise
    if fitted is None:
        return None
    if isinstance(fitted, Exception):
        raise Infeasible(
            f"{fitted}\nNothing was written to {output}",
            fix=f"measure again with the same command; the measurements are in {path}",
        )
    write_atomically(output, dumps(fitted.machine))
    return {"output": str(output), "journal": str(path), **_outcome(outcome, fitted, journal)}


def _in_rounds(
    here: Here,
    tasks: Sequence[Task],
    bench: Bench,
    journal: Journal,
    settings: Settings,
    name: str,
    report: Callable[[str, int, int], None],
) -> tuple[SessionResult, Fitted | Refused | None]:
    """Measure and fit, then repeat the samples that the fit reports as doubtful and fit again, a few times.

    report: called with (what is measured, how many measurements are done, of how many).

    Returns the outcome of the session, and the last fit or the reason why there is none; None on every process except
    the first.
    """
    from pase.calibrate import Refused, session
    from pase.calibrate.session import remeasured

    outcome = session(tasks, bench, journal, settings, report)
    fitted: Fitted | Refused | None = None
    for remaining in reversed(range(_ROUNDS)):
        if here.process == 0:
            try:
                fitted = _fitted(here, tasks, journal, settings, name)
            except Refused as e:
                fitted = e
        doubtful = fitted.doubtful if isinstance(fitted, Refused) else ()
        if not remaining or not remeasured(tasks, doubtful, bench, journal, settings, report):
            break
    return outcome, fitted


def _outcome(outcome: SessionResult, fitted: Fitted, journal: Journal) -> JsonObject:
    """What --json prints about the measurements and the fit, in addition to the files."""
    spreads = sorted(s.spread for s in journal.samples.values())
    return {
        "machine": _outline(fitted.machine),
        "measured": outcome.measured,
        "resumed": outcome.resumed,
        "seconds": round(outcome.seconds, 2),
        "beyond_budget": outcome.beyond,
        "too_slow": list(outcome.too_slow),
        "median_spread": spreads[len(spreads) // 2],
        "smoothed": {k: v for k, v in fitted.smoothed.items() if v > 0},
        "checks_predicted_over_measured": dict(fitted.checks),
        "notes": list(fitted.notes),
        "provenance": dict(fitted.machine.provenance),
    }


def _fitted(here: Here, tasks: Sequence[Task], journal: Journal, settings: Settings, name: str) -> Fitted:
    from pase.calibrate.fit import Believed, fit
    from pase.calibrate.here import ceilings

    return fit(
        tasks,
        journal.samples,
        name=name,
        device_name=here.device_name,
        memory_bytes=here.memory_bytes,
        levels=here.levels,
        provenance={**here.provenance, **_asides(journal, settings.budget_s)},
        believed=Believed(ceilings=ceilings(here), max_spread=settings.max_spread),
    )


def _dtypes(text: str | None) -> tuple[str, ...]:
    """The value of --dtypes; empty if it was not given."""
    from pase.errors import PaseError

    wanted = tuple(text.split(",")) if text else ()
    known = ("float32", "bfloat16", "float16")
    for dtype in wanted:
        if dtype not in known:
            raise PaseError(
                f"there is no dtype '{dtype}'", where="--dtypes", fix=f"choose from {', '.join(known)}"
            )
    return wanted


@contextmanager
def _quiet_output() -> Iterator[None]:
    """Redirect standard output to standard error, so that libraries such as gloo do not print into the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _asides(journal: Journal, budget_s: float) -> dict[str, str]:
    """Facts about the measurements that are worth recording but are not in a machine's tables."""
    out = {"budget": f"{budget_s:g} s"}
    dispatch = next((s for s in journal.samples.values() if s.key.startswith("dispatch")), None)
    if dispatch is not None:
        out["dispatch"] = f"{dispatch.seconds * 1e6:.0f} us for a program of one small op, from the host"
    return out


def _from_traces(traces: Path, base: str | None, output: Path, name: str | None) -> JsonObject:
    """Write the machine ``base``, corrected by these traces."""
    from pase.calibrate.traces import with_traces
    from pase.costmodels.analytic import Analytic
    from pase.errors import PaseError
    from pase.machine import dumps, load

    if base is None:
        raise PaseError(
            "traces have the ops of one program only",
            where="--from",
            fix="give the machine to correct with --base NAME",
        )
    machine, facts = with_traces(load(base), traces, name or output.stem, Analytic)
    write_atomically(output, dumps(machine))
    return {"output": str(output), "machine": _outline(machine), **facts}


def _from_table(table: Path, base: str | None, output: Path, name: str | None) -> JsonObject:
    """Write the machine ``base``, corrected by this table of ops."""
    from pase.calibrate.op_table import read_table, with_table
    from pase.costmodels.analytic import Analytic
    from pase.errors import PaseError
    from pase.machine import dumps, load

    if base is None:
        raise PaseError(
            "a table has some of a machine's ops only",
            where="--from-table",
            fix="give the machine of this card with --base NAME",
        )
    machine, facts = with_table(load(base), read_table(table), name or output.stem, table.name, Analytic)
    write_atomically(output, dumps(machine))
    return {"output": str(output), "machine": _outline(machine), "products": facts}


def _outline(machine: Machine) -> JsonObject:
    """What --json prints about a machine: its numbers, and the sizes of its tables."""
    device = machine.device
    return {
        "name": machine.name,
        "device": device.name,
        "digest": machine.digest,
        "peak_flops": dict(device.peak_flops),
        "memory_bytes": device.memory_bytes,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "vector_flops": device.vector_flops,
        "launch_s": device.launch_s,
        "host": None
        if machine.host is None
        else {"program_s": machine.host.program_s, "op_s": machine.host.op_s},
        "conv_of_matmul": device.efficiency.get("conv"),
        "matmul_tables": {t.dtype: [len(t.m), len(t.n), len(t.k)] for t in device.matmul_tables},
        "memory_points": len(device.memory_curve.nbytes) if device.memory_curve else 0,
        "levels": [
            {
                "name": l.name,
                "ways": l.ways,
                "latency_s": l.latency_s,
                "bandwidth_bytes_per_s": l.bandwidth_bytes_per_s,
            }
            for l in machine.levels
        ],
        "collectives": [
            {
                "kind": c.kind,
                "ways": list(c.ways),
                "points": len(c.curve.nbytes),
                "largest_bytes": c.curve.nbytes[-1],
                "largest_s": c.curve.seconds[-1],
            }
            for c in machine.collectives
        ],
    }


def _print(r: JsonObject) -> None:
    """Print the result of the command as tables. r: as --json prints it."""
    from rich.table import Table

    from pase.calibrate.card import card_lines
    from pase.commands.machines import _si

    out, m = console(), r["machine"]
    numbers = Table(title=f"{m['name']}: {m['device']}", show_header=False)
    for dtype, peak in m["peak_flops"].items():
        size = "x".join(map(str, m["matmul_tables"].get(dtype, []))) or "no table"
        numbers.add_row(f"matmul {dtype}", f"up to {_si(peak, 'FLOP/s')} ({size})")
    numbers.add_row(
        "memory", f"{_si(m['memory_bandwidth_bytes_per_s'], 'B/s')} ({m['memory_points']} points)"
    )
    if m["vector_flops"]:
        numbers.add_row("outside of matmuls", _si(m["vector_flops"], "FLOP/s"))
    numbers.add_row("launch", f"{m['launch_s'] * 1e6:.3g} µs an op")
    if m["host"]:
        program, op = (f"{1e6 * m['host'][k]:.3g} µs" for k in ("program_s", "op_s"))
        numbers.add_row("the host's launch", f"{program} a program, {op} an op by itself")
    for l in m["levels"]:
        ways = l["ways"] or "any number"
        rate = _si(l["bandwidth_bytes_per_s"], "B/s")
        numbers.add_row(f"link {l['name']}", f"{ways}, {rate}, {l['latency_s'] * 1e6:.3g} µs a step")
    out.print(numbers)
    if m["collectives"]:
        table = Table(title="Collectives")
        for column in ("kind", "ways, innermost first", "points", "largest", "takes"):
            table.add_column(column, justify="right" if column in ("points", "largest", "takes") else "left")
        for c in m["collectives"]:
            takes = f"{c['largest_s'] * 1e3:.4g} ms"
            ways = "x".join(map(str, c["ways"]))
            table.add_row(c["kind"], ways, str(c["points"]), _si(c["largest_bytes"], "B"), takes)
        out.print(table)
    for what, ratio in r.get("checks_predicted_over_measured", {}).items():
        out.print(f"check, not fitted: {what}: predicted {ratio:.2f} of measured")
    if "products" in r:
        kept = r["products"]["kept_median_error"]
        judged = "" if kept is None else f", {kept:.1%} on those kept back from the fit"
        out.print(
            f"{r['products']['rows']} products: median error {r['products']['median_error']:.1%}{judged}"
        )
    for c in r.get("rates", []):
        out.print(
            f"{c['figure']}: {c['before']:.3g} -> {c['after']:.3g} of the peak ({c['ops']} kinds of ops take "
            f"{c['measured_s'] * 1e3:.2f} ms a step, {c['predicted_s'] * 1e3:.2f} by the old figure)"
        )
    for line in card_lines(r["card"]) if "card" in r else ():
        out.print(line)
    for figure, why in r.get("rates_left", {}).items():
        out.print(f"{figure}: not corrected; {why}")
    for note in r.get("notes", []):
        out.print(f"note: {note}")
    if "measured" in r:
        out.print(
            f"{r['measured']} measured, {r['resumed']} from the journal, {r['beyond_budget']} not reached within the "
            f"budget, {len(r['too_slow'])} left out as too slow for it, in {r['seconds']:.0f} s; median spread "
            f"{r['median_spread']:.0%}",
        )
    out.print(f"written: {r['output']}")
