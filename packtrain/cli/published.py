"""Which of a run's published saves a person means."""

from __future__ import annotations

import os
import re

from packtrain.checkpoint.asked import next_restored
from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.listing import listing
from packtrain.checkpoint.reader import survey
from packtrain.checkpoint.where import reachable_folder
from packtrain.cli.runs import state
from packtrain.core.errors import RunMissing, UsageError
from packtrain.core.platform import Platform
from packtrain.monitor.fold import Facts
from packtrain.monitor.report import counted, gather, one_line

NAMED_MAX = 8


def log_of(platform: Platform, folder: str) -> CommitLog:
    """Raises RunMissing where no attempt ever began: there is no log, which is no damage."""
    if not platform.is_dir(f"{folder}/commits"):
        raise nothing_yet(platform, folder)
    return CommitLog(platform, f"{folder}/commits")


def named(platform: Platform, folder: str, word: str | None) -> Commit:
    """The save that a person means: None, the one that the next attempt begins from; a step, on the lineage or, where
    only one has it, off it; `commit:N`; or a checkpoint folder. Raises RunMissing, UsageError."""
    return _chosen(platform, folder, word, present(platform, folder))


def to_mend(platform: Platform, folder: str, word: str | None) -> list[Commit]:
    """Saves that a person means, of those that should be here: whole, damaged, or taken away by somebody; not those
    that retention took, nor those that were never brought to this place of copies. `all`: each of them, oldest first.
    """
    log_of(platform, folder)
    seen = survey(platform, folder)
    here = {one.commit for one in listing(seen, CheckpointConfig(), None) if not (one.purged or one.left)}
    saves = [commit for commit in seen.commits if commit.kind == "save" and commit.number in here]
    if not saves:
        raise nothing_yet(platform, folder)
    return saves if word == "all" else [_chosen(platform, folder, None if word == "latest" else word, saves)]


def _chosen(platform: Platform, folder: str, word: str | None, saves: list[Commit]) -> Commit:
    log = log_of(platform, folder)
    lineage = {commit.number for commit in log.follow(log.head())}
    saves = sorted(saves, key=lambda commit: (commit.number in lineage, commit.number), reverse=True)
    restored = next_restored(platform, folder, log) if word is None else None
    found = [commit for commit in saves if commit == restored or (word is not None and _fits(commit, word))]
    if not found:
        raise _missing(f"there is no checkpoint {word or 'to restore'}", folder, saves)
    if len(found) > 1 and found[0].number not in lineage:
        names = ", ".join(f"commit:{commit.number}" for commit in found)
        raise UsageError(f"several attempts saved step {word}, all rolled back", where=folder, fix=f"name one: {names}")
    return found[0]


def present(platform: Platform, folder: str) -> list[Commit]:
    """Every published save whose folder is there, oldest first. Raises RunMissing where there is none."""
    saves = [commit for commit in log_of(platform, folder).all() if _is_there(platform, folder, commit)]
    if not saves:
        raise nothing_yet(platform, folder)
    return saves


def run_and_word(text: str) -> tuple[str, str | None]:
    """`RUN@STEP` -> (RUN, STEP); `RUN` -> (RUN, None). Raises UsageError."""
    run, at, word = text.rpartition("@")
    if at and not (run and word):
        raise UsageError(f"{text!r} is no RUN@STEP", where="packtrain ckpt diff", fix="write RUN, or RUN@STEP")
    return (run, word) if at else (text, None)


def _fits(commit: Commit, word: str) -> bool:
    number = re.fullmatch(r"(commit:)?([0-9]{1,18})", word)
    if number is None:
        return commit.folder == word
    return (commit.number if number[1] else commit.step) == int(number[2])


def _is_there(platform: Platform, folder: str, commit: Commit) -> bool:
    return commit.kind == "save" and platform.is_dir(reachable_folder(platform, folder, commit))


def nothing_yet(platform: Platform, folder: str) -> RunMissing:
    """There is no checkpoint: what the run did so far, and what to do for one."""
    facts, name = gather(platform, folder).facts, os.path.basename(folder)
    if facts.published():
        what = f"of {counted(len(facts.published()), 'checkpoint')} that this run has published none is here"
        return RunMissing(what, where=folder, fix=f"`packtrain ckpt ls {name} --all` tells what became of them")
    runs = state(platform, folder, facts.state) == "running"
    fix = f"`packtrain report {name}` tells more; the command that made the run goes on with it"
    if runs:
        fix = f"let it train until a save (checkpoint.every_s, every_steps), or `packtrain stop {name}`: it saves then"
    what = f"this run has published no checkpoint yet: {one_line(_so_far(facts, runs))}"
    return RunMissing(what, where=folder, fix=fix)


def _so_far(facts: Facts, runs: bool) -> str:
    failed = [save.error for save in facts.saves if save.error]
    if failed:
        return f"{counted(len(failed), 'save')} failed, the last with {failed[-1]}"
    if not facts.attempts:
        return "no attempt has begun"
    last = facts.attempts[-1]
    step = max(last.step, 0)
    if runs or not last.ended:
        return f"attempt {last.attempt} {'runs' if runs else 'was cut off'}, at step {step}"
    return f"attempt {last.attempt} ended after step {step}: {last.reason} ({last.exit_code})"


def _missing(what: str, folder: str, saves: list[Commit]) -> RunMissing:
    there = ", ".join(str(commit.step) for commit in saves[:NAMED_MAX])
    return RunMissing(what, where=folder, fix=f"there are steps {there}")
