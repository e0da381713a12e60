"""SimuMax's runs of Megatron on 8 B200, priced in their own configurations.

    python -m bench published.simumax [FILE.md] [--machine FILE.toml] [--json] [--only PREFIX] [-o OUT]

The runs have cut models (llama3_70b_l12: 12 of its layers), one example a micro-batch, and Megatron's distributed
optimizer. ``pase calibrate --from-table`` makes a machine file of the table of ops that was measured on the same box.
``bench/published/steps.py`` says what the JSON has; memory is what PyTorch's allocator held at most.
"""

from __future__ import annotations

import re
from pathlib import Path

from bench.cases import SHARED
from bench.published.rows import PublishedRow, shapes
from bench.published.steps import report
from pase.errors import PaseError

__all__ = ["main", "read"]

_SHAPES = shapes("simumax")
"""The public config.json of each model, but for Llama 3.1 405B, which their script runs with 16 heads of keys. Its
mixtures have one layer without experts (run_pretrain_deepseekv2.sh: MOE_LAYER_FREQ)."""
_DEGREES = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "l": "layers", "seq": "seq"}


def read(path: str | Path) -> list[PublishedRow]:
    """Reads the table of runs. Raises PaseError if it is not such a table."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        cells = [[c.strip() for c in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
        rows = [_row(i, c[0], c[2], c[5]) for i, c in enumerate(cells[1:], 1)]
    except (OSError, UnicodeDecodeError, LookupError, ValueError) as e:
        raise PaseError(f"this is no table of SimuMax's runs: {e}", where=str(path)) from e
    if not rows:
        raise PaseError("this is no table of SimuMax's runs: it has no rows", where=str(path))
    return rows


def _row(number: int, case: str, milliseconds: str, gibibytes: str) -> PublishedRow:
    name = next(n for n in _SHAPES if case.startswith(n))
    told = {k: v for k, v in re.findall(r"_(tp|pp|cp|ep|dp|l|seq|mbc)(\d+)", case)}
    columns = dict(_SHAPES[name]) | {v: told[k] for k, v in _DEGREES.items() if k in told}
    columns.setdefault("seq", "4096")
    columns |= {"dense_layers": "1"} if name.startswith("deepseek") else {}
    columns |= {"cp_comm": "a2a"} if "cp" in columns else {}
    columns |= {
        "gpu": "B200",
        "gpus": "8",
        "global_batch": str(int(told["mbc"]) * int(told["dp"])),
        "micro_batch": "1",
        "dp_type": "zero1",
        "precision": "BF16",
        "act_ckpt": "none",
        "step_s": str(float(milliseconds) / 1e3),
        "notes": f"allocated {gibibytes} GiB",
        "source": f"SimuMax v1.2, {case}",
    }
    return PublishedRow(id=f"smx{number:03d}", columns=columns)


def main() -> None:
    """Prints a row for each run, predicted and measured, as text or JSON; with -o, writes their summary."""
    report(__doc__, read, SHARED / "measured" / "simumax" / "docs__b200__b200_release_v1.2_summary.md")
