"""A node keeps another's slots in memory: the last whole one is there whatever fails while the next arrives."""

from __future__ import annotations

import queue

import pytest

from packtrain.checkpoint.fetching import Fetch
from packtrain.checkpoint.holding import is_true
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.saver import MARGIN_S
from packtrain.checkpoint.slots import bringing, choose, held_in, memory_folder, peer_folder
from packtrain.core.errors import PeerCopyFailed, SlotDamaged
from packtrain.core.fake import FakeCrash, FakePlatform, crash, fail, late, lost_reply, tear
from packtrain.core.units import NS
from tests.checkpoint.keepers import PIECE_BYTES, Nodes
from tests.checkpoint.worlds import RUN, same_bits, tensor_of

FULL = 28


def state(step, writer="r00000"):
    """Of one writer; both together are a checkpoint."""
    return [tensor_of(writer, "float32", (10, 40), step)]


def two_sent():
    """Step 1 of n0 is whole at n1, and step 2 is lent."""
    nodes = Nodes()
    first = nodes.remember("n0", 1, state(1))
    assert nodes.lendings["n0"].bring(first)["peer"] == "n1"
    nodes.returned("n0")
    return nodes, nodes.remember("n0", 2, state(2))


def must_be_true(nodes, name):
    """Every slot that is kept has the image its record says; of a writer there are two at most."""
    kept, images = nodes.kept(name)
    assert images <= 2
    for one in held_in(FakePlatform(nodes.disk, name), peer_folder(RUN, name)):
        assert is_true(FakePlatform(nodes.disk, name), one)
    return kept


def test_what_a_round_needs_is_kept():
    """The slot of the last round that all held stays beside the one that came after it, until the next comes; sent
    twice it costs nothing; an older one is refused."""
    nodes, lend = two_sent()
    for _ in range(2):
        pieces = nodes.pieces
        assert nodes.lendings["n0"].bring(lend)["step"] == 2
        assert must_be_true(nodes, "n1") == [("r00000", 1), ("r00000", 2)]
    assert nodes.pieces - pieces < 20, "the image went twice"
    older = Nodes()
    first, second = older.remember("n0", 1, state(1)), None
    older.returned("n0")
    second = older.remember("n0", 2, state(2))
    assert isinstance(older.lendings["n0"].bring(second), dict)
    refused = older.lendings["n0"].bring(first)
    assert isinstance(refused, PeerCopyFailed) and "step 1 of r00000 is older" in refused.what
    assert nodes.lendings["n0"].sent == 3 and nodes.warned == []
    for step, before, kept in ((3, 1, [1, 3]), (4, 1, [1, 4]), (5, 4, [4, 5]), (6, 2, [5, 6])):
        nodes.returned("n0")
        nodes.last["n0"] = before
        assert nodes.lendings["n0"].bring(nodes.remember("n0", step, state(step)))["step"] == step
        assert must_be_true(nodes, "n1") == [("r00000", step) for step in kept]


def test_of_copies_whose_time_was_over_the_newest_is_sent():
    """A carrier that was stopped for longer than a copy may take finds several slots of one worker, which waited for
    none of them: the newest goes to the peer, and the others have an answer at once."""
    nodes, told = Nodes(), queue.SimpleQueue()
    lending, saver = nodes.lendings["n0"], nodes.saver("n0")
    for step in (1, 2, 3):
        lending.lend(nodes.remember("n0", step, state(step)), told.put)
        nodes.platforms["n0"].sleep(60.0 + MARGIN_S + 1.0)
        saver.poll()
        assert saver.round_ended == step and saver.peer_news() == (0, 1)
    assert [told.get_nowait().what for _ in (1, 2)] == ["step 1 gave way to step 2", "step 2 gave way to step 3"]
    assert told.empty()
    lending.start()
    assert told.get(timeout=60)["step"] == 3 and must_be_true(nodes, "n1") == [("r00000", 3)]
    lending.stop()


@pytest.mark.parametrize("fault", [crash(), tear(0.5, "crash"), fail(FULL), late(FULL), lost_reply(FULL)],
                         ids=["crash", "torn", "full", "late", "no reply"])
@pytest.mark.parametrize("who", ["n0", "n1"])
def test_a_fault_at_any_operation_costs_one_copy(fault, who):
    """Sender or holder killed, or refused, at every operation of a copy: the last whole slot is there and true, or the
    new one is; the next carrier takes the same slot, and no more than two images ever lie there."""
    struck = 0
    for k in range(1, 200):
        (nodes, lend), hit = two_sent(), []
        platform = nodes.carrier(who).platform
        begins = platform.ops

        def strike(op, path, n, k=k + begins, hit=hit):
            return hit.append(op) or fault if n == k else None

        platform.faults = strike
        try:
            nodes.lendings["n0"].bring(lend)
        except FakeCrash:
            assert who == "n0"
        kept = must_be_true(nodes, "n1")
        assert kept and {step for _, step in kept} <= {1, 2}, (k, hit)
        if not hit:
            break
        struck += 1
        if fault.kind in ("crash", "tear"):
            nodes.carrier(who)
        assert isinstance(nodes.lendings["n0"].bring(lend), dict), (k, hit)
        assert ("r00000", 2) in must_be_true(nodes, "n1"), (k, hit)
    assert struck > (3 if who == "n0" else 20) and k < 199


def test_what_broke_off_goes_on():
    """A connection that is cut in the middle costs what was not checked yet; cuts without end cost the copy, said
    once; the slot before stays all the time."""
    nodes, lend = two_sent()
    start = nodes.pieces
    nodes.cut_at = start + 20
    assert nodes.lendings["n0"].bring(lend)["step"] == 2
    assert ("n1", "hold") in nodes.asked and must_be_true(nodes, "n1")[-1:] == [("r00000", 2)]
    nodes.returned("n0")
    third = nodes.remember("n0", 3, state(3))
    nodes.cut_at, nodes.cuts = nodes.pieces + 20, True
    assert isinstance(nodes.lendings["n0"].bring(third), PeerCopyFailed)
    assert nodes.kept("n1") == ([("r00000", 2)], 2)
    nodes.cuts = False
    nodes.returned("n0")
    third = nodes.remember("n0", 4, state(4))
    assert isinstance(nodes.lendings["n0"].bring(third), dict)
    assert nodes.kept("n1") == ([("r00000", 2), ("r00000", 4)], 2)
    nodes.returned("n0")
    nodes.warned.clear()
    third = nodes.remember("n0", 5, state(5))
    nodes.dead.add("n1")
    for _ in range(2):
        assert isinstance(nodes.lendings["n0"].bring(third), PeerCopyFailed)
    assert len(nodes.warned) == 1 and "step 5 of r00000 has no copy on another node" in nodes.warned[0].what
    assert must_be_true(nodes, "n1") == [("r00000", 2), ("r00000", 4)]
    nodes.dead.clear()
    assert nodes.lendings["n0"].bring(third)["step"] == 5


@pytest.mark.parametrize("known", [True, False], ids=["gone", "unknown"])
def test_a_carrier_that_is_started_again_is_waited_for(known):
    """A peer whose carrier comes back within a minute, or is not known before, gets the slot that was lent meanwhile.
    One that stays away is waited for so long once: until a copy arrives again all others fail within seconds."""
    nodes, lend = two_sent()
    clock, seconds = nodes.disk.clock, []
    for away_s in (25.0, 1e9, 1e9):
        if known:
            nodes.dead.add("n1")
        else:
            nodes.names.remove("n1")
        begun_ns, back = clock.now_ns, []

        def come_back(op, path, n, since_ns=begun_ns, away_s=away_s, back=back):
            if clock.now_ns - since_ns > away_s * NS and not back:
                back.append(nodes.dead.clear() if known else nodes.names.append("n1"))

        nodes.lendings["n0"].platform.faults = come_back
        seconds.append((type(nodes.lendings["n0"].bring(lend)), (clock.now_ns - begun_ns) / NS))
        if not (back or known):
            nodes.names.append("n1")
        nodes.dead.clear()
        nodes.returned("n0")
        lend = nodes.remember("n0", lend.step + 1, state(lend.step + 1))
    (first, first_s), (second, second_s), (third, third_s) = seconds
    assert (first, second, third) == (dict, PeerCopyFailed, PeerCopyFailed)
    assert 25 < first_s < 50 and 55 < second_s < 65 and third_s < 5
    nodes.lendings["n0"].platform.faults = None
    assert isinstance(nodes.lendings["n0"].bring(lend), dict) and len(nodes.warned) == 1


@pytest.mark.parametrize("drains", [True, False], ids=["heard", "cut off"])
def test_a_byte_that_changes_on_the_way_is_found(drains):
    """Whatever piece of a slot is changed on its way is refused by block and writer, also where the connection was cut
    for it, and the slot before stays."""
    for number in range(1, 18):
        nodes, lend = two_sent()
        nodes.drains = drains
        seen = []

        def flip(piece, number=number, seen=seen):
            seen.append(piece)
            return bytes([piece[0] ^ 1, *piece[1:]]) if len(seen) == number else piece

        nodes.tamper = lambda piece, flip=flip: memoryview(flip(piece))
        found = nodes.lendings["n0"].bring(lend)
        assert isinstance(found, PeerCopyFailed), number
        assert "no record of a slot" in found.what or "block 0 of r00000, step 2, is not" in found.what
        nodes.tamper = lambda piece: piece
        assert must_be_true(nodes, "n1") == [("r00000", 1)]


def test_no_room_is_said_and_the_slot_before_stays():
    """Where a second image does not fit in half of what is left, it is refused with the figures."""
    nodes, lend = two_sent()
    used = nodes.disk.used_bytes
    nodes.disk.capacity_bytes = used + 100
    found = nodes.lendings["n0"].bring(lend)
    assert isinstance(found, PeerCopyFailed) and "is over half of the" in found.what
    assert must_be_true(nodes, "n1") == [("r00000", 1)]


# --- an attempt that begins from what a peer kept ----------------------------------------------------------


def lost_and_begun(count=3):
    """Steps 1 and 2 were sent by all, step 3 is in each worker's own memory; then n1 is gone, and an attempt began."""
    nodes = Nodes(count)
    for step in (1, 2, 3):
        for name, writer in zip(nodes.names, nodes.writers):
            lend = nodes.remember(name, step, state(step, writer))
            if step < 3:
                assert nodes.lendings[name].bring(lend)["step"] == step
            nodes.returned(name)
    nodes.lose("n1")
    chosen = choose(nodes.helds("n0", "n2"), nodes.begun)
    nodes.savers.clear()
    return nodes, chosen


def test_the_slot_of_a_lost_node_comes_from_its_peer():
    """A node's memory is gone altogether: the step its peer has is chosen, its slot fetched by whoever takes its rank,
    and what is restored is bit for bit what each writer had."""
    nodes, chosen = lost_and_begun()
    assert chosen.memory[:2] == (1, 2) and chosen.holders["r00001"] == ("n2",)
    nodes.dead.clear()  # a spare takes its place, with nothing in memory
    nodes.begin(chosen.memory)
    homes = dict(zip(nodes.writers, nodes.names))
    for name, writers in bringing(chosen, homes).items():
        assert isinstance(nodes.lendings[name].fetching.fetch(Fetch(1, writers)), dict)
    for name, writer in zip(nodes.names, nodes.writers):
        platform = FakePlatform(nodes.disk, name)
        [one] = [one for one in held_in(platform, memory_folder(RUN, name)) if one.slot.step == 2]
        assert one.slot.writer == writer
    assert restored(nodes, nodes.names, nodes.writers) == 2


def restored(nodes, names, writers):
    """What all `writers` had, read by one rank that can see the folders of all `names`; the step."""
    platform, told = FakePlatform(nodes.disk, "n0"), []
    memory = nodes.begun.memory
    for name in names:
        for one in held_in(platform, memory_folder(RUN, name)):
            if one.slot.step == memory[1]:
                told.append(platform.read(one.image + ".json"))
                if name != "n0":
                    platform.link(one.image, f"{memory_folder(RUN, 'n0')}/{one.slot.writer}.image")
                    platform.write_new(f"{memory_folder(RUN, 'n0')}/{one.slot.writer}.image.json", told[-1])
    with restoring(platform, RUN, nodes.begun.number, memory[2]) as checkpoint:
        for writer in writers:
            [piece] = state(memory[1], writer)
            assert same_bits(checkpoint.read(writer), piece.array)
        return checkpoint.manifest.step


def test_a_smaller_world_begins_where_the_slots_are():
    """No spare: the peer takes over what it kept, without a byte on the wire."""
    nodes, chosen = lost_and_begun()
    nodes.names, nodes.writers = ["n0", "n2"], nodes.writers[:2]
    nodes.begin(chosen.memory)
    moves = bringing(chosen, {"r00000": "n0", "r00001": "n2"})
    assert moves["n2"] == {"r00001": "n2", "r00002": "n2"}
    pieces = nodes.pieces
    assert nodes.lendings["n2"].fetching.fetch(Fetch(1, moves["n2"])) == {"fetched": 0} and nodes.pieces == pieces
    assert restored(nodes, ["n0", "n2"], chosen.holders) == 2
    for step in (3, 4):
        begun_from = {(one.node, one.own) for one in nodes.helds() if one.writer == "r00002" and one.step == 2}
        assert {("n0", False), ("n2", True)} <= begun_from
        for name, writer in zip(nodes.names, nodes.writers):
            assert isinstance(nodes.lendings[name].bring(nodes.remember(name, step, state(step, writer))), dict)
            nodes.returned(name)
    assert nodes.kept("n2")[0] == [("r00000", 3), ("r00000", 4)], "what it began from goes with the second round"
    assert nodes.kept("n0")[0] == [("r00001", 3), ("r00001", 4)]
    assert [(one.writer, one.step) for one in nodes.helds("n2") if one.own] == [
        ("r00001", 2), ("r00001", 3), ("r00001", 4),
    ]


@pytest.mark.parametrize("harm", ["flipped", "flipped, and much behind it", "dead", "gone"])
def test_a_slot_that_cannot_be_fetched_is_named(harm):
    """A byte that changed where it was kept, a peer that does not answer, a slot that is not there any more: the error
    says so by name, nothing lies where workers look, and what is damaged is chosen by nobody again."""
    nodes, chosen = lost_and_begun()
    nodes.dead.clear()
    nodes.begin(chosen.memory)
    [one] = [one for one in nodes.lendings["n2"].holding.whole() if one.slot.writer == "r00001"]
    nodes.drains = harm == "flipped"
    if "flipped" in harm:
        nodes.disk.find_file(one.image).data[-3] ^= 8
    if harm == "dead":
        nodes.dead.add("n2")
    if harm == "gone":
        nodes.lendings["n2"].holding.drop()
    found = nodes.lendings["n1"].fetching.fetch(Fetch(1, {"r00001": "n2"}))
    assert isinstance(found, SlotDamaged if "flipped" in harm else PeerCopyFailed)
    words = {"flipped": "block 0 of r00001, step 2", "dead": "nobody listens", "gone": "no such slot of r00001"}
    assert words[harm.partition(",")[0]] in found.what and "node n2" in found.what
    assert FakePlatform(nodes.disk, "n1").listdir(memory_folder(RUN, "n1")) == []
    if "flipped" in harm:
        assert choose(nodes.helds(), nodes.begun).memory is None


def test_a_fetch_goes_on_where_it_broke_off():
    """Cut in the middle it goes on from the last whole block; done before, nothing moves."""
    nodes, chosen = lost_and_begun()
    nodes.dead.clear()
    nodes.begin(chosen.memory)
    nodes.cut_at = nodes.pieces + 12
    found = nodes.lendings["n1"].fetching.fetch(Fetch(1, {"r00001": "n2"}))
    assert found["fetched"] > 10 * PIECE_BYTES
    assert nodes.lendings["n1"].fetching.fetch(Fetch(2, {"r00001": "n2"})) == {"fetched": 0}


def test_what_a_killed_carrier_had_in_part_goes():
    """Killed at any operation of a fetch, the next carrier finds the slot whole or drops what there is of it, and then
    fetches it."""
    for k in range(1, 100):
        nodes, chosen = lost_and_begun()
        nodes.dead.clear()
        nodes.begin(chosen.memory)
        platform = nodes.lendings["n1"].platform
        begins = platform.ops
        platform.faults = lambda op, path, n, k=k + begins: tear(0.5, "crash") if n == k else None
        try:
            nodes.lendings["n1"].fetching.fetch(Fetch(1, {"r00001": "n2"}))
            break
        except FakeCrash:
            nodes.carrier("n1")
        after, folder = FakePlatform(nodes.disk, "n1"), memory_folder(RUN, "n1")
        names = [name for name in after.listdir(folder) if ".json" not in name] if after.exists(folder) else []
        assert names == [one.image.rpartition("/")[2] for one in held_in(after, folder)], k
        assert isinstance(nodes.lendings["n1"].fetching.fetch(Fetch(1, {"r00001": "n2"})), dict)
        assert [one.slot.writer for one in held_in(after, folder)] == ["r00001"], k
    assert 10 < k < 99


# --- leftovers -------------------------------------------------------------------------------------------


def test_leftovers_go():
    """What this attempt began from stays with its peers until a round of its own was held by all; what no attempt can
    begin from goes when the next carrier starts, and all of it when the run is over."""
    nodes, chosen = lost_and_begun()
    nodes.dead.clear()
    assert nodes.kept("n2")[0] == [("r00001", 1), ("r00001", 2)]
    nodes.begin(chosen.memory)
    assert nodes.kept("n2")[0] == [("r00001", 2)] and nodes.kept("n0")[0] == [("r00002", 2)]
    nodes.lendings["n1"].fetching.fetch(Fetch(1, {"r00001": "n2"}))
    lend = nodes.remember("n1", 3, state(3, "r00001"))
    assert nodes.lendings["n1"].bring(lend)["peer"] == "n2"
    assert must_be_true(nodes, "n2") == [("r00001", 2), ("r00001", 3)]
    nodes.returned("n1")
    assert nodes.lendings["n1"].bring(nodes.remember("n1", 4, state(4, "r00001")))["peer"] == "n2"
    assert must_be_true(nodes, "n2") == [("r00001", 3), ("r00001", 4)]
    nodes.log.begin(None, nodes.writers, "n0")
    nodes.begun = nodes.log.begun()
    for name in nodes.names:
        nodes.carrier(name)
        assert nodes.kept(name) == ([], 0)
        assert all(one.attempt == nodes.begun.attempt for one in nodes.helds(name))
    for name in nodes.names:
        nodes.lendings[name].holding.drop()
        assert not FakePlatform(nodes.disk, name).exists(peer_folder(RUN, name))


def test_strangers_are_refused():
    """A slot of another attempt, of a writer the attempt has not, or a record that is none, is not taken in."""
    nodes, lend = two_sent()
    holding = nodes.lendings["n1"].holding
    nodes.log.begin(None, nodes.writers, "n0")
    nodes.begun = nodes.log.begun()
    nodes.carrier("n1")
    found = nodes.lendings["n0"].bring(lend)
    assert isinstance(found, PeerCopyFailed) and "is none of attempt 2" in found.what
    for record in (b"", b"rubbish\n{}", b"\n" * 9):
        with pytest.raises(SlotDamaged):
            holding.expect(record, 1, 0)
