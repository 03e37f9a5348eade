"""Worker processes: results in order, the first error in order, bounded work ahead, and nobody left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from packtrain.core.errors import BuildFailed, CorruptInput
from packtrain.data.pool import AHEAD, Pool


def square(n: int) -> tuple[int, int]:
    return n * n, os.getpid()


def fail_at_three(n: int) -> int:
    if n in (3, 4):
        raise CorruptInput(f"task {n}", where=f"line {n}", fix="mend it")
    return n


def die_at_three(n: int) -> int:
    if n == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def broken(n: int) -> int:
    return n // 0


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def test_results_in_order(pool: Pool) -> None:
    """Results come in the order of the tasks, from more than one process, none of them this one; a pool can be used
    again."""
    for _ in range(2):
        results = list(pool.map(square, range(50)))
        assert [value for value, _ in results] == [n * n for n in range(50)]
    assert os.getpid() not in {pid for _, pid in results}
    assert list(pool.map(square, [])) == []


def test_work_ahead_is_bounded(pool: Pool) -> None:
    """However slowly results are taken, only so many tasks are drawn beyond them."""
    drawn = 0

    def tasks() -> Iterator[int]:
        nonlocal drawn
        for n in range(60):
            drawn = n + 1
            yield n

    for taken, _ in enumerate(pool.map(square, tasks())):
        assert drawn <= taken + 1 + 2 * AHEAD


def test_one_worker_is_the_caller() -> None:
    """With one worker the caller does the work itself, lazily."""
    with Pool(1) as alone:
        results = alone.map(square, iter(range(3)))
        assert next(results) == (0, os.getpid())


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_error_in_order(workers: int) -> None:
    """What the first failing task raised is raised, whole, after the results before it."""
    seen = []
    with Pool(workers) as pool, pytest.raises(CorruptInput, match="task 3") as caught:
        for n in pool.map(fail_at_three, range(9)):
            seen.append(n)
    assert seen == [0, 1, 2]
    assert (caught.value.where, caught.value.fix) == ("line 3", "mend it")


def test_other_errors_keep_their_meaning() -> None:
    """A fault of ours comes back as an assertion with its traceback."""
    with Pool(2) as pool, pytest.raises(AssertionError, match="ZeroDivisionError"):
        list(pool.map(broken, [1]))


def test_a_killed_worker_is_reported() -> None:
    """A worker killed by the system ends the work with an error that says so, and the others are ended too."""
    with Pool(2) as pool:
        processes = [psutil.Process(p.pid) for p in pool._workers.values()]
        with pytest.raises(BuildFailed, match="exit -9"):
            list(pool.map(die_at_three, range(20)))
    assert not any(p.is_running() for p in processes)
