"""Orders: the control file under damage, SIGTERM, and agreement of skewed ranks."""

from __future__ import annotations

import os
import pathlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.words import NO_ORDER, Control, Order, Word, agree, order_bytes, parse_order

INT32 = st.integers(0, (1 << 31) - 1)
ORDERS = st.builds(Order, INT32, st.sampled_from(Word), INT32, INT32)


def give(path: pathlib.Path, order: Order | bytes) -> None:
    """Replace the control file atomically, as the agent does."""
    temp = path.with_name("new")
    temp.write_bytes(order if isinstance(order, bytes) else order_bytes(order))
    os.replace(temp, path)


# --- the file ----------------------------------------------------------------------------------------


def test_the_file_is_one_line_a_person_can_read() -> None:
    """The bytes of the control file are part of the contract."""
    assert order_bytes(Order(3, Word.SKIP, 5, 6)) == b'{"id":3,"word":"skip","a":5,"b":6,"crc":1159202752}\n'


@given(ORDERS)
def test_an_order_survives_the_file(order: Order) -> None:
    """What the agent writes is what the loop reads."""
    assert parse_order(order_bytes(order)) == order


@given(ORDERS, st.data())
def test_a_damaged_order_is_never_another_order(order: Order, data: st.DataObject) -> None:
    """After a flipped bit or a cut the file reads as the same order or as nothing."""
    whole = bytearray(order_bytes(order))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert parse_order(bytes(whole)) in (None, order)
    assert parse_order(order_bytes(order)[: data.draw(st.integers(0, len(whole)))]) in (None, order)


@given(st.binary(max_size=100))
def test_other_bytes_are_no_order(data: bytes) -> None:
    """Whatever stands in the file, nothing is raised."""
    assert parse_order(data) is None


# --- the loop's view ---------------------------------------------------------------------------------


def test_absent_damaged_and_older_content_change_nothing(tmp_path: pathlib.Path) -> None:
    """The last good order with the highest id stays in force."""
    path = tmp_path / "control.json"
    control = Control(str(path))
    assert control.poll() is None
    save, stop = Order(4, Word.SAVE), Order(5, Word.STOP)
    give(path, save)
    assert control.poll() == save
    for content in (b"", b"{", order_bytes(stop)[:-3], order_bytes(stop).replace(b"stop", b"save"), b"x" * 100_000):
        give(path, content)
        assert control.poll() == save
    give(path, Order(3, Word.STOP))
    assert control.poll() == save
    path.unlink()
    assert control.poll() == save
    give(path, stop)
    assert control.poll() == stop
    control.close()


def test_an_unchanged_file_is_not_read_again(tmp_path: pathlib.Path) -> None:
    """A poll reads only when inode, time or size changed: content slipped in behind the same three is not seen."""
    path = tmp_path / "control.json"
    give(path, Order(4, Word.SAVE))
    control = Control(str(path))
    control.poll()
    before = path.stat()
    path.write_bytes(order_bytes(Order(5, Word.STOP)))
    os.truncate(path, before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert control.poll() == Order(4, Word.SAVE)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert control.poll() == Order(5, Word.STOP)
    control.close()


def test_two_orders_between_polls_cannot_hide_behind_a_reused_inode(tmp_path: pathlib.Path) -> None:
    """Orders given faster than the file system's clock ticks are seen although inode numbers are used again."""
    path, control = tmp_path / "control.json", Control(str(tmp_path / "control.json"))
    for number in range(100, 160, 2):
        for order in (Order(number, Word.SAVE), Order(number + 1, Word.SAVE)):
            temp = tmp_path / "new"
            temp.write_bytes(order_bytes(order).ljust(80))
            os.utime(temp, ns=(1, 1))
            os.replace(temp, path)
        seen = control.poll()
        assert seen is not None and seen.id == number + 1
    control.close()


def test_what_is_no_file_holds_nobody(tmp_path: pathlib.Path) -> None:
    """A pipe or a folder in place of the control file neither blocks the loop nor changes its order."""
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        make(tmp_path / name)
        assert Control(str(tmp_path / name)).poll() is None


@pytest.fixture
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_becomes_the_word_stop(tmp_path: pathlib.Path, own_sigterm: None) -> None:
    """A SIGTERM is an order above all others seen, until a stop or drain is in force anyway."""
    path = tmp_path / "control.json"
    control = Control(str(path), sigterm=True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert control.poll() == Order(1, Word.STOP)
    give(path, Order(6, Word.SAVE))
    assert control.poll() == Order(7, Word.STOP)
    give(path, Order(8, Word.DRAIN))
    assert control.poll() == Order(8, Word.DRAIN)
    control.close()


def test_sigterm_works_without_a_control_file(own_sigterm: None) -> None:
    """A program run by hand stops at a step boundary too."""
    control = Control(None, sigterm=True)
    assert control.poll() is None
    os.kill(os.getpid(), signal.SIGTERM)
    assert control.poll() == Order(1, Word.STOP)


# --- agreement ---------------------------------------------------------------------------------------


class World:
    """Ranks as threads, with an all-reduce that waits for all of them (and fails after 20 s instead of hanging)."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.calls = 0
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._rows: list[list[int]] = [[]] * ranks

    def reducer(self, rank: int) -> Callable[[list[int]], list[int]]:
        def all_reduce_max(row: list[int]) -> list[int]:
            self._rows[rank] = row
            self._barrier.wait()
            result = [max(column) for column in zip(*self._rows, strict=True)]
            self._barrier.wait()
            self.calls += rank == 0
            return result

        return all_reduce_max

    def run(self, loop: Callable[[int], list[Order]]) -> list[list[Order]]:
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(loop, range(self.ranks)))


def skewed_run(seed: int, ranks: int, steps: int) -> tuple[list[list[Order]], list[Order]]:
    """Each rank learns of the orders given so far with a delay of its own, and one gets a SIGTERM of its own."""
    chance = random.Random(seed)
    words = [Word.SAVE, Word.DRAIN, Word.SKIP]
    issued = [Order(i + 1, chance.choice(words), chance.randrange(9), chance.randrange(9)) for i in range(steps // 3)]
    delays = [[chance.randrange(4) for _ in range(steps)] for _ in range(ranks)]
    signalled = (chance.randrange(ranks), chance.randrange(steps))
    world = World(ranks)

    def loop(rank: int) -> list[Order]:
        reduce_max, agreed, seen = world.reducer(rank), [], 0
        for step in range(steps):
            seen = max(seen, min(len(issued), (step - delays[rank][step]) // 3))
            mine = issued[seen - 1] if seen > 0 else None
            if (rank, step) >= signalled and rank == signalled[0]:
                mine = Order(seen + 1, Word.STOP)
            agreed.append(agree(reduce_max, mine))
        return agreed

    return world.run(loop), issued


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_all_ranks_end_each_step_with_the_same_order(seed: int, ranks: int) -> None:
    """Under skewed reads and a SIGTERM at one rank, all ranks hold one order after every step, and one really given."""
    agreed, issued = skewed_run(seed, ranks, steps=12)
    assert all(rank == agreed[0] for rank in agreed)
    for order in agreed[0]:
        plain = order if order.word is Word.SKIP else order._replace(a=0, b=0)
        assert order == NO_ORDER or order.word is Word.STOP or any(
            plain == (one if one.word is Word.SKIP else one._replace(a=0, b=0)) for one in issued
        )
    assert [order.id for order in agreed[0]] == sorted(order.id for order in agreed[0])


def test_one_number_travels_where_no_order_has_arguments() -> None:
    """A quiet step costs a single all-reduce of a single number."""
    world = World(3)
    agreed = world.run(lambda rank: [agree(world.reducer(rank), Order(2, Word.SAVE) if rank == 1 else None)])
    assert agreed == [[Order(2, Word.SAVE)]] * 3 and world.calls == 1


def test_arguments_come_from_the_order_that_won() -> None:
    """Two orders are never mixed: a rank with an older one adds nothing to the arguments."""
    world = World(2)
    mine = [Order(8, Word.SKIP, 100, 1), Order(9, Word.SKIP, 7, 50)]
    assert world.run(lambda rank: [agree(world.reducer(rank), mine[rank])]) == [[mine[1]]] * 2
