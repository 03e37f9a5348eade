"""What doctor says of the compiled programs of a run's worlds."""

from __future__ import annotations

import importlib.metadata
import pathlib
from typing import Any

import pytest

from packtrain.cli.cached import COLD, cached_findings
from packtrain.cli.checkup import FAIL, OK, WARN, Finding
from packtrain.core.config import encode
from packtrain.core.platform import LocalPlatform
from packtrain.core.units import MIB
from packtrain.recipes.spec import RunSpec
from packtrain.train import cached
from packtrain.train.cached import Note
from packtrain.train.config import TrainConfig
from packtrain.train.sections import load

HERE = LocalPlatform()
WORLDS = {"4": {"fsdp": 8}, "3": {"fsdp": 6}, "1": {"fsdp": 2}}
TRAIN = TrainConfig(worlds=WORLDS)
GPU = Finding(OK, "devices", "8 gpu H100")


class Kept:
    """A run, and a folder of programs."""

    def __init__(self, base: pathlib.Path, train: TrainConfig = TRAIN) -> None:
        self.folder, self.run, self.asked = base / "kept", base / "run", 0
        self.folder.mkdir(mode=0o700)
        (self.run / "spec").mkdir(parents=True)
        (self.run / "spec" / "0001.toml").write_bytes(encode(RunSpec(recipe="x", train=train)))

    def note(self, nodes: int, program: str, **other: Any) -> None:
        code, jax = other.pop("code", cached.code_hash(HERE)), other.pop("jax", importlib.metadata.version("jax"))
        world = cached.world_of(load(HERE, str(self.run)), nodes, 2 * nodes, code, jax)
        fields = {"platform": "gpu", "processor": cached.processor_mark(HERE), "made_s": HERE.wall_s(), "bytes": MIB}
        cached.write(HERE, str(self.folder), Note(world=world, program=program, **fields | other))
        if program:
            (self.folder / f"{program}{cached.PROGRAM}").touch()

    def told(self, devices: Finding = GPU) -> list[tuple[str, str, str]]:
        def ask() -> Finding:
            self.asked += 1
            return devices

        env = {"JAX_COMPILATION_CACHE_DIR": str(self.folder)}
        return [found[:3] for found in cached_findings(HERE, str(self.run), env, ask)]


def test_worlds_that_are_compiled_are_told(tmp_path: pathlib.Path) -> None:
    """One line a world, the largest first: size and age of what is there, and which one's start compiles."""
    kept = Kept(tmp_path)
    kept.note(4, "jit_step-a", made_s=HERE.wall_s() - 10800)
    kept.note(4, "jit_evaluate-b")
    kept.note(1, "jit_evaluate-c")
    assert kept.told() == [
        (OK, "world 4", "4x2, fsdp 8: compiled (2.0 MiB, 3h00m old)"), (WARN, "world 3", f"fsdp 6: {COLD}"),
        (WARN, "world 1", f"1x2, fsdp 2: {COLD}"),
    ]
    assert kept.asked == 0, "notes told that it is no CPU"
    (kept.folder / f"jit_step-a{cached.PROGRAM}").unlink()
    assert kept.told()[0] == (WARN, "world 4", f"4x2, fsdp 8: {COLD}")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"jax": "0.1"}, "compiled with jax 0.1"), ({"code": "x"}, "compiled by another version of Packtrain"),
        ({"platform": "cpu", "processor": "x"}, "compiled for another processor"),
    ],
)
def test_what_may_not_be_found_is_not_promised(tmp_path: pathlib.Path, other: dict[str, str], says: str) -> None:
    """A program by other code, by another release of JAX or for another processor is told as that."""
    kept = Kept(tmp_path, TrainConfig())
    kept.note(1, "jit_step-a", **other)
    assert kept.told() == [(WARN, "world 1", f"1x2, every device on fsdp: {says}: its next start may compile")]
    kept.note(1, "jit_step-b", made_s=1.0)
    assert kept.told()[0][0] == OK, "an older one that fits is what is found"


def test_another_spec_is_another_world(tmp_path: pathlib.Path) -> None:
    """What was compiled before `packtrain set` is not what the next attempt looks for."""
    kept = Kept(tmp_path)
    kept.note(4, "jit_step-a")
    changed = encode(RunSpec(recipe="x", train=TrainConfig(worlds=WORLDS, steps=7)))
    (kept.run / "spec" / "0002.toml").write_bytes(changed)
    assert kept.told()[0] == (WARN, "world 4", f"fsdp 8: {COLD}")


def test_what_is_never_kept_is_told_plainly(tmp_path: pathlib.Path) -> None:
    """On CPU several devices' programs are compiled at every start: told where a worker noted it, and where nobody did
    by what this machine has; a world of one device is told as any other."""
    kept = Kept(tmp_path, TrainConfig(worlds={"2": {"fsdp": 2}, "1": {"fsdp": 1}}))
    never, cold = (OK, "world 2", f"fsdp 2: {cached.NOT_ON_CPU}"), (WARN, "world 1", f"every axis 1: {COLD}")
    assert kept.told(Finding(OK, "devices", "1 cpu cpu")) == [never, cold]
    assert kept.told(Finding(FAIL, "devices", "no answer"))[0] == (WARN, "world 2", f"fsdp 2: {COLD}")
    kept.note(2, "", platform="cpu", why=cached.NOT_ON_CPU)
    assert kept.told() == [(OK, "world 2", f"2x2, fsdp 2: {cached.NOT_ON_CPU}"), cold]
    assert kept.asked == 2


def test_a_folder_that_is_not_used_is_told(tmp_path: pathlib.Path) -> None:
    """Where others could put programs every start compiles, whatever lies there; where no folder is, all is cold; a
    spec that cannot be read is a failure."""
    kept = Kept(tmp_path)
    kept.note(4, "jit_step-a")
    kept.folder.chmod(0o755)
    ((verdict, subject, found),) = kept.told()
    assert (verdict, subject) == (WARN, "compiled") and "open to others" in found
    kept.folder.rename(tmp_path / "elsewhere")
    assert [found[0] for found in kept.told()] == [WARN] * 3
    (kept.run / "spec" / "0001.toml").write_text("train = 3")
    assert [found[:2] for found in kept.told()] == [(FAIL, "compiled")]
