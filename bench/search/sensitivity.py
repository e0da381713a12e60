"""Does the strategy found for the H100 stay the best where the machine's file is off by up to a factor of 2?

    python -m bench.search.sensitivity [-o bench/results/sensitivity.json]

For each model and each quantity of the machine: the strategy found at its stated figures, priced at half and at
twice the figure, beside a new search there and beside the other methods.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.arguments import parser, wanted
from bench.provenance import save
from pase.machine.scale import QUANTITIES
from pase.questions.sensitivity import sensitivity

MODELS = ("zoo:gpt2", "zoo:gpt_1_3b", "zoo:llama3_8b", "zoo:bert_base", "zoo:alexnet", "zoo:transformer")
DEVICES = 32


def main() -> None:
    """Writes bench/results/sensitivity.json: the strategy's regret at each changed figure of the machine."""
    args = parser(__doc__, "sensitivity").parse_args()
    rows: list[dict[str, Any]] = []
    for model in wanted(((m, m) for m in MODELS), args.only):
        for quantity in QUANTITIES:
            for p in sensitivity(model, devices=DEVICES, vary=[f"{quantity}=0.5,2"]):
                rows.append({"model": model, **asdict(p), "regret": p.regret, "winner": p.winner})
            mine = [r for r in rows if r["model"] == model and quantity in r["factors"]]
            print(
                model,
                quantity,
                [f"x{r['factors'][quantity]:g} {r['regret']:.2%} {r['winner']}" for r in mine],
                flush=True,
            )
    record = {
        "devices": DEVICES,
        "worst_regret": max(r["regret"] for r in rows),
        "ahead_of_every_method": sum(r["winner"] == "pase" for r in rows),
        "points": len(rows),
        "rows": rows,
    }
    print(
        f"worst regret {record['worst_regret']:.2%}; ahead at {record['ahead_of_every_method']} of {len(rows)}"
    )
    save(record, args.o)


if __name__ == "__main__":
    main()
