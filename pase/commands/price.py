"""``pase price``: prices a given strategy, without a search."""

from __future__ import annotations

from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import (
    JsonOption,
    ModelName,
    StrictOption,
    compile_options,
    print_json,
    progress,
    strictly,
)
from pase.compiler.problem.options import CompileOptions
from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.plan.types import PlanData
    from pase.stated.price import Priced

__all__ = ["price"]

PURPOSE = "Price what you have"


@compile_options("devices", "machine", "unknown", "dims")
def price(
    model: ModelName,
    options: CompileOptions,
    strategy: Annotated[
        str,
        typer.Option(
            "--as",
            help="The strategy, for example fsdp=32,tp=8. Degrees: dp, fsdp, tp, cp, ep, pp, vp (chunks per stage), "
            "micro (examples per micro-batch). Others: zero=0..3, sp, async, a2a, remat=none|selective|full, "
            "schedule=gpipe|1f1b|interleaved, precision=bf16|fp8|nvfp4. The remaining devices are data parallel.",
            metavar="STRATEGY",
        ),
    ] = "",
    executor: Annotated[
        str,
        typer.Option(
            "--executor", help="How the program runs: eager, compiled, xla, megatron or megatron_2021."
        ),
    ] = "compiled",
    like_search: Annotated[
        bool,
        typer.Option(
            "--like-search",
            help="Also give the price of the same split as 'pase compare' lists it, and what makes the difference. "
            "This runs the search.",
        ),
    ] = False,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Price a strategy that you give: step time, memory, collectives.

    There is no search, unless --like-search is given. The strategy is applied to the model's own graph and priced as a
    framework would run it, with gathers and sums that overlap compute, recomputation, and the pipeline bubble.

    Prints the step time by cause, the MFU, the time of each kind of collective, and the memory on the fullest rank by
    kind. The figures are predictions, not measurements.

    \b
    Examples:
      pase price 'zoo:llama3_8b?batch=128' --devices 64 --as fsdp=64,remat=full
      pase price 'zoo:llama3_70b?batch=512' --devices 256 \\
                 --as fsdp=32,tp=8,sp,micro=1 --executor megatron
      pase price 'zoo:llama3_70b?batch=512' --devices 512 \\
                 --as dp=16,zero=1,tp=8,sp,pp=4,vp=5 --executor megatron --json
      pase price zoo:gpt2 --devices 32 --as fsdp=32 --like-search
    """
    from pase.api import price as priced
    from pase.stated.searched import baseline_of, price_like_search
    from pase.stated.table import as_lines, difference_text, like_search_text, unsearched_text

    with progress() as say:
        say("pricing the strategy")
        found = priced(
            model,
            devices=options.devices,
            strategy=strategy,
            executor=executor,
            machine=options.machine,
            unknown=options.unknown,
            dims=options.dims,
        )
        row = price_like_search(model, None, (), options, found.strategy, say) if like_search else None
    if json:
        print_json(
            {"model": model, **found.to_json(), **({} if row is None else {"like_search": _row(found, *row)})}
        )
        strictly(found.sound, strict)
        return
    out = console()
    lines = as_lines(model, found)
    if row is not None:
        lines += [like_search_text(found, *row), difference_text(found, row[1])]
    elif (name := baseline_of(found.strategy)) is not None:
        lines.append(unsearched_text(name))
    for line in lines:
        folded = fill(
            line, out.width, subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False
        )
        out.print(folded, style="bold red" if line.startswith("WARNING") else None)
    strictly(found.sound, strict)


def _row(found: Priced, name: str, plan: PlanData) -> JsonObject:
    """The search's price of the same split."""
    from pase.stated.table import difference

    return {
        "name": name,
        "step_s": plan.cost,
        "longer_here_s": difference(found, plan),
        "memory_bytes": plan.memory.total,
        "fits": plan.fits,
        "micro_batches": plan.accumulate,
        "blocks_computed_again": len(plan.remat),
    }
