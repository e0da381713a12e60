"""Machine files: those of the package, and the errors for broken ones."""

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pase
from pase.errors import PaseError
from pase.machine import dumps, load, names, parse
from pase.machine.load import schema
from tests.tables.graphs import CPU, HERE

GOOD = """
schema = "pase.machine/1"
name = "mine"
[device]
name = "d"
memory_bytes = 16_000_000_000
memory_bandwidth_bytes_per_s = 900e9
[device.peak_flops]
float32 = 15.7e12
[[levels]]
name = "link"
ways = 4
latency_s = 3e-6
bandwidth_bytes_per_s = 100e9
[[levels]]
name = "net"
latency_s = 1e-5
bandwidth_bytes_per_s = 10e9
[sources]
device = "datasheet"
levels = "datasheet"
"""


def test_the_machines_that_were_asked_for():
    wanted = {"1080tix8", "2080tix8", "v100x8", "a100x8", "h100x8", "h200x8", "tpu_v5e", "cpu_host"}
    assert wanted <= set(names())


@pytest.mark.parametrize("name", names())
def test_package_machine_is_sound_and_named_after_its_file(name):
    m = load(name)
    assert m.name == name
    assert m.title
    assert all(source.strip() for source in m.sources.values())


@pytest.mark.parametrize("spelling", ["h100x8", "h100_x8", "H100-x8", "h100 x8"])
def test_names_as_people_type_them(spelling):
    assert load(spelling) == load("h100x8")


@pytest.mark.parametrize("name", names())
def test_the_published_schema_takes_the_machines_of_the_package(name):
    text = (Path(pase.__file__).parent / "machine" / "data" / f"{name}.toml").read_text(encoding="utf-8")
    jsonschema.validate(tomllib.loads(text), schema())


def test_the_published_schema_refuses_what_parse_refuses():
    checks = jsonschema.Draft202012Validator(schema())
    for old, new in (("memory_bytes", "memory_byte"), ("900e9", "-900e9"), ("ways = 4", "ways = -4")):
        assert not checks.is_valid(tomllib.loads(GOOD.replace(old, new, 1)))
    assert checks.is_valid(tomllib.loads(GOOD))


LINES = GOOD.strip().splitlines()


@given(
    st.lists(
        st.tuples(st.integers(0, len(LINES) - 1), st.sampled_from(["", "[levels]", "ways = {}", "k = -1"]))
    )
)
def test_a_file_with_any_line_replaced_is_read_or_gets_one_clear_error(changes):
    lines = list(LINES)
    for at, new in changes:
        lines[at] = (
            new if "=" not in lines[at] or not new.endswith("{}") else f"{lines[at].split('=')[0]}= {{}}"
        )
    try:
        machine = parse("\n".join(lines), "f.toml")
    except PaseError as e:
        assert e.where == "f.toml" and "\n" not in str(e)
    else:
        assert machine.device.memory_bytes == 16_000_000_000 and len(machine.levels) == 2


def test_default_machine():
    assert load().name == "h100x8"


def test_paper_machines_carry_the_papers_figures():
    for name in ("1080tix8", "2080tix8"):
        p = load(name).paper
        assert p is not None
        assert p.flop_per_byte * p.word_bytes == 5000


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    m = load(path)
    assert m == load(str(path))
    assert (m.name, m.levels[0].ways, m.levels[1].ways, m.paper) == ("mine", 4, 0, None)


def test_new_fields_at_their_defaults_leave_a_digest_as_layouts_have_it():
    """Layouts name the digest of their machine. Read it off again only if a figure of this file changes."""
    v100 = load("v100x8")
    assert v100.algorithms and v100.digest.startswith("8239de49")


def test_digest_follows_what_prices_and_nothing_else():
    base = parse(GOOD, "f").digest
    assert len(base) == 64
    assert hash(parse(GOOD, "f")) == hash(parse(GOOD, "g"))
    assert parse(GOOD.replace('"mine"', '"other"').replace('"datasheet"', '"elsewhere"'), "f").digest == base
    assert parse(GOOD + '[provenance]\ndate = "today"\n', "f").digest == base
    assert parse(GOOD.replace("900e9", "901e9"), "f").digest != base
    assert parse(GOOD.replace("ways = 4", "ways = 8"), "f").digest != base
    # The order of keys in the file has no meaning.
    swapped = GOOD.replace(
        'name = "d"\nmemory_bytes = 16_000_000_000', 'memory_bytes = 16_000_000_000\nname = "d"'
    )
    assert swapped != GOOD
    assert parse(swapped, "f").digest == base


CURVE = """
[[collectives]]
kind = "all_reduce"
ways = [4, 1]
nbytes = [1e3, 1e6, 1e9]
seconds = [1e-5, 2e-5, 1e-2]
"""
MATMUL = """
[[device.matmul_tables]]
dtype = "float32"
m = [128, 1024]
n = [128]
k = [64, 512]
flops_per_s = [1e12, 2e12, 3e12, 4e12]
"""
SOURCES = '[sources]\ncollectives = "measured"\n'


def with_tables(tables: str) -> str:
    return GOOD.replace("[sources]\n", tables + SOURCES)


def test_measured_tables_are_read():
    m = parse(with_tables(CURVE + MATMUL), "f")
    assert m.collectives[0].curve.seconds == (1e-5, 2e-5, 1e-2)
    assert m.collectives[0].ways == (4, 1)
    assert m.device.matmul_tables[0].k == (64, 512)


BROKEN = [
    ("[device]", "[device", "not TOML"),
    (
        'schema = "pase.machine/1"',
        'schema = "pase.machine/9"',
        "schema is 'pase.machine/9', but this version",
    ),
    ('schema = "pase.machine/1"\n', "", "schema is None, but this version"),
    ("memory_bytes = 16_000_000_000\n", "", "at device/memory_bytes: is missing"),
    ("900e9", "-900e9", "at device/memory_bandwidth_bytes_per_s: must be above 0, got -900000000000.0"),
    ("900e9", "nan", "at device/memory_bandwidth_bytes_per_s: must be finite, got nan"),
    ("900e9", "inf", "at device/memory_bandwidth_bytes_per_s: must be finite, got inf"),
    ("900e9", '"fast"', "at device/memory_bandwidth_bytes_per_s: must be a number, got 'fast'"),
    ("900e9", "true", "at device/memory_bandwidth_bytes_per_s: must be a number, got True"),
    ("16_000_000_000", "16e9", "at device/memory_bytes: must be a whole number, got 16000000000.0"),
    ("float32 = 15.7e12\n", "", "at device/peak_flops: must have at least 1 entry, got {}"),
    ("float32 = 15.7e12", "float32 = 0.0", "at device/peak_flops/float32: must be above 0, got 0.0"),
    (
        'name = "d"\n',
        'name = "d"\ncolour = "red"\n',
        "at device/colour: is not known; device takes: name, peak_flops",
    ),
    (
        'name = "mine"',
        'name = "mine"\nspeed = 3',
        "at speed: is not known; the top level takes: name, device",
    ),
    ("ways = 4\n", "", "at levels/0/ways: may be 0"),
    ("ways = 4", "ways = -4", "at levels/0/ways: must be at least 0, got -4"),
    ("latency_s = 3e-6", "latency_s = -3e-6", "at levels/0/latency_s: must be at least 0, got -3e-06"),
    (
        "bandwidth_bytes_per_s = 10e9",
        "bandwidth_bytes_per_s = 10e9\nefficiency = 1.2",
        "at levels/1/efficiency: must be at most 1, got 1.2",
    ),
    (
        "latency_s = 3e-6",
        'latency_s = 3e-6\ntopology = "star"',
        "at levels/0/topology: must be one of switch, torus, got 'star'",
    ),
    ('device = "datasheet"\n', "", "device.memory_bytes has no source; add it to [sources]"),
    (
        "memory_bytes = 16",
        "memory_byte = 16",
        "at device/memory_byte: is not known; did you mean memory_bytes? device takes: name",
    ),
    (
        "[sources]",
        "[device.efficiency]\nmatmull = 0.5\n[sources]",
        "at device/efficiency/matmull: is not known",
    ),
    (
        "[sources]",
        "[device.efficiency]\nmatmul = 1.5\n[sources]",
        "device/efficiency/matmul: must be at most 1",
    ),
    (
        "ways = 4",
        "ways = 4\nbandwidth_at_ways.1 = 1e9",
        "levels/0/bandwidth_at_ways: each key must be at least 2, got '1'",
    ),
    ("[[levels]]", "[levels]", "not TOML"),
    ("[device.peak_flops]", "[device.peaks]", "at device/peaks: is not known"),
    (
        'levels = "datasheet"',
        'levels = "a"\nlevel = "b"',
        "sources.level is the source of no number in the file",
    ),
    ('levels = "datasheet"', "levels = 3", "at sources/levels: must be text, got 3"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN, ids=[b[2][:40] for b in BROKEN])
def test_a_broken_file_gets_one_clear_error(old, new, message):
    assert old in GOOD
    with pytest.raises(PaseError) as e:
        parse(GOOD.replace(old, new, 1), "f.toml")
    assert e.value.where == "f.toml"
    assert message in e.value.what


ATTENTION = """
[device.attention]
keys = [512, 4096]
efficiency = [0.4, 0.6]
"""
BROKEN_TABLES = [
    ("[512, 4096]", "[4096, 512]", "at device/attention: is not monotone: keys 512 follows 4096"),
    (
        "[0.4, 0.6]",
        "[0.4]",
        "at device/attention: needs as many efficiencies as keys, one or more; got 1 and 2",
    ),
    ("[0.4, 0.6]", "[0.4, 1.6]", "at device/attention: must have efficiencies above 0 and up to 1"),
    ("[1e3, 1e6, 1e9]", "[1e3, 1e9, 1e6]", "at collectives/0: is not monotone: nbytes 1e+06 follows 1e+09"),
    (
        "[1e-5, 2e-5, 1e-2]",
        "[1e-5, 5e-6, 1e-2]",
        "is not monotone: 5e-06 s at 1e+06 bytes, less than 1e-05 s",
    ),
    (
        "[1e-5, 2e-5, 1e-2]",
        "[1e-5, 2e-5]",
        "at collectives/0: needs as many seconds as nbytes, two or more; got 2 and 3",
    ),
    ("[1e-5, 2e-5, 1e-2]", "[0.0, 2e-5, 1e-2]", "must have nbytes and seconds above 0"),
    (
        "[1e-5, 2e-5, 1e-2]",
        "[nan, 2e-5, 1e-2]",
        "at collectives/0/seconds/0: must be finite, got nan",
    ),
    ('"all_reduce"', '"gossip"', "at collectives/0/kind: must be one of all_gather, all_reduce"),
    ("ways = [4, 1]", "ways = [4]", "at collectives/0/ways: needs one number per link level (2)"),
    ("ways = [4, 1]", "ways = [1, 1]", "one of them 2 or more; got [1, 1]"),
    ("[128, 1024]", "[1024, 128]", "at device/matmul_tables/0: is not monotone: m = 128 follows 1024"),
    ("[1e12, 2e12, 3e12, 4e12]", "[1e12, 2e12, 3e12]", "needs 2 x 1 x 2 flops_per_s (m, n, k), got 3"),
    ("[1e12, 2e12, 3e12, 4e12]", "[1e12, 2e12, 3e12, 4e13]", "a larger m takes less time; measure again"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN_TABLES, ids=[b[2][-40:] for b in BROKEN_TABLES])
def test_a_nonsensical_measurement_is_refused(old, new, message):
    text = with_tables(CURVE + MATMUL + ATTENTION)
    assert old in text
    with pytest.raises(PaseError) as e:
        parse(text.replace(old, new, 1), "f.toml")
    assert message in str(e.value)


def test_the_same_measurement_twice_is_refused():
    with pytest.raises(PaseError, match=r"collectives/1: .*all_reduce over ways \[4, 1\]"):
        parse(with_tables(CURVE + CURVE + MATMUL), "f.toml")


def test_shapes_and_algorithms_are_checked_against_the_levels():
    for extra, message in (
        (
            "[shapes]\n8 = [4, 3]\n",
            "at shapes/8: needs one number of ways per link level (2) with product 8, got [4, 3]",
        ),
        ("[shapes]\nmany = [4, 2]\n", "at shapes: each key must be a whole number, got 'many'"),
        (
            '[[algorithms]]\nalgorithm = "ring"\nprotocol = "p"\nlaunch_s = 0\nstep_s = [1e-6]\n',
            "at algorithms/0/step_s: needs one number per link level (2), got 1",
        ),
        (
            '[[algorithms]]\nalgorithm = "ring"\nprotocol = "p"\nlaunch_s = 0\nstep_s = [0, 0]\n'
            'kinds = ["all"]\n',
            "at algorithms/0/kinds/0: must be one of all_gather",
        ),
        ("levels_ = 3\n", "at levels_: is not known; did you mean levels?"),
    ):
        where = "[device]\n" if extra.startswith("levels_") else "[sources]\n"
        text = GOOD.replace(where, extra + where, 1) if where == "[sources]\n" else extra + GOOD
        with pytest.raises(PaseError) as e:
            parse(text, "f.toml")
        assert message in str(e.value)


def test_what_is_not_there():
    with pytest.raises(PaseError, match="'dgx'") as e:
        load("dgx")
    assert all(name in e.value.fix for name in names())
    with pytest.raises(PaseError, match="cannot read") as e:
        load("no/such.toml")
    assert e.value.where == "no/such.toml"
    assert math.isclose(load("h100x8").device.peak("complex64"), 66.9e12)


def test_the_examples_of_the_documentation_load():
    page = Path(__file__).parents[2] / "docs" / "explanation" / "cost-model.md"
    examples = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 1
    text = GOOD.replace("ways = 4", "ways = 8").replace("[sources]\n", examples[0] + SOURCES)
    m = parse(text, "docs")
    assert (len(m.collectives), len(m.device.matmul_tables)) == (1, 1)
    assert m.device.memory_curve is not None


def test_a_memory_tile_is_rows_and_columns():
    assert load("tpu_v5e").device.memory_tile == (8, 128) and load("h100x8").device.memory_tile == ()
    for tile, message in (
        ("[8]", "must be rows and columns, got [8]"),
        ("[8, 0]", "must be at least 1, got 0"),
    ):
        text = GOOD.replace("[device]\n", f"[device]\nmemory_tile = {tile}\n", 1)
        with pytest.raises(PaseError) as e:
            parse(text, "f.toml")
        assert "device/memory_tile" in str(e.value) and message in str(e.value)


def test_a_number_of_thousands_of_digits_is_refused():
    with pytest.raises(PaseError, match="Exceeds the limit") as e:
        parse("schema = " + "9" * 5000, "here.toml")
    assert e.value.where == "here.toml"


def test_they_are_kept_in_the_file_and_priced_by() -> None:
    assert parse(dumps(CPU), "again") == CPU
    assert CPU.digest != HERE.digest
    # Files and layouts from before these fields existed keep their digests.
    assert replace(HERE, bucket_bytes=float(25 << 20)).digest == HERE.digest
    with pytest.raises(pase.errors.PaseError, match="sums_readers"):
        parse("sums_readers = 1\n" + dumps(HERE), "a file")
