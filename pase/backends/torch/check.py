"""``plan.torch.check``: whether the gradient of a plan's step is the slope of its own loss.

Every rank calls it. Parameters are changed in place, in the layout in which they are stored, and restored afterwards.
No rank has whole tensors, except that rank 0 runs the unsharded step as a reference, if that fits.

All ranks take the same decisions, because every number that decides something is the same on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from pase.backends.torch.check_state import CheckedModule, HeldState, gradient_of, local_of
from pase.errors import PaseError
from pase.frontends.torch.doubts import coarsest, doubts
from pase.frontends.torch.frontend import TracedTorch
from pase.plan.gradient_check import GradientCheck, GradientDifference, GradientReference
from pase.plan.gradient_lines import CheckedPlan, CheckLines, gradient_check
from pase.plan.gradient_steps import JITTER, POINTS, AlongLine, Line, uphill_factors, zero_scales

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Parameter

__all__ = ["Say", "TorchAgainst", "TorchSteps", "check_module", "rounded_differently", "wide"]

TorchAgainst = Literal["auto", "unsharded", "none"]
"""The reference for the gradients, in addition to the slope of the loss: the unsharded module, or nothing. auto: the
unsharded module if rank 0 has enough memory for it."""

Say = Callable[[str], None]


def check_module(
    run: CheckedModule,
    traced: TracedTorch,
    devices: int,
    compiler: str | None,
    reference: Callable[[TorchSteps], GradientReference | str],
    lines: CheckLines,
) -> GradientCheck:
    """Run the check, and restore all state.

    compiler: the backend of torch.compile; None: ops run one by one.
    reference: computes the reference from the steps at their first point; returns a text if there is none, which says
        why.
    """
    import torch

    if run.device.type == "meta":
        raise PaseError(
            "parameters on the meta device have no values, but the check runs the step",
            where="check",
            fix="load or initialize the parameters first",
        )
    held = HeldState(run=run)
    try:
        with torch.enable_grad():
            lines.told("the step near the given parameters")
            steps = TorchSteps(
                run=run, held=held, seed=lines.seed, coarsest=coarsest(traced, _tf32(traced, run.device))
            )
            lines.told("another program to compare with")
            found = reference(steps)
            return gradient_check(
                steps,
                found,
                doubts(traced),
                CheckedPlan(
                    model=traced.graph.name,
                    devices=devices,
                    lowering="run by PyTorch" if compiler is None else f"compiled by PyTorch ({compiler})",
                ),
                lines,
                advice="",
            )
    finally:
        held.put_back()


def _tf32(traced: TracedTorch, device: torch.device) -> bool:
    """Whether products of float32 numbers are rounded to TF32."""
    import torch

    if device.type != "cuda":
        return False
    convolutions = any("conv" in str(n.target) for n, _ in traced.scope.every())
    return torch.backends.cuda.matmul.allow_tf32 or (torch.backends.cudnn.allow_tf32 and convolutions)


class TorchSteps:
    """The steps of one parallel module along lines (``GradientSteps``). All ranks must make the same calls."""

    def __init__(self, *, run: CheckedModule, held: HeldState, seed: int, coarsest: float) -> None:
        self.run, self.held, self.count, self.coarsest = run, held, 0, coarsest
        self._mine = list(run.mine.values())
        self._given = [was for _, was in held.parameters]
        # Sums over ranks are computed here and not in a cached_property: in Python 3.11 its lock is shared by all
        # threads, and ranks may be threads.
        sizes = {i: float(p.numel()) for i, p in run.mine.items()}
        self._elements = np.maximum(self._maximum(sizes), 1)
        self._given_squares = self._squares(self._given)
        self._scales = zero_scales(self._given_squares, self._elements)
        toward = self._random([JITTER] * len(self._mine), self._given, seed + 7)
        self.start = [_perturbed(x, d, 1.0) for x, d in zip(self._given, toward, strict=True)]
        self.step(
            self._given
        )  # if state wrongly survives a step, it now belongs to other parameters than the start
        self.loss, self.gradients = self.step(self.start)
        self.jittered = math.isfinite(self.loss)
        if not self.jittered:
            self.start = self._given
            self.loss, self.gradients = self.step(self.start)
        self.gradient_norms = np.sqrt(self._squares(self.gradients))
        self.gradient_noise, noise = self._rounded()
        self.copies = self._copies(noise)

    @property
    def names(self) -> Sequence[str]:
        return self.run.names

    def along(self, line: Line) -> AlongLine:
        """The step at nine points of a line."""
        toward = self._direction(line)
        losses, slopes = [self.loss], [self._dots(self.gradients, toward)]
        for k in range(1, POINTS):
            share = k / (POINTS - 1)
            loss, gradients = self.step(
                [_perturbed(x, d, share) for x, d in zip(self.start, toward, strict=True)]
            )
            losses.append(loss)
            slopes.append(self._dots(gradients, toward))
        reach = self.gradient_norms * np.sqrt(self._squares(toward))
        if line.direction == "random":
            reach = reach / np.sqrt(self._elements)
        return AlongLine(
            losses=np.array(losses),
            slopes=np.array(slopes),
            reach=reach,
            loss_eps=self.loss_eps,
            slope_eps=self.coarsest,
        )

    def step(self, parameters: Sequence[Tensor]) -> tuple[float, list[Tensor]]:
        """The loss, which is the same on every rank, and this rank's parts of the gradients."""
        import torch

        self.count += 1
        self.place(parameters)
        self.held.before_step()
        loss = self.run.backward(*self.run.batch)
        self.loss_eps = float(torch.finfo(loss.dtype).eps)
        return self._agreed_loss(float(loss)), [gradient_of(p) for p in self._mine]

    def place(self, parameters: Sequence[Tensor]) -> None:
        """Set this rank's parts of the parameters to these values."""
        import torch

        with torch.no_grad():
            for p, x in zip(self._mine, parameters, strict=True):
                local_of(p).copy_(x)

    def _copies(self, noise: np.ndarray) -> tuple[GradientDifference, ...]:
        """The differences between gradients on ranks that hold the same part of a parameter."""
        import torch

        apart = {}
        for (i, p), g in zip(self.run.mine.items(), self.gradients, strict=True):
            apart[i] = _largest(wide(g) - wide(_first_copy(p, g)))
        furthest = self._maximum(apart)
        largest = self._maximum({i: _largest(g) for i, g in zip(self.run.mine, self.gradients, strict=True)})
        eps = self._maximum({i: float(torch.finfo(p.dtype).eps) for i, p in self.run.mine.items()})
        rows = zip(self.names, furthest, largest, noise, eps, strict=True)
        return tuple(
            GradientDifference(
                name=name,
                difference=float(d),
                largest=float(r),
                noise=float(n),
                eps=max(float(e), self.coarsest),
            )
            for name, d, r, n, e in rows
        )

    def _rounded(self) -> tuple[np.ndarray, np.ndarray]:
        """How much the gradients change if every parameter changes by one unit in its last place: (the change relative
        to the gradient's norm, the largest change of an element), per parameter."""
        toward = self._random([_eps(x) for x in self.start], self.start, 11)
        _, other = self.step([_perturbed(x, d, 1.0) for x, d in zip(self.start, toward, strict=True)])
        apart = [wide(a) - wide(b) for a, b in zip(other, self.gradients, strict=True)]
        norms = self.gradient_norms
        relative = np.divide(
            np.sqrt(self._squares(apart)), norms, out=np.full(len(norms), np.inf), where=norms > 0
        )
        return relative, self._maximum({i: _largest(x) for i, x in zip(self.run.mine, apart, strict=True)})

    def _random(self, sizes: Sequence[float], start: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Random directions in which each element changes by at most a given fraction of itself."""
        every = zip(self.run.mine.items(), start, self._given, sizes, strict=True)
        return [
            _randomly(x, was, size, float(self._scales[i]), (seed, i, *_shard(p)))
            for (i, p), x, was, size in every
        ]

    def _direction(self, line: Line) -> list[Tensor]:
        perturbed = set(line.perturbed)
        if line.direction == "random":
            sizes = [line.size if i in perturbed else 0.0 for i in self.run.mine]
            return self._random(sizes, self.start, line.seed)
        factors = uphill_factors(line.size, self._given_squares, self._elements, self.gradient_norms)
        of = [float(factors[i]) if i in perturbed else 0.0 for i in self.run.mine]
        return [_to_end(x, wide(g) * f) for x, g, f in zip(self.start, self.gradients, of, strict=True)]

    def _dots(self, gradients: Sequence[Tensor], toward: Sequence[Tensor]) -> np.ndarray:
        """Re Σ conj(g)·D. For a complex parameter, PyTorch's gradient is the direction of steepest ascent."""
        return self._summed([_dot(g, d) for g, d in zip(gradients, toward, strict=True)])

    def _squares(self, of: Sequence[Tensor]) -> np.ndarray:
        return self._summed([_dot(x, x) for x in of])

    def _summed(self, of: Sequence[Tensor]) -> np.ndarray:
        """Sums over all ranks of numbers of parameters' parts. Each part counts once, even if several ranks hold it."""
        own = zip(self.run.mine.items(), of, strict=True)
        return self._over_ranks({i: x for (i, p), x in own if _counts(p)}, "sum", 0.0)

    def _maximum(self, of: Mapping[int, Tensor | float]) -> np.ndarray:
        """The maximum over all ranks, per parameter."""
        return self._over_ranks(of, "max", -math.inf)

    def _over_ranks(
        self, of: Mapping[int, Tensor | float], how: Literal["sum", "max"], none: float
    ) -> np.ndarray:
        import torch
        import torch.distributed as dist

        x = torch.full((len(self.names),), none, dtype=torch.float64, device=self.run.device)
        for i, value in of.items():
            x[i] = value
        if how == "max":
            x = torch.where(x.isnan(), math.inf, x)
        dist.all_reduce(x, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
        dist.broadcast(x, 0)  # so that all ranks have exactly the same
        return x.cpu().numpy()

    def on_any_rank(self, here: bool) -> bool:
        import torch
        import torch.distributed as dist

        x = torch.tensor(float(here), device=self.run.device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return bool(x > 0)

    def _agreed_loss(self, loss: float) -> float:
        """The loss. Raises PaseError if it is not the same on every rank."""
        import torch
        import torch.distributed as dist

        x = loss if math.isfinite(loss) else math.inf
        both = torch.tensor([x, -x], dtype=torch.float64, device=self.run.device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        dist.broadcast(both, 0)
        high, low = float(both[0]), -float(both[1])
        if math.isfinite(high) and high - low > 32 * self.loss_eps * max(abs(high), abs(low)):
            raise PaseError(
                f"the loss of this step differs from rank to rank, from {low:.8g} to {high:.8g}",
                where="check",
                fix="report it as a bug in pase, with the plan (plan.save)",
            )
        return high


def _shard(p: Parameter) -> Iterator[int]:
    """Identifies the part of a parameter that this rank has. Ranks with the same part get the same numbers."""
    at = p.device_mesh.get_coordinate()
    return (c for c, placed in zip(at, p.placements, strict=True) if placed.is_shard())


def _counts(p: Parameter) -> bool:
    """Whether this rank is the first of the ranks that hold the same part."""
    at = p.device_mesh.get_coordinate()
    return all(c == 0 for c, placed in zip(at, p.placements, strict=True) if not placed.is_shard())


def _first_copy(p: Parameter, x: Tensor) -> Tensor:
    """The values of the same part on the first rank that holds it."""
    import torch
    import torch.distributed as dist

    first = x.clone().contiguous()
    for dim, placed in enumerate(p.placements):
        if not placed.is_shard() and p.device_mesh.size(dim) > 1:
            group = p.device_mesh.get_group(dim)
            wire = torch.view_as_real(first) if first.is_complex() else first
            dist.broadcast(wire, dist.get_global_rank(group, 0), group=group)
    return first


def wide(x: Tensor) -> Tensor:
    """The tensor in at least 32 bits."""
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def _eps(x: Tensor) -> float:
    import torch

    return float(torch.finfo(x.dtype).eps)


def _perturbed(x: Tensor, toward: Tensor, share: float) -> Tensor:
    return (wide(x) + share * wide(toward)).to(x.dtype)


def _to_end(x: Tensor, toward: Tensor) -> Tensor:
    """The direction from x to the nearest point that the dtype can represent."""
    end = (wide(x) + toward).to(x.dtype)
    return (wide(end) - wide(x)).to(x.dtype)


def _randomly(x: Tensor, given: Tensor, size: float, scale: float, seed: tuple[int, ...]) -> Tensor:
    import torch

    if size == 0:
        return torch.zeros_like(x)
    source = torch.Generator(device=x.device)
    source.manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))

    def uniform() -> Tensor:
        return torch.rand(x.shape, generator=source, device=x.device)

    far = wide(given).abs()
    far = torch.where(far > 0, far, scale) * (uniform() / 2 + 0.5) * size
    if x.is_complex():
        return _to_end(x, torch.polar(far, (2 * math.pi * uniform()).to(far.dtype)))
    return _to_end(x, torch.where(uniform() < 0.5, far, -far))


def rounded_differently(x: Tensor, seed: int, coarsest: float) -> Tensor:
    """Move each floating-point number up or down by one unit in its last place, at random. The unit is that of the
    coarsest dtype that the program computes in, if that is larger."""
    import torch

    if not (x.is_floating_point() or x.is_complex()):
        return x
    source = torch.Generator(device=x.device)
    source.manual_seed(seed)
    up = torch.rand(x.shape, generator=source, device=x.device) < 0.5
    return x * (1 + torch.where(up, 1, -1).to(x.real.dtype) * max(_eps(x), coarsest))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    import torch

    both = wide(a).conj() * wide(b)
    return (both.real if both.is_complex() else both).sum(dtype=torch.float64)


def _largest(x: Tensor) -> Tensor | float:
    return wide(x).abs().max() if x.numel() else 0.0
