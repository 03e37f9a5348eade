"""Large files: whatever is direct and whatever goes through the cache, the file holds what was written."""

from __future__ import annotations

import errno
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from packtrain.core.bulk import ALIGN_BYTES, DirectImage, Threads, aligned

SIZES = (0, 1, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1, 5 * ALIGN_BYTES + 7)


def buffer_of(data: bytes) -> memoryview:
    buffer = aligned(max(len(data), 1))
    buffer[: len(data)] = data
    return buffer[: len(data)]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_holds_what_was_written(tmp_path: Path, size: int) -> None:
    """The bytes come back, and no padding with them."""
    data = os.urandom(size)
    with DirectImage(str(tmp_path / "image"), size, 0o600) as image:
        image.write_at(0, buffer_of(data))
        image.fsync()
    assert (tmp_path / "image").read_bytes() == data
    assert (tmp_path / "image").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("at", "skew"), [(ALIGN_BYTES, 0), (ALIGN_BYTES, 8), (100, 0), (100, 8)])
def test_pieces_come_in_any_order_and_at_any_address(tmp_path: Path, at: int, skew: int) -> None:
    """Unaligned offsets and addresses are written as well, through the cache."""
    data = os.urandom(3 * ALIGN_BYTES + 5)
    buffer = aligned(len(data) + skew)
    buffer[skew:] = data
    with DirectImage(str(tmp_path / "image"), len(data), 0o600) as image:
        image.write_at(at, buffer[skew + at :])
        image.write_at(0, buffer[skew : skew + at])
        image.fsync()
    assert (tmp_path / "image").read_bytes() == data


def test_aligned_writes_do_not_pass_through_the_cache(tmp_path: Path) -> None:
    """The descriptor that whole pages go to was opened with O_DIRECT, where the file system has it."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct writes here: {error}")
    path = tmp_path / "image"
    with DirectImage(str(path), ALIGN_BYTES, 0o600):
        links = [link for link in Path("/proc/self/fd").iterdir() if os.path.exists(link) and path.samefile(link)]
        flags = [int(Path(f"/proc/self/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0], 8) for fd in links]
    assert [bool(flag & os.O_DIRECT) for flag in sorted(flags)] == [False, True]


def test_a_file_has_its_size_from_the_start(tmp_path: Path) -> None:
    """So no write extends it."""
    with DirectImage(str(tmp_path / "image"), 12_345, 0o600):
        assert (tmp_path / "image").stat().st_size == 12_345


def test_a_file_that_exists_is_not_touched(tmp_path: Path) -> None:
    """EEXIST, and the bytes stay."""
    (tmp_path / "image").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        DirectImage(str(tmp_path / "image"), 8, 0o600)
    assert (tmp_path / "image").read_bytes() == b"old"


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait()


def test_a_crew_works_side_by_side_and_tells_each_error_to_its_waiter() -> None:
    """Two tasks that wait for each other both end; of a third that fails the waiter hears, and nobody else."""
    meet = threading.Barrier(2)

    def failing() -> None:
        raise OSError(errno.ENOSPC, "full")

    with Threads(2) as crew:
        waits = [crew.start(partial(_meet, meet)) for _ in range(2)]
        failed = crew.start(failing)
        for wait in waits:
            wait()
        with pytest.raises(OSError, match="full"):
            failed()
        crew.start(lambda: None)()


def test_a_closed_crew_leaves_no_thread() -> None:
    """Work handed in before is still done; then the threads end."""
    before, done = set(threading.enumerate()), []
    with Threads(3) as crew:
        crew.start(lambda: done.append(1))
        threads = set(threading.enumerate()) - before
    for thread in threads:
        thread.join()
    assert done == [1] and len(threads) == 3
