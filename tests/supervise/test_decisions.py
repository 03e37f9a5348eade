"""The coordinator's log: durable before anything leaves, replayed to the same state, honest about damage."""

from __future__ import annotations

import errno
import pathlib

import msgspec
import pytest

from packtrain.core.errors import DecisionsDamaged
from packtrain.core.fake import Choices, FakeDisk, FakePlatform, fail, tear
from packtrain.core.platform import LocalPlatform
from packtrain.supervise import decisions
from packtrain.supervise.decisions import Decisions
from packtrain.supervise.events import Joined, Opened, Setup
from packtrain.supervise.policy import decide
from packtrain.supervise.state import State, evolve

FOLDER = "/c/decisions"


def grown(log: Decisions, state: State, names: list[str], ns: int = 0) -> State:
    """The state after these nodes have joined, each batch in the log."""
    for name in names:
        records = decide(state, Joined(ns=ns, node=name, agent="a"))
        for record in records:
            state = evolve(state, record)
        log.append(records, state)
    return state


def opened() -> State:
    state = State()
    for record in decide(state, Opened(term=1, setup=Setup(nodes=3))):
        state = evolve(state, record)
    return state


def fake(faults: object = None) -> FakePlatform:
    platform = FakePlatform(FakeDisk(), "a")
    platform.mkdir("/c")
    platform.disk.sync_all()
    platform.faults = faults  # type: ignore[assignment]
    return platform


def test_replay_leads_to_the_same_state(tmp_path: pathlib.Path) -> None:
    """On a real disk: nothing yet is a new state; what was appended is there for the next writer, and the next."""
    folder, platform = str(tmp_path / "decisions"), LocalPlatform()
    assert Decisions(platform, folder).replay() == State()
    state = opened()
    for names in (["n0"], ["n1", "n2"], []):
        log = Decisions(platform, folder)
        before = log.replay()
        assert before in (State(), state)
        state = grown(log, state, names)
        log.close()
        assert Decisions(platform, folder).replay() == state


def test_what_was_appended_survives_a_power_cut() -> None:
    """Whatever unsynced content a power cut spares, every batch that `append` returned for is there."""
    for seed in range(20):
        platform = fake()
        log = Decisions(platform, FOLDER)
        log.replay()
        state = grown(log, opened(), [f"n{n}" for n in range(4)])
        after = platform.crash(Choices(seed=(seed,)))
        assert Decisions(after, FOLDER).replay() == state


@pytest.mark.parametrize("op", ["write", "fsync", "create", "fsync_dir"])
@pytest.mark.parametrize("strike", [fail(errno.ENOSPC), tear(0.5)])
def test_a_batch_that_failed_counts_for_nothing(op: str, strike: object) -> None:
    """After a write that the disk refused, at any point, the log goes on in another segment, with all that counted."""
    hits = [0]
    platform = fake()
    log = Decisions(platform, FOLDER)
    log.replay()
    state = opened()

    def faults(what: str, path: str, n: int) -> object:
        if what == op and path.startswith(FOLDER):
            hits[0] += 1
            return strike if hits[0] % 2 else None
        return None

    platform.faults = faults  # type: ignore[assignment]
    refused = 0
    for n in range(6):
        try:
            state = grown(log, state, [f"n{n}"])
        except OSError:
            refused += 1
            state = grown(log, state, [f"again{n}"])
        platform.faults, kept = None, platform.faults
        assert Decisions(platform, FOLDER).replay() == state
        platform.faults = kept
    assert refused


def test_a_torn_tail_is_cut(tmp_path: pathlib.Path) -> None:
    """Cut anywhere in its last line the log leads to the batch before; cut in its first line, to the segment before."""
    folder, platform = str(tmp_path), LocalPlatform()
    log = Decisions(platform, folder)
    one = grown(log, opened(), ["n0"])
    two = grown(log, one, ["n1"])
    path = tmp_path / "000001.jsonl"
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data)):
        path.write_bytes(data[:cut])
        assert Decisions(platform, folder).replay() == one
    path.write_bytes(data)
    (tmp_path / "000002.jsonl").write_bytes(data[: first // 2])
    assert Decisions(platform, folder).replay() == two


def test_every_damaged_byte_is_noticed(tmp_path: pathlib.Path) -> None:
    """A bit flipped in any whole line is refused with file and line; nothing is guessed."""
    log = Decisions(LocalPlatform(), str(tmp_path))
    grown(log, opened(), ["n0", "n1"])
    data = (tmp_path / "000001.jsonl").read_bytes()
    last = data.rstrip(b"\n").rindex(b"\n")
    for at in range(0, last, 7):
        broken = bytearray(data)
        broken[at] ^= 4
        with pytest.raises(DecisionsDamaged, match="line [12]"):
            decisions.replayed(bytes(broken), "f")


def test_segments_end_and_old_ones_go(tmp_path: pathlib.Path) -> None:
    """A long log goes on in other segments that each begin with a snapshot; the last two stay."""
    log = Decisions(LocalPlatform(), str(tmp_path))
    state = opened()
    for n in range(60):
        state = grown(log, state, [f"{'n' * 60}{n}" + "x" * 60])
        log._written += decisions.SEGMENT_BYTES // 9
    assert len(list(tmp_path.iterdir())) == 2 and Decisions(LocalPlatform(), str(tmp_path)).replay() == state


def test_a_large_snapshot_is_not_written_with_each_batch() -> None:
    """Where a snapshot is larger than a segment ought to be the segment grows to four times the snapshot."""
    platform = fake()
    log = Decisions(platform, FOLDER)
    log.replay()
    state = grown(log, opened(), ["n0"])
    node = msgspec.structs.replace(state.nodes["n0"], held="x" * 2 * decisions.SEGMENT_BYTES)
    state = msgspec.structs.replace(state, nodes={"n0": node})
    log.close()
    state = grown(log, state, [f"n{n}" for n in range(1, 30)])
    assert platform.listdir(FOLDER) == ["000001.jsonl", "000002.jsonl"]
    assert Decisions(platform, FOLDER).replay() == state
