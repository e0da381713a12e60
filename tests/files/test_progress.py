"""Lines of progress give the time so far and, for similar steps, an estimate of the remaining time."""

from pase.files.progress import PieceOfWork, estimating


def test_an_estimate_is_the_rate_so_far_over_what_is_left():
    now, said = [0.0], []
    say = estimating(said.append, clock=lambda: now[0])
    say("reading")
    now[0] = 1.0
    for done in range(3):
        say(PieceOfWork("mesh", done, 4))
        now[0] += 10.0
    say("drawing")
    assert said == [
        "reading",
        "mesh (1 of 4)",
        "mesh (2 of 4) · 11 s · about 30 s left",
        "mesh (3 of 4) · 21 s · about 20 s left",
        "drawing · 31 s",
    ]


def test_a_step_is_text():
    assert f"{PieceOfWork('a', 0, 2)}" == "a (1 of 2)" and PieceOfWork("a", 0, 2).total == 2
