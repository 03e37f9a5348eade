"""What a trainer writes into the journal on its way to a step; for workers that are none."""

from __future__ import annotations

from packtrain.core.records import AttemptReached, StepDone, TrainerStarted


def begun(attempt: int) -> tuple[AttemptReached, TrainerStarted]:
    """By rank 0, before its first step."""
    started = TrainerStarted(
        attempt=attempt, rank=0, parameters=1, mesh={}, attention="none", precision="f32", peak_flops_per_s=1.0,
        digest_repeats=True,
    )
    return AttemptReached(attempt=attempt, point="state", rank=0), started


def step(count: int) -> StepDone:
    return StepDone(
        step=count, loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=0.5, mfu=0.5
    )
