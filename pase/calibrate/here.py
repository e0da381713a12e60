"""Describes the devices that are measured: their link levels, a fingerprint, and the provenance of a measurement."""

from __future__ import annotations

import datetime
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.calibrate.fit import Ceilings
from pase.calibrate.types import Level
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine.jax_devices import by_hosts, chip_coords

if TYPE_CHECKING:
    from jax import Device as JaxDevice

__all__ = [
    "Here",
    "busy_s",
    "ceilings",
    "find",
    "level_layout",
    "memory_of_device",
    "others_s",
    "parse_levels",
    "start",
]

_CPU_HZ_AT_MOST = 7e9
_CPU_FLOP_A_CYCLE = 4096  # two matrix units of 1,024 multiply-adds
_CPU_MEMORY_BYTES_PER_S = 2e12  # well above one socket's memory bandwidth
_NVIDIA = "driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,power.limit,name"


@dataclass(frozen=True, kw_only=True)
class Here:
    """The devices to measure, and facts about them.

    devices: in the order in which ``levels`` numbers them, innermost level fastest.
    fingerprint: a journal can be resumed only if it has the same fingerprint.
    provenance: facts for the machine file.
    """

    devices: tuple[JaxDevice, ...]
    levels: tuple[Level, ...]
    platform: str
    device_name: str
    memory_bytes: int
    process: int
    processes: int
    fingerprint: JsonObject
    provenance: Mapping[str, str]


def start(
    *, host_devices: int | None, coordinator: str | None, processes: int | None, process_id: int | None
) -> None:
    """Configures JAX before it looks for devices: the number of CPU devices, and the processes that take part.

    Raises PaseError if the options of several processes are incomplete, or the process cannot join.
    """
    import jax

    if host_devices:
        jax.config.update("jax_num_cpu_devices", host_devices)
    given = (coordinator, processes, process_id)
    if all(x is None for x in given):
        return
    if coordinator is None or processes is None or process_id is None:
        raise PaseError(
            "an option for several processes is missing",
            where="--coordinator, --processes, --process-id",
            fix="give all of --coordinator HOST:PORT, --processes N and --process-id I",
        )
    if not 0 <= process_id < processes:
        raise PaseError(
            f"{process_id} is out of range",
            where="--process-id",
            fix=f"give a number from 0 to {processes - 1}",
        )
    # CPU devices of different processes need it to communicate; other platforms ignore it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(coordinator, processes, process_id, initialization_timeout=120)
    except RuntimeError as e:
        raise PaseError(
            f"process {process_id} of {processes} cannot join at {coordinator} ({str(e).splitlines()[0]})",
            where="--coordinator",
            fix="start all processes within two minutes, and make sure that each can reach that address",
        ) from e


def parse_levels(text: str, devices: int) -> tuple[Level, ...]:
    """Parses link levels such as "host=2,rack=2", innermost first. Their product must be the number of devices.

    >>> parse_levels("gpu=8,node=2", 16)[1]
    Level(name='node', ways=2, topology='switch')
    """
    out, product = [], 1
    for part in text.split(","):
        name, eq, ways = part.partition("=")
        if not eq or not ways.strip().isdigit() or int(ways) < 1 or not name.strip():
            raise PaseError(
                f"'{text}' is not a list of levels",
                where="--levels",
                fix="write NAME=WAYS, innermost first, as in gpu=8,node=2",
            )
        out.append(Level(name=name.strip(), ways=int(ways)))
        product *= int(ways)
    if product != devices:
        raise PaseError(
            f"'{text}' is for {product} devices, but there are {devices}",
            where="--levels",
            fix=f"give levels whose product is {devices}",
        )
    return tuple(out)


def level_layout(devices: Sequence[JaxDevice]) -> tuple[tuple[JaxDevice, ...], tuple[Level, ...]]:
    """Returns the devices in order, and their levels.

    The levels are the dims of a torus if the devices have torus coordinates, or else the devices of a process and the
    processes. Raises PaseError if processes have different numbers of devices.
    """
    coords = [c for d in devices if (c := chip_coords(d)) is not None]
    if len(coords) == len(devices) > 1 and len({d.core_on_chip for d in devices}) == 1:
        extents = [sorted({c[i] for c in coords}) for i in range(len(coords[0]))]
        used = [i for i, e in enumerate(extents) if len(e) > 1]
        count = 1
        for i in used:
            count *= len(extents[i])
        if count == len(devices):
            ordered = sorted(devices, key=lambda d: tuple(reversed(d.coords)))
            return tuple(ordered), tuple(
                Level(name="xyz"[i] if i < 3 else f"dim{i}", ways=len(extents[i]), topology="torus")
                for i in used
            )
    ordered = by_hosts(devices)
    processes = len({d.process_index for d in devices})
    inside = len(devices) // processes
    if inside * processes != len(devices):
        raise PaseError(
            "the processes have different numbers of devices", fix="give each process the same number"
        )
    levels = []
    if inside > 1 or processes == 1:
        levels.append(Level(name="device", ways=inside))
    if processes > 1:
        levels.append(Level(name="process", ways=processes))
    return tuple(ordered), tuple(levels)


def find(levels: str | None = None) -> Here:
    """Describes the devices that JAX finds.

    levels: text for ``parse_levels``, if the link levels differ from devices and processes.
    """
    import jax
    import jaxlib

    ordered, found = level_layout(jax.devices())
    if levels:
        found = parse_levels(levels, len(ordered))
    first = ordered[0]
    kind = first.device_kind if first.platform != "cpu" else _cpu_name()
    local = max(jax.local_device_count(), 1)
    memory, said = memory_of_device(jax.local_devices()[0], local)
    nvidia = _nvidia() if first.platform in ("gpu", "cuda") else {}
    fingerprint = {
        "platform": first.platform,
        "device": kind,
        "host": platform.node(),
        "devices": len(ordered),
        "processes": jax.process_count(),
        "levels": [[l.name, l.ways] for l in found],
        "operands": "sets in turn",  # journals from before operand sets were cycled must not be resumed
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "runtime": str(getattr(first.client, "platform_version", "")).strip().splitlines()[0:1],
        "driver": nvidia.get("driver_version", ""),
    }
    provenance = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "platform": first.platform,
        "device": kind,
        "devices": f"{len(ordered)} in {jax.process_count()} processes, all busy at the same time",
        "links": ", ".join(f"{l.name} x{l.ways}" for l in found),
        "framework": f"jax {jax.__version__}, jaxlib {jaxlib.__version__}",
        "host": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, {_cpu_name()}",
        "memory": said,
        **{f"nvidia-smi {k}": v for k, v in nvidia.items()},
    }
    if first.platform == "cpu":
        provenance["clocks"] = _cpu_clock()
    return Here(
        devices=ordered,
        levels=found,
        platform=first.platform,
        device_name=kind,
        memory_bytes=memory,
        process=jax.process_index(),
        processes=jax.process_count(),
        fingerprint=fingerprint,
        provenance=provenance,
    )


def memory_of_device(device: JaxDevice, local: int) -> tuple[int, str]:
    """Return the bytes that a device may hold, and what says so. local: how many devices this process has; host devices
    share the host's memory."""
    stats = device.memory_stats() if hasattr(device, "memory_stats") else None
    if stats and stats.get("bytes_limit"):
        return int(stats["bytes_limit"]), "the device's bytes_limit"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // local, f"the host's {total} bytes over its process's {local} devices"


def busy_s() -> float:
    """Returns the core-seconds that all programs have used on this host since boot, including time stolen by the
    hypervisor; NaN if the host does not report it (it is not Linux)."""
    try:
        with open("/proc/stat", encoding="ascii") as f:
            user, nice, system, _, _, irq, soft, steal, *_ = map(int, f.readline().split()[1:])
    except (OSError, ValueError):
        return math.nan
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def others_s() -> float:
    """Returns the core-seconds that all other processes have used on this host; 0 if the host does not report it."""
    busy = busy_s()
    return 0.0 if math.isnan(busy) else busy - time.process_time()


def _proc(field: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next((line.partition(":")[2].strip() for line in f if line.startswith(field)), "")
    except OSError:
        return ""


def _cpu_name() -> str:
    return _proc("model name") or platform.processor() or platform.machine()


def _cpu_clock() -> str:
    mhz = _proc("cpu MHz")
    return f"{mhz} MHz at the time of measurement" if mhz else "unknown"


def _nvidia() -> dict[str, str]:
    """Returns what nvidia-smi reports of the first GPU; empty if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={_NVIDIA}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = said.splitlines()[0].split(",") if said.strip() else []
    return {k: v.strip() for k, v in zip(_NVIDIA.split(","), values, strict=False)}


def ceilings(here: Here) -> Ceilings:
    """Returns rate limits: the datasheet's plus 20% if a machine file has the device, or generous limits of a CPU.

    Other devices get limits that no known device reaches.
    """
    from pase.machine import load
    from pase.machine.recognize import machine_named

    if here.platform == "cpu":
        cores = os.cpu_count() or 1
        return Ceilings(
            flops_per_s=cores * _CPU_HZ_AT_MOST * _CPU_FLOP_A_CYCLE,
            memory_bytes_per_s=_CPU_MEMORY_BYTES_PER_S,
            source=f"{cores} cores of any CPU",
        )
    if (name := machine_named(here.device_name)) is not None:
        device = load(name).device
        return Ceilings(
            flops_per_s=1.2 * max(device.peak_flops.values()),
            memory_bytes_per_s=1.2 * device.memory_bandwidth_bytes_per_s,
            source=f"the datasheet in {name} plus 20%",
        )
    return Ceilings()
