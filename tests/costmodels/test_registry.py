"""Cost models by name, and what each of them must answer."""

import numpy as np
import pytest

from pase.costmodels import get, names
from pase.errors import PaseError
from pase.machine import CostModel, load, mesh_from
from pase.machine import names as machine_names
from tests.costmodels.machines import flat


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("machine", machine_names())
def test_every_model_answers_the_protocol_on_every_machine(name, machine):
    model = get(name, load(machine))
    assert isinstance(model, CostModel)
    assert (model.name, model.unit) in {("analytic", "s"), ("paper", "FLOP")}
    got = model.compute("matmul", "bfloat16", np.array([0.0, 1e12]), np.array([0.0, 1e9]))
    assert got[0] == 0 < got[1]
    assert model.collective("all_reduce", mesh_from("2x4", 8), np.arange(4), 1e6).shape == (4,)


def test_an_unknown_model_names_those_there_are():
    with pytest.raises(PaseError, match="no cost model 'guess'"):
        get("guess", flat())


@pytest.mark.parametrize("name", names())
def test_an_unknown_kind_of_work_is_refused(name):
    with pytest.raises(ValueError, match="got 'sort'"):
        get(name, flat()).compute("sort", "float32", 1.0, 1.0)
