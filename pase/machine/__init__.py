"""Machines as data files, meshes over their devices, and the cost-model protocol."""

from pase.machine.types import COLLECTIVES, CollectiveKind, CostModel, Device, LinkLevel, Machine, Mesh

__all__ = ["COLLECTIVES", "CollectiveKind", "CostModel", "Device", "LinkLevel", "Machine", "Mesh"]
