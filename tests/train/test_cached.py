"""Notes of what is compiled for which world: they say what is there, and nothing that is not."""

from __future__ import annotations

import os
import pathlib
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from packtrain.core.platform import LocalPlatform
from packtrain.train import cached
from packtrain.train.cached import Note
from packtrain.train.config import TrainConfig
from packtrain.train.sections import Sections

HERE = LocalPlatform()
SPEC = Sections(train=TrainConfig(worlds={"2": {"fsdp": 2}, "1": {}}))


def note(program: str = "jit_step-a", made_s: float = 1.0, **other: Any) -> Note:
    world = cached.world_of(SPEC, 2, 4, other.pop("code", "c"), "0.1")
    return Note(world=world, platform="cpu", processor="p", program=program, made_s=made_s, bytes=7, **other)


def kept(folder: pathlib.Path, *notes: Note) -> None:
    """Those notes, and their programs."""
    for one in notes:
        if one.program:
            (folder / f"{one.program}{cached.PROGRAM}").write_bytes(b"program")
        cached.write(HERE, str(folder), one)


def programs(folder: pathlib.Path) -> list[str]:
    return [one.program for one in cached.read(HERE, str(folder))]


def test_notes_come_back_the_newest_first(tmp_path: pathlib.Path) -> None:
    """What was noted is read as it was; a second word on the same program of the same world, by other code too, stands
    in place of the first."""
    kept(tmp_path, note("a", 1.0), note("b", 3.0), note("", 2.0, why="never"), note("a", 4.0, code="d"))
    assert cached.read(HERE, str(tmp_path)) == [
        note("a", 4.0, code="d"), note("b", 3.0), note("", 2.0, why="never")
    ]


def test_what_says_nothing_is_passed_over(tmp_path: pathlib.Path) -> None:
    """Notes that are torn, of another kind or not UTF-8, and those whose program was deleted."""
    kept(tmp_path, note("whole"), note("torn"), note("other"), note("bytes"), note("gone"))
    number = note().world.number
    for program, data in (("torn", b'{"world":'), ("other", b'{"made_s":1}'), ("bytes", b'{"\xff\xfe":1}')):
        (tmp_path / f"{program}.{number}{cached.NOTE}").write_bytes(data)
    (tmp_path / f"gone{cached.PROGRAM}").unlink()
    (tmp_path / f"folder{cached.NOTE}").mkdir()
    assert programs(tmp_path) == ["whole"]


@pytest.mark.root
def test_notes_of_others_are_passed_over(tmp_path: pathlib.Path) -> None:
    """Another user's word is not believed, in whatever folder it lies."""
    kept(tmp_path, note("ours"), note("theirs"))
    os.chown(tmp_path / f"theirs.{note().world.number}{cached.NOTE}", 12345, -1)
    assert programs(tmp_path) == ["ours"]


def test_ranks_note_at_once(tmp_path: pathlib.Path) -> None:
    """While eight write the same notes, whoever reads finds each of them whole; nothing else is left."""
    some = [note(f"p{n}") for n in range(5)]
    kept(tmp_path, *some)
    threads = [threading.Thread(target=lambda: [kept(tmp_path, *some) for _ in range(9)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen = [programs(tmp_path)]
    while any(thread.is_alive() for thread in threads):
        seen.append(programs(tmp_path))
    for thread in threads:
        thread.join()
    assert all(sorted(read) == [f"p{n}" for n in range(5)] for read in seen)
    assert len(list(tmp_path.iterdir())) == 10


def test_a_disk_that_refuses_costs_the_note(tmp_path: pathlib.Path) -> None:
    """Whoever compiles goes on."""
    cached.write(HERE, str(tmp_path / "absent"), note())


def test_what_decides_the_step_decides_the_digest() -> None:
    """Another rate, mesh or length is another world; how often it is evaluated, saved, or named otherwise, is not."""
    digest, train = cached.digest(SPEC, 2), SPEC.train

    def changed(**fields: Any) -> str:
        return cached.digest(replace(SPEC, train=msgspec.structs.replace(train, **fields)), 2)

    assert changed(eval_every_steps=7, minutes_max=3.0, sample_tokens=9) == digest
    assert changed(worlds={"2": {"fsdp": 2}}) == digest == changed(worlds={}, mesh={"fsdp": 2})
    others = [
        changed(worlds={"2": {"replica": 2}}), changed(steps=7), cached.digest(SPEC, 1),
        cached.digest(replace(SPEC, optim=msgspec.structs.replace(SPEC.optim, learning_rate=0.5)), 2),
        cached.digest(replace(SPEC, data=msgspec.structs.replace(SPEC.data, length=64)), 2),
        cached.digest(replace(SPEC, seed=1), 2),
    ]
    assert len({digest, *others}) == 7
    damage = msgspec.structs.replace(SPEC.data, damaged_rows_max=3)
    assert cached.digest(replace(SPEC, data=damage), 2) == digest
