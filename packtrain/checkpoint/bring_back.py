"""A published checkpoint that was deleted from outside, or lost files, comes back from a store that has it.

Into a folder of a try's name first, every block checked against the part tables, and those against the digest in the
log; then by one rename to the name the log knows. What is left under that name steps aside to a try's name before that:
nothing of it is overwritten, and retention takes it away as debris. A crash anywhere leaves the checkpoint lost, or
back.
"""

from __future__ import annotations

import threading

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.copies import stored_items
from packtrain.checkpoint.format import FolderName
from packtrain.checkpoint.publish import new_try
from packtrain.checkpoint.purge import discard_try
from packtrain.checkpoint.reader import missing
from packtrain.checkpoint.retention import tombstone_name
from packtrain.checkpoint.where import own_folder
from packtrain.core.errors import ConfigError, PurgeRefused
from packtrain.core.platform import Platform
from packtrain.core.stores import Folder, Store
from packtrain.core.transfer import Rate, Tally, TransferConfig, copy, unlimited

BACK_TRY = 1000
"""Try of the folder that a checkpoint comes back into. No save tries so often, so nobody else writes there."""
ASIDE_TRY = 2000
"""From here on: what was left of it."""


def bring_back(
    platform: Platform, run_folder: str, commit: Commit, store: Store, config: TransferConfig | None = None, *,
    rate: Rate = unlimited, stop: threading.Event | None = None,
) -> Tally:
    """Publish `commit`'s checkpoint again, under its own name, from `store`. What arrived before an error that may pass
    stays for the next call.

    Raises NameAbsent where the store has it not, CheckpointDamaged where it has another, PurgeRefused where retention
    marked it meanwhile, OSError, and what `transfer.copy` and the stores raise; then nothing has changed.
    """
    items = stored_items(store, commit)
    trial = f"checkpoints/{_name(commit, BACK_TRY)}"
    platform.mkdir(f"{run_folder}/{trial}")
    moved = [item._replace(target=f"{trial}/{item.target.rpartition('/')[2]}") for item in items]
    try:
        done = copy(
            platform, store, Folder(platform, run_folder), moved, config, rate=rate, stop=stop, replace=True
        )
        _publish_again(platform, run_folder, commit, f"{run_folder}/{trial}")
    except ConfigError:
        discard_try(platform, f"{run_folder}/{trial}")
        raise
    return done


def _publish_again(platform: Platform, run_folder: str, commit: Commit, trial: str) -> None:
    checkpoints, published = f"{run_folder}/checkpoints", own_folder(run_folder, commit)
    platform.fsync_dir(trial)
    if platform.exists(f"{run_folder}/tombstones/{tombstone_name(commit.folder)}"):
        raise PurgeRefused(
            "retention marked it while it was brought back", where=published, fix="nothing: it is not kept any more"
        )
    if not missing(platform, run_folder, commit):
        discard_try(platform, trial)  # somebody else was faster
        return
    if platform.exists(published):
        platform.replace(published, f"{checkpoints}/{new_try(platform, checkpoints, _name(commit, ASIDE_TRY))}")
    platform.replace(trial, published)
    platform.fsync_dir(checkpoints)


def _name(commit: Commit, trial: int) -> FolderName:
    name = fmt.parse_folder(commit.folder)
    assert name is not None, f"{commit.folder} is no checkpoint folder"
    return name._replace(trial=trial)
