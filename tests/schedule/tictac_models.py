"""TicTac's models (its Table 1) by their shapes in TF-slim: parameters, bytes and branches.

In TF-slim, batch norm has an offset and no scale, which the paper's counts confirm. Times are proportional to
multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pase.schedule.pipedream import Layer

# name -> (parameters, MiB): the paper's Table 1.
TABLE_1 = {
    "AlexNet v2": (16, 191.89),
    "Inception v1": (116, 25.24),
    "Inception v2": (141, 42.64),
    "Inception v3": (196, 103.54),
    "ResNet-50 v1": (108, 97.39),
    "ResNet-101 v1": (210, 169.74),
    "ResNet-50 v2": (125, 97.45),
    "ResNet-101 v2": (244, 169.86),
    "VGG-16": (32, 527.79),
    "VGG-19": (38, 548.05),
}


@dataclass
class Net:
    """Collects the layers of a model. `at` is the last layer, `c` its channels, `hw` its height and width."""

    c: int = 3
    hw: float = 224.0
    layers: list[Layer] = field(default_factory=list)
    at: tuple[int, ...] = ()

    def add(self, shapes: dict[str, int], work: float) -> None:
        name = f"l{len(self.layers)}"
        parameters = tuple((f"{name}.{k}", 4 * n) for k, n in shapes.items())
        # A training step of these models takes about a second on the paper's K80: 1e-11 s per multiply-add.
        self.layers.append(
            Layer(
                name=name,
                forward_s=work * 1e-11,
                backward_s=2e-11 * work,
                parameters=parameters,
                after=self.at,
            )
        )
        self.at = (len(self.layers) - 1,)

    def conv(
        self, c: int, kh: int, kw: int | None = None, stride: float = 1, also: tuple[str, ...] = ("beta",)
    ) -> None:
        kw = kw or kh
        self.hw /= stride
        weights = self.c * c * kh * kw
        self.add({"w": weights, **dict.fromkeys(also, c)}, weights * self.hw**2)
        self.c = c

    def branches(self, *branches: list[tuple[int, ...]]) -> None:
        """Add parallel branches, each a list of (channels, kernel[, kernel]), and concatenate their channels."""
        start, c, ends, total = self.at, self.c, [], 0
        for branch in branches:
            self.at, self.c = start, c
            for conv in branch:
                self.conv(conv[0], conv[1], conv[2] if len(conv) > 2 else None)
            ends += list(self.at)
            total += self.c
        self.at, self.c = tuple(ends), total


def vgg(blocks: tuple[int, ...]) -> list[Layer]:
    n = Net()
    for width, count in zip((64, 128, 256, 512, 512), blocks, strict=True):
        for _ in range(count):
            n.conv(width, 3, also=("b",))
        n.hw /= 2
    n.hw = 1
    n.conv(4096, 7, also=("b",))
    n.conv(4096, 1, also=("b",))
    n.conv(1000, 1, also=("b",))
    return n.layers


def alexnet() -> list[Layer]:
    n = Net()
    for c, k, hw in (
        (64, 11, 54),
        (192, 5, 26),
        (384, 3, 12),
        (384, 3, 12),
        (256, 3, 12),
        (4096, 5, 1),
        (4096, 1, 1),
    ):
        n.hw = hw
        n.conv(c, k, also=("b",))
    n.conv(1000, 1, also=("b",))
    return n.layers


def resnet(blocks: tuple[int, ...], version: int) -> list[Layer]:
    n = Net()
    n.conv(64, 7, stride=2, also=("beta",) if version == 1 else ("b",))
    n.hw /= 2
    for stage, (width, count) in enumerate(zip((64, 128, 256, 512), blocks, strict=True)):
        for unit in range(count):
            if version == 2:
                n.add({"preact": n.c}, n.c * n.hw**2)
            start, c = n.at, n.c
            skip = start
            if unit == 0:
                n.conv(4 * width, 1, also=("beta",) if version == 1 else ("b",))
                skip, n.at, n.c = n.at, start, c
            n.conv(width, 1)
            n.conv(width, 3, stride=2 if stage and unit == 0 else 1)
            n.conv(4 * width, 1, also=("beta",) if version == 1 else ("b",))
            n.at = (*n.at, *skip)
    if version == 2:
        n.add({"postnorm": n.c}, n.c * n.hw**2)
    n.hw = 1
    n.conv(1000, 1, also=("b",))
    return n.layers


def inception_v1() -> list[Layer]:
    n = Net()
    n.conv(64, 7, stride=2)
    n.hw /= 2
    n.conv(64, 1)
    n.conv(192, 3)
    n.hw /= 2
    mixed = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        None,
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        None,
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )
    for m in mixed:
        if m is None:
            n.hw /= 2
        else:
            a, b, c, d, e, f = m
            n.branches([(a, 1)], [(b, 1), (c, 3)], [(d, 1), (e, 3)], [(f, 1)])
    n.hw = 1
    n.conv(1000, 1, also=("b",))
    return n.layers


def inception_v2() -> list[Layer]:
    n = Net()
    n.hw = 112
    n.add({"depthwise": 7 * 7 * 3 * 8, "pointwise": 24 * 64, "beta": 64}, (7 * 7 * 3 * 8 + 24 * 64) * n.hw**2)
    n.c, n.hw = 64, 56
    n.conv(64, 1)
    n.conv(192, 3)
    n.hw = 28
    mixed = (
        (64, 64, 64, 64, 96, 32),
        (64, 64, 96, 64, 96, 64),
        (128, 160, 64, 96),
        (224, 64, 96, 96, 128, 128),
        (192, 96, 128, 96, 128, 128),
        (160, 128, 160, 128, 160, 96),
        (96, 128, 192, 160, 192, 96),
        (128, 192, 192, 256),
        (352, 192, 320, 160, 224, 128),
        (352, 192, 320, 192, 224, 128),
    )
    for m in mixed:
        if len(m) == 4:
            c = n.c
            n.branches([(m[0], 1), (m[1], 3)], [(m[2], 1), (m[3], 3), (m[3], 3)])
            n.c, n.hw = n.c + c, n.hw / 2
        else:
            n.branches([(m[0], 1)], [(m[1], 1), (m[2], 3)], [(m[3], 1), (m[4], 3), (m[4], 3)], [(m[5], 1)])
    n.hw = 1
    n.conv(1000, 1, also=("b",))
    return n.layers


def inception_v3() -> list[Layer]:
    n = Net(hw=299)
    n.conv(32, 3, stride=2)
    n.conv(32, 3)
    n.conv(64, 3)
    n.hw = 73
    n.conv(80, 1)
    n.conv(192, 3)
    n.hw = 35
    for pool in (32, 64, 64):
        n.branches([(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pool, 1)])
    c = n.c
    n.branches([(384, 3)], [(64, 1), (96, 3), (96, 3)])
    n.c, n.hw = 384 + 96 + c, 17
    for w in (128, 160, 160, 192):
        n.branches(
            [(192, 1)],
            [(w, 1), (w, 1, 7), (192, 7, 1)],
            [(w, 1), (w, 7, 1), (w, 1, 7), (w, 7, 1), (192, 1, 7)],
            [(192, 1)],
        )
    start, c = n.at, n.c
    n.hw = 5
    n.conv(128, 1)
    n.conv(768, 5)
    n.hw = 1
    n.conv(1000, 1, also=("b",))
    n.at, n.c, n.hw = start, c, 17
    n.branches([(192, 1), (320, 3)], [(192, 1), (192, 1, 7), (192, 7, 1), (192, 3)])
    n.c, n.hw = 320 + 192 + c, 8
    for _ in range(2):
        start, c = n.at, n.c
        ends: list[int] = []
        n.conv(320, 1)
        ends += n.at
        for first in ((384, 1),), ((448, 1), (384, 3)):
            n.at, n.c = start, c
            for k, kernel in first:
                n.conv(k, kernel)
            fork = n.at
            for kh, kw in ((1, 3), (3, 1)):
                n.at, n.c = fork, 384
                n.conv(384, kh, kw)
                ends += n.at
        n.at, n.c = start, c
        n.conv(192, 1)
        n.at, n.c = (*ends, *n.at), 2048
    n.hw = 1
    n.conv(1000, 1, also=("b",))
    return n.layers


MODELS = {
    "AlexNet v2": alexnet,
    "Inception v1": inception_v1,
    "Inception v2": inception_v2,
    "Inception v3": inception_v3,
    "ResNet-50 v1": lambda: resnet((3, 4, 6, 3), 1),
    "ResNet-101 v1": lambda: resnet((3, 4, 23, 3), 1),
    "ResNet-50 v2": lambda: resnet((3, 4, 6, 3), 2),
    "ResNet-101 v2": lambda: resnet((3, 4, 23, 3), 2),
    "VGG-16": lambda: vgg((2, 2, 3, 3, 3)),
    "VGG-19": lambda: vgg((2, 2, 4, 4, 4)),
}
