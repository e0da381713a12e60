"""The loop nests that all frontends lower into."""

from pase.ops.builder import GraphBuilder, Read, Write

__all__ = ["GraphBuilder", "Read", "Write"]
