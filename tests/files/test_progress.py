"""Lines of progress give the time so far and, for similar steps, an estimate of the remaining time."""

from queue import Queue

from pase.files.progress import PieceOfWork, estimating, seldom


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
        "mesh (2 of 4) · 11 s · about 30 s left of these",
        "mesh (3 of 4) · 21 s · about 20 s left of these",
        "drawing · 31 s",
    ]


def test_the_estimate_of_the_larger_pieces_stays_while_their_parts_are_told():
    now, said = [0.0], []
    say = estimating(said.append, clock=lambda: now[0])
    for done in range(2):
        variant = PieceOfWork("trying", done, 4, most=True)
        say(variant)
        for mesh in range(2):
            now[0] += 10.0
            variant.inside(say)(PieceOfWork("mesh", mesh, 2))
    assert said == [
        "trying (1 of at most 4)",
        "1 of at most 4: mesh (1 of 2) · 10 s",
        "1 of at most 4: mesh (2 of 2) · 20 s",
        "trying (2 of at most 4) · 20 s · at most about 60 s left of these",
        "2 of at most 4: mesh (1 of 2) · 30 s · at most about 50 s left of these",
        "2 of at most 4: mesh (2 of 2) · 40 s · at most about 40 s left of these",
    ]


def test_a_step_is_text():
    assert f"{PieceOfWork('a', 0, 2)}" == "a (1 of 2)" and PieceOfWork("a", 0, 2).total == 2


def test_a_log_gets_the_latest_line_again_and_again():
    said = Queue[str]()
    with seldom(said.put, first_s=0.001, every_s=0.001) as told:
        told("reading")
        while said.get(timeout=60) != "reading":
            pass
        told("searching")
        while said.get(timeout=60) != "searching":
            pass


def test_short_work_leaves_nothing_in_a_log():
    said: list[str] = []
    with seldom(said.append) as told:
        told("reading")
    assert said == []
