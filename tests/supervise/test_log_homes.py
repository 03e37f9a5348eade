"""The second place of a coordinator's log: one of both counts, whenever whoever moves it is killed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any

import pytest

from packtrain.checkpoint.commits import CommitLog
from packtrain.core.errors import LogMoved, TermLost
from packtrain.core.fake import Choices, FakeCrash, FakeDisk, FakePlatform, crash, fail, lost_reply, power_cut
from packtrain.core.journal import read_folder
from packtrain.core.records import CoordinatorBegan, ErrorSeen
from packtrain.core.units import NS
from packtrain.supervise.config import SuperviseConfig
from packtrain.supervise.coordinator import Coordinator, lead
from packtrain.supervise.decisions import Decisions
from packtrain.supervise.desk import Desk
from packtrain.supervise.job import Job
from packtrain.supervise.keys import Address
from packtrain.supervise.link import Read
from packtrain.supervise.log_homes import REFUSED_NS, Lead, Moves, place_of, places_of
from packtrain.supervise.state import FINISHED, State
from packtrain.supervise.status import status
from tests.supervise.test_decisions import grown, opened

FIRST, SECOND = PLACES = ("/place/decisions", "/second/run-1")
REFUSED = OSError(errno.ENOSPC, "No space left on device")


class Scene:
    """A coordinator under term 1, whose log in the first place has two nodes in it."""

    def __init__(self) -> None:
        self.platform = FakePlatform(FakeDisk(), "a")
        for folder in ("/place", "/second", "/run/commits"):
            self.platform.mkdir(folder)
        self.platform.disk.sync_all()
        self.commits = CommitLog(self.platform, "/run/commits")
        self.log = Decisions(self.platform, FIRST)
        self.log.replay()
        self.state = grown(self.log, opened(), ["n0", "n1"])
        self.commits.begin(None, ["r00000"], "a")
        self.lead = Lead(FIRST, self.commits.take_term("a", FIRST).term)
        self.moves = Moves(self.platform, self.commits, self.log, PLACES, self.lead)
        self.platform.disk.sync_all()

    def move(self) -> Lead | None:
        """What comes of a log that has been refused for long enough."""
        assert self.moves.look(1, REFUSED, self.state) is None
        return self.moves.look(REFUSED_NS + 1, REFUSED, self.state)


def found(platform: FakePlatform) -> tuple[str, State]:
    """Where the next coordinator goes on, and from what."""
    place = place_of(CommitLog(platform, "/run/commits"), PLACES)
    return place, Decisions(platform, place).replay()


def test_it_moves_after_a_while_under_a_new_term() -> None:
    """What is refused now and then stays; after ten seconds in a row the log goes on in the other place, from the state
    that it led to; nothing is appended to the old one any more."""
    scene = Scene()
    for n in range(8):
        trouble = REFUSED if n % 2 else None
        assert scene.moves.look(1 + n * (REFUSED_NS - NS), trouble, scene.state) is None
    scene.moves.look(1 + 8 * REFUSED_NS, None, scene.state)
    assert scene.move() == Lead(SECOND, scene.lead.term + 1)
    assert found(scene.platform) == (SECOND, scene.state)
    with pytest.raises(OSError, match="another place"):
        grown(scene.log, scene.state, ["n2"])


def test_a_log_with_one_place_stays() -> None:
    """However long it is refused; and of a place that is not its own a coordinator knows nothing."""
    scene = Scene()
    moves = Moves(scene.platform, scene.commits, scene.log, (FIRST,), scene.lead)
    assert all(moves.look(ns, REFUSED, scene.state) is None for ns in range(1, 5 * REFUSED_NS, NS))
    assert place_of(scene.commits, ("/other/decisions", SECOND)) == "/other/decisions"
    job = Job(name="r", run_folder="/run", worker=(), carrier=(), version="t")
    assert places_of(job, "/place") == (FIRST,)


def test_there_and_back() -> None:
    """The second place may fail as the first did: the log goes back, from what it is by then."""
    scene = Scene()
    lead = scene.move()
    assert lead is not None
    log = Decisions(scene.platform, lead.place)
    state = grown(log, log.replay(), ["n2", "n3"])
    moves = Moves(scene.platform, scene.commits, log, PLACES, lead)
    moves.look(1, REFUSED, state)
    assert moves.look(REFUSED_NS + 1, REFUSED, state) == Lead(FIRST, lead.term + 1)
    assert found(scene.platform) == (FIRST, state) and len(state.nodes) == 4


def operations() -> int:
    """How many a move takes."""
    scene = Scene()
    before = scene.platform.ops
    scene.move()
    return scene.platform.ops - before


def struck(scene: Scene, at: int, fault: object) -> None:
    begin = scene.platform.ops
    scene.platform.faults = lambda op, path, n: fault if n == begin + at else None  # type: ignore[assignment]


@pytest.mark.parametrize("kill", [crash, power_cut])
def test_killed_at_every_operation_of_a_move_there_is_one_log(kill: Callable[[], object]) -> None:
    """Whichever place the next coordinator finds, the state is the one that was left, and the same place, with what was
    appended to it, is found by the one after it, though the other one could be written again meanwhile."""
    places = set()
    for at in range(1, operations() + 1):
        scene = Scene()
        struck(scene, at, kill())
        with pytest.raises(FakeCrash):
            scene.move()
        for seed in range(4):
            after = scene.platform.crash(Choices(seed=(at, seed)))
            place, state = found(after)
            assert state == scene.state
            places.add(place)
            log = Decisions(after, place)
            further = grown(log, log.replay(), ["n9"])
            CommitLog(after, "/run/commits").take_term("a", place)
            assert found(after) == (place, further)
            assert found(after.crash(Choices(seed=(seed,)))) == (place, further)
    assert places == {FIRST, SECOND}


def test_a_disk_that_refuses_any_operation_of_a_move_leaves_one_log() -> None:
    """Refused, or done and the reply lost: either the move is not made, and the old log is gone on with or shut until
    it is; or it is made. The next try makes it, and where all goes on the pointer says."""
    for strike in (fail(errno.EIO), lost_reply()):
        for at in range(1, operations() + 1):
            scene = Scene()
            struck(scene, at, strike)
            lead = scene.move()
            scene.platform.faults = None
            if lead is None:
                place, state = found(scene.platform)
                assert state == scene.state
                if place == SECOND or scene.log._shut:
                    with pytest.raises(OSError, match="another place"):
                        grown(scene.log, scene.state, ["n9"])
                lead = scene.moves.look(2 * REFUSED_NS + 1, REFUSED, scene.state)
            assert lead is not None and found(scene.platform) == (SECOND, scene.state), (strike, at)


def test_a_coordinator_that_lost_its_term_moves_nothing() -> None:
    """Another one leads: its log is the one that counts."""
    scene = Scene()
    other = scene.commits.take_term("b", FIRST)
    with pytest.raises(TermLost):
        scene.move()
    assert scene.commits.last_term() == other and found(scene.platform)[0] == FIRST


class Nobody:
    """A link to which no agent comes. Each wait takes 0.1 s; `at` that second something happens."""

    address = Address(address="tcp://c:1", server_key="k", term=1)

    def __init__(self, platform: FakePlatform) -> None:
        self.platform = platform
        self.at: dict[float, Callable[[], None]] = {}
        self.waited_s = 0.0

    def wait(self, timeout_s: float, also: object = ()) -> None:
        self.platform.pause(timeout_s)
        self.waited_s += timeout_s
        for second in [second for second in self.at if second <= self.waited_s]:
            self.at.pop(second)()

    def receive(self) -> Read:
        return Read([], 0)

    def send(self, peer: bytes, message: object) -> bool:
        return True

    def close(self) -> None: ...


def test_a_coordinator_goes_on_from_the_other_place() -> None:
    """The disk of its log is full: it says so to whoever asks, goes on in the second place after ten seconds, does what
    a person asked for meanwhile, tells where the log is; and the next one would go on there."""
    platform = FakePlatform(FakeDisk(), "a")
    for folder in ("/place", "/second", "/run"):
        platform.mkdir(folder)
    link, told = Nobody(platform), dict[str, dict[str, Any]]()
    job = Job(
        name="r", run_folder="/run", worker=(), carrier=(), version="t", second_log=SECOND,
        supervise=SuperviseConfig(nobody_s=1000, nodes_s=30),
    )

    def full(op: str, path: str, n: int) -> object:
        return fail(errno.ENOSPC) if op in ("write", "create") and path.startswith("/place/decisions") else None

    def ask(name: str, op: str) -> Any:
        stream = platform.stream_connect("/place/operator", 1.0)
        stream.sendall(json.dumps({"op": op}).encode() + b"\n")
        link.at[link.waited_s + 0.5] = lambda: told.update({name: json.loads(stream.recv(1 << 16))})

    link.at = {
        5.0: lambda: setattr(platform, "faults", full), 6.0: lambda: ask("full", "stop"),
        8.0: lambda: ask("later", "status"),
    }
    finish, _ = lead(lambda moved: Coordinator(job, platform, "/place", link, moved=moved))
    assert (finish.exit_code, finish.reason) == (75, "stopped on request")
    assert told["full"]["ok"] and "noted" in told["full"]["said"] and "cannot be written" in told["later"]["log"]
    entries = [entry.record for entry in read_folder(platform, "/run/journal").entries]
    assert [one.log for one in entries if isinstance(one, CoordinatorBegan)] == [FIRST, SECOND]
    assert [one.where for one in entries if isinstance(one, ErrorSeen) and one.name == LogMoved.name] == [SECOND]
    platform.faults = None
    place, state = found(platform)
    assert place == SECOND and state.run.stage == FINISHED and 16 <= link.waited_s <= 20


def test_what_is_said_of_a_log() -> None:
    """Nothing while it is where it belongs; else where it is, or why it cannot be written."""
    desk = Desk(State(), 1, Scene().log, 0)
    job = Job(name="r", run_folder="/run", worker=(), carrier=(), version="t")
    assert status(job, 1, desk)["log"] == "" and SECOND in status(job, 1, desk, elsewhere=SECOND)["log"]
    desk.trouble = REFUSED
    assert "No space left" in status(job, 1, desk, elsewhere=SECOND)["log"]


def test_the_last_term_is_found_between_many_records() -> None:
    """Whatever lies before and behind it."""
    scene = Scene()
    for attempts in (0, 1, 2, 5, 0, 8):
        taken = scene.commits.take_term("a", SECOND)
        for _ in range(attempts):
            assert scene.commits.last_term() == taken
            scene.commits.begin(None, ["r00000"], "a", term=taken.term)
        assert scene.commits.last_term() == taken


def test_no_term_no_place() -> None:
    """A run that nobody has led yet goes on in the first place."""
    platform = FakePlatform(FakeDisk(), "a")
    platform.mkdir("/run/commits")
    log = CommitLog(platform, "/run/commits")
    assert log.last_term() is None and place_of(log, PLACES) == FIRST
    log.begin(None, ["r00000"], "a")
    assert log.last_term() is None
