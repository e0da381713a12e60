"""MLPerf training submissions, priced in their own configurations.

    python -m bench published.mlperf [FILE.csv] [--json] [--only PREFIX] [-o bench/results/mlperf.json]

Rows are those whose configuration is trusted (its devices are those of the system, and its degrees make the batch) and
whose file of settings is for the system's own card. The models' shapes are those of the benchmark's rules; precision,
degrees and the overlap of tensor parallelism are the submission's. All of them ran, so all fit. Rows of the first
rounds state no step, but only an upper bound of it, with evaluation inside: they judge the memory alone.
``bench/published/steps.py`` says what the JSON has.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

from bench.cases import SHARED, csv_rows
from bench.published.rows import PublishedRow, shapes
from bench.published.steps import report
from pase.errors import PaseError

__all__ = ["main", "read"]

_SHAPES = shapes("mlperf")
"""The benchmarks' own models: mlcommons/training, large_language_model (gpt3), large_language_model_pretraining, and
small_llm_pretraining."""
_ADAPTERS = "it trains adapters beside frozen weights, which no stated strategy has"
_CARDS = {"theia": "GB300", "tyche": "GB200", "eos": "H100", "coreweave_hgxh100": "H100"}
"""Systems whose name has no card -> the card of their description (systems/*.json of the submission)."""
_KNOWN = ("GB300", "GB200", "B300", "B200", "H200", "H100", "MI300X", "MI325X")


def _card(text: str) -> str | None:
    """
    >>> _card("config_DGXB200_64x8x144xtp4pp8cp2.sh"), _card("b300_n1"), _card("config_SR780.sh")
    ('B200', 'B300', None)
    """
    found = re.search("|".join(_KNOWN), text.upper())
    return found.group() if found else None


def read(path: str | Path) -> list[PublishedRow]:
    """Reads the table's trusted rows. Raises PaseError if it is not such a table."""
    try:
        rows = csv_rows(path)
        return [_row(i, r) for i, r in enumerate(rows, 1) if r["config_trust"] == "high" and _own_settings(r)]
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, ValueError) as e:
        raise PaseError(f"this is no table of MLPerf's submissions: {e}", where=str(path)) from e


def _of_system(r: Mapping[str, str]) -> str | None:
    named = next((card for system, card in _CARDS.items() if r["system"].lower().startswith(system)), None)
    return named or _card(r["system"])


def _own_settings(r: Mapping[str, str]) -> bool:
    system, settings = _of_system(r), _card(r["config"])
    return system is None or settings is None or system == settings


def _row(number: int, r: Mapping[str, str]) -> PublishedRow:
    gpus = int(r["nodes"]) * int(r["gpus_per_node"])
    precision = "NVFP4" if r["fp4"] == "True" else "FP8" if r["fp8"] == "True" else "BF16"
    columns = dict(_SHAPES.get(r["benchmark"], {"model": r["benchmark"], "why_not": _ADAPTERS}))
    columns |= {k: "" if r[k] == "null" else r[k] for k in ("step_s", "global_batch", "tp", "pp", "vp", "cp")}
    columns |= {
        "gpu": _of_system(r) or _card(r["config"]) or "",
        "gpus": str(gpus),
        "dp_type": "zero1",
        "precision": precision,
        "micro_batch": r["micro"],
        "act_ckpt": "none",
        "sp": "yes",
        "step_kind": "given",
        "notes": "tp and pp communication overlapped" if r["tp_overlap"] == "True" else "",
        "source": f"MLPerf training {r['round']}, {r['submitter']}, {r['example']}",
    }
    return PublishedRow(id=f"mlp{number:03d}", columns=columns)


def main() -> None:
    """Prints a row for each submission, predicted and measured, as text or JSON; with -o, writes their summary."""
    report(__doc__, read, SHARED / "measured" / "mlperf_training" / "steps.csv")
