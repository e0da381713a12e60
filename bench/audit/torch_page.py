"""Generates docs/evidence/torch-steps.md from the rows of ``bench/audit/torch.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["page"]

_HEAD = """# PyTorch truth

`bench/audit/torch.py` made this page. Twelve models of transformers, in small sizes, are split by the baselines, by our
own search (on a given mesh, at prices under which everything is split), and at random. PyTorch runs the plans as
[PyTorch in and out](../how-to/torch.md) describes.
"""
_NUMBERS = """## Numbers

A step on four ranks, which are threads of one process, is compared with the same step by PyTorch alone: the loss, every
gradient, and all parameters and buffers after an update by AdamW. All of it is computed in float64, including what
transformers computes in float32, so that rounding cannot hide an error. A cell is the largest difference of any element
on any rank, as a share of the largest element of the same tensor (or of a thousandth of the largest element of all, if
that is larger).
"""
_BYTES = """## Bytes

The same plans for 32 devices (meshes 32, 8×4 and 4×8; the batch has 32 examples). One rank runs a step on fake tensors,
over a process group that sends nothing. Each collective that PyTorch issues is counted by kind, mesh axes and bytes.
*exact*: the list is the plan's own list, without any difference. The number is that of all bytes of the plan's list, in
thousands.
"""
_TRACE = """
## Messages beside backward

`tests/backends/torch/spmd/test_trace.py` records a step of two processes over Gloo with PyTorch's profiler: each
layer's message begins while backward computes the products of the layers before it.
"""


def page(found: dict[str, Any], strategies: Sequence[str], limit: float) -> str:
    """Returns the page. found: the contents of the result file. limit: the largest difference that is rounding."""
    rows: dict[str, Any] = found["rows"]
    total, versions = found["summary"], found["versions"]
    notes: list[str] = []

    def numbers(cell: dict[str, Any]) -> str:
        if "loss" not in cell:
            return _noted(cell, notes)
        worst = max(cell[k] for k in ("loss", "gradient", "after"))
        return f"{worst:.0e}" if worst <= limit else f"**{worst:.0e}** ({cell['worst']})"

    def sent(cell: dict[str, Any]) -> str:
        if "exact" not in cell:
            return _noted(cell, notes)
        planned, real = (sum(cell[k].values()) for k in ("planned_bytes", "sent_bytes"))
        if cell["exact"]:
            return f"{planned / 1e3:,.0f} exact"
        if cell["sent_bytes"] == cell["planned_bytes"]:
            return f"{planned / 1e3:,.0f} in other messages"
        return f"{planned / 1e3:,.0f}, sent {real / 1e3:,.1f}"

    t, b, g = total["threads"], total["bytes"], total["gloo"]
    said = (
        f"PyTorch {versions['torch']}, transformers {versions['transformers']}. Of {t['pairs']} pairs of a model and "
        f"a strategy, {t['ran']} ran, and {t['equal']} of them are equal to the unsharded step (largest difference "
        f"{t['largest_difference']:.0e}). {g['ran']} pairs were run by four Gloo processes too: {g['equal']} are "
        f"equal. Of {b['ran']} pairs on 32 devices, {b['exact']} send exactly what the plan lists, and "
        f"{b['same_bytes_by_kind'] - b['exact']} as many bytes in other messages (rows of neighbours come in two). "
        "A note explains each cell that did not run.\n"
    )
    tables = [
        _NUMBERS,
        _table(rows, strategies, "threads", numbers),
        "\nBy four processes over Gloo:\n",
        *(_gloo(rows, numbers) or ["None was run.\n"]),
        "\n" + _BYTES,
        _table(rows, strategies, "bytes", sent),
    ]
    text = "\n".join([_HEAD, said, *tables])
    every = "".join(f"\n[{i}] {why}\n" for i, why in enumerate(notes, 1))
    return f"{text}\n{every}{_TRACE}"


def _noted(cell: dict[str, Any], notes: list[str]) -> str:
    why = cell.get("refused") or cell.get("error") or "not run"
    if why not in notes:
        notes.append(why)
    return f"– [{notes.index(why) + 1}]"


def _table(
    rows: dict[str, Any], strategies: Sequence[str], how: str, said: Callable[[dict[str, Any]], str]
) -> str:
    lines = ["| model | " + " | ".join(strategies) + " |", "|---|" + "--:|" * len(strategies)]
    for name, row in rows.items():
        made = row.get("strategies")
        cells = [said(made[s].get(how, {}) if made else row) for s in strategies]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _gloo(rows: dict[str, Any], said: Callable[[dict[str, Any]], str]) -> list[str]:
    return [
        f"- {name}, {s}: {said(cell['gloo'])}"
        for name, row in rows.items()
        for s, cell in row.get("strategies", {}).items()
        if "gloo" in cell
    ]
