"""The machine of a published run: a machine file, possibly with a few other figures of the card that the page names.

Each figure has its source next to it; none is fitted to a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pase import machine
from pase.errors import PaseError
from pase.machine import LinkLevel, Machine

__all__ = ["card"]


def _device(m: Machine, **changed: object) -> Machine:
    return replace(m, device=replace(m.device, **changed))  # type: ignore[arg-type]


def _shown(name: str, mebibytes: int) -> Machine:
    """Returns the machine with the memory that NVIDIA's driver shows for the card (nvidia-smi), which is more than the
    datasheet's decimal figure. The part that a program cannot use is the executor's reserve."""
    return _device(machine.load(name), memory_bytes=mebibytes * 2**20)


def _link(m: Machine, level: int, bytes_per_s: float) -> Machine:
    levels: list[LinkLevel] = list(m.levels)
    levels[level] = replace(levels[level], bandwidth_bytes_per_s=bytes_per_s)
    return replace(m, levels=tuple(levels))


def _meta_h100(memory_bytes: int) -> Machine:
    """Returns Meta's H100: HBM2e at 2.4 TB/s, 500 W. torchao (benchmarks/float8/float8_roofline.py and
    roofline_utils.py, 2024) measured on it: products reach 0.6 of either peak, light kernels 0.92 of the memory
    bandwidth."""
    m = machine.load("h100x8")
    assert m.device.products is not None
    rates = {dtype: 0.6 for dtype in m.device.products.rate}
    # The power limit slows attention's products down in the same way.
    part = 0.6 / m.device.reached("matmul", "bfloat16")
    kernels = tuple(
        replace(k, forward=tuple(part * e for e in k.forward), backward=tuple(part * e for e in k.backward))
        for k in m.device.attention_kernels
    )
    return _device(
        m,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=2.4e12,
        efficiency=m.device.efficiency | {"memory": 0.92},
        products=replace(m.device.products, rate=rates, steady=1.0),
        attention_kernels=kernels,
    )


def _a100_40() -> Machine:
    """NVIDIA A100 datasheet: 40 GB HBM2 at 1,555 GB/s."""
    return _device(machine.load("a100x8"), memory_bytes=40_000_000_000, memory_bandwidth_bytes_per_s=1.555e12)


def _h800() -> Machine:
    """NVLink at 400 GB/s both ways together (DeepSeek-V3, arXiv 2412.19437, section 3.1: halved against H100)."""
    return _link(machine.load("h100x8"), 0, 200e9)


def _v100_16() -> Machine:
    """AWS p3.16xlarge: 8 V100 of 16 GB and 25 Gb/s a node. 16,152 MiB by nvidia-smi there
    (vantage-sh/ec2instances.info#289)."""
    m = _shown("v100x8", 16_152)
    return _link(m, len(m.levels) - 1, 25e9 / 8 / 8)


_CARDS: dict[str, Callable[[], Machine]] = {
    "H100-80GB": lambda: _shown("h100x8", 81_559),
    "H100": lambda: _shown("h100x8", 81_559),
    "H100-96GB": lambda: _meta_h100(96 * 2**30),
    "H100-94GB": lambda: _meta_h100(94 * 2**30),
    "H200": lambda: machine.load("h200x8"),
    "H800": _h800,
    "A100-80GB": lambda: _shown("a100x8", 81_920),
    "A100": lambda: _shown("a100x8", 81_920),
    "A100-40GB": _a100_40,
    # NVIDIA A100 datasheet: the PCIe cards' memory bandwidths.
    "A100-80GB-PCIe": lambda: _device(machine.load("a100x8"), memory_bandwidth_bytes_per_s=1.935e12),
    "A100-40GB-PCIe": lambda: _device(machine.load("a100x8"), memory_bandwidth_bytes_per_s=1.555e12),
    "V100-16GB": _v100_16,
    "V100-32GB": lambda: machine.load("v100x8"),
    "TPU-v4": lambda: machine.load("tpu_v4"),
    "TPU-v5e": lambda: machine.load("tpu_v5e"),
    "TPU-v5p": lambda: machine.load("tpu_v5p"),
    "TPU-v6e": lambda: machine.load("tpu_v6e"),
    "B200": lambda: machine.load("b200x8"),
    "B300": lambda: machine.load("b300x8"),
    "GB200": lambda: machine.load("gb200_nvl72"),
    "GB300": lambda: machine.load("gb300_nvl72"),
    "MI300X": lambda: machine.load("mi300x8"),
}


def card(gpu: str) -> Machine:
    """Returns the machine of a card's name. Raises PaseError if there is no machine file for it."""
    if gpu not in _CARDS:
        raise PaseError(f"no machine file for '{gpu}'")
    return _CARDS[gpu]()
