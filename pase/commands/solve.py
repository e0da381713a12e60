"""``pase solve``: runs the search engine alone, on an instance file."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.files.formats import written_as
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.search.types import SearchProgress, Solution

__all__ = ["solve"]

PURPOSE = "This installation"

_END_S = 0.5
_END_SHARE = 0.1  # of the time that reading took


def solve(
    instance: Annotated[
        Path,
        typer.Argument(
            help="An IOPDDL .json or .json.gz, or an index .json with its .npz in the same folder.",
            metavar="INSTANCE",
        ),
    ],
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            min=0.0,
            help="Seconds, including those to read the file. Then the best solution found so far is returned.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The largest number of rounds of the search, if no elimination order is affordable. Each is a fixed "
            "amount of work. Default: 60, or no limit if there is a time limit.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the solution as a JSON list with one index per node.",
            callback=written_as("JSON"),
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed. The same seed gives the same solution, unless a time limit stops the search."
        ),
    ] = 0,
    method: Annotated[
        str, typer.Option("--search", help="The search: auto, bounded, paper or brute_force.")
    ] = "auto",
    kernel: Annotated[
        str, typer.Option(help="The kernels: numba (fast) or numpy (to check them).")
    ] = "numba",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
    ] = False,
) -> None:
    """Run the search engine alone, on an instance file.

    Minimises node costs + edge costs, under the instance's memory limit if it has one.

    The search is exact if an elimination order fits in memory. Otherwise it returns the best solution found within its
    budget of work, with a lower bound. A time limit or Ctrl-C ends it earlier, with the best solution found so far.

    Prints the cost, whether it is proven optimal or its gap to the lower bound, and the time. The exit status is 1 if
    no solution within the memory limit was found.

    \b
    Examples:
      pase solve instance.json
      pase solve instance.json.gz --time-limit 60 -o solution.json
    """
    began = time.perf_counter() - _since_start()
    from pase.errors import Infeasible, PaseError
    from pase.search.instances.readers import read_instance, write_solution
    from pase.search.registry import SEARCHES, SearchOptions

    if kernel not in ("numba", "numpy"):
        raise PaseError(f"there are no kernels '{kernel}'", where="--kernel", fix="choose numba or numpy")
    search = SEARCHES[method]
    read_from = time.perf_counter()
    tables, memory = read_instance(instance)
    read_s = time.perf_counter() - read_from
    if memory is not None and not search.takes_limit:
        raise PaseError(
            f"{instance} has a memory limit, which {method} does not support",
            where="--search",
            fix="choose auto",
        )
    if time_limit is not None:  # writing the solution and freeing the memory also take time
        time_limit = max(0.0, time_limit - (time.perf_counter() - began) - _END_S - _END_SHARE * read_s)
    counts = {"nodes": len(tables.node_costs), "edges": len(tables.edges)}

    try:
        with _progress(f"{instance.name}: {counts['nodes']} nodes, {counts['edges']} edges") as progress:
            options = SearchOptions(
                time_limit=time_limit,
                rounds=rounds,
                seed=seed,
                kernel=kernel,  # type: ignore[arg-type]
                progress=progress,
            )
            found = search.run(tables, memory, options)
    except Infeasible:
        if as_json:
            none = {"cost": None, "bound": None, "optimal": False, "feasible": False, "seconds": 0.0}
            print(json.dumps(none | counts))
        raise
    if output is not None:
        write_solution(output, found.choice)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if as_json:
        print(json.dumps(_answer(found, counts) | {"peak_mb": round(peak_mb, 1)}))
    else:
        print(f"cost {found.cost:,.12g}   {_verdict(found)}")
        print(f"{counts['nodes']} nodes, {counts['edges']} edges, {found.seconds:.3f} s by {found.method}")
        if output is not None:
            print(f"written to {output}")
    if not found.feasible:
        raise typer.Exit(1)


def _answer(found: Solution, counts: dict[str, int]) -> dict[str, object]:
    """The object that --json prints."""
    return {
        "cost": _number(found.cost),
        "bound": _number(found.bound),
        "optimal": found.optimal,
        "feasible": found.feasible,
        "seconds": found.seconds,
        **counts,
        "gap": _number(found.gap),
        "method": found.method,
        "certificate": found.certificate,
    }


def _verdict(found: Solution) -> str:
    if found.optimal:
        return f"optimal, proven by {found.certificate}"
    if found.feasible:
        return f"lower bound {found.bound:,.12g} ({found.certificate}), gap {found.gap:.3%}"
    return "no solution within the memory limit was found, but none is proven not to exist"


@contextmanager
def _progress(what: str) -> Iterator[SearchProgress | None]:
    """Yields a function that shows the search's progress on a line of the terminal.

    None if standard error is not a terminal; rich is then not imported.
    """
    if not sys.stderr.isatty():
        yield None
        return

    with console(err=True).status(what) as status:

        def progress(phase: str, cost: float, bound: float, seconds: float) -> None:
            status.update(f"{phase} · best {cost:,.6g} · bound {bound:,.6g} · {seconds:.0f} s")

        yield progress


def _since_start() -> float:
    """Seconds since this program started, from the operating system, or else the CPU time used."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()
    return max(age, time.process_time())


def _number(x: float) -> float | int | None:
    """A number for JSON: None if it is not finite, and an int if it is a whole number."""
    if x != x or x in (float("inf"), float("-inf")):
        return None
    return int(x) if x == int(x) and abs(x) < 2**63 else x
