"""A composed program as one line of text: its shape, its parts, its loss and the ways to run it."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ProgramPart", "Spec", "parse"]


@dataclass(frozen=True, kw_only=True)
class ProgramPart:
    """A pattern and the seed of its choices. plain: its weights are parameters, not functions of parameters."""

    pattern: str
    seed: int
    plain: bool = False

    def __str__(self) -> str:
        return f"{self.pattern}.{self.seed}{'!' if self.plain else ''}"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A program without its arrays. shape: batch, sequence, width. manners: the ways to plan and run it."""

    shape: tuple[int, int, int]
    parts: tuple[ProgramPart, ...]
    loss: ProgramPart
    manners: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns the text that ``parse`` reads.

        >>> str(parse("8,4,16 glu.3 attention.1! | mean_square.2 @ default random1@2x2/manual"))
        '8,4,16 glu.3 attention.1! | mean_square.2 @ default random1@2x2/manual'
        """
        model = " ".join([",".join(map(str, self.shape)), *map(str, self.parts), "|", str(self.loss)])
        return " ".join([model, "@", *self.manners]) if self.manners else model

    def smaller(self) -> list[Spec]:
        """Yields smaller programs: without a part, a transform of weights, or a way to run."""
        found = [replace(self, manners=(m,)) for m in self.manners] if len(self.manners) > 1 else []
        n = len(self.parts)
        if n > 2:
            found += [replace(self, parts=self.parts[: n // 2]), replace(self, parts=self.parts[n // 2 :])]
        found += [replace(self, parts=self.parts[:i] + self.parts[i + 1 :]) for i in range(n)]
        for i, part in enumerate(self.parts):
            if not part.plain:
                parts = (*self.parts[:i], replace(part, plain=True), *self.parts[i + 1 :])
                found.append(replace(self, parts=parts))
        if self.loss.pattern != "mean_square":
            found.append(replace(self, loss=ProgramPart(pattern="mean_square", seed=0, plain=True)))
        if not self.loss.plain:
            found.append(replace(self, loss=replace(self.loss, plain=True)))
        return found


def _part(text: str) -> ProgramPart:
    name, _, seed = text.removesuffix("!").rpartition(".")
    return ProgramPart(pattern=name, seed=int(seed), plain=text.endswith("!"))


def parse(text: str) -> Spec:
    """Returns the program of a line. Raises ValueError if it is not one."""
    model, _, manners = text.partition(" @ ")
    shape, *parts, bar, loss = model.split()
    if bar != "|":
        raise ValueError(f"not a program: {text!r}; expected BATCH,SEQUENCE,WIDTH PART … | LOSS @ MANNER …")
    batch, sequence, width = map(int, shape.split(","))
    return Spec(
        shape=(batch, sequence, width),
        parts=tuple(map(_part, parts)),
        loss=_part(loss),
        manners=tuple(manners.split()),
    )
