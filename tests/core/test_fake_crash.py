"""What a power cut leaves on the fake disk: everything synced, any part of the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.fake import Choices, FakeCrash, FakeDisk, FakePlatform, explore, power_cut
from packtrain.core.platform import Platform


def outcomes(scene: Callable[[FakePlatform], None], look: Callable[[Platform], object]) -> set[object]:
    """Everything `look` may find after a power cut that follows `scene`."""
    found = set()
    for choices in explore():
        platform = FakePlatform(FakeDisk())
        platform.mkdir("/run")
        platform.disk.sync_all()
        scene(platform)
        found.add(look(platform.crash(choices)))
    return found


def content(platform: Platform) -> dict[str, bytes]:
    return {name: platform.read(f"/run/{name}") for name in platform.listdir("/run")}


def shown(platform: Platform) -> str:
    return " ".join(f"{name}={data.decode()!r}" for name, data in content(platform).items())


def test_an_entry_needs_its_folder_synced() -> None:
    """A fsynced file may be gone with its name until the folder was fsynced; after that it is there for good."""
    assert outcomes(lambda p: p.write_new("/run/a", b"A"), shown) == {"", "a='A'"}

    def with_folder(platform: FakePlatform) -> None:
        platform.write_new("/run/a", b"A")
        platform.fsync_dir("/run")

    assert outcomes(with_folder, shown) == {"a='A'"}


def test_content_needs_its_file_synced() -> None:
    """What follows the last fsync is lost, kept, cut or NULs; what came before it stays."""

    def scene(platform: FakePlatform) -> None:
        file = platform.create("/run/a")
        file.write(b"safe")
        file.fsync()
        platform.fsync_dir("/run")
        file.write(b"loose")

    assert outcomes(scene, shown) == {
        "a='safe'", "a='safeloose'", "a='safelo'", "a='safe\\x00\\x00\\x00\\x00\\x00'",
    }


def test_a_rename_is_whole_or_not_at_all() -> None:
    """After a cut a replaced name shows the old file or the new one, and one of two names is there at least."""

    def scene(platform: FakePlatform) -> None:
        platform.write_new("/run/a", b"old")
        platform.write_new("/run/b", b"new")
        platform.fsync_dir("/run")
        platform.replace("/run/b", "/run/a")

    assert outcomes(scene, shown) == {"a='old' b='new'", "a='new'"}


def test_changes_of_names_survive_independently() -> None:
    """A later change may be kept where an earlier one is lost, as POSIX allows."""

    def scene(platform: FakePlatform) -> None:
        for name in "ab":
            platform.write_new(f"/run/{name}", name.encode())

    assert outcomes(scene, shown) == {"", "a='a'", "b='b'", "a='a' b='b'"}


def test_links_are_one_file() -> None:
    """Two names of one file are still one after a cut, and an unlink that was not synced may come undone."""

    def scene(platform: FakePlatform) -> None:
        file = platform.create("/run/a")
        platform.link("/run/a", "/run/b")
        platform.fsync_dir("/run")
        file.write(b"xy")
        platform.unlink("/run/a")

    assert outcomes(scene, shown) == {
        f"{a}b={data}" for data in ("''", "'xy'", "'x'", "'\\x00\\x00'") for a in ("", f"a={data} ")
    }


def test_syncing_one_folder_says_nothing_of_another() -> None:
    """A folder made a moment ago is lost with its synced content unless its own parent was fsynced."""

    def scene(platform: FakePlatform) -> None:
        platform.mkdir("/run/new")
        platform.write_new("/run/new/a", b"A")
        platform.fsync_dir("/run/new")

    found = outcomes(scene, lambda p: ",".join(p.listdir("/run")) + str(p.exists("/run/new/a")))
    assert found == {"False", "newTrue"}


def test_a_rename_between_folders_is_synced_with_either() -> None:
    """One change of two folders is durable as a whole, together with earlier changes of the same names."""

    def scene(platform: FakePlatform) -> None:
        platform.mkdir("/run/x")
        platform.fsync_dir("/run")
        platform.write_new("/run/x/a", b"first")
        platform.replace("/run/x/a", "/run/a")
        platform.write_new("/run/x/b", b"other")
        platform.fsync_dir("/run")

    look = outcomes(scene, lambda p: f"{p.listdir('/run')} {p.listdir('/run/x')}")
    assert look == {"['a', 'x'] []", "['a', 'x'] ['b']"}


def test_replacing_a_file_survives_every_cut() -> None:
    """`write_replacing` leaves the old or the new content wherever the power fails, and is durable when it returns."""
    operations = []

    def run(cut_at: int, choices: Choices) -> tuple[bytes, bool]:
        disk = FakeDisk()
        platform = FakePlatform(disk)
        platform.mkdir("/run")
        platform.write_new("/run/a", b"old")
        disk.sync_all()
        victim = FakePlatform(disk, faults=lambda op, path, n: power_cut() if n == cut_at else None)
        try:
            victim.write_replacing("/run/a", b"new")
        except FakeCrash:
            return victim.crash(choices).read("/run/a"), False
        operations.append(victim.ops)
        return victim.crash(choices).read("/run/a"), True

    for cut_at in range(1, 12):
        for choices in explore():
            data, finished = run(cut_at, choices)
            assert data == b"new" or (data == b"old" and not finished), (cut_at, choices)
    assert operations, "the loop went past the last operation"


def test_death_without_a_power_cut_loses_nothing() -> None:
    """kill -9 leaves what was written, synced or not; the dead process can do nothing more, not even clean up."""
    disk = FakeDisk()
    platform = FakePlatform(disk, "a")
    file = platform.create("/tmp/a")
    file.write(b"x")
    lock = platform.lock("/tmp/holder", "a")
    assert lock is not None
    assert FakePlatform(disk, "b").lock("/tmp/holder", "b") is None
    platform.kill()
    for dead in (file.close, platform.boot_ns, lock.release, lambda: platform.unlink("/tmp/a")):
        with pytest.raises(FakeCrash):
            dead()
    other = FakePlatform(disk, "b")
    assert other.read("/tmp/a") == b"x"
    assert other.lock("/tmp/holder", "b") is not None


def test_a_reboot_is_a_new_boot_with_other_chance() -> None:
    """After a power cut the node has a new boot id, an uptime that began again, no locks, and draws other tokens."""
    first = FakePlatform(FakeDisk(), "a")
    lock = first.lock("/tmp/holder", "a")
    first.sleep(1000)
    boot, token, wall, uptime = first.boot_id(), first.token(), first.wall_s(), first.boot_ns()
    first.disk.sync_all()
    again = first.crash()
    assert lock is not None and again.lock("/tmp/holder", "a") is not None
    assert (again.boot_id(), again.token()) != (boot, token)
    assert again.boot_id() != boot and again.token() != token and again.wall_s() > wall
    assert again.boot_ns() < uptime
    assert FakePlatform(again.disk, "a").boot_id() == again.boot_id() != FakePlatform(again.disk, "b").boot_id()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), max_size=25), st.integers(0, 1000))
def test_what_was_synced_is_always_there(ops: list[tuple[int, str]], seed: int) -> None:
    """However operations are mixed, a file synced with its folder and left alone since is whole after any cut."""
    platform = FakePlatform(FakeDisk())
    platform.mkdir("/run")
    platform.disk.sync_all()
    durable: dict[str, bytes] = {}
    for i, (kind, name) in enumerate(ops):
        path, other = f"/run/{name}", f"/run/{'b' if name == 'a' else 'a'}"
        if kind == 5:
            platform.fsync_dir("/run")
            durable = content(platform)
        elif kind <= 2:
            platform.write_new(path + str(i), str(i).encode())
        elif kind == 3 and platform.exists(path):
            platform.unlink(path)
            durable.pop(name, None)
        elif kind == 4 and not platform.exists(other):
            platform.write_new(other, str(i).encode())
            durable.pop(other[-1], None)
    after = content(platform.crash(Choices(seed=seed)))
    assert durable.items() <= after.items()


def test_space_is_counted_once_for_all_names() -> None:
    """A full disk takes what fits and says ENOSPC; space comes back with the last name, also after a power cut."""
    disk = FakeDisk(capacity_bytes=10)
    platform = FakePlatform(disk)
    platform.write_new("/tmp/a", b"12345678")
    platform.link("/tmp/a", "/tmp/b")
    assert platform.free_bytes("/tmp") == 2
    with pytest.raises(OSError, match="No space left"):
        platform.write_new("/tmp/c", b"1234")
    assert platform.read("/tmp/c") == b"12"
    platform.unlink("/tmp/c")
    platform.unlink("/tmp/a")
    assert platform.free_bytes("/tmp") == 2
    disk.sync_all()
    after = platform.crash()
    assert after.free_bytes("/tmp") == 2
    after.unlink("/tmp/b")
    assert after.free_bytes("/tmp") == 10
