"""The client of the carrier: each accepted offer has one outcome, whatever the carrier does, and no call hangs."""

from __future__ import annotations

import json
import pathlib
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.contract import CarrierClient
from packtrain.core.errors import EXIT_AGAIN, CarrierLost
from packtrain.core.offers import LINE_BYTES_MAX

Script = Callable[["Carrier"], None]


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


class Carrier:
    """The other side: a thread that plays one script for each connection, then closes it."""

    def __init__(self, folder: str, *scripts: Script) -> None:
        self.path = f"{folder}/carrier"
        self.heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self.word = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._thread = threading.Thread(target=self._play, args=(scripts,), daemon=True)
        self._thread.start()

    def _play(self, scripts: tuple[Script, ...]) -> None:
        for script in scripts:
            self._stream, _ = self._listener.accept()
            self._stream.settimeout(20)
            self._file = self._stream.makefile("rb")
            script(self)
            self._file.close()
            self._stream.close()

    def hear(self) -> None:
        self.heard.put(json.loads(self._file.readline()))

    def say(self, *lines: bytes, piece: int = 1 << 20) -> None:
        data = b"".join(lines)
        for start in range(0, len(data), piece):
            self._stream.sendall(data[start : start + piece])

    def wait_word(self) -> None:
        assert self.word.wait(20)

    def close(self) -> None:
        self.word.set()
        self._thread.join(20)
        self._listener.close()


@pytest.fixture
def carrier() -> Iterator[Callable[..., Carrier]]:
    made: list[Carrier] = []
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        def make(*scripts: Script) -> Carrier:
            made.append(Carrier(folder, *scripts))
            return made[-1]

        yield make
        for one in made:
            one.close()


Make = Callable[..., Carrier]


def test_an_accepted_offer_has_its_outcome_later(carrier: Make) -> None:
    """The offer arrives with its fields, is answered at once, and the outcome is waited for by id."""
    def script(c: Carrier) -> None:
        c.hear()
        c.say(line(re="accepted", id=1))
        c.wait_word()
        c.say(line(re="outcome", id=1, commit=12))

    other = carrier(script)
    client = CarrierClient(other.path, timeout_s=20)
    assert client.offer({"id": 1, "path": "/dev/shm/a"}) == "accepted"
    assert other.heard.get(timeout=20) == {"op": "offer", "id": 1, "path": "/dev/shm/a"}
    assert client.outcomes() == [] and client.wait(1, timeout_s=0.0) is None
    other.word.set()
    assert client.wait(1, timeout_s=20) == {"re": "outcome", "id": 1, "commit": 12}
    client.close()


def test_a_busy_carrier_says_so_and_owes_nothing(carrier: Make) -> None:
    """Busy is an answer: the same id may be offered again on the same connection."""
    def script(c: Carrier) -> None:
        for answer in ("busy", "accepted"):
            c.hear()
            c.say(line(re=answer, id=1))
        c.say(line(re="outcome", id=1))

    client = CarrierClient(carrier(script).path, timeout_s=20)
    assert [client.offer({"id": 1}), client.offer({"id": 1})] == ["busy", "accepted"]
    assert client.wait(1, timeout_s=20) == {"re": "outcome", "id": 1}
    client.close()


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_messages_arrive_whole_however_the_stream_is_cut(carrier: Make, piece: int) -> None:
    """Partial reads, several messages in one read and outcomes before an answer are put in their places."""
    def script(c: Carrier) -> None:
        c.hear()
        c.say(line(re="accepted", id=1), piece=piece)
        c.hear()
        c.say(line(re="outcome", id=1, n="é" * 50), line(re="accepted", id=2), line(re="outcome", id=2), piece=piece)
        c.wait_word()

    client = CarrierClient(carrier(script).path, timeout_s=20)
    assert client.offer({"id": 1}) == client.offer({"id": 2}) == "accepted"
    assert client.wait(2, timeout_s=20) == {"re": "outcome", "id": 2}
    assert client.outcomes() == [{"re": "outcome", "id": 1, "n": "é" * 50}]
    client.close()


def test_a_carrier_that_dies_owes_outcomes_that_say_so(carrier: Make) -> None:
    """Each accepted offer without an outcome ends as lost, exactly once, and the next offer connects anew."""
    def dies(c: Carrier) -> None:
        for ticket in (1, 2, 3):
            c.hear()
            c.say(line(re="accepted", id=ticket))
        c.say(line(re="outcome", id=2))

    def lives(c: Carrier) -> None:
        c.hear()
        c.say(line(re="accepted", id=4), line(re="outcome", id=4))

    client = CarrierClient(carrier(dies, lives).path, timeout_s=20)
    for ticket in (1, 2, 3):
        assert client.offer({"id": ticket}) == "accepted"
    lost = client.wait(3, timeout_s=20)
    assert lost is not None and lost["error"]["name"] == "checkpoint.carrier_lost"
    rest = client.outcomes()
    assert [(one["id"], "error" in one) for one in sorted(rest, key=lambda one: one["id"])] == [(1, True), (2, False)]
    assert client.wait(1, timeout_s=20) is None, "a lost carrier is not waited for"
    assert client.offer({"id": 4}) == "accepted"
    assert client.wait(4, timeout_s=20) == {"re": "outcome", "id": 4}
    client.close()


def ends_at_once(c: Carrier) -> None:
    c.hear()


def hangs(c: Carrier) -> None:
    c.hear()
    c.wait_word()


def babbles(c: Carrier) -> None:
    c.hear()
    c.say(b"Traceback (most recent call last)\n")
    c.wait_word()


def never_ends_a_line(c: Carrier) -> None:
    c.hear()
    c.say(b"x" * (LINE_BYTES_MAX + 1))
    c.wait_word()


@pytest.mark.parametrize("script", [ends_at_once, hangs, babbles, never_ends_a_line])
def test_an_offer_without_an_answer_ends_in_one_clear_error(carrier: Make, script: Script) -> None:
    """A carrier that ends, hangs or talks nonsense is a CarrierLost by the deadline, never a hang."""
    other = carrier(script)
    client = CarrierClient(other.path, timeout_s=0.2 if script is hangs else 20)
    with pytest.raises(CarrierLost) as caught:
        client.offer({"id": 1})
    assert caught.value.where == other.path and caught.value.fix and caught.value.exit_code == EXIT_AGAIN
    assert client.outcomes() == [], "what was not accepted has no outcome"
    client.close()


def test_an_answer_before_nonsense_still_counts(carrier: Make) -> None:
    """An offer accepted in the same read as a broken line is accepted, and its outcome is lost, once."""
    def script(c: Carrier) -> None:
        c.hear()
        c.say(line(re="accepted", id=1), b"\x00\n")
        c.wait_word()

    client = CarrierClient(carrier(script).path, timeout_s=20)
    assert client.offer({"id": 1}) == "accepted"
    assert [(one["id"], one["error"]["name"]) for one in client.outcomes()] == [(1, "checkpoint.carrier_lost")]
    assert client.outcomes() == []


def test_no_carrier_at_all_is_the_same_error(tmp_path: pathlib.Path) -> None:
    """An offer to nobody says where it looked; asking for outcomes is harmless."""
    client = CarrierClient(str(tmp_path / "nobody"), timeout_s=20)
    with pytest.raises(CarrierLost, match="could not be sent"):
        client.offer({"id": 1})
    assert client.outcomes() == [] and client.wait(1, timeout_s=20) is None
    client.close()


def test_a_carrier_that_does_not_read_cannot_hold_an_offer(carrier: Make) -> None:
    """Sending has a deadline too: a message larger than the stream's buffer ends in CarrierLost."""
    client = CarrierClient(carrier(lambda c: c.wait_word()).path, timeout_s=0.2)
    with pytest.raises(CarrierLost):
        client.offer({"id": 1, "big": "x" * (8 << 20)})
    client.close()


ANSWERS = st.lists(st.sampled_from(["accepted", "accepted, outcome", "busy", "die"]), max_size=6)


def script_for(part: list[tuple[int, str]], piece: int) -> Script:
    """One connection: answers to offers, some with the outcome at once; it ends after the last."""
    def script(c: Carrier) -> None:
        for ticket, answer in part:
            c.hear()
            first, _, outcome = answer.partition(", ")
            said = [] if answer == "die" else [line(re=first, id=ticket)]
            c.say(*said, *([line(re="outcome", id=ticket)] if outcome else []), piece=piece)

    return script


@given(ANSWERS, st.integers(1, 40))
def test_every_accepted_offer_has_exactly_one_outcome(answers: list[str], piece: int) -> None:
    """For any sequence of answers and deaths, outcomes are the accepted ids, each once."""
    parts: list[list[tuple[int, str]]] = [[]]
    for ticket, answer in enumerate(answers):
        parts[-1].append((ticket, answer))
        if answer == "die":
            parts.append([])
    with tempfile.TemporaryDirectory(prefix="pt-") as folder:
        other = Carrier(folder, *(script_for(part, piece) for part in parts if part))
        client, accepted, ended = CarrierClient(other.path, timeout_s=20), [], []
        for ticket, answer in enumerate(answers):
            try:
                if client.offer({"id": ticket}) == "accepted":
                    accepted.append(ticket)
            except CarrierLost:
                assert answer == "die"
            ended += client.outcomes()
        ended += [one for ticket in accepted if (one := client.wait(ticket, timeout_s=20))]
        client.close()
        other.close()
    assert accepted == [ticket for ticket, answer in enumerate(answers) if answer.startswith("accepted")]
    assert sorted(one["id"] for one in ended) == accepted
