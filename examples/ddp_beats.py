"""ddp.py with beats: a hang is found in seconds, a stop saves first, and a report knows steps and where time went.

    packtrain run --procs-per-node 2 -- python ddp_beats.py OUT --steps 200

The ten lines below are all of it. They need no framework and no Packtrain either, but copies of contract.py, words.py,
wire.py and errors.py; run by torchrun or by hand, they do nothing.
"""

import os
import sys

import ddp
import torch
import torch.distributed as dist

from packtrain.core import contract

place = contract.Place.from_env(os.environ)
beats = contract.Beats(place.socket or None, place.attempt, place.rank)
control = contract.Control(place.control or None, sigterm=True)


def largest(values):
    rows = torch.tensor(values)
    dist.all_reduce(rows, op=dist.ReduceOp.MAX)
    return rows.tolist()


def after_step(step, save_now):
    beats.step_done(step)
    if contract.agree(largest, control.poll()).word in (contract.Word.STOP, contract.Word.DRAIN):
        save_now()
        sys.exit(contract.EXIT_AGAIN)


beats.enter("step")
ddp.main(after_step)
beats.close()
