"""What a worker's environment says, and what a run ends with."""

from __future__ import annotations

import math
import pathlib

import pytest

from packtrain.checkpoint.config import CheckpointConfig, Mirror
from packtrain.cli.launch import child_env, closing, without_itself
from packtrain.core.journal import Entry
from packtrain.core.records import EvalDone, Record, TrainingDone
from packtrain.monitor.fold import fold


def test_workers_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's glibc backs its buffers with huge pages."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert child_env()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_what_the_person_set_for_glibc_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunables of the person's own are passed on as they are."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert child_env()["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


def told(*records: Record) -> list[Entry]:
    return [Entry(record, "w", "b", n, n) for n, record in enumerate(records)]


def test_the_closing_line() -> None:
    """Steps, bits per byte of each held-out store, folder; a store without a number is said to have none."""
    good = [
        EvalDone(step=9, store=name, loss=2.0, bits_per_byte=1.5, tokens=9, final=True) for name in ("/a/b", "/c")
    ]
    line = closing(fold(told(*good, TrainingDone(step=9, updates_skipped=0))), "/r")
    assert line == "done: 9 steps, held out 1.500 bits/byte on a/b, 1.500 bits/byte on /c; run folder: /r"
    bad = EvalDone(step=1, store="/a/b", loss=math.nan, bits_per_byte=math.nan, tokens=10, final=True)
    assert "the result is not a number on a/b" in closing(fold(told(bad)), "/r")
    assert closing(fold([]), "/r") == "done: 0 steps; run folder: /r"


def test_a_promoted_place_is_no_mirror_of_itself(tmp_path: pathlib.Path) -> None:
    """Of the mirrors in its spec the very folder of the run is left out, also behind a link; the others stay."""
    (tmp_path / "link").symlink_to(tmp_path)
    places = {"a": f"{tmp_path}/link", "b": f"file://{tmp_path}", "c": "/elsewhere", "d": "s3://bucket/x"}
    config = CheckpointConfig(mirrors=tuple(Mirror(name=name, place=place) for name, place in places.items()))
    left = without_itself(config, str(tmp_path.resolve())).mirrors
    assert [mirror.name for mirror in left] == ["c", "d"]
