"""A world with no framework in it: every rank counts until there is a file `enough` in the run folder; rank 0 keeps
the count there, and writes each step into the journal. Who was started stands in the file `starts`: a line `attempt
rank pid` each."""

from __future__ import annotations

import os
import sys

from packtrain.core import contract
from packtrain.core.breaking import Faults
from packtrain.core.contract import Place, Word
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from tests.supervise.noted import begun, step

STEP_S = 0.05


def main() -> int:
    place, platform = Place.from_env(os.environ), LocalPlatform()
    journal = Journal(platform, f"{place.run}/journal", rank=place.rank)
    beats = contract.Beats(place.socket, place.attempt, place.rank)
    control = contract.Control(place.control, sigterm=True)
    faults = Faults(place.faults)
    with open(f"{place.run}/starts", "a") as starts:
        starts.write(f"{place.attempt} {place.rank} {os.getpid()}\n")
    path = f"{place.run}/count"
    count = int(platform.read(path)) if platform.exists(path) else 0
    if not contract.wait_for_go(place, control, {"count": str(count)}):
        return contract.EXIT_AGAIN
    beats.enter("step", count)
    if place.rank == 0:
        for record in begun(place.attempt):
            journal.write(record)
    while not platform.exists(f"{place.run}/enough"):
        platform.sleep(STEP_S)
        order = control.poll()
        if order is not None and order.word in (Word.STOP, Word.DRAIN):
            return contract.EXIT_AGAIN
        faults.step()
        count += 1
        beats.step_done(count)
        if place.rank == 0:
            platform.write_replacing(path, b"%d" % count)
            journal.write(step(count))
    beats.close()
    journal.close()
    return contract.EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
