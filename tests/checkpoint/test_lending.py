"""Slots that are lent to the carrier: the worker is never held up, and no image changes while it is read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, held_in, look
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import Contradiction
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from tests.checkpoint.test_slots import FOLDER, Client, begun_run, remember
from tests.checkpoint.worlds import RUN, WRITER, small_state


def lending_saver(platform, log, client, every=1, lends=True):
    where = BufferFolder(FOLDER, slots=True, lends=lends)
    return Saver(platform, where, client, 1, WRITER, 60.0, log.begun(), every, 2)


def answer(client, ok=True):
    client.ended.append({"id": client.told[-1]["id"]} | ({} if ok is None else {"ok": ok}))


def test_one_is_lent_at_a_time_and_the_newest_next():
    """While one slot is on loan the worker goes on with the others, as with three; then the newest whole one goes, and
    those in between are counted. One line says all the carrier needs."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    saver = lending_saver(platform, log, client)
    for step in range(1, 8):
        assert remember(saver, step) is not None
        saver.poll()
    [line] = client.told
    [image] = [one.image for one in held_in(platform, FOLDER) if one.slot.step == 1]
    assert line == {
        "op": "lend", "id": 1, "attempt": 1, "step": 1, "writer": WRITER, "image": image, "of": 2,
    }
    assert (saver.forgot, saver.passed_over) == (0, 5)
    assert (saver.peer_news(), saver.peer_news()) == ((0, 5), (0, 0))
    answer(client)
    saver.poll()
    assert [told["step"] for told in client.told] == [1, 7] and saver.copied == 1
    answer(client, ok=False)
    saver.poll()
    assert len(client.told) == 2 and (saver.copied, saver.not_copied) == (1, 1) and saver.peer_news() == (1, 1)


def test_only_those_of_the_cadence_and_only_where_wanted():
    """Steps that the cadence does not divide are not lent; without it, or without room, nothing is said and there are
    three images."""
    for every, lends, lent in ((4, True, [4, 8]), (0, True, []), (4, False, [])):
        platform, client = FakePlatform(FakeDisk(), "a"), Client()
        saver = lending_saver(platform, begun_run(platform), client, every, lends)
        for step in range(1, 10):
            remember(saver, step)
            saver.poll()
            if client.told:
                answer(client)
        assert [line["step"] for line in client.told] == lent
        images = [name for name in platform.listdir(FOLDER) if not name.endswith(".json")]
        assert len(images) <= (4 if lent else 3)


EVENTS = ("remember", "save", "published", "over", "failed", "lost", "back", "poll")


@settings(max_examples=120)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_what_is_on_loan_does_not_change(events):
    """Whatever the order of copies, saves, answers and lost carriers: an image on loan is not touched, at most one is,
    and the newest copy is whole in memory."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    saver, step, on_loan, done = lending_saver(platform, log, client), 0, None, 0
    for event in events:
        if event == "remember":
            step += 1
            if remember(saver, step) is not None:
                done = step
        elif event == "save" and step:
            saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "mark": "kept"})
        elif event == "published" and client.offers:
            client.publish(-1)
        elif event in ("over", "failed") and on_loan:
            answer(client, event == "over")
            on_loan = None
        elif event in ("lost", "back"):
            client.lost = event == "lost"
        before = len(client.told)
        saver.poll()
        if len(client.told) > before:
            assert on_loan is None and len(client.told) == before + 1
            image = client.told[-1]["image"]
            on_loan = image, platform.read(image), platform.read(image + ".json")
        if on_loan:
            image, content, record = on_loan
            assert (platform.read(image), platform.read(image + ".json")) == (content, record)
        assert not done or look(platform, RUN, log).memory[1] >= done


def test_a_slot_whose_carrier_was_lost_is_left_to_it():
    """A carrier that may only hang and read on keeps the file it was lent: the next copies go elsewhere."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    remember(saver, 1)
    saver.poll()
    answer(client, ok=None)
    for step in range(2, 9):
        assert remember(saver, step) is not None
        saver.poll()
        if len(client.told) > 1:
            answer(client)
    assert not platform.exists(client.told[0]["image"])
    assert [line["image"] for line in client.told[1:]].count(client.told[0]["image"]) == 0


def test_telling_waits_for_nobody(tmp_path):
    """A carrier that does not read is told until its socket is full, and then is not; nobody waits. When it is gone
    each line that was told is heard of as lost; where there is none, nothing is told."""
    path, told = str(tmp_path / "socket"), 0
    listener = LocalPlatform().stream_listener(path)
    client = CarrierClient(path, 3600.0)
    while client.tell({"op": "lend", "id": told + 1, "writer": "w" * 200}):
        told += 1
    assert 10 < told < 100_000
    listener.close()
    assert [said["id"] for said in client.outcomes() if "ok" not in said] == list(range(1, told + 1))
    client.close()
    assert not CarrierClient(str(tmp_path / "none"), 3600.0).tell({"op": "lend", "id": 1})


def test_the_cadence_fits_that_of_copies():
    """A cadence for peers that is no multiple of that of copies in memory is refused, with the remedy."""
    assert CheckpointConfig(memory_every_steps=5, peer_memory=10).peer_memory == 10
    for memory, peer in ((0, 10), (3, 10), (10, -10)):
        try:
            CheckpointConfig(memory_every_steps=memory, peer_memory=peer)
        except Contradiction:
            continue
        raise AssertionError((memory, peer))
