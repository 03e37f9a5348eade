"""Worker processes: results in order, the first error in order, bounded work ahead, and nobody left behind."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
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


def slow_first(task: tuple[int, str]) -> int:
    """Task 0 takes until task 7 is done, and then some."""
    number, fifo = task
    if number == 0:
        with open(fifo, "rb") as file:
            file.read()
        hashlib.sha256(bytes(30 << 20)).digest()
    if number == 7:
        with open(fifo, "wb"):
            pass
    return number


def test_work_ahead_is_bounded(pool: Pool, tmp_path: pathlib.Path) -> None:
    """While the first task is not done, only so many are handed out beyond it, however fast they are."""
    os.mkfifo(tmp_path / "fifo")
    drawn = 0

    def tasks() -> Iterator[tuple[int, str]]:
        nonlocal drawn
        for n in range(60):
            drawn = n + 1
            yield n, str(tmp_path / "fifo")

    results = pool.map(slow_first, tasks())
    assert next(results) == 0 and drawn == 2 * AHEAD
    assert list(results) == list(range(1, 60))


def hang(fifo: str) -> None:
    with open(fifo, "rb") as file:
        file.read()


HANGING = """
import sys
from packtrain.data.pool import Pool
from tests.data.test_pool import hang
pool = Pool(2)
print(*(process.pid for process in pool._workers.values()), flush=True)
list(pool.map(hang, sys.argv[1:]))
"""


def test_workers_die_with_their_parent(tmp_path: pathlib.Path) -> None:
    """When the parent is killed, its workers end at once, whatever they are busy with."""
    fifos = [str(tmp_path / name) for name in "ab"]
    for fifo in fifos:
        os.mkfifo(fifo)
    root = pathlib.Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", HANGING, *fifos], cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    with open(fifos[0], "wb"), open(fifos[1], "wb"):  # opening waits until each worker is in its task
        parent.kill()
        parent.wait()
        parent.stdout.close()
        _, alive = psutil.wait_procs(workers, timeout=60)
    assert len(workers) == 2 and not alive


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
