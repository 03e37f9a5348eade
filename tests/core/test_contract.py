"""The seam: environment, beats, and that it is usable with nothing but its own folder."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core import contract
from packtrain.core.contract import (
    GO_ID,
    PHASES,
    Beats,
    Order,
    Place,
    Ready,
    Restore,
    Word,
    parse_beat,
    parse_ready,
    ready_bytes,
    wait_for_go,
    worker_env,
)
from packtrain.core.errors import BadValue, NeitherRestoreNorFresh, NoGo

CORE = pathlib.Path(contract.__file__).parent
INT32 = st.integers(0, (1 << 31) - 1)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-") as path:
        yield pathlib.Path(path)


@pytest.fixture
def inbox(folder: pathlib.Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(folder / "beats"))
        sock.settimeout(20)
        yield sock


def path_of(inbox: socket.socket) -> str:
    return str(inbox.getsockname())


# --- alone -------------------------------------------------------------------------------------------

ALONE = """
import sys
sys.path.insert(0, sys.argv[1])
from seam import contract
beats = contract.Beats(sys.argv[1] + "/nobody", 3, 1)
with beats.during("save"):
    pass
beats.close()
assert contract.Place.from_env({"RANK": "2"}).rank == 2 and contract.restore({"PACKTRAIN_FRESH": "1"}) is None
assert contract.crc32c(b"123456789") == 0xE3069283
print(" ".join(sorted(name for name in sys.modules if name.split(".")[0] not in sys.stdlib_module_names)))
"""


def test_the_contract_runs_in_a_bare_interpreter_with_only_its_own_folder(tmp_path: pathlib.Path) -> None:
    """A copy of the folder works under any name, without site-packages, on the standard library alone."""
    shutil.copytree(CORE, tmp_path / "seam", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-I", "-S", "-c", ALONE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    files = ("contract", "errors", "offers", "wire", "words")
    assert done.stdout.split() == ["__main__", "seam", *(f"seam.{file}" for file in files)]


def test_every_variable_is_in_the_table_of_the_docstring() -> None:
    """A PyTorch user copies names from one table, so each variable that is read stands in it."""
    place = Place(
        run="r", attempt=1, restore=Restore(1, "d"), fresh=True, carrier="c", socket="s", control="o", node="n",
        go_s=1.0, master_addr="a", master_port=1,
    )
    assert contract.__doc__ is not None
    assert [name for name in worker_env(place) if name not in contract.__doc__] == []


@given(st.binary(max_size=300), st.integers(0, 300))
def test_crc32c_equals_googles(data: bytes, cut: int) -> None:
    """Our table-driven checksum equals google-crc32c, in one piece and continued, on bytes and on views."""
    assert contract.crc32c(data) == google_crc32c.value(data)
    assert contract.crc32c(memoryview(data)[cut:], contract.crc32c(data[:cut])) == google_crc32c.value(data)


# --- environment -------------------------------------------------------------------------------------

PLACES = st.builds(
    Place, run=WORDS, attempt=INT32, fresh=st.booleans(), carrier=WORDS, socket=WORDS, control=WORDS, node=WORDS,
    restore=st.none() | st.builds(Restore, st.integers(1, 10**18 - 1), st.text("0123456789abcdef", min_size=1)),
    grace_s=st.floats(0.001, 1e6), go_s=st.just(0.0) | st.floats(0.001, 1e6), rank=INT32, world_size=INT32,
    local_rank=INT32, local_world_size=INT32,
    failures=INT32, node_minutes=INT32, spec=INT32, master_addr=WORDS, master_port=st.integers(0, 65535),
)


@given(PLACES)
def test_a_place_survives_the_environment(place: Place) -> None:
    """What the supervisor puts into the environment is what the worker reads."""
    assert Place.from_env(worker_env(place)) == place


def test_a_program_run_by_hand_is_rank_0_of_1() -> None:
    """An empty environment is a world of one that talks to nobody."""
    place = Place.from_env({})
    assert (place.run, place.rank, place.world_size, place.socket, place.carrier) == ("", 0, 1, "", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "-1"), ("RANK", "two"), ("WORLD_SIZE", "9" * 30), ("PACKTRAIN_ATTEMPT", "1.5"), ("LOCAL_RANK", "²"),
        ("PACKTRAIN_GRACE_S", "0"), ("PACKTRAIN_GRACE_S", "nan"), ("PACKTRAIN_GO_S", "0"),
        ("PACKTRAIN_GO_S", "soon"), ("PACKTRAIN_FRESH", "yes"),
        ("PACKTRAIN_RESTORE", "12"), ("PACKTRAIN_RESTORE", "0:ab"), ("PACKTRAIN_RESTORE", "7:"),
        ("PACKTRAIN_RESTORE", "7:../x"), ("PACKTRAIN_RESTORE", "-7:ab"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(name: str, text: str) -> None:
    """A bad variable is a configuration error (78) that names it and its value."""
    with pytest.raises(BadValue) as caught:
        Place.from_env({name: text})
    assert caught.value.where == f"environment: {name}"
    assert repr(text) in caught.value.what and caught.value.exit_code == contract.EXIT_CONFIG


def test_restore_returns_what_was_chosen() -> None:
    """Exactly one of the two variables is an answer."""
    assert contract.restore({"PACKTRAIN_RESTORE": "41:9f86d0"}) == Restore(41, "9f86d0")
    assert contract.restore({"PACKTRAIN_FRESH": "1"}) is None


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, "neither PACKTRAIN_RESTORE nor PACKTRAIN_FRESH is set"),
        ({"PACKTRAIN_FRESH": "0"}, "neither PACKTRAIN_RESTORE nor PACKTRAIN_FRESH is set"),
        ({"PACKTRAIN_RESTORE": "1:a", "PACKTRAIN_FRESH": "1"}, "both PACKTRAIN_RESTORE and PACKTRAIN_FRESH are set"),
    ],
)
def test_restore_refuses_neither_and_both(env: dict[str, str], said: str) -> None:
    """Nothing starts from random in silence."""
    with pytest.raises(NeitherRestoreNorFresh) as caught:
        contract.restore(env)
    assert caught.value.what.startswith(said)
    assert "PACKTRAIN_FRESH=1" in caught.value.fix and caught.value.exit_code == contract.EXIT_CONFIG


# --- beats -------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.ns = 1_000

    def __call__(self) -> int:
        return self.ns


MOVES = st.lists(
    st.tuples(st.integers(0, 10**12), st.sampled_from([*PHASES, "step done", "during"]), st.integers(0, 10**9)),
    max_size=20,
)


@given(MOVES)
def test_phases_sum_to_the_time_since_start(moves: list[tuple[int, str, int]]) -> None:
    """At every moment each nanosecond since construction belongs to one phase, the right one."""
    clock = Clock()
    beats = Beats(None, clock=clock)
    expected = dict.fromkeys(PHASES, 0)
    for ns, move, step in moves:
        clock.ns += ns
        expected[beats.phase] += ns
        if move == "step done":
            beats.step_done(step)
        elif move == "during":
            with beats.during("save"):
                clock.ns += step
                expected["save"] += step
        else:
            beats.enter(move, step)
        assert beats.totals() == expected
        assert sum(beats.totals().values()) == clock.ns - 1_000


def test_a_beat_at_each_change_and_step_says_where_the_time_went(inbox: socket.socket) -> None:
    """The agent can tell phase, step and cumulative time from each datagram alone."""
    clock = Clock()
    beats = Beats(path_of(inbox), attempt=7, rank=2, clock=clock, repeat_s=1e6)
    clock.ns += 5
    beats.enter("step", step=0)
    clock.ns += 7
    beats.step_done(1)
    with beats.during("save"):
        clock.ns += 11
    beats.close()
    got = [parse_beat(inbox.recv(8192)) for _ in range(6)]
    assert all(beat is not None and (beat.attempt, beat.rank) == (7, 2) for beat in got)
    assert [(b.seq, b.phase, b.step, b.ns) for b in got if b] == [
        (1, "init", -1, {}),
        (2, "step", 0, {"init": 5}),
        (3, "step", 1, {"init": 5, "step": 7}),
        (4, "save", 1, {"init": 5, "step": 7}),
        (5, "step", 1, {"init": 5, "step": 7, "save": 11}),
        (6, "step", 1, {"init": 5, "step": 7, "save": 11}),
    ]
    assert beats.lost == 0


def test_beats_repeat_while_the_loop_is_stuck(inbox: socket.socket) -> None:
    """The thread goes on beating with growing time in the same phase when the loop does nothing.

    By sequence number: the loop may be interrupted between numbering its own beat and sending it.
    """
    beats = Beats(path_of(inbox), repeat_s=0.001)
    beats.enter("compile")
    ns: dict[int, int] = {}
    while len(ns) < 6:
        beat = parse_beat(inbox.recv(8192))
        assert beat is not None
        if beat.phase == "compile":
            ns[beat.seq] = beat.ns.get("compile", 0)
    beats.close()
    assert all(one < two for one, two in itertools.pairwise(ns[seq] for seq in sorted(ns)))


def assert_one_order(beats: list[contract.Beat]) -> None:
    assert len({beat.seq for beat in beats}) == len(beats)
    for one, two in itertools.pairwise(sorted(beats)):
        assert one.step <= two.step
        assert all(two.ns.get(phase, 0) >= ns for phase, ns in one.ns.items())


class MeetingClock:
    """Whoever reads it in the chosen thread stops there until the other has read it too."""

    def __init__(self, held: str) -> None:
        self.held = held
        self.open = True
        self.inside, self.other = threading.Event(), threading.Event()
        self._ns = itertools.count(0, 10)

    def __call__(self) -> int:
        here = "loop" if threading.current_thread() is threading.main_thread() else "thread"
        if self.open or here != self.held:
            self.other.set()
        else:
            self.inside.set()
            assert self.other.wait(20)
        return next(self._ns)


def test_a_beat_that_the_loop_overtook_is_dropped(inbox: socket.socket) -> None:
    """A thread stopped inside its beat while the loop changes phase does not report the old phase as the newest."""
    clock = MeetingClock("thread")
    beats = Beats(path_of(inbox), clock=clock, repeat_s=0.001)
    clock.other.clear()
    clock.open = False
    assert clock.inside.wait(20)
    beats.enter("step", 1)
    clock.open = True
    assert_one_order([beat for beat in (parse_beat(inbox.recv(8192)) for _ in range(4)) if beat])
    beats.close()


def test_no_beat_leaves_in_the_middle_of_a_change(inbox: socket.socket) -> None:
    """A thread that beats while the loop is between two phases gives no time to the phase being left."""
    clock = MeetingClock("loop")
    beats = Beats(path_of(inbox), clock=clock, repeat_s=0.001)
    clock.other.clear()
    clock.open = False
    beats.enter("step", 1)
    clock.open = True
    assert_one_order([beat for beat in (parse_beat(inbox.recv(8192)) for _ in range(5)) if beat])
    beats.close()


def test_thread_and_loop_agree_on_one_order_of_beats(inbox: socket.socket) -> None:
    """However the two threads interleave, a higher sequence number never carries an older phase, step or total."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    taken: list[bytes] = []
    drain = threading.Thread(target=lambda: taken.extend(iter(lambda: inbox.recv(8192), b"end")))
    drain.start()
    try:
        beats = Beats(path_of(inbox), repeat_s=0.0)
        for step in range(3_000):
            beats.enter(PHASES[step % len(PHASES)], step)
        beats.close()
    finally:
        sys.setswitchinterval(before)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.connect(path_of(inbox))
            last.send(b"end")
        drain.join(20)
    got = [beat for beat in map(parse_beat, taken) if beat]
    assert len(got) == len(taken) > 10
    assert_one_order(got)


@pytest.mark.parametrize("path", ["nobody", "x" * 200, "folder/nobody"])
def test_a_beat_that_cannot_be_sent_is_counted_and_ignored(folder: pathlib.Path, path: str) -> None:
    """No agent, an impossible path: the job does not notice, and the count says so."""
    beats = Beats(str(folder / path), repeat_s=1e6)
    beats.enter("step")
    beats.close()
    assert beats.lost == 3


def test_a_full_queue_never_blocks_the_loop(inbox: socket.socket) -> None:
    """An agent that stops reading costs beats, not time."""
    beats = Beats(path_of(inbox), repeat_s=1e6)
    for step in range(1_000):
        beats.step_done(step)
    beats.close()
    inbox.setblocking(False)
    received = 0
    with pytest.raises(BlockingIOError):
        while inbox.recv(8192):
            received += 1
    assert received + beats.lost == 1_002 and beats.lost > 0


def test_beats_find_an_agent_that_came_back(folder: pathlib.Path) -> None:
    """Beats lost to a dead agent are repaired by the first that reaches the next one under the same path."""
    clock, path = Clock(), folder / "beats"
    beats = Beats(str(path), clock=clock, repeat_s=1e6)
    for lost in (2, 4):
        clock.ns += 5
        beats.enter("step")
        assert beats.lost == lost
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
            agent.bind(str(path))
            agent.settimeout(20)
            clock.ns += 7
            beats.step_done(lost)
            beat = parse_beat(agent.recv(8192))
        assert beat is not None and sum(beat.ns.values()) == clock.ns - 1_000
        beats.step_done(lost)
        path.unlink()
    beats.close()


def test_run_by_hand_there_is_no_thread() -> None:
    """Without a socket nothing is sent and no thread is started; totals work all the same."""
    before = threading.active_count()
    beats = Beats(None)
    beats.enter("step")
    assert threading.active_count() == before and sum(beats.totals().values()) > 0
    beats.close()
    assert beats.lost == 0


GOOD = {"seq": 1, "attempt": 2, "rank": 3, "pid": 4, "phase": "step", "step": 5, "ns": {"step": 6, "init": 7}}


def test_a_good_beat_is_read_and_unknown_keys_are_ignored() -> None:
    """A trainer of a later version may say more."""
    beat = parse_beat(json.dumps({**GOOD, "later": [1]}).encode())
    assert beat == contract.Beat(1, 2, 3, 4, "step", 5, {"step": 6, "init": 7})


@pytest.mark.parametrize(
    "change",
    [
        {"seq": -1}, {"seq": 1 << 63}, {"seq": 1.0}, {"seq": True}, {"seq": None}, {"seq": "1"}, {"rank": 1 << 31},
        {"attempt": []}, {"pid": -4}, {"phase": "lunch"}, {"phase": ["step"]}, {"phase": None}, {"step": -2},
        {"step": False}, {"step": -1.0}, {"step": 1 << 63}, {"ns": None}, {"ns": [1]}, {"ns": {"lunch": 1}},
        {"ns": {"step": -1}}, {"ns": {"step": 0.5}}, {"ns": {"step": 1 << 63}}, {"pad": "x" * 5000},
    ],
)
def test_a_beat_out_of_bounds_is_no_beat(change: dict[str, object]) -> None:
    """Each field is checked for type and range, and the whole for size."""
    assert parse_beat(json.dumps({**GOOD, **change}).encode()) is None


@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 4000, b'{"a":' * 700, b"\xff\xfe{}", b"[1]", b"1" * 4000, json.dumps(GOOD).encode()[:-1], b"{}"],
)
def test_hostile_bytes_are_no_beat(data: bytes) -> None:
    """Deep nesting, endless numbers, other encodings and torn datagrams end in None, not in an exception."""
    assert parse_beat(data) is None


@given(st.binary(max_size=200) | st.builds(lambda v: json.dumps(v).encode(), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(PHASES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*GOOD, *PHASES]), inner, max_size=8),
    max_leaves=20,
)))
def test_anything_at_all_is_a_beat_within_bounds_or_none(data: bytes) -> None:
    """Whatever arrives at the socket, what comes out is within bounds."""
    beat = parse_beat(data)
    assert beat is None or (beat.phase in PHASES and 0 <= beat.rank < 1 << 31 and set(beat.ns) <= set(PHASES))


# --- ready, and go -----------------------------------------------------------------------------------

READIES = st.builds(Ready, INT32, INT32, INT32, st.dictionaries(WORDS, WORDS, max_size=8))
WAITING = Place(attempt=2, rank=1, go_s=10.0)


@given(READIES)
def test_what_a_rank_says_survives_its_datagram(ready: Ready) -> None:
    """What was said is what is read; and it is no beat."""
    assert parse_ready(ready_bytes(ready)) == ready
    assert parse_beat(ready_bytes(ready)) is None


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b'{"ready":{},"attempt":1,"rank":0}', b'{"ready":[],"attempt":1,"rank":0,"pid":1}',
        b'{"ready":{"step":3},"attempt":1,"rank":0,"pid":1}', b'{"ready":{},"attempt":-1,"rank":0,"pid":1}',
        b'{"ready":{},"attempt":1,"rank":true,"pid":1}',
        b'{"ready":{"a":"' + b"x" * 5000 + b'"},"attempt":1,"rank":0,"pid":1}',
    ],
)
def test_other_datagrams_say_nothing_of_being_ready(data: bytes) -> None:
    """Wrong types, ranges and sizes, and what is missing, are dropped."""
    assert parse_ready(data) is None


class Told:
    """A control file and a clock: the order of the highest second that has passed is there."""

    def __init__(self, orders: dict[int, Order]) -> None:
        self.orders, self.ns = orders, 0

    def poll(self) -> Order | None:
        due = [second for second in self.orders if second * 10**9 <= self.ns]
        return self.orders[max(due)] if due else None

    def clock(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)

    def wait(self, place: Place = WAITING, asked_after_s: float = 1e9) -> bool:
        asked = asked_after_s * 1e9
        return wait_for_go(place, self, {}, lambda: self.ns >= asked, clock=self.clock, sleep=self.sleep)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "goes"),
    [
        (Order(GO_ID, Word.GO), True), (Order(GO_ID + 1, Word.SAVE), True), (Order(GO_ID, Word.STOP), False),
        (Order(GO_ID + 1, Word.STOP), False), (Order(GO_ID + 1, Word.DRAIN), False),
    ],
)
def test_a_rank_goes_when_it_is_told_to(order: Order, goes: bool) -> None:
    """Not before; a later order means that go was missed, and a stop of any number means stop."""
    told = Told({3: order})
    assert told.wait() is goes
    assert 3.0 <= told.ns / 1e9 < 3.1


def test_a_rank_that_is_asked_to_stop_does_not_wait() -> None:
    """SIGTERM ends the wait as the word does."""
    told = Told({})
    assert told.wait(asked_after_s=2) is False
    assert 2.0 <= told.ns / 1e9 < 2.1


def test_a_wait_has_an_end() -> None:
    """After `go_s` it is an error that says where and how long; by hand nothing is waited for, nor said."""
    told = Told({0: Order(GO_ID, Word.SAVE)})
    with pytest.raises(NoGo, match="10 s"):
        told.wait()
    assert 10.0 <= told.ns / 1e9 < 10.1
    assert told.wait(Place()) is True


def test_a_rank_says_it_twice_a_second(inbox: socket.socket) -> None:
    """So that an agent that comes late, or lost one, hears it."""
    place = Place(attempt=2, rank=1, go_s=10.0, socket=path_of(inbox))
    Told({4: Order(GO_ID, Word.GO)}).wait(place)
    inbox.setblocking(False)
    heard = []
    while True:
        try:
            heard.append(parse_ready(inbox.recv(8192)))
        except BlockingIOError:
            break
    assert len(heard) == 8 and {(one.attempt, one.rank) for one in heard if one} == {(2, 1)}
