"""Programs kept on disk: every rank finds them, what is damaged is not run, and others cannot put any there."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from packtrain.core.platform import LocalPlatform
from packtrain.train import cached, compiled
from packtrain.train.compiled import Kept
from packtrain.train.sections import Sections
from tests.train.test_words import free_port

WORKER = "tests.train.compiled_worker"
DEADLINE_S = 240


def counts(cache: pathlib.Path, ranks: int) -> list[dict[str, int]]:
    """How often each rank of a world asked for a program, and found it."""
    common = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    world = [
        subprocess.Popen(
            [sys.executable, "-m", WORKER], env=os.environ | common | {"RANK": str(rank)}, stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S)[0] for process in world]
    finally:
        for process in world:
            process.kill()
            process.wait()
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.timeout(DEADLINE_S + 60)
def test_every_rank_finds_what_it_runs_alone(tmp_path: pathlib.Path) -> None:
    """The second time neither of two ranks compiles anything of its own, and a world of one finds what it was as rank
    0. What they run together is compiled each time and never written: loaded, its collectives have lost their order."""
    first, second = counts(tmp_path / "kept", 2), counts(tmp_path / "kept", 2)
    assert all(rank["asked"] > rank["hit"] for rank in first)
    assert all(rank["asked"] == rank["hit"] > 0 for rank in second), second
    files = [path.name for path in (tmp_path / "kept").iterdir() if path.suffix == cached.PROGRAM]
    assert len([name for name in files if name.startswith("jit_alone-")]) == 2
    assert not [name for name in files if name.startswith("jit_together-")]
    (alone,) = counts(tmp_path / "kept", 1)
    assert alone["hit"] > 0
    assert_noted(tmp_path / "kept")


def assert_noted(folder: pathlib.Path) -> None:
    """What two worlds kept, or loaded, is noted for both; of the one of two ranks also that its programs are not."""
    notes = cached.read(LocalPlatform(), str(folder))
    of = {ranks: [note for note in notes if note.world.ranks == ranks] for ranks in (1, 2)}
    assert {note.why for note in of[2]} == {"", cached.NOT_ON_CPU} and {note.why for note in of[1]} == {""}
    shared = {note.program for note in of[1]} & {note.program for note in of[2]}
    assert any(key.startswith("jit_alone-") for key in shared)
    assert {(note.platform, note.world.spec) for note in notes} == {
        ("cpu", cached.digest(Sections(), ranks)) for ranks in (1, 2)
    }
    sizes = {path.name.removesuffix(cached.PROGRAM): path.stat().st_size for path in folder.glob("*.program")}
    assert all(note.bytes == sizes[note.program] for note in notes if note.program)


def kept(folder: pathlib.Path, bytes_max: int = 1000) -> Kept:
    return Kept(LocalPlatform(), str(folder), bytes_max)


def test_what_is_damaged_is_not_run(tmp_path: pathlib.Path) -> None:
    """A flipped byte, a torn file and an empty one are as good as absent."""
    programs = kept(tmp_path)
    programs.put("a", b"program")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    assert programs.get("a") == b"program" and programs.has("a") and programs.get("b") is None
    for damaged in (whole[:-1] + b"M", whole[:-1], b""):
        path.write_bytes(damaged)
        assert programs.get("a") is None


def test_the_folder_has_a_bound(tmp_path: pathlib.Path) -> None:
    """The oldest go first, and only as many as have to."""
    programs = kept(tmp_path, bytes_max=320)
    for n, key in enumerate("abc"):
        programs.put(key, b"x" * 68)
        os.utime(tmp_path / f"{key}.program", (n, n))
    programs.put("d", b"x" * 68)
    assert sorted(path.name[0] for path in tmp_path.iterdir()) == ["b", "c", "d"]


class Beside(LocalPlatform):
    """Another rank ends its own entry between our listing the folder and our look at what is there."""

    def listdir(self, path: str) -> list[str]:
        return [*super().listdir(path), ".new-of-another-rank"]


def test_what_another_rank_renames_meanwhile_costs_nothing(tmp_path: pathlib.Path) -> None:
    """A name that is gone when it is looked at keeps no program from being kept."""
    programs = Kept(Beside(), str(tmp_path), 1000)
    programs.put("a", b"program")
    assert programs.get("a") == b"program"


def test_a_disk_that_refuses_costs_nothing_but_time(tmp_path: pathlib.Path) -> None:
    """Where nothing can be written the program just goes on."""
    programs = kept(tmp_path / "absent")
    programs.put("a", b"program")
    assert programs.get("a") is None


def test_a_folder_others_can_reach_is_not_used(tmp_path: pathlib.Path) -> None:
    """What lies there is run, so a folder that is open, or a link to another, is refused with the reason; ours is made
    closed."""
    platform, mine = LocalPlatform(), tmp_path / "mine"
    assert compiled.refused(platform, str(mine)) == "" and mine.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(mine)
    assert "not a folder of this user" in compiled.refused(platform, str(tmp_path / "link"))
    mine.chmod(0o750)
    assert "open to others" in compiled.refused(platform, str(mine))
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in compiled.refused(platform, str(tmp_path / "file" / "x"))


def test_where_programs_are_kept() -> None:
    """Where JAX was told to, else with the caches of the user."""
    assert cached.folder_of({"JAX_COMPILATION_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}) == "/c"
    assert cached.folder_of({"XDG_CACHE_HOME": "/x"}) == "/x/packtrain/compiled"
    assert cached.folder_of({}).endswith("/.cache/packtrain/compiled")


def test_the_processor_is_part_of_the_key() -> None:
    """What this machine's code may rely on is told, the same each time, and what changes from moment to moment is not.
    """
    here = cached.processor(LocalPlatform())
    assert here == cached.processor(LocalPlatform()) and len(here) > 20
    assert "MHz" not in here and "bogomips" not in here.lower()
