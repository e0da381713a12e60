"""The link levels of this host's devices, found or stated."""

import dataclasses

import pytest

from pase.calibrate.here import Here, ceilings, level_layout, parse_levels
from pase.errors import PaseError


@dataclasses.dataclass(frozen=True)
class Chip:
    id: int
    process_index: int = 0
    coords: tuple[int, int, int] | None = None
    platform: str = "tpu"

    @property
    def core_on_chip(self) -> int:
        if self.platform != "tpu":
            raise AttributeError
        return 0


def test_levels_are_processes_or_a_torus():
    ordered, levels = level_layout([Chip(i, i // 4) for i in reversed(range(8))])
    assert [d.id for d in ordered] == list(range(8))
    assert [(l.name, l.ways) for l in levels] == [("device", 4), ("process", 2)]
    assert [(l.name, l.ways) for l in level_layout([Chip(i, i) for i in range(2)])[1]] == [("process", 2)]
    assert [(l.name, l.ways) for l in level_layout([Chip(0)])[1]] == [("device", 1)]
    torus, levels = level_layout([Chip(i, i // 4, (i % 4, i // 4, 0)) for i in range(8)])
    assert [(l.name, l.ways, l.topology) for l in levels] == [("x", 4, "torus"), ("y", 2, "torus")]
    assert [d.coords[:2] for d in torus] == [(x, y) for y in range(2) for x in range(4)]
    cards = [Chip(i, i // 4, (0, i // 4, i % 4), "gpu") for i in reversed(range(8))]
    ordered, levels = level_layout(cards)
    assert [d.id for d in ordered] == list(range(8))
    assert [(l.name, l.ways) for l in levels] == [("device", 4), ("process", 2)]
    with pytest.raises(PaseError, match="numbers of devices"):
        level_layout([Chip(0), Chip(1), Chip(2, 1)])


def test_levels_by_hand():
    assert [l.ways for l in parse_levels("host=2, rack=3", 6)] == [2, 3]
    with pytest.raises(PaseError, match="6 devices") as e:
        parse_levels("host=2,rack=3", 8)
    assert e.value.where == "--levels" and "8" in e.value.fix
    with pytest.raises(PaseError, match="'2x3'") as e:
        parse_levels("2x3", 6)
    assert e.value.where == "--levels" and "NAME=WAYS" in e.value.fix


@pytest.mark.parametrize(
    ("name", "source"),
    [("NVIDIA H100 80GB HBM3", "h100x8"), ("NVIDIA A100-SXM4-80GB", "a100x8"), ("NVIDIA L40S", "")],
)
def test_the_datasheet_is_that_of_the_card_s_model(name: str, source: str) -> None:
    """Not that of another card with as much memory, by which measured rates would be refused as not physical."""
    here = Here(
        devices=(),
        levels=(),
        platform="gpu",
        device_name=name,
        memory_bytes=1,
        process=0,
        processes=1,
        fingerprint={},
        provenance={},
    )
    found = ceilings(here).source
    assert found == f"the datasheet in {source} plus 20%" if source else "datasheet in" not in found
