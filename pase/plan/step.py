"""Predicts the seconds of a strategy's training step as a given program would run it.

The step consists of micro-batches, the optimizer's update, the sum of gradients, and the host's kernel launches. The
search minimizes the time of a compiled program. A framework that launches kernel by kernel takes longer, for two
reasons. First, light ops are separate kernels, so whatever passes between them and a product goes through memory.
Second, the host needs time for every kernel, which a small model does not hide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pase.ir import Access, Graph, Node, Op, Place
from pase.ir.recompute import needs
from pase.ir.types import PRODUCTS
from pase.machine import CostModel, Machine, Mesh
from pase.tables.build import habits, work_price
from pase.tables.itemize import collectives
from pase.tables.layouts import concrete_size, local_bytes
from pase.tables.work import Phase, Work, node_work

__all__ = [
    "COMPILED",
    "EAGER",
    "Executor",
    "PassTime",
    "StepTime",
    "executed_work",
    "launches",
    "on_host",
    "saved_by_kernels",
    "step_time",
]

_HEAVY = PRODUCTS | {"gather", "scatter", "window", "sequential", "opaque"}
_LIGHT = ("elementwise", "reduce")
_LIBRARY = frozenset(("layer_norm", "rms_norm", "batch_norm", "softmax", "gelu", "silu", "bias_gelu"))
_MASKED = frozenset(("dropout", "native_dropout", "bias_dropout_add"))
_NORMS = {"layer_norm": (1.6, 2.4), "rms_norm": (1.4, 2.5)}
"""PyTorch's norms, relative to the time of their traffic at 0.85 of the memory bandwidth. Backward is two kernels, each
of which reads operand and gradient (layer_norm_kernel.cu). torch.nn.LayerNorm: forward takes 1.4 to 1.6 times and
backward 2.3 to 2.8 times as long on H100, 1.6 and 2.4 times on A100, for 4,096 rows of 2,048 to 16,384
(linkedin/Liger-Kernel@ead96b61, benchmark/data/all_benchmark_data.csv). torch.nn.RMSNorm in bfloat16: 1.2 to 1.7 and
2.3 to 2.8 times on H200, 1.3 to 1.8 and 3.0 to 3.5 times on GB200, where cuDNN's kernel takes 1.1 and 1.1 to 1.4 times
(NVIDIA/cudnn-frontend@3929da2, benchmark/norms/results)."""

_ROW_READERS = {"softmax": (2, 2), "log_softmax": (2, 1)}
"""A call of PyTorch whose kernel passes over each row several times -> how many arrays of its result's size forward and
backward read again. Forward reads a row for its maximum, for its sum, and to make the result. Backward sums the
gradient (times the result, if there is no logarithm) before it reads both (aten/src/ATen/native/cuda/SoftMax.cu)."""
_ROW_BYTES = 49_152
"""The longest row, in bytes, that such a kernel finds in the cache again. Softmax in PyTorch on A100 takes the time of
one read and one write at 0.85 of the memory bandwidth for up to 8,192 columns of float32 (1.05 and 1.09), 1.3 times as
long for 10,240, 1.5 and 1.6 times for 12,288, and 1.9 times for 16,384 (NeuSight's table of softmax, A100 of 40 and
80 GB). The rows of a vocabulary do not stay in any GPU's cache, because each of its units works on some."""


@dataclass(frozen=True, kw_only=True)
class Executor:
    """How a program's ops reach the device.

    fused: whether light ops run inside the neighboring products. If not, each is a separate kernel that reads and
        writes memory, except that a function for which libraries have a kernel is one kernel, and so are PyTorch's
        calls, but those that it has written in others.
    widens: whether a product whose result is wider than its operands runs in the result's dtype in backward, as in JAX.
        Other frameworks cast the result after the product.
    splits_norms: whether norms are as many kernels as XLA for GPUs makes of them (``pase.tables.passes``).
    kernels: names of such functions that the user provides.
    masked: those among ``kernels`` that write a mask for backward to read.
    inside: a function -> the one among ``kernels`` whose kernel does its work, too.
    host_s: the host's mean seconds per kernel launch, in forward and in backward; 0 if the program is launched as a
        whole.
    collective_s: the least time of a collective between products, including its launch; 0 if it takes what the cost
        model says.
    waits: whether the host waits for the device between forward and backward, so that it runs ahead only within each of
        them.
    reruns_all: whether a rematerialized region runs again as a whole, not only the part that backward needs.
    update_bytes: bytes per parameter that the optimizer's update reads and writes, in addition to its state, gradient
        and parameter.
    overlapped: whether gradients are summed during the backward pass of the last micro-batch.
    source: the source of host_s.
    traffic: for a library's kernel, by its function's name: forward and backward time, relative to reading its operands
        and writing its results once. A kernel that is absent has 1.
    """

    name: str
    fused: bool
    widens: bool
    splits_norms: bool
    kernels: frozenset[str]
    masked: frozenset[str]
    host_s: tuple[float, float]
    collective_s: float
    waits: bool
    reruns_all: bool
    update_bytes: float
    overlapped: bool
    source: str
    traffic: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)


COMPILED = Executor(
    name="compiled",
    fused=True,
    widens=True,
    splits_norms=True,
    kernels=frozenset(),
    masked=frozenset(),
    host_s=(0.0, 0.0),
    collective_s=0.0,
    waits=False,
    reruns_all=False,
    update_bytes=0.0,
    overlapped=False,
    source="a compiled program is launched as a whole",
)
EAGER = Executor(
    name="eager",
    fused=False,
    widens=False,
    splits_norms=False,
    kernels=_LIBRARY | _MASKED,
    masked=_MASKED,
    host_s=(49e-6, 34e-6),
    collective_s=80e-6,
    waits=True,
    reruns_all=True,
    update_bytes=0.0,
    overlapped=False,
    traffic=_NORMS,
    source="host_s: PyTorch on an A100 host, profiler on, mean between launches less than 1 ms apart: forward 49 us "
    "(503 a step), backward 34 us (925) (HolisticTraceAnalysis, tests/data/trace_diff/control.json.gz, 6 steps). "
    "collective_s: 32 bytes to 64 KiB among 2 A100 of a node take 76 to 82 us in Megatron "
    "(aliyun/aicb, visualize/inputs/A100_example.csv). waits: Megatron's timers (megatron/timers.py) "
    "synchronize the device at each pass's ends. reruns_all: torch.utils.checkpoint",
)


def on_host(executor: Executor, machine: Machine) -> Executor:
    """Return the executor with the machine's measured launch time.

    The executor is returned unchanged if that time is not known or if it does not launch op by op.
    """
    if machine.host is None or executor.host_s == (0.0, 0.0):
        return executor
    s = machine.host.op_s
    return replace(executor, host_s=(s, s), source=f"host_s: {machine.sources.get('host', machine.name)}")


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass over a micro-batch: the device's work, the collectives in between, the host's launches."""

    device_s: float
    communication_s: float
    host_s: float

    @property
    def busy_s(self) -> float:
        return self.device_s + self.communication_s

    @property
    def seconds(self) -> float:
        """The longer of the device's and the host's time, because the host runs ahead of the device."""
        return max(self.busy_s, self.host_s)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    passes: forward and backward of one micro-batch.
    sync_s: the sum of gradients.
    update_s: the optimizer's update.
    """

    micro_batches: int
    passes: tuple[PassTime, PassTime]
    sync_s: float
    update_s: float
    executor: Executor

    @property
    def micro_batch_s(self) -> float:
        forward, backward = self.passes
        if self.executor.waits:
            return forward.seconds + backward.seconds
        return max(forward.busy_s + backward.busy_s, forward.host_s + backward.host_s)

    @property
    def host_bound(self) -> bool:
        """Whether the host's launches take longer than the device's work."""
        return sum(p.host_s for p in self.passes) > sum(p.busy_s for p in self.passes)

    @property
    def total_s(self) -> float:
        hidden = self.passes[1].busy_s if self.executor.overlapped else 0.0
        return self.micro_batches * self.micro_batch_s + max(self.sync_s - hidden, 0.0) + self.update_s


def step_time(
    graph: Graph,
    mesh: Mesh,
    configs: Mapping[str, np.ndarray],
    model: CostModel,
    *,
    executor: Executor = COMPILED,
    micro_batches: int = 1,
    optimizer: str = "adam",
) -> StepTime:
    """Return the time of a step of ``micro_batches`` passes over the graph's batch.

    Gradients are summed over the mesh once, after the last micro-batch. Parameters are gathered in each micro-batch.

    configs: node name -> int8 [axes].
    """
    if executor.reruns_all:
        graph = _rerun(graph)
    device, host, sent = ({"forward": 0.0, "backward": 0.0, "update": 0.0} for _ in range(3))
    launch_s = dict(zip(("forward", "backward"), executor.host_s, strict=True))
    for n in graph.nodes:
        cfg = configs[n.name][None, :]
        work = executed_work(graph, n, cfg, mesh, model, executor, optimizer)
        work += _accumulated(graph, n, cfg, mesh) if micro_batches > 1 else []
        for w in work:
            seconds = w.times * float(np.ravel(work_price(w, model))[0])
            device[w.phase] += seconds
        if n.kind == "parameter" and executor.update_bytes:
            device["update"] += _update_passes_s(graph, n, cfg, mesh, model, executor)
        for phase, count in launches(graph, n, executor).items():
            host[phase] += count * launch_s[phase]
    sync = 0.0
    stored = {a.tensor for n in graph.nodes if n.kind == "parameter" for op in n.ops for a in op.writes}
    for c in collectives(graph, mesh, configs, model):
        if c.tensor in stored and c.phase == "backward":
            sync += c.cost
        else:
            sent[c.phase] += max(c.cost, c.times * executor.collective_s)
            host[c.phase] += c.times * max(launch_s.get(c.phase, 0.0), executor.collective_s)
    forward, backward = (
        PassTime(device_s=device[p], communication_s=sent[p], host_s=host[p]) for p in ("forward", "backward")
    )
    return StepTime(
        micro_batches=micro_batches,
        passes=(forward, backward),
        sync_s=sync,
        update_s=device["update"] + sent["update"],
        executor=executor,
    )


def executed_work(
    graph: Graph, n: Node, cfg: np.ndarray, mesh: Mesh, model: CostModel, executor: Executor, optimizer: str
) -> list[Work]:
    """Return the node's local work as the executor runs it, under one config: int8 [1, axes]."""
    products = any(op.kind in _HEAVY - PRODUCTS for op in n.ops)
    apart = not (executor.fused or products or n.kind == "parameter")
    does = habits(model)
    does = replace(does, widens=does.widens and executor.widens, splits_norms=executor.splits_norms)
    work = list(node_work(graph, n, cfg, mesh, optimizer, does))
    work = [w for w in work if w.casts or not (apart and w.kind == "memory")]
    if not executor.fused:
        work += [_sum_of_gradients(graph, n, a, cfg, mesh) for a in _added_gradients(graph, n, executor)]
    return work + (list(_apart(graph, n, cfg, mesh, executor)) if apart else [])


@dataclass(frozen=True, kw_only=True)
class _FusedKernel:
    """Light ops that run as one kernel.

    name: the function for which a library has the kernel.
    reads: tensors that are made before the kernel.
    writes: tensors that are used after the kernel.
    inside: whether the ops run inside of the kernel of a product or a look-up, which is counted apart.
    """

    name: str
    ops: tuple[Op, ...]
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    inside: bool

    @property
    def backward(self) -> bool:
        """Whether it runs in backward."""
        return self.ops[0].backward

    def passes_back(self, graph: Graph) -> bool:
        """Whether its gradient is that of its result, as for a sum, or the sum of that over some dims.

        What is not PyTorch's, whose calls are known, passes it on only if no operand is repeated in the result.
        """
        whole = {graph.tensors[a.tensor].elements for a in (*self.reads, *self.writes)}
        return (_calls(graph) or len(whole) == 1) and all(op.function.hands_on for op in self.ops)

    def summed_back(self, graph: Graph) -> list[Access]:
        """The operands of a sum whose gradient is a sum of the result's, because they are repeated in it."""
        (size,) = {graph.tensors[a.tensor].elements for a in self.ops[-1].writes}
        wanted = [graph.tensors[a.tensor] for a in self.reads]
        return [a for a, t in zip(self.reads, wanted, strict=True) if t.needs_grad and t.elements != size]

    @property
    def reads_masks_only(self) -> bool:
        """Whether backward needs no operands other than conditions."""
        return all(op.function.needs in ("nothing", "choice") for op in self.ops)


def _kernels(graph: Graph, node: Node, executor: Executor) -> Iterator[_FusedKernel]:
    """Yield the node's light ops, grouped as the executor runs them."""
    groups: list[tuple[str, _KernelKey | None, list[Op]]] = []
    for op in node.ops:
        if op.kind not in (*_LIGHT, "view"):
            continue
        name, by = _run_by(graph, op, executor)
        if groups and by is not None and groups[-1][1] == by:
            groups[-1][2].append(op)
        elif op.kind != "view":
            groups.append((name, by, [op]))
    used = {a.tensor: op for op in node.ops for a in op.reads}
    for name, by, ops in groups:
        made = {a.tensor for op in ops for a in op.writes}
        after = {a.tensor for op in node.ops if op not in ops for a in op.reads}
        reads = {
            a.tensor: a for op in ops for a in op.reads if a.tensor not in made and a.tensor in graph.producer
        }
        if name in executor.masked:
            reads |= {a.tensor: a for op in ops for a in op.reads if graph.tensors[a.tensor].dtype == "bool"}
        writes = [
            a
            for op in ops
            for a in op.writes
            if a.tensor in after or graph.read_outside(node, a.tensor) or a.tensor not in used
        ]
        inside = by is not None and any(_is_part(graph, op, by) for op in ops)
        yield _FusedKernel(
            name=name, ops=tuple(ops), reads=tuple(reads.values()), writes=tuple(writes), inside=inside
        )


_KernelKey = tuple[Place | str, str]
"""What the ops of one kernel have in common: the call, or the function around their lines, and its name."""


def _is_part(graph: Graph, op: Op, by: _KernelKey) -> bool:
    """Whether a call of PyTorch runs a light op in the kernel of a product or a look-up that it reads: the bias of a
    linear layer, or what a loss makes of the labels' scores. A convolution's bias is a kernel of its own (cuDNN)."""
    if not _calls(graph):
        return False
    before = (
        o
        for a in op.reads
        if a.tensor in graph.producer
        for o in graph.producer[a.tensor].ops
        if o.kind in _HEAVY - {"conv"} and any(w.tensor == a.tensor for w in o.writes)
    )
    return any((o.eqn, o.source.call) == by for o in before)


def _calls(graph: Graph) -> bool:
    """Whether it is known which ops are one call of the program, and so one kernel."""
    return graph.facts.frontend == "torch"


def _run_by(graph: Graph, op: Op, executor: Executor) -> tuple[str, _KernelKey | None]:
    """Return (the name of the library's kernel that runs a light op, what its other ops have in common with it).

    The name is "" for a kernel without one, and what it has in common None if it runs no other op. PyTorch's frontend
    knows which calls are one kernel. In other graphs, the name of the function around the line tells.
    """
    if _calls(graph):
        call = op.source.call
        return (call if call in executor.kernels else ""), ((op.eqn, call) if call else None)
    name = executor.inside.get(op.source.name, op.source.name)
    return (name, (name, name)) if name in executor.kernels else ("", None)


def _added_gradients(graph: Graph, node: Node, executor: Executor) -> Iterator[Access]:
    """Yield the node's results once for each call of PyTorch but the first that reads them: backward adds up the
    gradients that these give."""
    for op in node.ops if _calls(graph) else ():
        for a in op.writes:
            if node.kind == "parameter" or not graph.tensors[a.tensor].needs_grad:
                continue
            readers = [graph.node[name] for name in {node.name, *graph.readers.get(a.tensor, ())}]
            found = {
                _run_by(graph, o, executor)[1] or id(o)
                for n in readers
                for o in n.ops
                if any(r.tensor == a.tensor for r in o.reads)
                if o.differentiable
                and not o.backward
                and any(graph.tensors[w.tensor].needs_grad for w in o.writes)
            }
            yield from [a] * (len(found) - 1)


def saved_by_kernels(graph: Graph, node: Node, executor: Executor) -> Iterator[Access]:
    """Yield what the executor's kernels of light ops keep for backward.

    A separate op keeps what its derivative needs. A function for which libraries have a kernel keeps the operands from
    which its backward recomputes that; but a dropout keeps its mask.
    """
    for kernel in _kernels(graph, node, executor):
        if kernel.inside or not any(graph.tensors[a.tensor].needs_grad for a in kernel.reads):
            continue
        # Random numbers have no derivative, nor has what is made of them alone.
        passes = [op for op in kernel.ops if any(graph.tensors[a.tensor].needs_grad for a in op.reads)]
        wanted = {t for op in passes for t in needs(op, graph.tensors)}
        if len(kernel.ops) == 1 or kernel.name in executor.masked:
            yield from (a for op in kernel.ops for a in (*op.reads, *op.writes) if a.tensor in wanted)
            continue
        for op in reversed(kernel.ops):
            if any(a.tensor in wanted for a in op.writes):
                wanted |= {a.tensor for a in op.reads}
        yield from (a for a in kernel.reads if a.tensor in wanted)


def launches(graph: Graph, node: Node, executor: Executor) -> dict[Phase, float]:
    """Return the number of kernels that the executor launches for a node in one pass, by phase.

    Forward launches one kernel for each product, lookup, …, and one for each kernel of light ops. Backward launches:

    - one for each operand of a product that has a gradient;
    - one for each kernel of light ops whose gradient is not passed on unchanged, and one for each parameter among its
      operands (its gradient is a sum over rows);
    - one for each operand of a sum that is repeated in the result, such as a bias;
    - one for each further kernel that reads a result, whose gradients are added up;
    - one for each parameter, which adds the gradient to those of earlier micro-batches.

    The update is one kernel for many parameters (apex's FusedAdam).
    """
    out: dict[Phase, float] = {"forward": 0.0, "backward": 0.0}
    if node.kind == "parameter":
        if graph.tensors[node.ops[0].writes[0].tensor].needs_grad:
            # A stack of layers is one parameter in the graph, but one parameter per layer in the framework.
            stack = max(
                (float(concrete_size(e.op.times, e.dst)) for e in graph.edges if e.src == node.name),
                default=1.0,
            )
            out["backward"] = stack
        return out
    times = float(concrete_size(node.times, node.name))
    out["backward"] += times * sum(1 for _ in _added_gradients(graph, node, executor))
    for op in node.ops:
        if op.kind in _HEAVY:
            out["backward" if op.backward else "forward"] += times * (2 if op.remat else 1)
            grads = [a for a in op.reads if op.differentiable and graph.tensors[a.tensor].needs_grad]
            out["backward"] += times * (len(grads) if op.kind in ("matmul", "conv") else bool(grads))
    for kernel in _kernels(graph, node, executor):
        if not kernel.inside:
            out["backward" if kernel.backward else "forward"] += times * (
                2 if any(op.remat for op in kernel.ops) else 1
            )
        if kernel.passes_back(graph):
            out["backward"] += times * len(kernel.summed_back(graph))
        elif not kernel.inside:
            grads = [a for a in kernel.reads if graph.tensors[a.tensor].needs_grad]
            sums = sum(graph.producer[a.tensor].kind == "parameter" for a in grads)
            out["backward"] += times * ((len(grads) > sums) + sums)
    return out


def _apart(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, executor: Executor) -> Iterator[Work]:
    """Yield the work of light ops as separate kernels, which read operands and write results.

    Backward also reads again what it needs.
    """
    times = float(concrete_size(node.times, node.name))

    def local(accesses: Iterable[Access]) -> float:
        return _local_bytes_of(graph, node, accesses, cfg, mesh)

    def moved(kernel: _FusedKernel, nbytes: float, phase: Phase, again: bool = False) -> Work:
        return Work(
            kind="memory",
            dtype=graph.tensors[kernel.ops[-1].writes[0].tensor].dtype,
            flops=np.zeros(1),
            nbytes=np.array([nbytes]),
            mnk=None,
            phase=phase,
            times=times * (2 if again else 1),
        )

    for kernel in _kernels(graph, node, executor):
        longer = executor.traffic.get(kernel.name, (1.0, 1.0))
        there, back_again = _read_again(graph, kernel, local)
        if not kernel.inside:
            nbytes = longer[0] * (local(kernel.reads) + local(kernel.writes)) + there
            again = any(op.remat for op in kernel.ops)
            yield moved(kernel, nbytes, "backward" if kernel.backward else "forward", again)
        if kernel.passes_back(graph):
            for a in kernel.summed_back(graph):
                yield moved(kernel, local(kernel.writes) + local([a]), "backward")
            continue
        grads = [a for a in kernel.reads if graph.tensors[a.tensor].needs_grad]
        if grads and not kernel.inside:
            masks = [a for a in kernel.reads if graph.tensors[a.tensor].dtype == "bool"]
            recompute = local(masks) if kernel.reads_masks_only else local(kernel.reads)
            back = longer[1] * (local(kernel.writes) + local(grads) + recompute) + back_again
            yield moved(kernel, back, "backward")


def _local_bytes_of(
    graph: Graph, node: Node, accesses: Iterable[Access], cfg: np.ndarray, mesh: Mesh
) -> float:
    """Return the bytes that a device has of what is read or written."""
    return sum(float(local_bytes(node, graph.tensors[a.tensor], a, cfg, mesh)[0]) for a in accesses)


def _read_again(
    graph: Graph, kernel: _FusedKernel, local: Callable[[Iterable[Access]], float]
) -> tuple[float, float]:
    """Return the bytes that forward and backward of a kernel read again, because its rows do not stay in the cache.

    local: the bytes that a device has.
    """
    arrays = _ROW_READERS.get(kernel.ops[0].source.call) if _calls(graph) else None
    sums = [op for op in kernel.ops if op.kind == "reduce"]
    if arrays is None or not sums:
        return 0.0, 0.0
    (read,), (made,) = sums[0].reads, sums[0].writes
    if set(read.map.walks[-1].dims) <= set(made.map.dims):
        return 0.0, 0.0  # not a row in memory, which another kernel reads
    row = local([read]) / local([made]) * graph.tensors[made.tensor].itemsize
    if row <= _ROW_BYTES:
        return 0.0, 0.0
    return arrays[0] * local(kernel.writes), arrays[1] * local(kernel.writes)


def _rerun(graph: Graph) -> Graph:
    """Return the graph in which every op of a rematerialized region runs again, together with its communication."""

    def again(op: Op) -> Op:
        if op.region is None:
            return op
        return replace(op, remat=True, reads=tuple(replace(a, recompute=True) for a in op.reads))

    return replace(graph, nodes=tuple(replace(n, ops=tuple(map(again, n.ops))) for n in graph.nodes))


def _update_passes_s(
    graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh, model: CostModel, executor: Executor
) -> float:
    """Return the seconds of the executor's own passes over a parameter and its gradient in the optimizer's update."""
    a = node.ops[0].writes[0]
    t = graph.tensors[a.tensor]
    if not t.needs_grad:
        return 0.0
    elements = local_bytes(node, t, a, cfg, mesh) / t.itemsize
    return float(np.ravel(model.compute("memory", t.dtype, 0.0, elements * executor.update_bytes))[0])


def _accumulated(graph: Graph, node: Node, cfg: np.ndarray, mesh: Mesh) -> Iterator[Work]:
    """Yield the work of adding a parameter's gradient to those of earlier micro-batches."""
    if node.kind != "parameter":
        return
    a = node.ops[0].writes[0]
    if graph.tensors[a.tensor].needs_grad:
        yield replace(_sum_of_gradients(graph, node, a, cfg, mesh), times=1.0)


def _sum_of_gradients(graph: Graph, node: Node, a: Access, cfg: np.ndarray, mesh: Mesh) -> Work:
    """Return the work of adding a gradient of a tensor to another one."""
    t = graph.tensors[a.tensor]
    local = local_bytes(node, t, a, cfg, mesh)
    return Work(
        kind="memory",
        dtype=t.dtype,
        flops=local / t.itemsize,
        nbytes=3 * local,
        mnk=None,
        phase="backward",
        times=float(concrete_size(node.times, node.name)),
    )
