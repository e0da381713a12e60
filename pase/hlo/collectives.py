"""Lists the collectives in a compiled program's HLO, with the size of each and how often it runs per step.

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

Sizes follow the convention of ``CostModel.collective``: the larger of the input and output buffers on one device. They
are the sizes in the compiled program, which may differ from the source program. The CPU backend widens 16-bit floats
to f32 before it sends them (``dtypes`` shows it). It also replaces an annotated reduce-scatter by an all-reduce and a
slice. On that backend, compare predictions with float32 programs.
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

    bytes: size of the larger local buffer on one device for one execution: the output of an all_gather, the input of a
    reduce_scatter, and the local tensor of any other kind. Variadic collectives sum over their operands.
    count: number of executions per step. The trip counts of all enclosing loops are multiplied.
    """

    kind: HloKind
    bytes: int
    parts: tuple[int, ...]
    """``bytes`` per operand. The compiler may combine several small collectives into one with several operands."""
    group_size: int
    groups: Groups
    """Device groups that communicate. For a permute: the sets of devices connected by its pairs."""
    count: int
    count_known: bool
    """False if an enclosing loop's trip count is unknown; ``count`` then assumes one iteration of that loop."""
    name: str
    computation: str
    operands: tuple[str, ...]
    dtypes: tuple[str, ...]
    """HLO names of the element types sent, such as ("f32",)."""
    pairs: Groups
    """(source, target) pairs of a permute; empty for other kinds."""
    axes: int | None
    """Bit set of mesh axes (bit i = axis i). None if no mesh was given or no set of its axes gives these groups."""
    op_name: str
    """The framework's name of the source op ("jit(f)/dot_general"), or ""."""


def collectives(compiled: str | XlaProgram, mesh: Mesh | None = None) -> list[HloCollective]:
    """Returns the collectives of a compiled program, in the order of its text.

    compiled: the compiled object, or the text that its ``as_text()`` returns.
    mesh: if given, ``axes`` of each collective is set. Device ids must be row-major positions in the mesh, as in JAX.

    Of the branches of a conditional, only the one that sends the most bytes is counted. Raises PaseError if the text is
    not compiled HLO.
    """
    found = [c for module in modules(compiled) for c in _of_module(module)]
    if mesh is None:
        return found
    return [
        replace(c, axes=axes_of_pairs(c.pairs, mesh) if c.pairs else axes_of_groups(c.groups, mesh))
        for c in found
    ]


def summary(found: Iterable[HloCollective]) -> dict[HloKind, tuple[int, int]]:
    """Returns (number of executions, total bytes) per kind. Groups of one device send nothing and are left out."""
    total: dict[HloKind, tuple[int, int]] = {}
    for c in found:
        if c.group_size > 1:
            count, nbytes = total.get(c.kind, (0, 0))
            total[c.kind] = (count + c.count, nbytes + c.count * c.bytes)
    return total


def kind_of(i: Instruction) -> HloKind | None:
    """Returns the kind of collective that an instruction performs or starts; None for any other instruction."""
    return _KINDS.get(i.opcode.removesuffix("-start"))


def sent(computation: Computation, i: Instruction) -> list[Shape]:
    """Returns a collective's larger local buffers, one per operand: outputs of an all-gather, else inputs."""
    if kind_of(i) == "all_gather":
        made = i.shape.parts[1] if i.opcode.endswith("-start") else i.shape
        return list(made.arrays())
    # Only the first operand is data: an in-place permute also takes its output buffer and offsets, and the ragged form
    # takes sizes and offsets.
    one = i.in_place or i.opcode.startswith("ragged")
    return [o.shape for o in computation.operands(i)[: 1 if one else None]]


def _of_module(module: Module) -> list[HloCollective]:
    merged: dict[tuple[str, str], HloCollective] = {}
    for c in _walk(module, module.entry):
        key = (c.computation, c.name)
        # A computation may have several callers.
        merged[key] = replace(merged[key], count=merged[key].count + c.count) if key in merged else c
    return list(merged.values())


def _walk(module: Module, computation: Computation) -> list[HloCollective]:
    """Returns the collectives of one execution of a computation and of everything it calls."""
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
    """Whether this instruction continues a collective that another fusion started.

    XLA for TPU fuses a collective with the matrix products that overlap with it. The same collective then appears in
    the fusion that starts it, in each fusion that overlaps with it, and in the fusion that ends it.
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
        for callee, more in zip(module.called(loop), (0, 1), strict=True)  # the condition runs once more
        for c in _walk(module, callee)
    ]


def _collective(module: Module, computation: Computation, i: Instruction, kind: HloKind) -> HloCollective:
    groups = joined(i.pairs) if kind == "permute" else i.groups or (tuple(range(module.devices)),)
    # XLA for TPU writes a reduce-scatter as a fusion of this name that contains an all-reduce and a slice.
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
        pairs=i.pairs,
        axes=None,
        op_name=i.op_name,
    )
