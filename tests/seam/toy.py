"""A trainer with no framework in it: it counts, and meets every side of the seam. `toy.py STEPS`"""

from __future__ import annotations

import os
import sys

from packtrain.core import contract
from packtrain.core.contract import Place, Restore, Word
from packtrain.core.errors import CheckpointDamaged, PacktrainError


def load(run: str, restore: Restore) -> int:
    with open(f"{run}/state-{restore.commit}", "rb") as file:
        data = file.read()
    if f"{contract.crc32c(data):08x}" != restore.digest:
        raise CheckpointDamaged(f"state-{restore.commit} is not what was saved", where=run, fix="restore an older one")
    return int(data)


def save(run: str, count: int) -> None:
    with open(f"{run}/new", "wb") as file:
        file.write(b"%d" % count)
    os.replace(f"{run}/new", f"{run}/state-{count}")


def train(place: Place, restore: Restore | None, steps: int) -> int:
    beats = contract.Beats(place.socket, place.attempt, place.rank)
    control = contract.Control(place.control, sigterm=True)
    with beats.during("restore"):
        count = load(place.run, restore) if restore else 0
    if not contract.wait_for_go(place, control, {"count": str(count)}):
        return contract.EXIT_AGAIN
    beats.enter("step", count)
    obeyed, order = 0, contract.NO_ORDER
    while count < steps and order.word not in (Word.STOP, Word.DRAIN):
        count += 1
        beats.step_done(count)
        order = contract.agree(lambda row: row, control.poll())  # a world of one; else torch.distributed.all_reduce
        if (order.id > obeyed and order.word is not Word.GO) or count == steps:
            obeyed = order.id
            with beats.during("save"):
                save(place.run, count)
    beats.close()
    return contract.EXIT_DONE if count == steps else contract.EXIT_AGAIN


if __name__ == "__main__":
    try:
        sys.exit(train(Place.from_env(os.environ), contract.restore(os.environ), int(sys.argv[1])))
    except PacktrainError as error:
        print(error.render(), file=sys.stderr)
        sys.exit(error.exit_code)
