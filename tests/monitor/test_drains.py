"""Which nodes were drained, and what came of it, told from the journal."""

from __future__ import annotations

from packtrain.core.records import NodeDrained, RunFinished
from packtrain.monitor.drains import fold, lines
from tests.monitor.test_incidents import began, chosen, said


def drained(node: str, in_world: bool = True, by: str = "packtrain drain") -> NodeDrained:
    return NodeDrained(node=node, by=by, in_world=in_world)


FIRST = ((0.0, began(1)), (0.1, chosen(1, "n0", "n1")), (9.0, drained("n1")))
SECOND = ((11.0, began(2, 40)), (11.1, chosen(2, "n0", "n2")))


def test_a_drained_node_and_what_followed() -> None:
    """Who asked, when, and the attempt that went on without it."""
    assert list(lines(fold(said(*FIRST, *SECOND)))) == [
        "nodes that were drained",
        "  n1 (packtrain drain), 9.0s into attempt 1: attempt 2 runs on n0, n2, from step 40 on disk",
    ]
    assert list(lines([])) == []


def test_a_world_that_was_chosen_before_goes_on_without_nobody() -> None:
    """One that still has the node is not what followed."""
    late = ((0.0, began(1)), (0.1, drained("n1")), (0.2, chosen(1, "n0", "n1")))
    (one,) = fold(said(*late))
    assert one.followed == "" and one.words().endswith("nothing followed yet")
    (one,) = fold(said(*late, *SECOND))
    assert one.followed.startswith("attempt 2")


def test_a_spare_is_told_to_have_had_no_ranks() -> None:
    """No attempt ends of it, so none that begins later followed."""
    (one,) = fold(said((0.0, began(1)), (1.0, drained("n3", in_world=False)), *SECOND))
    assert one.followed == "it had no ranks"


def test_a_run_that_ends_before_it_goes_on() -> None:
    """Then the end of the run is what followed, and not what a later start of it did."""
    over = RunFinished(exit_code=75, reason="stopped on request")
    (one,) = fold(said(*FIRST, (10.0, over), *SECOND))
    assert one.followed == "the run ended first (stopped on request)"


def test_before_any_attempt_no_time_is_told() -> None:
    """Nor where clocks of two boots would have to be compared."""
    assert fold(said((1.0, drained("n1"))))[0].words() == "n1 (packtrain drain): nothing followed yet"
    both = [*said((0.0, began(1))), *said((5.0, drained("n1")), boot="other")]
    assert fold(both)[0].when == ""


def test_a_program_is_not_said_to_begin_anew() -> None:
    """It restores what it saved itself, and nobody else knows what that is."""
    (one,) = fold(said(*FIRST, (11.0, began(2)), (11.1, chosen(2, "n0", "n2"))))
    assert one.followed == "attempt 2 runs on n0, n2"


def test_of_many_the_last_are_told() -> None:
    """And how many there were before."""
    told = list(lines(fold(said(*((float(n), drained(f"n{n}")) for n in range(10))))))
    assert len(told) == 10 and told[1].startswith("  n2 ") and told[-1] == "  and 2 earlier"
