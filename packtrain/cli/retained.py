"""What the verbs of `packtrain ckpt` share that ask retention, or hold a run that nobody trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.retention import Survey
from packtrain.core.errors import PacktrainError, RunUnusable
from packtrain.core.holder import hold
from packtrain.core.platform import Platform
from packtrain.core.units import duration_text
from packtrain.monitor.report import Kept

WHY = ("last", "pinned", "every", "best", "unknown")
"""Reasons of retention, in the order of a report."""


def config_of(platform: Platform, folder: str) -> CheckpointConfig:
    """The checkpoint section in force. Raises what a spec that cannot be read raises."""
    from packtrain.cli import spec
    from packtrain.train.sections import newest_spec

    return spec.read(newest_spec(platform, folder)).checkpoint


def surveyed(platform: Platform, folder: str) -> tuple[Survey, CheckpointConfig]:
    """What a plan of retention would be made from just now: the same as whoever has something deleted sees."""
    from packtrain.checkpoint.judged import Judging
    from packtrain.checkpoint.reader import survey

    config = config_of(platform, folder)
    return survey(platform, folder, Judging(platform, folder, config).look), config


def kept(platform: Platform, folder: str) -> list[Kept]:
    """For a report: each checkpoint that stays, by reason and step; nothing where that cannot be told."""
    try:
        rows = listing(*surveyed(platform, folder), None)
    except (PacktrainError, OSError):
        return []
    here = [row for row in rows if row.present or row.mirrors]
    found = [(WHY.index(reason.why), Kept(row.step, reason.words)) for row in here for reason in row.kept]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def purge_words(left_s: float) -> str:
    """When a tombstoned checkpoint goes: `in 5m00s`, `by the next carrier`."""
    return f"in {duration_text(left_s)}" if left_s else "by the next carrier"


@contextmanager
def unheld(platform: Platform, folder: str, verb: str) -> Iterator[None]:
    """Inside, nobody trains this run. Raises RunHeld naming who does, RunUnusable."""
    fix = "stop it with Ctrl-C or SIGTERM, then give this command, then start it again"
    try:
        lock = hold(platform, folder, verb, fix)
    except OSError as error:
        raise RunUnusable(
            f"the run cannot be held: {error.strerror}", where=f"{folder}/holder",
            fix="see that its folder can be written",
        ) from error
    try:
        yield
    finally:
        lock.release()
