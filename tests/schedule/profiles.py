"""A PipeDream profile of three layers, as text."""

from __future__ import annotations


def _row(name: str, forward_ms: float, backward_ms: float, activation: str, parameters: float) -> str:
    return (
        f"{name} -- forward_compute_time={forward_ms:.3f}, backward_compute_time={backward_ms:.3f}, "
        f"activation_size={activation}, parameter_size={parameters:.3f}\n"
    )


PROFILE = (
    _row("node2 -- ReLU(inplace)", 1, 2, "8.0", 0)
    + _row("node1 -- Conv2d(3, 4)", 2, 3, "[8.0; 4.0]", 4e6)
    + _row("node3 -- Linear(4, 2)", 1.5, 1, "8.0", 8e6)
    + "\tnode1 -- node2\n\tnode2 -- node3\n"
)
