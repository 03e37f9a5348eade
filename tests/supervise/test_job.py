"""The file that says what a run is."""

from __future__ import annotations

import os
import pathlib

import msgspec
import pytest

from packtrain.core.errors import BadValue, RunUnusable
from packtrain.core.platform import LocalPlatform
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.job import Job, read_job, run_id, write_job

JOB = Job(
    name="small", run_folder="/data/runs/small", worker=("python", "w.py"), carrier=("python", "c.py"),
    env={"SECRET": "s"}, version="1", supervise=SuperviseConfig(grace_s=5.0), nodes=4, spares=1,
    worlds={"2": {"fsdp": 2}}, preload=("json",),
)


def test_a_job_comes_back_as_it_was_written(tmp_path: pathlib.Path) -> None:
    """What is read equals what was written, and only the owner may read it."""
    path = str(tmp_path / "job.json")
    write_job(LocalPlatform(), path, JOB)
    assert read_job(LocalPlatform(), path) == JOB
    assert os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("change", [
    {"nodes": "four"}, {"surprise": 1}, {"supervise": {"grace_s": -1.0}}, {"checkpoint": {"keep_last": 0}},
])
def test_what_is_no_job_of_this_version_says_so(tmp_path: pathlib.Path, change: dict) -> None:
    """A wrong type, an unknown key, a contradiction: one error that names the file."""
    path = tmp_path / "job.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(JOB), **change}))
    with pytest.raises(BadValue) as caught:
        read_job(LocalPlatform(), str(path))
    assert caught.value.where == str(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null"])
def test_bytes_that_are_nothing_are_refused(tmp_path: pathlib.Path, data: bytes) -> None:
    """Whatever stands in the file, the answer is an error of ours."""
    path = tmp_path / "job.json"
    path.write_bytes(data)
    with pytest.raises(BadValue):
        read_job(LocalPlatform(), str(path))


def test_a_job_that_is_not_there_or_cannot_be_written_says_so(tmp_path: pathlib.Path) -> None:
    """The machine's refusal is RunUnusable with the path; a job is never written over another."""
    with pytest.raises(RunUnusable, match="cannot be read"):
        read_job(LocalPlatform(), str(tmp_path / "none.json"))
    write_job(LocalPlatform(), str(tmp_path / "job.json"), JOB)
    with pytest.raises(RunUnusable, match="cannot be written"):
        write_job(LocalPlatform(), str(tmp_path / "job.json"), JOB)


def test_a_run_has_one_id_through_a_link(tmp_path: pathlib.Path) -> None:
    """The same folder under two names is one run, another folder is another."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert run_id(str(tmp_path / "run")) == run_id(str(tmp_path / "link")) != run_id(str(tmp_path / "other"))
