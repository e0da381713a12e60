"""Machines as data files, meshes over their devices, and the cost-model protocol."""

from pase.machine.dump import dumps
from pase.machine.groups import GroupedMachine, MachineGroup
from pase.machine.load import DEFAULT, load, names, parse
from pase.machine.meshes import axis_levels, level_ways, mesh_from, meshes
from pase.machine.types import (
    BUCKET_BYTES,
    COLLECTIVES,
    Algorithm,
    AttentionCurve,
    AttentionKernel,
    CollectiveCurve,
    CollectiveKind,
    CompiledForm,
    CostModel,
    Curve,
    Device,
    Host,
    LinkLevel,
    Machine,
    MatmulTable,
    Mesh,
    PaperFigures,
    Tile,
)

__all__ = [
    "BUCKET_BYTES",
    "COLLECTIVES",
    "DEFAULT",
    "Algorithm",
    "AttentionCurve",
    "AttentionKernel",
    "CollectiveCurve",
    "CollectiveKind",
    "CompiledForm",
    "CostModel",
    "Curve",
    "Device",
    "GroupedMachine",
    "Host",
    "LinkLevel",
    "Machine",
    "MachineGroup",
    "MatmulTable",
    "Mesh",
    "PaperFigures",
    "Tile",
    "axis_levels",
    "dumps",
    "level_ways",
    "load",
    "mesh_from",
    "meshes",
    "names",
    "parse",
]
