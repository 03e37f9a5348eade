"""Images that arrive in pieces: nothing but what the writer summed up becomes a slot."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.filling import Filling
from packtrain.checkpoint.slots import Slot, held_in, render
from packtrain.core.errors import SlotDamaged
from packtrain.core.fake import FakeDisk, FakePlatform

FOLDER = "/dev/shm/peers"


def arriving(size, block_bytes):
    """A platform, the image, and the record that goes with it."""
    platform, image = FakePlatform(FakeDisk(), "a"), random.Random(size).randbytes(size)
    platform.mkdir(FOLDER)
    crcs = tuple(fmt.crc32c(image[at : at + block_bytes]) for at in range(0, size, block_bytes))
    slot = Slot(
        begin="now", attempt=1, step=5, writer="r00000", bytes=size, block_bytes=block_bytes, crc32c=crcs, tensors=(),
        boxes=(), about={},
    )
    return platform, image, slot


@given(st.integers(1, 400), st.integers(1, 90), st.data())
def test_any_pieces_any_cuts(size, block_bytes, data):
    """In pieces of any size, cut off anywhere and gone on with from what was checked, the image that is whole in the
    end is the one that was sent; before the last byte there is no slot."""
    platform, image, slot = arriving(size, block_bytes)
    filling, at = Filling(platform, f"{FOLDER}/r0", render(slot)), 0
    while not filling.is_whole:
        assert held_in(platform, FOLDER) == []
        stop = min(at + data.draw(st.integers(1, 120)), size)
        filling.take(at, memoryview(image[at:stop]))
        whole = stop // block_bytes * block_bytes
        assert filling.checked == (size if stop == size else whole)
        at = filling.checked if data.draw(st.booleans()) else stop
    filling.finish()
    [one] = held_in(platform, FOLDER)
    assert one.slot == slot and platform.read(one.image) == image


@given(st.integers(1, 300), st.integers(1, 90), st.data())
def test_any_flipped_byte_is_found_in_its_block(size, block_bytes, data):
    """Any changed byte is found when its block is there, by its number; what came before stays, and the right bytes
    make the image whole all the same."""
    platform, image, slot = arriving(size, block_bytes)
    filling, wrong = Filling(platform, f"{FOLDER}/r0", render(slot)), bytearray(image)
    at = data.draw(st.integers(0, size - 1))
    wrong[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SlotDamaged, match=f"^(.|\n)*block {at // block_bytes} of r00000, step 5") as error:
        filling.take(0, memoryview(wrong))
    assert filling.checked == at // block_bytes * block_bytes and filling.damage is error.value
    filling.take(filling.checked, memoryview(image[filling.checked :]))
    filling.finish()
    assert platform.read(f"{FOLDER}/r0") == image


def test_what_does_not_follow_is_refused():
    """Bytes that leave a gap, or go past the end, are not taken; nor is a record whose sums do not fit its image."""
    platform, image, slot = arriving(100, 30)
    filling = Filling(platform, f"{FOLDER}/r0", render(slot))
    filling.take(0, memoryview(image[:40]))
    for at, piece in ((41, image[41:50]), (10, image[10:20]), (40, image[40:] + b"!")):
        with pytest.raises(SlotDamaged, match="came, not those from 30 on"):
            filling.take(at, memoryview(piece))
    short = Slot(
        begin="now", attempt=1, step=5, writer="r00000", bytes=100, block_bytes=30, crc32c=(1,), tensors=(), boxes=(),
        about={},
    )
    with pytest.raises(SlotDamaged, match="no record"):
        Filling(platform, f"{FOLDER}/r1", render(short))
    assert not platform.exists(f"{FOLDER}/r1")
