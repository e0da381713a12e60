"""What a compiled program really sends: the collectives in its HLO, each with its size and how often it runs.

>>> text = '''HloModule m, num_partitions=4
... ENTRY %main (p: f32[8]) -> f32[8] {
...   %p = f32[8]{0} parameter(0)
...   ROOT %ar = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%add
... }'''
>>> [(c.kind, c.bytes, c.group_size, c.count) for c in collectives(text)]
[('all_reduce', 32, 2, 1)]

Sizes follow ``CostModel.collective``: the larger local buffer on one device. They are the sizes in
the compiled program: the CPU backend widens 16-bit floats to f32 before it sends (``promoted`` marks
the sums; gathers are not marked, compare ``dtypes``), and turns an annotated reduce-scatter into an
all-reduce and a slice. Compare predictions with float32 programs there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pase.backends import hlo_loops
from pase.backends.hlo_text import (
    Computation,
    Groups,
    Instruction,
    Module,
    dtypes,
    parse_groups,
    parse_modules,
    parse_pairs,
    type_bytes,
)
from pase.frontends.jax_versions import Compiled, program_text
from pase.machine.types import Mesh

__all__ = ["HloCollective", "HloKind", "axes_of_groups", "axes_of_pairs", "collectives", "summary"]

HloKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast"]

_KINDS: dict[str, HloKind] = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}


@dataclass(frozen=True, kw_only=True)
class HloCollective:
    """One collective instruction of a compiled program.

    bytes: the larger local buffer on one device, in one run: all_gather: the output;
    reduce_scatter: the input; others: the local tensor. Variadic forms are summed.
    count: how often a step runs it; loops multiply, nested ones too.
    """

    kind: HloKind
    bytes: int
    parts: tuple[int, ...]
    """``bytes`` by operand: the compiler combines small collectives into one of several tensors."""
    group_size: int
    groups: Groups
    """Devices that talk to each other; of a permute: the devices joined by its pairs."""
    count: int
    count_known: bool
    """False inside of a loop whose trips cannot be read: ``count`` then takes that loop to run once."""
    name: str
    computation: str
    operands: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Element types sent, as HLO names them: ("f32",)."""
    promoted: bool
    """The compiler widened the type to add in it (16 bits to f32, so bytes are twice what was asked)."""
    pairs: Groups
    """(source, target) of a permute, else empty."""
    axes: int | None
    """Bit set of mesh axes (bit i = axis i), where a mesh was given and a set fits; else None."""
    op_name: str
    """The framework's name for where it comes from ("jit(f)/dot_general"), or ""."""


def collectives(compiled: str | Compiled, mesh: Mesh | None = None) -> list[HloCollective]:
    """The collectives of a compiled program, in the order in which they stand in the text.

    compiled: the text of ``.compile().as_text()``, or the compiled object.
    mesh: where given, each collective's ``axes`` are found: device ids are then taken to be the mesh's
    positions, row-major, as JAX numbers them.
    Of the branches of a conditional, the one that sends most bytes counts. Raises PaseError on text
    that is no compiled HLO.
    """
    text = program_text(compiled)
    found = [c for module in parse_modules(text) for c in _of_module(module)]
    if mesh is None:
        return found
    return [
        replace(c, axes=axes_of_pairs(c.pairs, mesh) if c.pairs else axes_of_groups(c.groups, mesh))
        for c in found
    ]


def summary(found: Iterable[HloCollective]) -> dict[HloKind, tuple[int, int]]:
    """Per kind: (how many run, their bytes in sum). Groups of one device send nothing and are left out."""
    total: dict[HloKind, tuple[int, int]] = {}
    for c in found:
        if c.group_size > 1:
            count, nbytes = total.get(c.kind, (0, 0))
            total[c.kind] = (count + c.count, nbytes + c.count * c.bytes)
    return total


def axes_of_groups(groups: Groups, mesh: Mesh) -> int | None:
    """The bit set of mesh axes whose groups are these, in any order; None where no set fits.

    >>> axes_of_groups(((0, 2), (1, 3)), Mesh(names=("x", "y"), sizes=(2, 2)))
    1
    """
    wanted = {frozenset(g) for g in groups}
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    real = [i for i, s in enumerate(mesh.sizes) if s > 1]
    for k in range(len(real) + 1):
        for chosen in itertools.combinations(real, k):
            axes = sum(1 << i for i in chosen)
            rest = [i for i in range(len(mesh.sizes)) if i not in chosen]
            rows = ids.transpose([*rest, *chosen]).reshape(-1, mesh.ways(axes))
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return axes
    return None


def axes_of_pairs(pairs: Groups, mesh: Mesh) -> int | None:
    """The bit set of mesh axes along which some source and its target differ; None off the mesh.

    >>> axes_of_pairs(((0, 1), (1, 0)), Mesh(names=("x", "y"), sizes=(2, 2)))
    2
    """
    if any(d >= mesh.devices for pair in pairs for d in pair):
        return None
    axes = 0
    for source, target in pairs:
        at = zip(np.unravel_index(source, mesh.sizes), np.unravel_index(target, mesh.sizes), strict=True)
        axes |= sum(1 << i for i, (s, t) in enumerate(at) if s != t)
    return axes


def _of_module(module: Module) -> list[HloCollective]:
    merged: dict[tuple[str, str], HloCollective] = {}
    for c in _walk(module, module.entry):
        key = (c.computation, c.name)
        # One computation may be called from several places.
        merged[key] = replace(merged[key], count=merged[key].count + c.count) if key in merged else c
    return list(merged.values())


def _walk(module: Module, name: str) -> list[HloCollective]:
    """The collectives of one run of a computation and all that it calls."""
    found: list[HloCollective] = []
    for i in module.computations[name].instructions.values():
        kind = _KINDS.get(i.opcode.removesuffix("-start"))
        if kind is not None and _goes_on(module.computations[name], i):
            continue
        if kind is not None:
            found.append(_collective(module, name, i, kind))
        elif i.opcode == "while":
            found += _loop(module, name, i)
        elif i.opcode == "conditional":
            branches = [_walk(module, b) for b in _branches(i)]
            found += max(branches, key=lambda cs: sum(c.count * c.bytes for c in cs), default=[])
        elif i.opcode in ("fusion", "async-start", "call", "custom-call"):
            called = i.attribute("calls") or i.attribute("called_computations")
            called = called or (i.attribute("to_apply") if i.opcode == "call" else None)
            for callee in _names(called):
                found += _walk(module, callee)
    return found


def _goes_on(computation: Computation, i: Instruction) -> bool:
    """True where a collective goes on that has started elsewhere.

    TPU fuses a collective with the products that hide it: the same collective then stands in the
    fusion that starts it, in each fusion that it runs beside, and in the one that ends it.
    """
    others = computation.instructions.values()
    calls = {c.attribute("custom_call_target") for c in others if c.opcode == "custom-call"}
    beside = '"async_collective_fusion_config"' in i.attributes and '"AsyncCollectiveStart"' not in calls
    return beside or '"AsyncCollectiveDone"' in calls


def _loop(module: Module, name: str, loop: Instruction) -> list[HloCollective]:
    trips = hlo_loops.trip_count(module, name, loop)
    runs = ((_names(loop.attribute("body")), 0), (_names(loop.attribute("condition")), 1))
    return [
        replace(
            c,
            count=c.count * (1 if trips is None else trips + more),  # the condition is asked once more
            count_known=c.count_known and trips is not None,
        )
        for callees, more in runs
        for callee in callees
        for c in _walk(module, callee)
    ]


def _branches(conditional: Instruction) -> list[str]:
    listed = _names(conditional.attribute("branch_computations"))
    either = (conditional.attribute("true_computation"), conditional.attribute("false_computation"))
    return listed or [n for text in either for n in _names(text)]


def _names(text: str | None) -> list[str]:
    return [n.strip().lstrip("%") for n in (text or "").strip("{}").split(",") if n.strip()]


def _collective(module: Module, computation: str, i: Instruction, kind: HloKind) -> HloCollective:
    local = module.computations[computation].instructions
    # An in-place permute names its output and offsets too; the ragged form names sizes and offsets.
    one = i.attribute("slice_sizes") is not None or i.opcode.startswith("ragged")
    sources = [local[o].type for o in (i.operands[:1] if one else i.operands)]
    pairs = parse_pairs(i.attribute("source_target_pairs") or "") if kind == "permute" else ()
    groups = _joined(pairs) if kind == "permute" else parse_groups(_groups_text(i), module.devices)
    group_size = max((len(g) for g in groups), default=1)
    # On TPU a reduce-scatter is a fusion named so, with an all-reduce and a slice inside.
    if kind == "all_reduce" and computation.startswith("all-reduce-scatter"):
        kind = "reduce_scatter"
    parts = tuple(type_bytes(t) * (group_size if kind == "all_gather" else 1) for t in sources)
    return HloCollective(
        kind=kind,
        bytes=sum(parts),
        parts=parts,
        group_size=group_size,
        groups=groups,
        count=1,
        count_known=True,
        name=i.name,
        computation=computation,
        operands=i.operands,
        dtypes=tuple(dict.fromkeys(d for t in sources for d in dtypes(t))),
        promoted="promoted" in (i.attribute("to_apply") or ""),
        pairs=pairs,
        axes=None,
        op_name=_op_name(i),
    )


def _groups_text(i: Instruction) -> str:
    text = i.attribute("replica_groups") or "{}"
    if not text.startswith("mesh["):
        return text
    # The mesh form has a comma of its own: it ends with the axes in braces.
    start = i.attributes.index("replica_groups=") + len("replica_groups=")
    return i.attributes[start : i.attributes.index("}", start) + 1]


def _op_name(i: Instruction) -> str:
    _, marked, rest = (i.attribute("metadata") or "").partition('op_name="')
    return rest.partition('"')[0] if marked else ""


def _joined(pairs: Groups) -> Groups:
    """Devices joined by (source, target) pairs, smallest first."""
    root: dict[int, int] = {}

    def find(d: int) -> int:
        while root.setdefault(d, d) != d:
            d = root[d]
        return d

    for a, b in pairs:
        root[find(a)] = find(b)
    members: dict[int, list[int]] = {}
    for d in sorted(root):
        members.setdefault(find(d), []).append(d)
    return tuple(tuple(m) for m in members.values())
