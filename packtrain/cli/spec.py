"""From a command line to the complete configuration of a run, and back: what was asked for against what is recorded."""

from __future__ import annotations

import errno
import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from packtrain.checkpoint.config import best_of_none
from packtrain.core import config
from packtrain.core.errors import (
    CommitsUnfit,
    Contradiction,
    CorpusMissing,
    HfUnusable,
    SpecDiffers,
    TokenizerMismatch,
    UsageError,
)
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.data.config import DataConfig, StoreUse
from packtrain.monitor.fold import fold
from packtrain.monitor.report import read_journal
from packtrain.recipes import catalog
from packtrain.recipes.spec import RunSpec
from packtrain.train.config import ModelConfig
from packtrain.train.sections import whole

NOT_GIVEN = "not given"
NOT_SETTABLE = ("recipe", "overrides", "chosen")
OF_A_PROGRAM = b'kind = "program"'
"""How the spec of `packtrain run` begins."""
LINK_REFUSED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
"""What a file system without hard links answers; anything else may be better later."""
DATA = "--data="
"""How the option is recorded among the overrides, so that the same command is recognized."""


def resolve(recipe: str, overrides: Sequence[str], data: str | None) -> RunSpec:
    """The recipe, for the data at hand, with the overrides. Raises ConfigError: BadValue, UnknownKey, CorpusMissing."""
    folder = os.path.abspath(data) if data else None
    spec = catalog.resolve(recipe, padded_vocab(folder) if folder else None)
    if folder:
        spec = with_data(spec, folder)
    spec = with_weights(overridden(spec, overrides), overrides)
    for key in (_pair(override)[0] for override in overrides):
        if key in ("checkpoint.keep_best_by", "checkpoint.keep_best_on") and not spec.checkpoint.keep_best:
            raise best_of_none(key)  # as it is usual, too: then the section cannot tell that it was given
    return msgspec.structs.replace(spec, overrides=(*([DATA + folder] if folder else []), *overrides))


def overridden(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    """With each `key=value` applied. What tells how a spec was made cannot be set."""
    for override in overrides:
        key, _ = _pair(override)
        if key in NOT_SETTABLE:
            raise UsageError(f"{key} cannot be set", where=f"--set {override}", fix="choose another recipe")
    return config.override(spec, list(overrides))


def padded_vocab(folder: str) -> int:
    """Rows of the embedding that the data's tokenizer needs: its size, up to a multiple of 128."""
    path = f"{folder}/train/card.json"
    try:
        size = int(json.loads(LocalPlatform().read(path))["tokenizer_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorpusMissing(
            "this is not a folder that `packtrain data build` finished", where=path,
            fix="make it with `packtrain data build PATH... --out DIR`, then give the same DIR",
        ) from error
    return -(-size // 128) * 128


def with_data(spec: RunSpec, folder: str) -> RunSpec:
    """The same configuration, reading what was built into `folder`."""
    data = msgspec.structs.replace(
        spec.data, stores=(StoreUse(path=f"{folder}/train"),), held_out=(f"{folder}/held_out",)
    )
    return msgspec.structs.replace(spec, data=data)


def with_weights(spec: RunSpec, overrides: Sequence[str]) -> RunSpec:
    """With the model that the folder `train.weights` holds, where one is named; of `overrides` those hold that its
    config.json does not decide. Its files' headers are read, none of the weights. Raises HfUnusable, Contradiction."""
    if not spec.train.weights:
        return spec
    from packtrain.checkpoint.interop import hf

    weights = hf.Weights(LocalPlatform(), spec.train.weights)
    of_model = [override for override in overrides if _pair(override)[0].split(".")[0] == "model"]
    for key in (_pair(override)[0] for override in of_model):
        if key.removeprefix("model.") in {"model", *weights.fields}:
            raise Contradiction(
                f"the model section comes from {hf.CONFIG} in {spec.train.weights}", where=f"--set {key}",
                fix=f"leave {key} out",
            )
    try:
        model = ModelConfig(**weights.fields)
    except Contradiction as error:
        raise HfUnusable(
            f"config.json describes a model that cannot be: {error.what}", where=f"{spec.train.weights}/{hf.CONFIG}",
            fix="download the model again, or correct it there",
        ) from error
    weights.matched(model)
    return config.override(msgspec.structs.replace(spec, model=model), of_model)


def check_data(spec: RunSpec) -> None:
    """Raises Contradiction where there is nothing to read or a held-out store is named twice, CorpusMissing where a
    store is not there, StoreDamaged where its card is, TokenizerMismatch where two stores, held out or not, were made
    with different tokenizers, or with another than foreign weights."""
    from packtrain.data.signed import read_card
    from packtrain.data.store import CARD, Card

    if not spec.data.stores:
        raise Contradiction(
            f"recipe {spec.recipe} was given nothing to read", where="data.stores",
            fix="packtrain data build PATH... --out DIR, then add --data DIR",
        )
    _check_distinct(spec.data.held_out)
    check_judged(spec)
    made_with: dict[str, str] = {}
    for folder in store_folders(spec.data):
        if not os.path.isfile(f"{folder}/{CARD}"):
            raise CorpusMissing("there is no store here", where=folder, fix="packtrain data build PATH... --out DIR")
        card, _ = read_card(LocalPlatform(), f"{folder}/{CARD}", Card)
        made_with.setdefault(card.tokenizer_hash, folder)
    if len(made_with) > 1:
        raise TokenizerMismatch(
            "the stores of one run were made with different tokenizers", where=", ".join(made_with.values()),
            fix="build all with one tokenizer.json (`packtrain data build --tokenizer FILE`)",
        )
    if spec.train.weights:
        from packtrain.checkpoint.interop import hf
        from packtrain.data.tokenizer import check_foreign

        weights = hf.Weights(LocalPlatform(), spec.train.weights)
        check_foreign(LocalPlatform(), weights.folder, weights.vocab, card.tokenizer_hash, card.tokenizer_size)


def _check_distinct(held_out: Sequence[str]) -> None:
    """Figures are kept by store: of one that is named twice a report would show one."""
    for n, folder in enumerate(held_out):
        if os.path.realpath(folder) in map(os.path.realpath, held_out[:n]):
            where = f"data.held_out.{n}: {folder}"
            raise Contradiction("a held-out store is given twice", where=where, fix="name it once")


def check_judged(spec: RunSpec) -> None:
    """Raises Contradiction where the best saves are to be kept and nothing tells which they are."""
    wanted, held_out = spec.checkpoint, spec.data.held_out
    if not wanted.keep_best:
        return
    if not held_out or not spec.train.eval_every_steps:
        raise Contradiction(
            f"the best {wanted.keep_best} saves are to be kept, and "
            f"{'nothing is evaluated in the loop' if held_out else 'there is no held-out store to judge them by'}",
            where="checkpoint.keep_best",
            fix="set train.eval_every_steps" if held_out else "set data.held_out, or checkpoint.keep_best=0",
        )
    if wanted.keep_best_on and wanted.keep_best_on not in held_out:
        raise Contradiction(
            f"{wanted.keep_best_on!r} is none of the held-out stores", where="checkpoint.keep_best_on",
            fix=f"name it as data.held_out does: {', '.join(held_out)}; or leave it out for all of them",
        )


def store_folders(data: DataConfig) -> list[str]:
    return [*(use.path for use in data.stores), *data.held_out]


def text(spec: RunSpec) -> str:
    """As it is written into the run folder."""
    return config.encode(spec).decode()


def read(path: str) -> RunSpec:
    """A recorded spec, whole. Raises UsageError for that of a program, UnknownKey, BadValue, Contradiction."""
    data = LocalPlatform().read(path)
    if data.startswith(OF_A_PROGRAM):
        raise UsageError(
            "this run keeps a program alive: it has no recipe, and its checkpoints are its own", where=path,
            fix="`packtrain report`, `logs`, `attach` and `stop` are for any run; --run or --new names another one",
        )
    return config.decode(whole(data, path), RunSpec, path)


def write(platform: Platform, path: str, data: bytes) -> bool:
    """Record a spec, whole or not at all; False: somebody else just wrote that one. Raises OSError, CommitsUnfit."""
    temp = f"{path}.new-{platform.token()}"
    try:
        platform.write_new(temp, data)
        platform.link(temp, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in LINK_REFUSED:
            raise
        raise CommitsUnfit(
            f"a run cannot live here: hard links are refused ({error.strerror})", where=os.path.dirname(path),
            fix="set PACKTRAIN_HOME to a folder on ext4, xfs, btrfs or NFS",
        ) from error
    finally:
        with suppress(FileNotFoundError):
            platform.unlink(temp)
    platform.fsync_dir(os.path.dirname(path))
    return True


def compare(recorded: RunSpec, wanted: RunSpec, name: str, path: str) -> None:
    """Raises SpecDiffers when the run was made by another recipe or other overrides. Defaults are not compared."""
    old, new = _asked(recorded), _asked(wanted)
    if old == new:
        return
    lines = [
        f"\n    {key}: {old.get(key, NOT_GIVEN)} -> {new.get(key, NOT_GIVEN)}"
        for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)
    ]
    raise SpecDiffers(
        f"run {name!r} was made by another command (recorded -> asked for now):{''.join(lines)}", where=path,
        fix=f"add --new to start another run, or resume this one: {command(recorded, name, world_options(path))}",
    )


def world_options(path: str) -> list[str]:
    """`--nodes` and what goes with it, as the run whose first spec is at `path` was launched the last time; none where
    that was one process, or where its journal does not tell."""
    journal = f"{os.path.dirname(os.path.dirname(path))}/journal"
    last = fold(read_journal(LocalPlatform(), journal).entries).launched
    if last is None or (last.nodes, last.spares, last.procs) == (1, 0, 1):
        return []
    counts = ("--nodes", last.nodes, 0), ("--spares", last.spares, 0), ("--procs-per-node", last.procs, 1)
    return [part for key, value, usual in counts if value != usual for part in (key, str(value))]


def _asked(spec: RunSpec) -> dict[str, str]:
    """What a person typed: the recipe, and the last value given to each key."""
    return {"recipe": spec.recipe, **dict(_pair(override) for override in spec.overrides)}


def _pair(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value


def command(spec: RunSpec, name: str, world: Sequence[str] = ()) -> str:
    """The command that made a run, as a person would type it again. `world`: its options about nodes."""
    options = [part for override in spec.overrides for part in _option(override)]
    return shlex.join(["packtrain", "train", spec.recipe, "--run", name, *options, *world])


def _option(override: str) -> tuple[str, str]:
    return ("--data", override[len(DATA):]) if override.startswith(DATA) else ("--set", override)
