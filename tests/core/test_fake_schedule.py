"""Choices, the clock and the baton: every run can be repeated, and every one that is possible is found."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from packtrain.core.fake import (
    Baton,
    Choices,
    FakeClock,
    FakeCrash,
    FakeDisk,
    FakePlatform,
    chosen_faults,
    crash,
    explore,
    lost_reply,
    sample,
)


def test_explore_finds_every_sequence_once() -> None:
    """Depth-first search over choices that depend on earlier ones visits each leaf exactly once."""
    seen = []
    for choices in explore():
        first = choices.pick(3)
        seen.append((first, *(choices.pick(2) for _ in range(first))))
    expected = [(first, *rest) for first in range(3) for rest in itertools.product((0, 1), repeat=first)]
    assert sorted(seen) == sorted(expected)
    assert len(list(explore(limit=5))) == 1, "no choice met: one run is all there is"
    assert sum(choices.pick(10) >= 0 for choices in explore(limit=4)) == 4


def test_a_script_repeats_a_run() -> None:
    """What a run picked, given back as a script, makes the same picks; a script that does not fit is noticed."""
    for choices in sample(20, seed="x"):
        picks = [choices.pick(n, rare=n == 4) for n in (2, 3, 4, 5, 1)]
        again = Choices(script=choices.script)
        assert [again.pick(n) for n in (2, 3, 4, 5, 1)] == picks
    with pytest.raises(AssertionError, match="does not repeat itself"):
        Choices(script=[3]).pick(2)


def test_rare_picks_are_rare() -> None:
    """Random faults and preemptions come at about the rate asked for."""
    choices = Choices(seed=1, rate=0.1)
    assert 50 < sum(choices.pick(3, rare=True) > 0 for _ in range(1000)) < 150


def two_counters(choices: Choices, preemptions_max: int, shared: Any = lambda op, path: True) -> tuple[str, list[str]]:
    """Two processes that each append three letters to one file; the order, and what each saw."""
    disk = FakeDisk()
    baton = Baton(choices, disk.clock, preemptions_max, shared)
    FakePlatform(disk).create("/tmp/order")

    def program(platform: FakePlatform) -> str:
        file = platform.create(f"/tmp/{platform.name}")
        node = disk.find_file("/tmp/order")
        for _ in range(3):
            file.write(b".")
            disk.append(node, platform.name.encode(), "/tmp/order")
        return bytes(node.data).decode()

    a, b = (FakePlatform(disk, name, baton) for name in "ab")
    outcomes = baton.run(lambda: program(a), lambda: program(b))
    return bytes(disk.find_file("/tmp/order").data).decode(), [outcome.value for outcome in outcomes]


def switches(order: str) -> int:
    return sum(x != y for x, y in itertools.pairwise(order))


@pytest.mark.parametrize("preemptions", [0, 1, 2, 5])
def test_every_interleaving_up_to_the_bound(preemptions: int) -> None:
    """All orders that need at most so many preemptions are found, and no other."""
    found = {two_counters(choices, preemptions)[0] for choices in explore()}
    orders = {"".join(order) for order in itertools.permutations("aaabbb")}
    # A writer that ends hands over for free: the last switch, when it ends what came before, costs nothing.
    cost = {order: switches(order.rstrip(order[-1]) + order[-1]) - 1 for order in orders}
    assert found == {order for order in orders if cost[order] <= preemptions}


def test_preemptions_only_where_asked() -> None:
    """`shared` limits where others may go first: nothing shared, nothing interleaved."""
    found = {two_counters(choices, 5, lambda op, path: False)[0] for choices in explore()}
    assert found == {"aaabbb", "bbbaaa"}


def test_the_same_seed_is_the_same_run() -> None:
    """Two runs of one seed have the same trace, tokens and clock; other seeds give other runs."""

    def run(seed: int) -> tuple[Any, ...]:
        disk = FakeDisk(seed=seed)
        choices = Choices(seed=seed, rate=0.3)
        baton = Baton(choices, disk.clock)
        faults = chosen_faults(choices, lambda op, path: [crash(), lost_reply()])

        def program(platform: FakePlatform) -> None:
            for _ in range(5):
                platform.write_new(f"/tmp/{platform.token()}", b"x")
                platform.sleep(0.001)

        writers = [FakePlatform(disk, name, baton, faults) for name in "abc"]
        outcomes = baton.run(*[lambda writer=writer: program(writer) for writer in writers])
        return disk.trace, disk.clock.now_ns, [repr(outcome.error) for outcome in outcomes], choices.script

    runs = [run(seed) for seed in range(20)]
    assert runs == [run(seed) for seed in range(20)]
    assert len({str(one) for one in runs}) == 20


def test_no_two_processes_draw_the_same_tokens() -> None:
    """Also two lives of one process on one node draw different tokens."""
    disk = FakeDisk()
    tokens = [FakePlatform(disk, name).token() for name in ("a", "a", "b") for _ in range(3)]
    first = FakePlatform(disk)
    tokens += [first.token(16), first.token(3), first.token(3)]
    assert len(set(tokens)) == len(tokens) and {len(token) for token in tokens} == {16, 32, 6}


def test_time_passes_only_when_all_wait() -> None:
    """Sleepers wake in the order of their times; a writer that works on keeps the clock from jumping."""
    disk = FakeDisk()
    baton = Baton(Choices(), disk.clock)
    order: list[tuple[str, int]] = []

    def program(platform: FakePlatform, seconds: float) -> None:
        platform.sleep(seconds)
        order.append((platform.name, round(disk.clock.now_ns / 1e9)))

    writers = [FakePlatform(disk, name, baton) for name in "abc"]
    baton.run(*[lambda p=p, s=s: program(p, s) for p, s in zip(writers, (30, 10, 20))])
    assert order == [("b", 10), ("c", 20), ("a", 30)]


def test_waiting_for_ever_is_an_error() -> None:
    """When every writer waits for what cannot come the run ends with an AssertionError and the threads are free."""
    disk = FakeDisk()
    baton = Baton(Choices(), disk.clock)
    a, b = (FakePlatform(disk, name, baton) for name in "ab")
    with pytest.raises(AssertionError, match="waits"):
        baton.run(lambda: a.until(lambda: False, None), lambda: b.until(lambda: False, None))
    with pytest.raises(AssertionError, match="never come"):
        FakePlatform(FakeDisk()).until(lambda: False, None)
    assert [outcome.value for outcome in Baton(Choices(), disk.clock).run(lambda: 1, lambda: 2)] == [1, 2]


def test_errors_and_deaths_are_told_apart() -> None:
    """A writer's exception is its outcome; a FakeCrash passes every `except Exception` and counts as death."""
    disk = FakeDisk()
    baton = Baton(Choices(), disk.clock)

    def die() -> None:
        try:
            FakePlatform(disk, "a", baton, lambda op, path, n: crash()).create("/tmp/a")
        except Exception:
            pytest.fail("a dead process caught its own death")

    def stumble() -> None:
        raise ValueError("x")

    died, stumbled, fine = baton.run(die, stumble, lambda: 3)
    assert died.crashed and isinstance(died.error, FakeCrash)
    assert not stumbled.crashed and isinstance(stumbled.error, ValueError)
    assert (fine.value, fine.error) == (3, None)


def test_timers_of_one_moment_keep_their_order() -> None:
    """Things planned for the same time happen in the order they were planned, and may plan more."""
    clock, seen = FakeClock(), []
    clock.at(5, lambda: (seen.append("first"), clock.at(7, lambda: seen.append("third"))))  # type: ignore[func-returns-value]
    clock.at(5, lambda: seen.append("second"))
    clock.advance(6)
    assert (seen, clock.now_ns, clock.next_ns()) == (["first", "second"], 6, 7)
    clock.advance(100)
    assert (seen, clock.now_ns, clock.next_ns()) == (["first", "second", "third"], 100, None)
