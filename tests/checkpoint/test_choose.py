"""What the next attempt may begin from, where several nodes say what they hold: the newest step that is whole."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.slots import Chosen, Held, bringing, choose, digest_of

WRITERS = ("r00000", "r00001", "r00002")
BEGUN = Commit(number=4, kind="begin", attempt=3, step=-1, parent=0, nonce="now", writers=WRITERS)


def has(node, writer, step, own=True, sha256="", begin="now", attempt=3):
    return Held(
        begin=begin, attempt=attempt, step=step, writer=writer, node=node, sha256=sha256 or f"{writer} {step}", own=own
    )


def digest(step, writers=WRITERS):
    return digest_of((writer, f"{writer} {step}") for writer in writers)


slots = st.builds(
    has, st.sampled_from(["n0", "n1"]), st.sampled_from((*WRITERS, "r00009")), st.integers(1, 3), st.booleans(),
    st.sampled_from(["", "", "", "other"]), st.sampled_from(["now", "now", "now", "before"]),
)


@given(st.lists(slots, max_size=16), st.integers(-1, 2))
def test_the_newest_step_of_which_all_is_there(helds, on_disk):
    """Of the steps newer than the disk of which each writer has slots with one record, and nobody two kinds, the newest
    is chosen, with all who hold each; whatever order the answers came in; else there is a reason in words."""
    found = choose(helds, BEGUN, on_disk)
    own = [one for one in helds if one.begin == "now" and one.writer in WRITERS]
    whole = [
        step for step in (1, 2, 3)
        if all(len({one.sha256 for one in own if (one.step, one.writer) == (step, writer)}) == 1 for writer in WRITERS)
    ]
    if max(whole, default=-1) <= on_disk:
        assert found.memory is None and found.note and not found.holders
        return
    step = max(whole)
    kinds = {one.writer: one.sha256 for one in own if one.step == step}
    assert found.memory == (3, step, digest_of(kinds.items())) and f"step {step} from memory" in found.note
    for writer in WRITERS:
        those = [one for one in own if (one.step, one.writer) == (step, writer)]
        assert sorted(found.holders[writer]) == sorted(one.node for one in those)
        first = found.holders[writer][0]
        assert any(one.own for one in those if one.node == first) or not any(one.own for one in those)
    assert choose(random.Random(1).sample(helds, len(helds)), BEGUN, on_disk) == found


def test_a_lost_node_is_made_up_for_by_its_peer():
    """What the node that is gone held lies at its peer: the step that peer has whole is taken, not a newer one."""
    helds = [has("n0", "r00000", step) for step in (8, 9)] + [has("n2", "r00002", step) for step in (8, 9)]
    nothing = choose(helds, BEGUN)
    assert nothing.memory is None and nothing.lacking == ("r00001",)
    assert nothing.note == "memory holds no whole step of the last attempt: nobody has r00001 of step 9"
    found = choose([*helds, has("n2", "r00001", 8, own=False)], BEGUN, on_disk=5)
    assert found.memory == (3, 8, digest(8)) and found.note.endswith("3 steps newer than the newest on disk")
    assert found.holders == {"r00000": ("n0",), "r00001": ("n2",), "r00002": ("n2",)}


def test_copies_that_differ_are_passed_over():
    """Where a writer has two different slots of one step nobody can tell which is good: the step before is taken. Of
    copies that are alike the one where a worker looks comes first."""
    helds = [has("n0", writer, step) for writer in WRITERS for step in (8, 9)]
    odd = has("n1", "r00001", 9, own=False, sha256="other")
    alike = has("n1", "r00001", 8, own=True), has("n0", "r00001", 8, own=False), has("n2", "r00001", 8)
    found = choose([*helds[:2], *helds[3:], odd, *alike], BEGUN)
    assert found.memory == (3, 8, digest(8)) and found.holders["r00001"] == ("n1", "n2", "n0")


def test_begun_from_memory_and_nothing_of_its_own_yet():
    """An attempt that began from memory and holds nothing newer may be begun again from the same, if every slot of that
    is still somewhere; with another record in its place, or none, it may not."""
    began = Commit(
        number=5, kind="begin", attempt=4, step=8, parent=4, nonce="later", writers=("r00000",),
        memory=(3, 8, digest(8)),
    )
    helds = [has("n0", writer, 8) for writer in WRITERS]
    assert choose(helds, began).memory == (3, 8, digest(8))
    assert choose(helds[1:], began) == Chosen(note="memory holds nothing of the last attempt")
    assert choose([*helds[1:], has("n0", "r00000", 8, sha256="other")], began).memory is None
    newer = has("n0", "r00000", 9, begin="later", attempt=4)
    assert choose([*helds, newer], began).memory == (4, 9, digest(9, WRITERS[:1]))


def test_what_moves_where():
    """Each slot goes to the node whose ranks it is for; from a node that has it there already it goes to itself; the
    slot of a writer that is no more stays with its first holder."""
    chosen = Chosen((3, 8, "d"), {"r00000": ("n0", "n1"), "r00001": ("n2",), "r00002": ("n2",)})
    assert bringing(chosen, {"r00000": "n1", "r00001": "n3"}) == {
        "n1": {"r00000": "n1"}, "n3": {"r00001": "n2"}, "n2": {"r00002": "n2"},
    }
