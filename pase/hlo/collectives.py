"""What a compiled program really sends: the collectives in its HLO, each with its size and how often it runs.

>>> text = '''HloModule m, num_partitions=4
... %add (a: f32[], b: f32[]) -> f32[] {
...   %a = f32[] parameter(0)
...   %b = f32[] parameter(1)
...   ROOT %sum = f32[] add(%a, %b)
... }
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

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from pase.hlo.groups import Groups, axes_of_groups, axes_of_pairs, joined
from pase.hlo.loops import trip_count
from pase.hlo.module import Computation, Instruction, Module, Shape, XlaProgram, modules
from pase.machine.types import Mesh

__all__ = ["HloCollective", "HloKind", "collectives", "kind_of", "sent", "summary"]

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


def collectives(compiled: str | XlaProgram, mesh: Mesh | None = None) -> list[HloCollective]:
    """The collectives of a compiled program, in the order of the text.

    compiled: the text of ``.compile().as_text()``, or the compiled object.
    mesh: where given, each collective's ``axes`` are found: device ids are then taken to be the mesh's
    positions, row-major, as JAX numbers them.
    Of the branches of a conditional, the one that sends most bytes counts. Raises PaseError on text
    that is no compiled HLO.
    """
    found = [c for module in modules(compiled) for c in _of_module(module)]
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


def kind_of(i: Instruction) -> HloKind | None:
    """The kind of collective that an instruction is or starts; None for any other instruction."""
    return _KINDS.get(i.opcode.removesuffix("-start"))


def sent(computation: Computation, i: Instruction) -> list[Shape]:
    """The larger local buffers of a collective, one per operand: the outputs of a gather, the inputs of any other."""
    if kind_of(i) == "all_gather":
        made = i.shape.parts[1] if i.opcode.endswith("-start") else i.shape
        return list(made.arrays())
    # An in-place permute names its output and offsets too; the ragged form names sizes and offsets.
    one = i.in_place or i.opcode.startswith("ragged")
    return [o.shape for o in computation.operands(i)[: 1 if one else None]]


def _of_module(module: Module) -> list[HloCollective]:
    merged: dict[tuple[str, str], HloCollective] = {}
    for c in _walk(module, module.entry):
        key = (c.computation, c.name)
        # One computation may be called from several places.
        merged[key] = replace(merged[key], count=merged[key].count + c.count) if key in merged else c
    return list(merged.values())


def _walk(module: Module, computation: Computation) -> list[HloCollective]:
    """The collectives of one run of a computation and all that it calls."""
    found: list[HloCollective] = []
    for i in computation.instructions.values():
        kind = kind_of(i)
        if kind is not None:
            if not _goes_on(computation, i):
                found.append(_collective(module, computation, i, kind))
        elif i.opcode == "while":
            found += _loop(module, computation, i)
        elif i.opcode == "conditional":
            branches = [_walk(module, c) for c in module.called(i)]
            found += max(branches, key=lambda cs: sum(c.count * c.bytes for c in cs), default=[])
        elif i.opcode in ("fusion", "async-start", "call", "custom-call"):
            found += [c for callee in module.called(i) for c in _walk(module, callee)]
    return found


def _goes_on(computation: Computation, i: Instruction) -> bool:
    """True if this continues a collective that was started elsewhere.

    TPU fuses a collective with the products that hide it. The same collective then appears in the
    fusion that starts it, in each fusion that overlaps with it, and in the one that ends it.
    """
    calls = {c.custom_call_target for c in computation.instructions.values()}
    beside = i.noted("async_collective_fusion_config") is not None and "AsyncCollectiveStart" not in calls
    return beside or "AsyncCollectiveDone" in calls


def _loop(module: Module, computation: Computation, loop: Instruction) -> list[HloCollective]:
    trips = trip_count(module, computation, loop)
    return [
        replace(
            c,
            count=c.count * (1 if trips is None else trips + more),
            count_known=c.count_known and trips is not None,
        )
        for callee, more in zip(module.called(loop), (0, 1), strict=True)  # the condition is asked once more
        for c in _walk(module, callee)
    ]


def _collective(module: Module, computation: Computation, i: Instruction, kind: HloKind) -> HloCollective:
    groups = joined(i.pairs) if kind == "permute" else i.groups or (tuple(range(module.devices)),)
    # On TPU a reduce-scatter is a fusion named so, with an all-reduce and a slice inside.
    if kind == "all_reduce" and computation.name.startswith("all-reduce-scatter"):
        kind = "reduce_scatter"
    sources = sent(computation, i)
    parts = tuple(s.nbytes for s in sources)
    return HloCollective(
        kind=kind,
        bytes=sum(parts),
        parts=parts,
        group_size=max((len(g) for g in groups), default=1),
        groups=groups,
        count=1,
        count_known=True,
        name=i.name,
        computation=computation.name,
        operands=tuple(o.name for o in computation.operands(i)),
        dtypes=tuple(dict.fromkeys(a.dtype for s in sources for a in s.arrays())),
        promoted=any("promoted" in c.name for c in module.called(i)),
        pairs=i.pairs,
        axes=None,
        op_name=i.op_name,
    )
