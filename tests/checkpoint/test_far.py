"""A save at a carrier that does not publish, on a disk whose time is scripted: how long it writes, and what it says."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from packtrain.checkpoint.clients import Offer
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.far import Far
from packtrain.checkpoint.format import FolderName
from packtrain.checkpoint.homes import Homes
from packtrain.checkpoint.joint import Order, Report, Source
from packtrain.checkpoint.open_save import OpenSave
from packtrain.core.errors import SaveFailed
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.units import NS
from tests.checkpoint.worlds import RUN, WRITER, make_run, save_of

STEP = 7
FOLDER = str(FolderName(STEP, 1, 1))
OVER = {"do": "over", "commit": msgspec.to_builtins(
    Commit(number=2, kind="save", attempt=1, step=STEP, parent=1, nonce="", folder=FOLDER)
)}


class Told:
    """A carrier on node `b` of a run that `a` publishes, and the one who publishes: it orders one write, then ends."""

    def __init__(self, left_s: float, deadline_s: float, slow_s: float) -> None:
        self.platform = FakePlatform(FakeDisk(), "b")
        log = make_run(self.platform)
        begin = log.begin(0, (WRITER,), "a")
        for folder in ("/buffers", f"{RUN}/checkpoints/{FOLDER}"):
            self.platform.mkdir(folder)
        (part,) = save_of(self.platform, 1, STEP).parts
        offer = Offer(1, 1, STEP, WRITER, part.buffer, part.bytes, deadline_s, part.specs, part.boxes)
        now_ns = self.platform.boot_ns()
        self.save = OpenSave(STEP, now_ns, now_ns + int(deadline_s * NS), {WRITER: offer})
        write = Order(do="write", trial="t", folder=FOLDER, writers=(WRITER,), left_s=left_s)
        self.orders = [msgspec.to_builtins(write), OVER]
        self.reports: list[Report] = []
        self.homes = Homes(self.platform, [RUN])
        self.at_image(lambda: self.platform.sleep(slow_s))
        self.far = Far(self.platform, log, self.homes, begin, Source("boot", 0, "round"), self.save, self.ask)

    def at_image(self, happens: Callable[[], object]) -> None:
        """When the file of the part is made."""

        def faults(op: str, path: str, n: int) -> None:
            if op == "create" and path.endswith(".safetensors"):
                happens()

        self.platform.faults = faults

    def ask(self, report: Report, offers: bytes | None) -> dict:
        self.reports.append(report)
        return self.orders.pop(0)


def test_what_is_written_in_time_is_told() -> None:
    """What the manifest will say of each part, and no obstacle."""
    told = Told(left_s=2.0, deadline_s=60.0, slow_s=0.5)
    assert told.far.carry().step == STEP
    assert [entry.writer for entry in told.reports[1].entries] == [WRITER] and not told.reports[1].obstacle


@pytest.mark.parametrize(("left_s", "deadline_s"), [(1.0, 60.0), (60.0, 1.0)])
def test_nobody_writes_beyond_the_time_of_a_try(left_s: float, deadline_s: float) -> None:
    """That of the try, or of the save at this node: a disk that is slower has failed the try and does not hang, so its
    home is used again, and nothing that was read from a buffer too late is told as a part."""
    told = Told(left_s, deadline_s, slow_s=1.1)
    assert told.far.carry().step == STEP
    assert (told.reports[1].obstacle, told.reports[1].entries) == ("the disk was too slow", ())
    assert told.homes.usable() == [RUN] and told.homes.hung() == []


def test_a_save_that_is_given_up_is_written_no_further() -> None:
    """Its buffer may be filled again: the try ends at the next chunk."""
    told = Told(left_s=60.0, deadline_s=60.0, slow_s=0.0)
    told.at_image(told.save.gate.shut)
    with pytest.raises(SaveFailed, match="no word from the carrier of node a"):
        told.far.carry()
    assert len(told.reports) == 1 and f"part-{WRITER}.json" not in told.platform.listdir(f"{RUN}/checkpoints/{FOLDER}")
