"""Generates the tables of docs/evidence/tpu.md from bench/results/tpu_aot.json."""

from __future__ import annotations

from typing import Any

CLOCK_HZ = 1.5e9
"""197 TFLOP/s over 4 units of 128 x 128 multiply-adds (Cloud TPU v5e documentation): 1.5 GHz."""


def step_s(row: dict[str, Any]) -> float | None:
    """Returns the seconds of the compiler's cycles plus the waiting time; None if the step does not fit."""
    return row["mcycles"] * 1e6 / CLOCK_HZ + row["waiting_s"] if "mcycles" in row else None


def tables(result: dict[str, Any]) -> str:
    """Returns the tables as Markdown."""
    rows = result["rows"]
    lines = [
        f"Compiled with jax {result['jax']} and libtpu {result['libtpu']}. Figures in italics were recorded elsewhere,",
        f"with {result['recorded']['source']}.",
        "",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        lines += [
            f"### {model}: `{mine[0]['zoo']}` on {mine[0]['topology'].replace(':', ' ')}",
            "",
            "| strategy | mesh | Mcycles | waiting ms | step ms | predicted ms | peak MB | predicted MB | compile s |",
            "|---|---|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for r in sorted(mine, key=lambda r: step_s(r) or float("inf")):
            lines.append(_line(r, bold=r["strategy"].startswith("ours")))
        for r in result["recorded"]["rows"]:
            if r["model"] == model:
                cycles = f"{r['mcycles']:,.1f}" if r["mcycles"] else "out of memory"
                peak = f"*{r['peak_mb']:,}*" if r["peak_mb"] else ""
                lines.append(f"| *{r['strategy']}* | | *{cycles}* | | | | {peak} | | |")
        lines.append("")
    return "\n".join([*lines, *_agreement(rows)]) + "\n"


def _line(r: dict[str, Any], *, bold: bool) -> str:
    mark = "**" if bold else ""
    mesh = "×".join(map(str, r["mesh"]))
    predicted = f"{r['predicted_s'] * 1e3:,.1f}" if "predicted_s" in r else ""
    foreseen = f"{r['predicted_peak'] / 1e6:,.0f}" if "predicted_peak" in r else ""
    if "out_of_memory" in r:
        peak = f"{r['out_of_memory'] / 1e6:,.0f} of {r['limit'] / 1e6:,.0f}"
        return (
            f"| {r['strategy']} | {mesh} | out of memory | | | {predicted} | {peak} | {foreseen} "
            f"| {r['compile_s']:.0f} |"
        )
    step = step_s(r) or 0.0
    return (
        f"| {mark}{r['strategy']}{mark} | {mesh} | {mark}{r['mcycles']:,.1f}{mark} | {r['waiting_s'] * 1e3:,.1f} "
        f"| {mark}{step * 1e3:,.1f}{mark} | {predicted} | {r['peak'] / 1e6:,.0f} | {foreseen} | {_compile(r)} |"
    )


def _compile(r: dict[str, Any]) -> str:
    """Returns the compile time: CPU seconds if they were measured, otherwise wall seconds."""
    return f"{r['compile_cpu_s']:.0f} CPU" if "compile_cpu_s" in r else f"{r['compile_s']:.0f}"


def _agreement(rows: list[dict[str, Any]]) -> list[str]:
    """Returns how predicted and compiled values agree over all rows that have both. If a plan has several lowerings,
    the annotated one counts."""
    from scipy.stats import kendalltau

    rows = [r for r in rows if not r["strategy"].startswith("ours, ")]
    both = [(r, step_s(r)) for r in rows if "predicted_s" in r and "mcycles" in r]
    errors = sorted(abs(r["predicted_s"] / s - 1) for r, s in both if s)
    memory = sorted(abs(r["predicted_peak"] / r["peak"] - 1) for r, _ in both if "predicted_peak" in r)
    ordered = agreed = 0
    for i, (a, s) in enumerate(both):
        for b, t in both[:i]:
            if a["model"] == b["model"] and s and t:
                ordered += 1
                agreed += (a["predicted_s"] < b["predicted_s"]) == (s < t)
    full = [r for r in rows if "predicted_peak" in r and ("out_of_memory" in r or "peak" in r)]
    verdicts = sum(
        (r["predicted_peak"] > r.get("limit", 15.75 * 2**30)) == ("out_of_memory" in r) for r in full
    )
    if not both:
        return []
    tau = kendalltau([r["predicted_s"] for r, _ in both], [s for _, s in both]).statistic
    return [
        "### Agreement",
        "",
        "| | |",
        "|---|---|",
        f"| rows with a prediction | {len(both)} |",
        f"| step time, predicted against compiled: median and largest error | {errors[len(errors) // 2]:.1%}, "
        f"{errors[-1]:.1%} |",
        f"| pairs of strategies of one model in the same order | {agreed} of {ordered} |",
        f"| Kendall's τ over all rows | {tau:.3f} |",
        f"| peak memory: median and largest error | {memory[len(memory) // 2]:.1%}, {memory[-1]:.1%} |",
        f"| peak memory within 5% | {sum(m <= 0.05 for m in memory)} of {len(memory)} |",
        f"| fits or does not fit, foreseen | {verdicts} of {len(full)} |",
    ]
