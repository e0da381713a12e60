"""The types of a machine: efficiencies and kernels, its mesh, and what a compiler makes of it."""

from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase.errors import PaseError
from pase.machine import BUCKET_BYTES, Mesh, load, parse
from pase.machine.types import CompiledForm


def test_efficiency_by_dtype_and_kernels_by_name():
    """A dtype's own efficiency takes precedence over its kind's. A named attention kernel has a rate per direction."""
    h100 = load("h100x8").device
    products = h100.products
    assert products.rate_of("float8_e4m3fn") == 0.81 < products.rate_of("bfloat16") == 0.867
    assert h100.reached("matmul", "bfloat16") == 0.867 * products.steady
    assert products.rate_of("float64") == min(products.rate.values())  # not listed: the slowest, never free
    assert products.slowdown("bfloat16") == 0.867 / 0.23 and products.slowdown("float8_e4m3fn") == 1.0
    v100 = load("v100x8").device
    assert v100.reached("matmul", "bfloat16") == v100.efficiency["matmul"]
    assert h100.reached("conv", "bfloat16") == 0.6 and h100.reached("other", "bfloat16") == 1.0
    flash2, cudnn, _, inference = h100.attention_kernels
    with pytest.raises(PaseError, match="'trtllm' has no backward"):
        inference.curve(backward=True)
    assert (flash2.name, cudnn.name) == ("flash2", "cudnn")
    keys = np.array([512.0, 8192.0])
    assert (flash2.at(keys, backward=False) < cudnn.at(keys, backward=False)).all()
    text = (resources.files("pase.machine") / "data" / "h100x8.toml").read_text(encoding="utf-8")
    with pytest.raises(PaseError, match=r"matmul\.float9: is not known"):
        parse(text.replace("conv = 0.6", '"matmul.float9" = 0.6'), "x")
    with pytest.raises(PaseError, match="efficiency/matmul: is replaced by device/products"):
        parse(text.replace("conv = 0.6", "conv = 0.6\nmatmul = 0.7"), "x")
    with pytest.raises(PaseError, match="attention_kernels/0/forward"):
        parse(text.replace("forward = [0.193", "forward = [1.5, 0.193"), "x")


SQUARE = CompiledForm(kind="all_reduce", becomes="reduce_scatter", levels=2, square=True)
SMALL = CompiledForm(kind="all_to_all", becomes="all_gather", more_than=2, below_bytes=1000)


@pytest.mark.parametrize(
    ("kind", "ways", "nbytes", "runs"),
    [
        ("all_reduce", (4, 4), 1, "reduce_scatter"),
        ("all_reduce", (2, 4), 1, "all_reduce"),  # not equally many at each level
        ("all_reduce", (2, 2), 1, "all_reduce"),  # not all devices
        ("all_reduce", (16, 1), 1, "all_reduce"),  # one level
        ("all_to_all", (4, 1), 999, "all_gather"),
        ("all_to_all", (4, 1), 1000, "all_to_all"),
        ("all_to_all", (2, 1), 999, "all_to_all"),
        ("permute", (4, 4), 1, "permute"),
    ],
)
def test_a_collective_runs_in_the_form_whose_conditions_all_hold(kind, ways, nbytes, runs):
    machine = replace(load("tpu_v5e"), forms=(SQUARE, SMALL))
    assert machine.as_compiled(kind, ways, 16, nbytes) == runs


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_strides_and_ways_of_a_mesh_are_those_of_numpys_index(sizes, data):
    mesh = Mesh(names=tuple("abcd"[: len(sizes)]), sizes=tuple(sizes))
    at = data.draw(st.tuples(*(st.integers(0, s - 1) for s in sizes)))
    number = sum(i * s for i, s in zip(at, mesh.strides, strict=True))
    assert number == np.ravel_multi_index(at, sizes)
    axes = data.draw(st.integers(0, 2 ** len(sizes) - 1))
    devices = np.arange(mesh.devices).reshape(sizes)
    group = devices[tuple(slice(None) if axes >> i & 1 else at[i] for i in range(len(sizes)))]
    assert mesh.ways(axes) == group.size


@pytest.mark.parametrize(("names", "sizes"), [(("a",), (2, 3)), (("a", "a"), (2, 3)), (("a", "b"), (2, 0))])
def test_a_mesh_needs_one_name_and_a_size_for_each_axis(names, sizes):
    with pytest.raises(ValueError, match="mesh"):
        Mesh(names=names, sizes=sizes)


def test_a_program_of_calls_sends_in_buckets_on_every_machine():
    """Its plans name the file's digest. What a file says of buckets stays."""
    file = replace(load("h100x8"), bucket_bytes=0.0, sums_readers=False)
    made = file.for_calls()
    assert (made.bucket_bytes, made.sums_readers) == (BUCKET_BYTES, True)
    assert made.digest == file.digest != load("h100x8").digest
    assert replace(file, bucket_bytes=5000.0).for_calls().bucket_bytes == 5000.0
    assert load("h100x8").for_calls() == load("h100x8")
