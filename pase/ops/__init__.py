"""The loop nests into which all frontends lower their ops."""

from pase.ops.builder import GraphBuilder, Read, Write

__all__ = ["GraphBuilder", "Read", "Write"]
