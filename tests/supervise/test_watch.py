"""Asking a carrier how it stands: that waits for nothing, whatever hangs."""

from __future__ import annotations

import json
import pathlib
import socket
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.platform import LocalPlatform
from packtrain.core.units import NS
from packtrain.supervise import watch as watching
from packtrain.supervise.one_carrier import Event, GivenUpEnded, Hung, Stands
from packtrain.supervise.processes import Processes
from packtrain.supervise.watch import CarrierWatch, parse_stands

ANSWER = {"re": "stands", "id": 1, "saves": 2, "hung": [{"path": "/run", "threads": 3, "s": 1.5}], "quarantine": ["/b"]}


class Clock(LocalPlatform):
    """The real machine with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10 * NS

    def boot_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def listener(tmp_path: pathlib.Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{tmp_path}/carrier")
        made.listen()
        made.settimeout(10)
        yield made


def heard(watch: CarrierWatch) -> list[Event]:
    """The next thing it has to say."""
    while not (events := watch.look()):
        continue
    return events


def test_a_carrier_is_asked_once_a_second(tmp_path: pathlib.Path, listener: socket.socket) -> None:
    """One question at a time: none again before it is answered, nor within a second; the answer is what the carrier
    said, at the time it was heard, in whatever pieces it comes."""
    platform = Clock()
    watch = CarrierWatch(platform, f"{tmp_path}/carrier", Processes().kill_group)
    assert watch.look() == []
    carrier, _ = listener.accept()
    platform.now_ns += 60 * NS
    assert watch.look() == [] and carrier.recv(1000) == b'{"op":"stand","id":1}\n'
    line = json.dumps(ANSWER).encode() + b"\n"
    carrier.sendall(line[:30])
    assert watch.look() == []
    carrier.sendall(line[30:])
    assert heard(watch) == [Stands(platform.now_ns, 2, (Hung("/run", 3, 1.5),), ("/b",))]
    assert carrier.recv(1000) == b'{"op":"stand","id":1}\n'
    carrier.sendall(line)
    heard(watch)
    carrier.setblocking(False)
    with pytest.raises(BlockingIOError):
        carrier.recv(1000)
    watch.drop()
    carrier.close()


def test_nobody_who_listens(tmp_path: pathlib.Path, listener: socket.socket) -> None:
    """Where nobody listens there is no news; one that hangs up is asked anew by another connection."""
    platform = Clock()
    watch = CarrierWatch(platform, f"{tmp_path}/nobody", Processes().kill_group)
    assert watch.look() == []
    watch = CarrierWatch(platform, f"{tmp_path}/carrier", Processes().kill_group)
    for _ in range(2):
        platform.now_ns += 2 * NS
        assert watch.look() == []
        carrier, _ = listener.accept()
        carrier.close()
        assert watch.look() == []


def test_one_that_is_given_up(tmp_path: pathlib.Path, listener: socket.socket) -> None:
    """It is killed with what it started, its name is free at once, and its end is told once, whenever it comes."""
    platform = Clock()
    process = platform.spawn([sys.executable, "-c", "import time; time.sleep(1000)"], {})
    watch = CarrierWatch(platform, f"{tmp_path}/carrier", Processes().kill_group)
    watch.look()
    watch.give_up(process)
    assert not (tmp_path / "carrier").exists()
    assert heard(watch) == [GivenUpEnded()] and watch.look() == [] and watch.left() == []
    assert process.poll() == -9


KEYS = st.sampled_from([*ANSWER, "path", "threads", "s"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner), max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(list(ANSWER)), JSON).map(lambda changes: ANSWER | changes))
def test_anything_else_is_no_answer(fields: dict[str, object]) -> None:
    """Whatever a line holds, it is an answer with everything in its place, or none."""
    stands = parse_stands(json.dumps(fields).encode(), 5)
    assert stands is None or (
        fields["re"] == "stands" and stands.saves == fields["saves"] and list(stands.quarantine) == fields["quarantine"]
        and [one.path for one in stands.hung] == [one["path"] for one in fields["hung"]]  # type: ignore[attr-defined]
    )


def test_an_answer_has_a_bound() -> None:
    """A line that is no JSON, or names more homes than a run can have, is none."""
    many = ANSWER | {"quarantine": ["/a"] * (watching.HOMES_MAX + 1)}
    assert parse_stands(b"{", 5) is None and parse_stands(json.dumps(many).encode(), 5) is None
