"""What a worker's environment says."""

from __future__ import annotations

import pytest

from packtrain.cli.launch import child_env


def test_workers_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's glibc backs its buffers with huge pages."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert child_env()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_what_the_person_set_for_glibc_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunables of the person's own are passed on as they are."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert child_env()["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"
