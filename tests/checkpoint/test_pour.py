"""Pouring an image: what is hashed, what is checksummed and what is written are the same bytes; no thread is left on
the file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.pour import CHUNK_BYTES, WRITERS, pour
from packtrain.core.bulk import Crew, Image
from packtrain.core.platform import LocalPlatform

SIZES = (0, 1, fmt.BLOCK_BYTES, CHUNK_BYTES + 1, (WRITERS + 3) * CHUNK_BYTES + fmt.BLOCK_BYTES + 77)


def fresh(offset: int, chunk: memoryview) -> None:
    """A buffer whose owner writes on: each look at it shows other bytes."""
    chunk[:] = os.urandom(len(chunk))


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_of_the_bytes_written(tmp_path: Path, size: int) -> None:
    """Of a source that never says the same twice, SHA-256 and each crc32c agree with what the file holds."""
    path = tmp_path / "image"
    poured = pour(LocalPlatform(), fresh, str(path), size, lambda: None)
    data = path.read_bytes()
    assert len(data) == size and poured.sha256 == hashlib.sha256(data).hexdigest()
    blocks = [data[at : at + fmt.BLOCK_BYTES] for at in range(0, size, fmt.BLOCK_BYTES)]
    assert poured.crcs == [fmt.crc32c(block) for block in blocks]


class _Lazy(Crew):
    """Works only when it is waited for."""

    def start(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def close(self) -> None:
        pass


class _LazyPlatform(LocalPlatform):
    def crew(self, threads: int) -> Crew:
        return _Lazy()


def test_a_buffer_is_not_filled_again_before_it_was_written(tmp_path: Path) -> None:
    """With writers as late as can be the file still holds what was hashed."""
    size = (2 * WRITERS + 3) * CHUNK_BYTES
    poured = pour(_LazyPlatform(), fresh, str(tmp_path / "image"), size, lambda: None)
    assert poured.sha256 == hashlib.sha256((tmp_path / "image").read_bytes()).hexdigest()


class _Watched(Image):
    """Counts writes under way; fails the one at `bad`; says whether it was closed while somebody wrote."""

    def __init__(self, bad: int) -> None:
        self.bad, self.busy, self.closed_busy, self.closed = bad, 0, False, False

    def write_at(self, offset: int, data: memoryview) -> None:
        self.busy += 1
        assert not self.closed
        if offset == self.bad:
            self.busy -= 1
            raise OSError(errno.ENOSPC, "full")
        hashlib.sha256(data)
        self.busy -= 1

    def fsync(self) -> None:
        if self.bad < 0:
            raise OSError(errno.EIO, "cannot be synced")

    def close(self) -> None:
        self.closed_busy, self.closed = self.busy > 0, True


class _Disk(LocalPlatform):
    def __init__(self, image: Image) -> None:
        self.image = image

    def create_image(self, path: str, size: int, mode: int = 0o644) -> Image:
        return self.image


def raising(after: int) -> Callable[[], None]:
    left = [after]

    def check() -> None:
        left[0] -= 1
        if not left[0]:
            raise TimeoutError

    return check


@pytest.mark.parametrize("bad", [0, CHUNK_BYTES, 7 * CHUNK_BYTES, 9 * CHUNK_BYTES])
def test_a_failed_write_is_heard_and_the_file_closed_only_when_all_writes_are_over(bad: int) -> None:
    """Of any chunk: the first, one in the middle, the last. A descriptor closed under a writing thread may be another
    file's by then."""
    image = _Watched(bad)
    with pytest.raises(OSError, match="full"):
        pour(_Disk(image), fresh, "image", 10 * CHUNK_BYTES, lambda: None)
    assert image.closed and not image.closed_busy


def test_a_failed_fsync_is_heard() -> None:
    """Bytes that may not outlive a crash are not poured."""
    with pytest.raises(OSError, match="synced"):
        pour(_Disk(_Watched(-1)), fresh, "image", CHUNK_BYTES, lambda: None)


def test_giving_up_waits_for_writes_under_way() -> None:
    """What `check` raises ends the pouring, after the threads have left the file."""
    image = _Watched(1)
    with pytest.raises(TimeoutError):
        pour(_Disk(image), fresh, "image", 10 * CHUNK_BYTES, raising(after=4))
    assert image.closed and not image.closed_busy
