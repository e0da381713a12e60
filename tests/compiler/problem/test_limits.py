"""The configs that a target's forms allow."""

from __future__ import annotations

import pytest

from pase.baselines.flow import roles
from pase.compiler.problem.limits import form_meshes
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import resolve
from pase.errors import Infeasible
from pase.plan.targets import TARGETS, TargetAxis, TargetForm
from pase.tables.layouts import NOT_SPLIT

MODEL = "zoo:llama3_8b?layers=2&batch=16&seq=64&vocab=1024&remat=0"
FORMS = [(name, form) for name, target in TARGETS.items() for form in target.forms if form.axes]


@pytest.mark.parametrize(("target", "form"), FORMS, ids=lambda x: getattr(x, "name", x))
def test_each_axis_splits_what_it_is_for(target: str, form: TargetForm) -> None:
    """On every mesh, each node has a config. A sharding axis splits every matrix, an axis that replicates splits no
    parameter, and an axis of one device splits nothing. Along an axis for weights alone, scales of norms are whole."""
    problem = SplitProblem.of(resolve(MODEL).graph, 8, None, "analytic", "adam", "none", form)
    meshes, weights = problem.meshes(None, 3), {w.parameter for w in roles(problem.graph).weights}
    assert meshes and weights
    for mesh in meshes:
        for node, cfg in zip(problem.graph.nodes, problem.pricing.configs(mesh), strict=True):
            assert len(cfg), (mesh, node.name)
            for i, axis in enumerate(form.axes):
                split = cfg[:, i] != NOT_SPLIT
                whole = axis.use == "replicate" or (axis.weights_alone and node.name not in weights)
                if mesh.sizes[i] == 1 or (node.kind == "parameter" and whole):
                    assert not split.any(), (mesh, node.name, axis)
                elif node.kind == "parameter" and axis.use.startswith("shard") and len(node.space.dims) > 2:
                    assert split.all(), (mesh, node.name, axis)


def test_a_form_without_a_mesh_says_why() -> None:
    problem = SplitProblem.of(resolve(MODEL).graph, 8, None, "analytic", "adam")
    graph, machine = problem.graph, problem.machine
    data = TargetForm(axes=(TargetAxis(name="data", use="replicate"),))
    tensor = TargetForm(axes=(TargetAxis(name="tensor", use="tensor"),))
    with pytest.raises(Infeasible, match="a batch of 16 is not divisible by 32"):
        form_meshes(data, graph, 32, machine)
    with pytest.raises(Infeasible, match="16 devices do not divide 4, 8 "):
        form_meshes(tensor, graph, 16, machine)
