"""Slots that are lent to the carrier: the worker is never held up, and no image changes while it is read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.rounds import NEVER, Round, Rounds
from packtrain.checkpoint.saver import MARGIN_S, Saver
from packtrain.checkpoint.slots import BufferFolder, held_in, look
from packtrain.core.contract import CarrierClient
from packtrain.core.errors import Contradiction
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.platform import LocalPlatform
from packtrain.train.assemble import lack_of_room
from tests.checkpoint.test_slots import FOLDER, Client, begin_again, begun_run, remember
from tests.checkpoint.worlds import RUN, WRITER, small_state


def lending_saver(platform, log, client, peers=True, lends=True):
    where = BufferFolder(FOLDER, slots=True, lends=lends)
    return Saver(platform, where, client, 1, WRITER, 60.0, log.begun(), peers, 2)


def answer(client, ok=True):
    client.ended.append({"id": client.told[-1]["id"]} | ({} if ok is None else {"ok": ok}))


def steps_held(platform):
    return {one.slot.step for one in held_in(platform, FOLDER)}


def test_the_slot_of_a_round_is_lent_once():
    """It is, as soon as it is whole, and the worker goes on with the other slots, as with three; what is copied in no
    round is not lent. One line says all the carrier needs, and how the round ended here is told from then on."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    for step in range(1, 8):
        assert remember(saver, step, begins=Round(1, 0) if step == 1 else None) is not None
        saver.poll()
    [line] = client.told
    [image] = [one.image for one in held_in(platform, FOLDER) if one.slot.step == 1]
    assert line == {
        "op": "lend", "id": 1, "attempt": 1, "step": 1, "writer": WRITER, "image": image, "of": 2, "before": 0,
    }
    assert (saver.forgot, saver.round_ended) == (0, 0)
    answer(client)
    saver.poll()
    assert saver.round_ended == 1 and (saver.peer_news(), saver.peer_news()) == ((1, 0), (0, 0))
    remember(saver, 8, begins=Round(8, 1))
    saver.poll()
    assert [told["step"] for told in client.told] == [1, 8] and client.told[1]["before"] == 1
    answer(client, ok=False)
    saver.poll()
    assert len(client.told) == 2 and saver.round_ended == 8 and saver.peer_news() == (0, 1)


def test_what_a_round_needs_stays_while_training_goes_on():
    """The slot of a round and that of the one before stay, whatever is copied meanwhile, and no copy is skipped for it,
    also while a save on disk has another slot; the next round lets go of the older one."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    for step, begins in ((1, Round(1, 0)), (2, Round(2, 1)), *((step, None) for step in range(3, 12))):
        assert remember(saver, step, begins=begins) is not None
        if step == 4:
            saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "mark": "kept"})
        saver.poll()
        if step <= 2:
            answer(client)
    assert {1, 2, 4, 11} <= steps_held(platform) and saver.forgot == 0
    remember(saver, 12, begins=Round(12, 2))
    remember(saver, 13)
    saver.poll()
    assert {2, 12, 13} <= steps_held(platform) and 1 not in steps_held(platform)


def test_a_copy_is_skipped_before_a_round_loses_anything():
    """Saves on disk that hang hold their slots: where nothing else is left, a copy is skipped and counted."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    for step, begins in ((1, Round(1, 0)), (2, Round(2, 1)), (3, None), (4, None), (5, None)):
        assert remember(saver, step, begins=begins) is not None
        saver.poll()
        if begins:
            answer(client)
        elif step < 5:
            saver.save(step, small_state(1, step), {"data_index": step, "seed": 7, "mark": "kept"})
    assert remember(saver, 6) is None and saver.forgot == 1
    assert steps_held(platform) == {1, 2, 3, 4, 5}


def test_what_an_attempt_began_from_stays_until_a_round_was_held():
    """A second node may be lost before the first round of an attempt has ended everywhere: what it began from is there
    until then, however many copies are made meanwhile."""
    platform = FakePlatform(FakeDisk(), "a")
    log = begun_run(platform)
    remember(lending_saver(platform, log, Client()), 5)
    begin_again(platform, log)
    where = BufferFolder(FOLDER, slots=True, lends=True)
    saver = Saver(platform, where, Client(), 2, WRITER, 60.0, log.begun(), True)
    for step in range(6, 22):
        begins = {12: Round(12, 0), 16: Round(16, 0), 20: Round(20, 16)}.get(step)
        assert remember(saver, step, attempt=2, begins=begins) is not None
        saver.poll()
        if begins:
            answer(saver._client)
        assert (5 in steps_held(platform)) == (step < 20), step


def test_they_stay_when_a_worker_ends_before_it_has_published():
    """A worker that ends because another one was lost leaves behind what its node may have to give to the next attempt:
    not the newest slot alone, which no other may have. What is no newer than a published step goes."""
    for published, left in ((False, {2, 4, 6}), (True, {6})):
        platform, client = FakePlatform(FakeDisk(), "a"), Client()
        saver = lending_saver(platform, begun_run(platform), client)
        for step, begins in ((2, Round(2, 0)), (3, None), (4, Round(4, 2)), (5, None)):
            remember(saver, step, begins=begins)
            saver.poll()
            if begins:
                answer(client)
        if published:
            saver.save(5, small_state(1, 5), {"data_index": 5, "seed": 7, "mark": "kept"})
            client.publish()
            saver.poll()
        remember(saver, 6)
        saver.close()
        assert steps_held(platform) == left


def test_a_step_that_was_not_held_is_said():
    """A round whose step found no room, or whose record could not be written, ends at once here, with the word that it
    was not held; what the round before needs stays."""
    for refused in (("unlink", "map_file"), ("replace", "write")):
        platform, client = FakePlatform(FakeDisk(), "a"), Client()
        saver = lending_saver(platform, begun_run(platform), client)
        remember(saver, 1, begins=Round(1, 0))
        saver.poll()
        answer(client)
        saver.poll()
        platform.faults = lambda op, path, n, refused=refused: fail(28) if op in refused else None
        remember(saver, 5, begins=Round(5, 1))
        saver.poll()
        assert (saver.round_ended, saver.peer_news(), len(client.told)) == (-5, (1, 1), 1) and saver.forgot == 1
        platform.faults = None
        for step in range(6, 12):
            assert remember(saver, step) is not None
        assert 1 in steps_held(platform)


def test_only_where_wanted_and_where_there_is_room():
    """Without room for lending nothing is said, there are three images, newer copies go before what a round needs, and
    nobody waits for this writer; a worker that copies nothing holds no round."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client, lends=False)
    for step in range(1, 10):
        assert remember(saver, step, begins=Round(step, step - 4) if step in (4, 8) else None) is not None
        saver.poll()
        assert saver.round_ended == step // 4 * 4
    assert client.told == [] and steps_held(platform) == {4, 8, 9} and saver.peer_news() == (0, 0)
    none = Saver(platform, BufferFolder(FOLDER), client, 1, WRITER, 60.0)
    assert none.round_ended == NEVER


def test_who_has_no_room_says_what_that_costs():
    """A worker without a memory tier keeps the whole run from having copies on other nodes, and says so where those are
    wanted; one that has no room for lending alone does not."""
    for where, name, stops in (
        (BufferFolder("here", fallback="no room"), "checkpoint.buffers_on_disk", True),
        (BufferFolder("here", no_slots="no room"), "checkpoint.no_memory_tier", True),
        (BufferFolder("here", slots=True, no_lends="no room"), "checkpoint.no_peer_copies", False),
    ):
        for peers in (True, False):
            lack = lack_of_room(where, peers)
            assert lack["name"] == name and ("no node of the run" in lack["what"]) == (peers and stops)
    assert lack_of_room(BufferFolder("here", slots=True, lends=True), True) == {}


EVENTS = ("remember", "save", "published", "over", "failed", "lost", "back", "poll")


@settings(max_examples=120)
@given(st.lists(st.sampled_from(EVENTS), max_size=40))
def test_what_is_on_loan_does_not_change(events):
    """Whatever the order of copies, saves, answers and lost carriers: an image on loan is not touched, at most one is,
    what a round needs stays, and the newest copy is whole in memory."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    log = begun_run(platform)
    saver, step, on_loan, done = lending_saver(platform, log, client), 0, None, 0
    rounds, needed = Rounds(2), set()
    for event in events:
        if event == "remember":
            step += 1
            begins = rounds.begins(step, [saver.round_ended])
            needed = {begins.before} - {0} if begins else needed
            if remember(saver, step, begins=begins) is not None:
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
        assert needed <= steps_held(platform)
        assert not done or look(platform, RUN, log).memory[1] >= done


def test_a_slot_whose_carrier_was_lost_is_left_to_it():
    """A carrier that may only hang and read on keeps the file it was lent: the next copies go elsewhere."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    remember(saver, 1, begins=Round(1, 0))
    saver.poll()
    answer(client, ok=None)
    for step in range(2, 9):
        assert remember(saver, step, begins=Round(step, step - 1)) is not None
        saver.poll()
        assert saver.round_ended == step - 1
        answer(client)
    assert not platform.exists(client.told[0]["image"])
    assert [line["image"] for line in client.told[1:]].count(client.told[0]["image"]) == 0


@pytest.mark.parametrize("why", ["untold", "unanswered"])
def test_a_carrier_that_does_not_answer_ends_the_round(why):
    """Where a carrier takes no word, or gives none back: when a copy has no more time the round ends here as with one
    that did not arrive, and the next begins. Its file is left to it, what it says later is passed over."""
    platform, client = FakePlatform(FakeDisk(), "a"), Client()
    saver = lending_saver(platform, begun_run(platform), client)
    client.lost = why == "untold"
    remember(saver, 1, begins=Round(1, 0))
    copies = 1 if why == "untold" else 2
    for seconds, ended in ((60.0 * copies, 0), (MARGIN_S + 1.0, 1)):
        saver.poll()
        platform.sleep(seconds)
        saver.poll()
        assert (saver.round_ended, saver.peer_news()) == (ended, (0, ended))
    client.lost = False
    for step in range(2, 9):
        assert remember(saver, step, begins=Round(2, 1) if step == 2 else None) is not None
        client.ended += [{"id": 1, "ok": True}] if step == 3 else []
        saver.poll()
    assert [line["step"] for line in client.told] == ([2] if why == "untold" else [1, 2])
    assert saver.round_ended == 1 and saver.peer_news() == (0, 0) and steps_held(platform) >= {1, 2, 8}
    answer(client)
    saver.poll()
    assert saver.round_ended == 2 and saver.peer_news() == (1, 0)


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
