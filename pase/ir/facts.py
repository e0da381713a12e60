"""What is known of a graph as a whole: where it comes from, and what later passes made of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from pase.errors import PaseError

__all__ = ["GraphFacts", "Hoisted", "facts_text", "read_facts"]

Hoisted = Literal["none", "gathers", "all"]
"""What runs once per step rather than once per micro-batch or recomputation: nothing; the all-gathers of parameters,
which then stay gathered; or these and the reductions of gradients, which stay partial sums until then."""


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """Facts of a graph.

    frontend: the framework that the model comes from, as ``pase.frontends.registry`` names it.
    dims: the sizes that the user gave to a model's symbolic dims.
    precision: the number format of products with weights ("fp8", "nvfp4"); "" if they keep their dtypes.
    hoisted: which collectives of parameters run once per step.
    micro_batches: how many a step has; ops other than the update run once in each.
    decomposed: whether an executor overlaps gathers and scatters with products piece by piece.
    eager: whether each call of the program runs by itself, as in PyTorch, so that backward keeps what each call saves.
        False: a compiler fuses calls.
    frees_gathered: whether what backward gathers again (``Access.recompute``) is let go after each of its reads.
    loss: for a whole train step, the tensor that is its loss; "" if the graph is no such step, or if none is known.
    constant_bytes: of values that do not depend on data, which each device holds whole during backward. It is no part
        of a graph's digest.
    """

    frontend: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    precision: str = ""
    hoisted: Hoisted = "none"
    micro_batches: int = 1
    decomposed: bool = False
    eager: bool = False
    frees_gathered: bool = False
    loss: str = ""
    constant_bytes: int = 0


def facts_text(facts: GraphFacts) -> dict[str, str]:
    """The facts that differ from their defaults, as the graph's text and layout files have them."""
    found = {
        "frontend": facts.frontend,
        "dims": json.dumps(dict(facts.dims)) if facts.dims else "",
        "precision": facts.precision,
        "hoisted": facts.hoisted if facts.hoisted != "none" else "",
        "accumulate": str(facts.micro_batches) if facts.micro_batches != 1 else "",
        "decompose": "products" if facts.decomposed else "",
        "eager": "calls" if facts.eager else "",
        "frees": "gathered" if facts.frees_gathered else "",
        "loss": facts.loss,
        "constant_bytes": str(facts.constant_bytes) if facts.constant_bytes else "",
    }
    return {k: v for k, v in found.items() if v}


def read_facts(text: Mapping[str, str]) -> GraphFacts:
    """The facts that ``facts_text`` wrote, in this version or an earlier one. Raises PaseError for any other text."""
    given = {_FORMER.get(k, k): v for k, v in text.items()}
    if unknown := sorted(given.keys() - _KEYS):
        raise PaseError(f"'{unknown[0]}' is no fact of a graph", fix=f"known are {', '.join(sorted(_KEYS))}")
    hoisted, times = given.get("hoisted", "none"), given.get("accumulate", "1")
    if hoisted not in get_args(Hoisted):
        raise PaseError(f"'{hoisted}' is not what can be hoisted: {', '.join(get_args(Hoisted))}")
    if not (times.isdecimal() and times.isascii() and 0 < len(times) < 10 and int(times)):
        raise PaseError(f"'{times[:20]}' is no number of micro-batches")
    held = given.get("constant_bytes", "0")
    if not (held.isdecimal() and held.isascii() and 0 < len(held) < 20):
        raise PaseError(f"'{held[:20]}' is no number of bytes")
    if given.get("decompose", "products") != "products":
        raise PaseError(f"'{given['decompose'][:20]}' is not what can be decomposed: products")
    if given.get("eager", "calls") != "calls":
        raise PaseError(f"'{given['eager'][:20]}' is not what can run by itself: calls")
    if given.get("frees", "gathered") != "gathered":
        raise PaseError(f"'{given['frees'][:20]}' is not what can be let go: gathered")
    return GraphFacts(
        frontend=given.get("frontend", ""),
        dims=_dims(given.get("dims", "{}")),
        precision=given.get("precision", ""),
        hoisted=cast("Hoisted", hoisted),
        micro_batches=int(times),
        decomposed="decompose" in given,
        eager="eager" in given,
        frees_gathered="frees" in given,
        loss=given.get("loss", ""),
        constant_bytes=int(held),
    )


_KEYS = {
    "frontend",
    "dims",
    "precision",
    "hoisted",
    "accumulate",
    "decompose",
    "eager",
    "frees",
    "loss",
    "constant_bytes",
}

_FORMER = {"once": "hoisted"}
"""Keys in texts that older versions wrote. They are still read."""


def _dims(text: str) -> dict[str, int]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        found = None
    if not isinstance(found, dict) or not all(type(v) is int for v in found.values()):
        raise PaseError(f"'{text[:40]}' are no sizes of dims", fix='write a JSON object such as {"batch": 8}')
    return found
