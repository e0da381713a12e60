"""Machines, meshes, and the protocol that every cost model implements."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike

from pase.errors import PaseError
from pase.files.codec import AtLeastOne, Count, NotNegative, Positive, Share
from pase.ir.precision import HIGHEST, STATED

__all__ = [
    "BUCKET_BYTES",
    "COLLECTIVES",
    "FIRST_BUCKET_BYTES",
    "Algorithm",
    "AttentionKernel",
    "CollectiveCurve",
    "CollectiveKind",
    "CompileTarget",
    "CostModel",
    "Curve",
    "Device",
    "Host",
    "LinkLevel",
    "Machine",
    "MatmulTable",
    "Mesh",
    "PaperFigures",
    "ProductKernels",
    "Tile",
]

Moved = TypeVar("Moved", float, np.ndarray)
BUCKET_BYTES = float(25 << 20)
FIRST_BUCKET_BYTES = float(1 << 20)
"""The first bucket is small, so that sending starts early. As in PyTorch's DistributedDataParallel."""
_TERMS = 3
"""Products of TF32 that give a product of float32 with all bits, but for the last few."""
_NEWER_OF_ALGORITHMS = {"most_bytes_per_s", "most_between_bytes_per_s", "least_ways", "named", "once"}
"""Fields that are newer than the digests in layouts."""

CollectiveKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast"]
COLLECTIVES: tuple[CollectiveKind, ...] = (
    "reduce_scatter",
    "all_to_all",
    "permute",
    "all_reduce",
    "all_gather",
    "broadcast",
)


@dataclass(frozen=True, kw_only=True)
class MatmulTable:
    """Measured matmul rates of one dtype on a grid of local extents.

    m, n, k: strictly increasing extents.
    flops_per_s: row-major over (m, n, k); a multiply-add counts as two.
    """

    dtype: str
    m: tuple[AtLeastOne, ...]
    n: tuple[AtLeastOne, ...]
    k: tuple[AtLeastOne, ...]
    flops_per_s: tuple[NotNegative, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured seconds by bytes: at least two points, with increasing bytes and weakly increasing seconds."""

    nbytes: tuple[NotNegative, ...]
    seconds: tuple[NotNegative, ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveCurve:
    """A measured collective. ways: the number of devices that it joins at each link level, innermost first.

    nbytes has the same meaning as in ``CostModel.collective``.
    """

    kind: CollectiveKind
    ways: tuple[AtLeastOne, ...]
    curve: Curve


@dataclass(frozen=True, kw_only=True)
class Tile:
    """An output tile of a matmul kernel: one compute unit computes m x n of the output, k at a time.

    Ragged extents are padded to whole tiles.

    rate: the fraction of the device's matmul efficiency that the tile reaches while it is busy.
    overhead_s: the time until it is busy and while its output is written, if no other tile runs on the unit meanwhile.
    """

    m: AtLeastOne
    n: AtLeastOne
    rate: Share
    k: AtLeastOne = 1
    overhead_s: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class ProductKernels:
    """How the product kernels of a GPU's library run (``costmodels/products.py``).

    rate: by dtype, the fraction of the peak that a compute unit reaches while it multiplies. The slowest listed rate is
        used for a dtype that is not listed.
    unaligned: by dtype, the same if rows in memory are no multiple of 16 bytes; a dtype that is not listed has
        ``rate``.
    steady: the fraction of ``rate`` that is left where product follows product, at the card's power limit.
    start_s: the time until a kernel is busy, its launch included.
    output_bytes_per_s: the rate at which a unit writes its part of the result, and multiplies nothing meanwhile.
    operand_bytes_per_s: the rate at which a unit receives its operands' parts, of which smaller tiles need more bytes;
        None if it never limits a unit.
    split_s: the additional time of a product whose contraction is divided among several units.
    memory: the fraction of the memory bandwidth that products reach.
    """

    rate: Annotated[dict[str, Share], Meta(min_length=1)]
    start_s: NotNegative
    output_bytes_per_s: Positive
    split_s: NotNegative
    memory: Share
    operand_bytes_per_s: Positive | None = None
    steady: Share = 1.0
    unaligned: dict[str, Share] = field(default_factory=dict)

    def rate_of(self, dtype: str) -> float:
        """The fraction of the peak in a dtype, before the card throttles."""
        return self.rate.get(dtype) or min(self.rate.values())

    def slowdown(self, dtype: str) -> float:
        """The factor by which the arithmetic takes longer if rows are no multiple of 16 bytes."""
        return max(self.rate_of(dtype) / self.unaligned.get(dtype, self.rate_of(dtype)), 1.0)


@dataclass(frozen=True, kw_only=True)
class AttentionCurve:
    """A fused attention kernel (``costmodels/attention.py``).

    efficiency: the fraction of the peak that a compute unit reaches with heads of 128 while it multiplies, by the
        number of keys; constant beyond its ends.
    wave_s: the time in which a unit begins and ends its squares, and multiplies nothing.
    softmax: the time of the exponentials beside that of the products at heads of 128. Other heads have other products
        and the same exponentials.
    """

    keys: tuple[AtLeastOne, ...]
    efficiency: tuple[NotNegative, ...]
    wave_s: NotNegative = 0.0
    softmax: NotNegative = 0.0

    def at(self, keys: np.ndarray) -> np.ndarray:
        """Interpolates over the logarithm of the number of keys.

        >>> AttentionCurve(keys=(1024, 4096), efficiency=(0.5, 0.6)).at(np.array([512.0, 2048.0])).tolist()
        [0.5, 0.55]
        """
        return np.interp(np.log2(keys), np.log2(self.keys), self.efficiency)


@dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """The fraction of the peak that a named attention kernel reaches, forward and backward, by the number of keys.

    Backward has 2.5 times the FLOPs of forward; an inference library's kernel has none, and then ``backward`` is empty.
    A program's attention is priced by its own kernel if the machine has it (``pase.stated``), and otherwise by
    ``Device.attention``. wave_s, softmax: as in ``AttentionCurve``.
    """

    name: str
    keys: tuple[AtLeastOne, ...]
    forward: tuple[NotNegative, ...]
    backward: tuple[NotNegative, ...] = ()
    wave_s: NotNegative = 0.0
    softmax: NotNegative = 0.0

    def curve(self, *, backward: bool) -> AttentionCurve:
        """One direction. Raises PaseError if the kernel has no backward."""
        efficiency = self.backward if backward else self.forward
        if not efficiency:
            raise PaseError(
                f"the attention kernel '{self.name}' has no backward", fix="name a kernel that trains"
            )
        return AttentionCurve(keys=self.keys, efficiency=efficiency, wave_s=self.wave_s, softmax=self.softmax)

    def at(self, keys: np.ndarray, *, backward: bool) -> np.ndarray:
        """Interpolates as ``AttentionCurve`` does."""
        return self.curve(backward=backward).at(keys)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator.

    peak_flops: dtype name -> FLOP/s (a multiply-add counts as two). "float32" is the rate of products whose program
        states no precision (TF32, or one pass of bfloat16); "float32_highest" that of products that keep all bits of
        their factors, "float32_high" of those in three passes of bfloat16.
    efficiency: the fraction of the peak that large work reaches, by kind: "matmul", "conv" (of peak_flops) and "memory"
        (of the memory bandwidth); 1 if absent. "matmul.float8_e4m3fn" is for one dtype only. "window" is the fraction
        of vector_flops that sliding windows (pools) reach; if it is absent, they are priced like other light ops.
        "cast" is the fraction of the memory bandwidth that casts to eight and four bits reach; if it is absent, it is
        that of "memory".
    vector_flops: FLOP/s outside the matrix units. None means as slow as the slowest matmul dtype.
    compute_units, tiles: matmul kernels fill the units tile by tile (tile and wave quantization). 0 and empty mean that
        there is no such effect.
    products: how the library's product kernels run. It replaces ``tiles``, and the efficiency of "matmul".
    attention: the rates of a fused attention kernel. None means that attention is priced as its two products.
    attention_kernels: the kernels that programs may name.
    matmul_tables, memory_curve: measurements, which replace efficiency, tiles and launch.
    memory_tile: the rows and columns of the tiles in which arrays are stored, padded to whole tiles. Empty means that
        there is no padding.
    reserved_bytes: the part of memory_bytes that arrays cannot use: context, buffers of libraries, gaps.
    workspace_bytes: the scratch memory that the library of matrix products takes in a compiled program.
    power_w: the most that the device draws, in watts; None if it is not known.
    host_bytes_per_s: the bytes per second between the device's memory and the host's, in the slower direction; None if
        they are not known.
    """

    name: str
    peak_flops: Annotated[dict[str, Positive], Meta(min_length=1)]
    memory_bytes: AtLeastOne
    memory_bandwidth_bytes_per_s: Positive
    efficiency: dict[str, Positive] = field(default_factory=dict)
    vector_flops: Positive | None = None
    launch_s: NotNegative = 0.0
    compute_units: Count = 0
    tiles: tuple[Tile, ...] = ()
    products: ProductKernels | None = None
    matmul_tables: tuple[MatmulTable, ...] = ()
    memory_curve: Curve | None = None
    attention: AttentionCurve | None = None
    memory_tile: tuple[AtLeastOne, ...] = ()
    attention_kernels: tuple[AttentionKernel, ...] = ()
    reserved_bytes: Count = 0
    workspace_bytes: Count = 0
    power_w: Positive | None = None
    host_bytes_per_s: Positive | None = None

    @property
    def usable_bytes(self) -> int:
        """The bytes that a plan may use on the device."""
        return max(self.memory_bytes - self.reserved_bytes, 0)

    def reached(self, kind: str, dtype: str) -> float:
        """The fraction of the peak that large work of a kind reaches in a dtype, in a step that takes seconds."""
        if kind == "matmul" and self.products is not None:
            return self.products.rate_of(dtype) * self.left_at_limit(dtype)
        return self.efficiency.get(f"{kind}.{dtype}", self.efficiency.get(kind, 1.0))

    def left_at_limit(self, dtype: str) -> float:
        """The fraction of a product's rate that is left where product follows product (``ProductKernels.steady``)."""
        return (
            1.0 if self.products is None or self.multiplies_on_vector_units(dtype) else self.products.steady
        )

    def multiplies_on_vector_units(self, dtype: str) -> bool:
        """Whether products run outside of the matrix units: those that keep all bits of float32, if their peak is no
        higher than that of the vector units."""
        return dtype == HIGHEST and self.peak(dtype) <= (self.vector_flops or 0.0)

    @property
    def moved_bytes_per_s(self) -> float:
        """The bytes per second that large copies in the device's memory reach."""
        return self.memory_bandwidth_bytes_per_s * self.efficiency.get("memory", 1.0)

    @property
    def cast_bytes_per_s(self) -> float:
        """The bytes per second of casts to eight and four bits."""
        return self.memory_bandwidth_bytes_per_s * self.efficiency.get(
            "cast", self.efficiency.get("memory", 1.0)
        )

    def cast_s(self, nbytes: Moved) -> Moved:
        """The seconds of a kernel that moves these bytes to bring an operand to eight or four bits."""
        return nbytes / self.cast_bytes_per_s + self.launch_s

    def peak(self, dtype: str) -> float:
        """FLOP/s for a dtype. A dtype that is not listed runs at the slowest listed rate, so it is never free."""
        listed = self.peak_flops.get(self.rated(dtype))
        return listed or min(v for k, v in self.peak_flops.items() if k not in STATED)

    def peak_of(self, kind: str, dtype: str) -> float:
        """FLOP/s for work of a kind. Fused attention of float32 that keeps all bits is three products of TF32 for each
        of its products (the high parts of both factors, and each high part with the other's low part), where these are
        faster than the vector units."""
        peak = self.peak(dtype)
        if kind == "attention" and self.attention is not None and dtype == HIGHEST:
            return max(peak, self.peak("float32") / _TERMS)
        return peak

    def rated(self, dtype: str) -> str:
        """The dtype whose rates and measurements price a product in this one.

        That is the dtype itself, but float32 if it is float32 with a stated precision and not listed.
        """
        return "float32" if dtype in STATED and dtype not in self.peak_flops else dtype


@dataclass(frozen=True, kw_only=True)
class LinkLevel:
    """One level of the interconnect, which joins ``ways`` units of the level below.

    bandwidth_bytes_per_s: per device and direction when all devices communicate.
    efficiency: the fraction of the bandwidth that collectives reach.
    ways: the number of units. The last level has 0, which means any number.
    topology: "switch": every pair communicates at full speed. "torus": a line of neighbours, which closes to a ring
        (both directions usable, so twice the bandwidth) if ``wrap_ways`` units are in use (0: never).
    bandwidth_at_ways: if links join only some pairs: number of devices in a group -> the bandwidth that it gets
        instead.
    """

    name: str
    latency_s: NotNegative
    bandwidth_bytes_per_s: Positive
    ways: Count = 0
    efficiency: Share = 1.0
    topology: Literal["switch", "torus"] = "switch"
    wrap_ways: Count = 0
    bandwidth_at_ways: dict[Annotated[int, Meta(ge=2)], Positive] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """How the machine's library can run a collective. For each size, the cheapest algorithm is taken.

    algorithm: "ring", "tree" (all_reduce), "one_shot" (all data to all peers at once: all_reduce, reduce_scatter,
        all_gather), "direct" (all_to_all, permute), "in_network" (all_reduce: the innermost switch itself adds
        and sends back, NVLink SHARP, and switches form a tree; it requires a step_s above 0 at every level that a group
        crosses).
    protocol: the library's name for the variant, e.g. "LL128".
    launch_s: seconds per call.
    step_s: seconds per step, by link level.
    bandwidth_fraction: the fraction of the level's bandwidth that it reaches.
    most_bytes_per_s: what a device sends at most, however fast its links are: a protocol that tests each line for a
        flag is bound by the units that it runs on. 0: no such bound.
    most_between_bytes_per_s: the same between units of the innermost level: a library sends to a peer in another node
        on few channels, each of which one unit serves. 0: no such bound of its own.
    least_ways: the fewest devices for which the library takes it.
    kinds: the collectives that it runs; empty means all for which the algorithm is possible.
    peers_at_once: the number of messages that "direct" keeps in flight.
    chain_levels: the number of innermost levels on which a "tree" is a chain (NCCL: 1, within the node).
    named: whether only programs that name the protocol use it: it is another library's (``Program.exchange``).
    once: whether an all_to_all sends an item once to each unit of a level (a device, a node) that holds one of those
        that the item is for, and the unit hands it on.
    """

    algorithm: Literal["ring", "tree", "one_shot", "direct", "in_network"]
    protocol: str
    launch_s: NotNegative
    step_s: tuple[NotNegative, ...]
    bandwidth_fraction: Share = 1.0
    most_bytes_per_s: NotNegative = 0.0
    most_between_bytes_per_s: NotNegative = 0.0
    least_ways: AtLeastOne = 1
    kinds: tuple[CollectiveKind, ...] = ()
    peers_at_once: AtLeastOne = 1
    chain_levels: Count = 0
    named: bool = False
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class PaperFigures:
    """What PaSE's cost model knows about a machine: two figures and the size of a word."""

    flops: Positive
    bandwidth_bytes_per_s: Positive
    word_bytes: AtLeastOne

    @property
    def flop_per_byte(self) -> float:
        return self.flops / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's time per launch, in seconds, while the host runs ahead of its devices.

    program_s: for a compiled program.
    op_s: for one op, in a framework that runs op by op.
    """

    program_s: Positive
    op_s: Positive


@dataclass(frozen=True, kw_only=True)
class CompiledForm:
    """How the machine's compiler changes a collective that a program calls as one collective over all its axes.

    kind: the collective in the program.
    becomes: the collective that runs instead, on the larger local buffer.

    The change applies if all of these hold:
    levels: the collective crosses at least this many link levels.
    more_than: it joins more devices than this.
    below_bytes: its larger local buffer is smaller than this; 0 means any size.
    square: if true, it joins all devices, with equally many at each link level that it crosses.
    """

    kind: CollectiveKind
    becomes: CollectiveKind
    levels: AtLeastOne = 1
    more_than: Count = 0
    below_bytes: Count = 0
    square: bool = False


@dataclass(frozen=True, kw_only=True)
class CompileTarget:
    """What XLA must be told to compile for the device on a machine without one (``pase verify``).

    platform: the compiler. The machine's other fields tell it the units, the memory and its bandwidth.
    topology: libtpu's name of the TPU, as in "v5e".
    clock_hz: the clock at which the compiler estimates cycles.
    compute_capability: of a CUDA device, major and minor.
    cache_bytes: its L2 cache. unit_lanes: float32 lanes of a compute unit.
    unit_shared_bytes, block_shared_bytes: shared memory of a compute unit, and the most that a thread block may take.
    """

    platform: Literal["cuda", "tpu", "cpu"]
    topology: str = ""
    clock_hz: NotNegative = 0.0
    compute_capability: tuple[Count, ...] = ()
    cache_bytes: Count = 0
    unit_lanes: Count = 0
    unit_shared_bytes: Count = 0
    block_shared_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices that are joined by link levels, innermost first.

    sources: path of a number, or of a table above it (e.g. "device.peak_flops") -> where the number is from.
    algorithms: the library's algorithms. Empty means ring, binary tree, one_shot and direct, at each level's latency.
    shapes: number of devices -> ways at each level, if the hardware fixes them (slices of a TPU pod).
    collectives: measurements, which replace the algorithms.
    provenance: how the measurements were made.
    paper: figures for the ``paper`` cost model. None means that they are derived from the device and outermost link.
    bucket_bytes: collectives of parameters are sent in buckets of about this size (PyTorch DDP's default cap; XLA
        combines to 30 MiB). A small one pays its share of a bucket's time. 0 means that each is sent separately.
    sums_readers: whether the compiler adds up the partial gradients of a tensor's readers before it reduces them. XLA's
        CPU pipeline reduces each of them.
    fuses_products: whether the compiler fuses light ops into neighbouring products and recomputes exponentials there
        (XLA for TPU). Memory is then modelled by ``pase.memory.course``, otherwise by ``pase.memory.account``.
    host: the measured machine's host; None if it was not measured.
    collective_units: the compute units that a collective's kernels occupy while they overlap with compute, which slows
        the compute.
    overlaps: whether collectives of parameters overlap with compute (``overlap="machine"``).
    sums_alone: whether the compiler overlaps reductions of gradients with nothing, so that only all-gathers overlap.
    own_part_bytes_per_s: the rate at which a device copies its own part of a collective to the result, in the kernel
        that also sends; 0 if this costs nothing.
    lone_gather_bytes: below this size, the compiler neither joins a parameter's all-gather with others nor overlaps it
        with compute.
    forms: collectives that the compiler does not run as they are written. Steps of the manual lowering are written
        accordingly (``pase.local.forms``).
    compiler: how to compile for the device without one; None if that is not possible.
    failures_per_device_hour: how often a device, or its part of the host and the network, stops a training run; None if
        it is not known.
    """

    name: str
    device: Device
    levels: Annotated[tuple[LinkLevel, ...], Meta(min_length=1)]
    sources: dict[str, str]
    title: str = ""
    algorithms: tuple[Algorithm, ...] = ()
    shapes: dict[AtLeastOne, tuple[AtLeastOne, ...]] = field(default_factory=dict)
    collectives: tuple[CollectiveCurve, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
    paper: PaperFigures | None = None
    bucket_bytes: NotNegative = BUCKET_BYTES
    sums_readers: bool = True
    fuses_products: bool = False
    host: Host | None = None
    collective_units: Count = 0
    overlaps: bool = False
    sums_alone: bool = False
    lone_gather_bytes: Count = 0
    own_part_bytes_per_s: NotNegative = 0.0
    forms: tuple[CompiledForm, ...] = ()
    compiler: CompileTarget | None = None
    failures_per_device_hour: Positive | None = None

    def __hash__(self) -> int:
        return hash(self.digest)

    def as_compiled(
        self, kind: CollectiveKind, ways: Sequence[int], devices: int, nbytes: int
    ) -> CollectiveKind:
        """The collective that runs if a program on this many devices calls one of this kind over all its axes.

        ways: the number of devices that it joins, at each link level.
        """
        crossed, joined = [w for w in ways if w > 1], math.prod(ways)
        square = joined == devices and len(crossed) > 1 and len(set(crossed)) == 1
        for f in self.forms:
            wide = len(crossed) >= f.levels and joined > f.more_than and (square or not f.square)
            if f.kind == kind and wide and (not f.below_bytes or nbytes < f.below_bytes):
                return f.becomes
        return kind

    def for_calls(self) -> Machine:
        """The machine of a program that runs call by call, as PyTorch does: it sends gradients and parameters in
        buckets, and sums the gradients of a tensor's readers, whatever the machine's compiler does. The digest stays,
        because a plan names that of the file."""
        made = dataclasses.replace(self, bucket_bytes=self.bucket_bytes or BUCKET_BYTES, sums_readers=True)
        made.__dict__["digest"] = self.digest
        return made

    @cached_property
    def digest(self) -> str:
        """The sha256 of what affects the costs of a plan's step: not names, sources, provenance, overlaps, forms,
        compiler, power, failures and the link to the host, over which no plan sends anything."""
        content = dataclasses.asdict(self)
        # overlaps determines which price a plan is made for, not what anything costs; the plan records the price.
        for key in ("name", "title", "sources", "provenance", "overlaps", "forms", "compiler"):
            del content[key]
        del content["failures_per_device_hour"]
        del content["device"]["power_w"], content["device"]["host_bytes_per_s"]
        # These fields are newer than the digests in layouts. At their defaults, the digests stay the same.
        newer = {"bucket_bytes", "sums_readers", "collective_units", "sums_alone", "lone_gather_bytes"}
        newer |= {"own_part_bytes_per_s"}
        for f in dataclasses.fields(self):
            if f.name in newer and content[f.name] == f.default:
                del content[f.name]
        for key in ("attention", "attention_kernels", "products"):
            if not content["device"][key]:
                del content["device"][key]
        for algorithm in content["algorithms"]:
            for f in dataclasses.fields(Algorithm):
                if f.name in _NEWER_OF_ALGORITHMS and algorithm[f.name] == f.default:
                    del algorithm[f.name]
        for curve in (content["device"].get("attention"), *content["device"].get("attention_kernels", ())):
            for key in ("wave_s", "softmax"):
                if curve is not None and not curve[key]:
                    del curve[key]
        # These determine what fits, not what anything costs.
        del content["device"]["reserved_bytes"], content["device"]["workspace_bytes"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A mesh of named axes. Devices are numbered row-major, so the last axis is the innermost.

    >>> m = Mesh(names=("data", "model"), sizes=(4, 8))
    >>> m.devices, m.strides
    (32, (8, 1))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError(
                f"a mesh needs one distinct name per axis, got names {self.names} sizes {self.sizes}"
            )
        if any(s < 1 for s in self.sizes):
            raise ValueError(f"mesh axis sizes must be positive, got {self.sizes}")

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def by_name(self) -> dict[str, int]:
        """Axis -> its size, in the mesh's order."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes)))

    def bits(self, axes: Collection[str]) -> int:
        """The bit set of these axes (bit i = axis i)."""
        return sum(1 << i for i, name in enumerate(self.names) if name in axes)

    def ways(self, axes: int) -> int:
        """The number of devices that a collective over the axes in this bit set (bit i = axis i) joins."""
        return math.prod(s for i, s in enumerate(self.sizes) if axes >> i & 1)


@runtime_checkable
class CostModel(Protocol):
    """Prices local work and collectives. Arguments and results are arrays, so one call prices many configs."""

    name: str
    unit: str
    """"s", or "FLOP" for the paper's model."""
    machine: Machine
    """The machine that is priced. Its buckets, memory tiles and compiler's sums determine which costs occur."""

    def compute(
        self,
        kind: str,
        dtype: str,
        flops: ArrayLike,
        nbytes: ArrayLike,
        *,
        mnk: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> np.ndarray:
        """The cost of local work on one device. Shapes broadcast.

        kind: "matmul" | "conv" | "attention" | "memory".
        flops: a multiply-add counts as two.
        nbytes: the bytes that device memory must move.
        mnk: the local extents of a matmul (or of a conv as a matmul), without batch dims. Models that know how the rate
            falls for small or ragged extents use them; others ignore them. For attention: queries, keys, and the width
            of a head.
        """
        ...

    def collective(self, kind: CollectiveKind, mesh: Mesh, axes: ArrayLike, nbytes: ArrayLike) -> np.ndarray:
        """The cost of one collective over mesh axes. Shapes broadcast. It is 0 if axes is 0 or nbytes is 0.

        axes: integer bit sets over ``mesh.names`` (bit i = axis i).
        nbytes: the size of the larger local buffer: the local tensor for all_reduce, all_to_all, permute and broadcast;
            the input for reduce_scatter; the output for all_gather.
        """
        ...
