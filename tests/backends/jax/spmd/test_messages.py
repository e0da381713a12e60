"""A manually lowered step sends the messages of its schedule, as XLA's compiled program shows, with equal results."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.cases.plans import TOLERANCE, case_of, reduced
from pase.backends.audit.xla import compare, sharded_step
from pase.errors import PaseError
from pase.local.text import program_from_text, program_text
from pase.local.verify import verify_program
from pase.plan.buckets import holding, problem_of
from pase.schedule.plan import BucketPlan, Message, Piece, issue_order

COLLECTIVE = re.compile(r"%(\S+) = .* (?:all-reduce|reduce-scatter|all-gather|all-to-all)(?:-start)?\(")
NAMED = re.compile(r'op_name="[^"]*?message (there|back) of ([^/")]*)')


def layered(params, batch):
    """Layers without a loop, so that each layer has its own gathers."""
    h = batch
    for w in params["layers"]:
        h = jnp.tanh(h @ w["up"]) @ w["down"] + w["bias"] + h
    return jnp.mean(h * h)


@pytest.fixture(scope="module")
def fsdp():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 8, "float32")

    layers = [{"up": draw(64, 128), "down": draw(128, 64), "bias": draw(64)} for _ in range(3)]
    params, batch = {"layers": layers}, draw(32, 64)
    plan = case_of(layered, params, batch).plan("fsdp")
    return plan, params, batch


def compiled(plan):
    return plan.jax.lower_train_step(optax.sgd(0.1), lowering="manual").compile()


def sent(program):
    """(direction, tensors) of each message, in the order in which the compiled program runs them."""
    lines = program.as_text().splitlines()
    found = [NAMED.search(line) for line in lines if COLLECTIVE.search(line)]
    return [(m[1], m[2]) for m in found if m]


def messages(plan, way):
    program = plan.jax.program
    mine = [m for m in program.messages if m.way == way]
    return [
        (way, ", ".join(dict.fromkeys(program.transfers[p.transfer].tensor for p in m.chunks))) for m in mine
    ]


def with_messages(plan, chosen):
    """The plan with a bucket plan. chosen: for each message, the numbers of the problem's tensors that it carries."""
    problem = problem_of(plan)
    whole = [
        Message(pieces=tuple(Piece(tensor=t, offset=0, nbytes=problem.tensors[t].nbytes) for t in group))
        for group in chosen
    ]
    return holding(plan, problem, BucketPlan(policy="by hand", messages=tuple(whole)))


CELLS = [
    ("mlp", "zero2", "ours"),
    ("mlp", "megatron/megatron_2x4", "tac"),
    pytest.param("gpt2", "fsdp", "ours", marks=pytest.mark.release),
    pytest.param("llama3_8b", "megatron/megatron_sp_2x4", "ours", marks=pytest.mark.release),
]


@pytest.mark.parametrize(("model", "strategy", "policy"), CELLS, ids=lambda x: x.split("/")[-1])
def test_the_compiled_step_sends_the_messages_and_nothing_else_changes(model, strategy, policy):
    case = reduced(model)
    plain = case.plan(strategy)
    plan = plain.scheduled(policy)
    program = plan.jax.program
    verify_program(program)
    assert program_from_text(program_text(program)) == program
    optimizer = optax.adam(1e-2, eps=1e-3)
    step = sharded_step(plan, optimizer, *case.model.init(0), lowering="manual")
    rows = compare(plan, step.compiled, "manual")
    assert {r.kind: r.compiled for r in rows} == {r.kind: r.predicted for r in rows}
    before = sharded_step(plain, optimizer, *case.model.init(0), lowering="manual")
    assert step.differences(before) == dict.fromkeys(TOLERANCE, 0.0)
    assert set(sent(step.compiled)) == {*messages(plan, "there"), *messages(plan, "back")}
    assert not sent(before.compiled)


def test_what_a_policy_joins_is_one_collective_and_its_order_is_kept(fsdp):
    plan = fsdp[0]
    problem = problem_of(plan)
    sums = [i for i, t in enumerate(problem.tensors) if t.kind == "reduce_scatter"]
    gathers = [i for i, t in enumerate(problem.tensors) if t.kind == "all_gather"]
    assert len(sums) == len(gathers) == 9
    for order in (sums, sums[::-1]):  # the order in which backward makes them, and the reverse
        made = with_messages(plan, [*([i] for i in order), gathers])
        verify_program(made.jax.program)
        found = sent(compiled(made))
        assert [m for m in found if m[0] == "back"] == messages(made, "back")
        assert len([m for m in found if m[0] == "back"]) == 9
        assert [m for m in found if m[0] == "there"] == messages(made, "there")
        assert len(messages(made, "there")) == 1
    joined = with_messages(plan, [sums[:4], sums[4:], gathers[:2], gathers[2:]])
    assert sorted(sent(compiled(joined))) == sorted([*messages(joined, "back"), *messages(joined, "there")])
    assert len(sent(compiled(joined))) == 4


def test_pieces_of_a_tensor_are_sent_apart_and_are_the_whole_again(fsdp):
    plan, params, batch = fsdp
    problem = problem_of(plan)
    pieces = []
    for t, tensor in enumerate(problem.tensors):
        cut = tensor.nbytes // 4096 * 1024 or tensor.nbytes
        pieces.append([Piece(tensor=t, offset=0, nbytes=cut)])
        if cut < tensor.nbytes:
            pieces.append([Piece(tensor=t, offset=cut, nbytes=tensor.nbytes - cut)])
    whole = [Message(pieces=tuple(p)) for p in pieces]
    order = issue_order(problem, whole, range(len(problem.tensors)))
    made = holding(plan, problem, BucketPlan(policy="cut", messages=order))
    verify_program(made.jax.program)
    assert len(made.jax.program.messages) > len(problem.tensors)
    step = sharded_step(made, optax.sgd(0.1), params, batch, lowering="manual")
    before = sharded_step(plan, optax.sgd(0.1), params, batch, lowering="manual")
    assert step.differences(before) == dict.fromkeys(TOLERANCE, 0.0)
    assert len(sent(compiled(made))) == len(whole)


def ancestors(text):
    """Instruction of the entry computation -> all instructions that it depends on."""
    entry = text[text.index("\nENTRY ") :]
    found: dict[str, set[str]] = {}
    for line in entry.splitlines():
        if m := re.match(r"\s+(?:ROOT )?%(\S+) = (.*)", line):
            reads = [r for r in re.findall(r"%([\w.\-]+)", m[2].split(", metadata=")[0]) if r in found]
            found[m[1]] = set(reads).union(*(found[r] for r in reads))
    return found


def test_a_gather_starts_when_the_plan_has_it_start(fsdp):
    """A gather that must overlap with a layer does not start before it: it then depends on the batch. Other gathers
    depend on nothing but their parameter."""
    plan, params, _ = fsdp
    inputs = len(jax.tree.leaves(params))
    for made, waits in ((plan, False), (plan.scheduled("tac"), True)):
        text = compiled(made).as_text()
        batch = re.search(rf"%(\S+) = \S+ parameter\({inputs}\)", text)[1]
        found = ancestors(text)
        gathers = [
            m[1]
            for line in text.splitlines()
            if (m := COLLECTIVE.search(line)) and "all-gather" in line and m[1] in found
        ]
        assert len(gathers) == 9
        late = [g for g in gathers if batch in found[g]]
        assert len(late) == sum(bool(m.after) for m in made.jax.program.messages)
        assert bool(late) == waits


def test_what_messages_would_wait_for_for_ever_is_refused(fsdp):
    program = fsdp[0].scheduled("tac").jax.program
    there = [m for m in program.messages if m.way == "there"]
    last = program.ops[-1].node
    for wrong, says in (
        (program.messages[1:], None),
        ((*program.messages, program.messages[0]), "each byte of step 0"),
        ((replace(there[0], after=last), *program.messages), f"waits for '{last}'"),
        (
            tuple(
                replace(m, chunks=tuple(replace(p, nbytes=p.nbytes - 4) for p in m.chunks))
                for m in program.messages
            ),
            "each byte of step 0",
        ),
        (
            tuple(replace(m, chunks=tuple(replace(p, stage=1) for p in m.chunks)) for m in program.messages),
            "carries step 1",
        ),
    ):
        broken = replace(program, messages=wrong)
        if says is None:  # a transfer that no message carries is sent by itself
            verify_program(broken)
            continue
        with pytest.raises(PaseError) as e:
            verify_program(broken)
        assert says in e.value.what


def test_messages_that_cannot_be_read_are_named_with_their_place(fsdp):
    text = program_text(fsdp[0].scheduled("tac").jax.program)
    at = len(text[: text.index("message ")].splitlines()) + 1
    piece = re.search(r"of (\d+)\.0\[0", text)[1]
    for old, new, says in (
        (f"of {piece}.0[0", f"of {piece}:0[0", r"expected TRANSFER\.STAGE\["),
        (f"of {piece}.0[0", "of 999.0[0", ".*'move 999'"),
        ("message ", "message away ", "'away' is not a direction"),
    ):
        with pytest.raises(PaseError, match=rf"line {at}, column \d+: {says}"):
            program_from_text(text.replace(old, new, 1))
