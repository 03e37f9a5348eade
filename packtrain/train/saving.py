"""Between the state on devices and the bytes of a checkpoint.

Out: each process hands over the pieces its own devices hold, one copy of each (replica 0); no tensor is ever gathered.
In:  what devices need is read once by all processes together, verified, whatever mesh it was written under.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.deal import Deal
from packtrain.checkpoint.format import Box, LocalTensor, Manifest, TensorSpec
from packtrain.checkpoint.gather import Boxes, gather
from packtrain.checkpoint.interop import hf
from packtrain.checkpoint.interval import RECENT, Cost
from packtrain.checkpoint.reader import Checkpoint
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import SaveResult
from packtrain.core.errors import CommitStale, SaveFailed, WrongModel
from packtrain.core.journal import Journal
from packtrain.core.platform import Platform
from packtrain.core.records import ErrorSeen, MemorySaved, SaveDone
from packtrain.core.units import NS, duration_text
from packtrain.train.axes import ParamSpec
from packtrain.train.fabric import between
from packtrain.train.model import Tree, name_of, param_specs
from packtrain.train.rounding import DTYPES
from packtrain.train.sections import Sections
from packtrain.train.state import LeafSpec, State, flatten, shardings, state_specs, unflatten

CARRIER_SHARE = 0.8
"""Part of a last save's time after which the carrier says what stands in the way; the rest is for hearing it."""
RETRY_S = 1.0
"""Between two tries of a last save."""
SKIPPED = "checkpoint.skipped"
"""`SaveDone.error` of a save that could not even be offered."""


@dataclass(frozen=True)
class Standing:
    """Where a lineage stands besides its state: kept in the checkpoint, so that a restart goes on from it."""

    index: int = 0
    """Next batch."""
    trained_ns: int = 0
    """Time in the loop over all attempts, pauses aside; what an attempt that was killed did after its last save is not
    in it."""
    windows: tuple[tuple[int, int], ...] = ()
    """Data ordered to be skipped: (from index, count)."""
    skips_in_a_row: int = 0
    """Batches the guard skipped since the last update."""

    def meta(self) -> dict[str, Any]:
        return {
            "data_index": self.index, "trained_ns": self.trained_ns, "windows": [list(w) for w in self.windows],
            "skips_in_a_row": self.skips_in_a_row,
        }

    @staticmethod
    def of(manifest: Manifest) -> Standing:
        meta = manifest.meta
        windows = tuple((int(first), int(count)) for first, count in meta.get("windows", []))
        return Standing(
            manifest.data_index, int(meta.get("trained_ns", 0)), windows, int(meta.get("skips_in_a_row", 0))
        )


class Offering(Protocol):
    """What `Saves` needs of `checkpoint.saver.Saver`."""

    skip_reason: str

    @property
    def remembers(self) -> bool: ...
    @property
    def round_ended(self) -> int: ...
    def remember(
        self, step: int, tensors: list[LocalTensor], meta: dict[str, Any], begins: Round | None = None
    ) -> float | None: ...
    def peer_news(self) -> tuple[int, int]: ...
    def forget(self) -> None: ...
    def save(
        self, step: int, tensors: list[LocalTensor], meta: dict[str, Any], deadline_s: float | None = None
    ) -> int | None: ...
    def poll(self) -> list[SaveResult]: ...
    def wait_all(self, deadline_s: float) -> list[SaveResult]: ...


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """A shard's index as start and stop per dim."""
    return tuple((s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=True))


def local_tensors(state: State, specs: Mapping[str, LeafSpec]) -> list[LocalTensor]:
    """Every piece this process is to write. On CPU the arrays are views of device memory: copy before the next step."""
    pieces = []
    for name, leaf in flatten(state).items():
        shape, dtype, dims = specs[name]
        tensor = TensorSpec(name, dtype, shape, dims)
        pieces += [
            LocalTensor(tensor, box_of(shard.index, shape), np.asarray(shard.data))
            for shard in leaf.addressable_shards if shard.replica_id == 0
        ]
    return pieces


def local_bytes(state: State) -> int:
    """Size of what `local_tensors` gives, with nothing copied."""
    leaves = jax.tree.leaves(state)
    return sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.replica_id == 0)


def restore_state(
    checkpoint: Checkpoint, spec: Sections, mesh: Mesh, told: Callable[[Taken], None] = lambda taken: None
) -> State:
    """The saved state on `mesh`, bit for bit; `told` as in `placed_tensors`, and called by all processes as that is.

    Raises WrongModel, CheckpointDamaged, CheckpointUnreadable, LayoutError.
    """
    check_model(checkpoint.specs, state_specs(spec.model, spec.optim), checkpoint.folder)
    places = flatten(shardings(spec.model, spec.optim, mesh))
    return unflatten(placed_tensors(checkpoint, places, told), spec.model, spec.optim)


def import_params(weights: hf.Weights, spec: Sections, mesh: Mesh) -> Tree:
    """Weights of a foreign folder on `mesh`, each device reading its own pieces. Raises HfUnusable, LayoutError."""
    specs, places = param_specs(spec.model), shardings(spec.model, spec.optim, mesh).params
    weights, dtype = weights.matched(spec.model), DTYPES[spec.optim.master]

    def placed(path: tuple[Any, ...], of: ParamSpec, place: NamedSharding) -> jax.Array:
        def fetch(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
            return weights.read(f"params/{name_of(path)}", box_of(index or (), of.shape)).astype(dtype)

        return jax.make_array_from_callback(of.shape, place, fetch)

    return jax.tree.map_with_path(placed, specs, places)


def restore_params(checkpoint: Checkpoint, spec: Sections, mesh: Mesh) -> Tree:
    """The weights alone, whatever optimizer trained them. Raises WrongModel, CheckpointDamaged, LayoutError."""
    check_model(_weights(checkpoint.specs), _weights(state_specs(spec.model, spec.optim)), checkpoint.folder)
    places = shardings(spec.model, spec.optim, mesh).params
    names = flatten(shardings(spec.model, spec.optim, mesh)._replace(opt=()))
    leaves = placed_tensors(checkpoint, _weights(names))
    return jax.tree.unflatten(jax.tree.structure(places), leaves.values())


def _weights(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: spec for name, spec in leaves.items() if name.startswith("params/")}


def check_model(found: Mapping[str, TensorSpec], wanted: Mapping[str, LeafSpec], where: str) -> None:
    """Raises WrongModel naming the first tensor that differs in existence, shape, dtype or dims."""
    here = {name: (spec.shape, spec.dtype, spec.dims) for name, spec in found.items()}
    for name in [*wanted, *(name for name in here if name not in wanted)]:
        if here.get(name) != wanted.get(name):
            raise WrongModel(
                f"the checkpoint is of another model or optimizer: tensor {name} is {_text(here.get(name))} there "
                f"and {_text(wanted.get(name))} as configured",
                where=where,
                fix="use the model and optim sections of the run that saved it, or start another run with --new",
            )


def _text(spec: LeafSpec | None) -> str:
    if spec is None:
        return "absent"
    shape, dtype, dims = spec
    return f"{dtype}[{', '.join(f'{dim} {n}' for dim, n in zip(dims, shape))}]"


class Taken(NamedTuple):
    """What a restore took, in bytes of images: read by this process, read by all, passed on by this one."""

    read_bytes: int
    read_bytes_all: int
    sent_bytes: int


def placed_tensors(
    checkpoint: Checkpoint, places: Mapping[str, NamedSharding], told: Callable[[Taken], None] = lambda taken: None
) -> dict[str, jax.Array]:
    """These tensors on their devices. Called by all processes that hold any of them: each block is read by one.

    `told` hears what it took. Raises CheckpointDamaged, CheckpointUnreadable; on all processes when on one.
    """
    devices: set[Any] = {device for place in places.values() for device in place.device_set}
    processes = sorted({device.process_index for device in devices})
    wanted = {name: _wanted(place, checkpoint.specs[name].shape, processes) for name, place in places.items()}
    deal = Deal(checkpoint.tables, wanted, len(processes), readers=_ranks_of(checkpoint.readers, processes))
    fabric = between(processes)
    placed: dict[str, jax.Array] = {}

    def place(name: str, boxes: Boxes) -> None:
        placed[name] = _placed(checkpoint.specs[name], places[name], boxes)

    gather(checkpoint, deal, fabric, place)
    for name in places:
        if name not in placed:
            place(name, {})  # no element of it belongs here
    told(Taken(deal.read_bytes(fabric.rank), deal.read_bytes(), deal.sent_bytes(fabric.rank)))
    return {name: placed[name] for name in places}


def _ranks_of(readers: Sequence[Sequence[int]] | None, processes: Sequence[int]) -> list[list[int]] | None:
    """Readers by their places among `processes`."""
    ranks = {process: rank for rank, process in enumerate(processes)}
    if readers is None:
        return None
    return [[ranks[process] for process in those if process in ranks] for those in readers]


def _wanted(place: NamedSharding, shape: tuple[int, ...], processes: Sequence[int]) -> dict[Box, list[int]]:
    """Which ranks hold which box: the same on every process."""
    ranks = {process: rank for rank, process in enumerate(processes)}
    found: dict[Box, dict[int, None]] = {}
    indices: Mapping[Any, tuple[slice, ...] | None] = place.devices_indices_map(shape)
    for device, index in indices.items():
        found.setdefault(box_of(index or (), shape), {})[ranks[device.process_index]] = None
    return {box: list(holders) for box, holders in found.items()}


def _placed(spec: TensorSpec, place: NamedSharding, boxes: Boxes) -> jax.Array:
    """One tensor on its devices; boxes without an element need not be there."""

    def piece(index: tuple[slice, ...] | None) -> np.ndarray[Any, Any]:
        box = box_of(index or (), spec.shape)
        return boxes[box] if box in boxes else np.empty(fmt.box_shape(box), fmt.DTYPES[spec.dtype][1])

    return jax.make_array_from_callback(spec.shape, place, piece)


def warning(error: Mapping[str, str]) -> ErrorSeen:
    """An error the run survives, from the four texts of `PacktrainError.as_dict`."""
    what, where, fix = error.get("what", ""), error.get("where", ""), error.get("fix", "")
    return ErrorSeen(severity="warning", name=error["name"], what=what, where=where, fix=fix)


class Saves:
    """The saves of one rank in one attempt: what is offered, what came of it, and what to say about it.

    `specs`: of every leaf of the state. `facts`: meta that all saves of the attempt share. `published`: (step, commit)
    the attempt restored, or (-1, 0).
    """

    def __init__(
        self, saver: Offering, specs: Mapping[str, LeafSpec], platform: Platform, journal: Journal,
        facts: Mapping[str, Any], published: tuple[int, int] = (-1, 0), speaks: bool = True,
    ) -> None:
        self.published = published
        self.began_ns = platform.boot_ns()
        """When the last save began, or the attempt."""
        self.costs: deque[Cost] = deque(maxlen=RECENT)
        """Of this attempt's last published saves."""
        self._saver, self._specs, self._platform, self._journal = saver, specs, platform, journal
        self._facts, self._speaks = dict(facts), speaks
        self._failure: dict[str, str] = {}

    def begin(self, state: State, standing: Standing, deadline_s: float | None = None) -> None:
        """Copy the state out and offer it; returns when the copy is complete, so the state may be donated again.

        `deadline_s`: where the carrier has less time than usual, so that it says in time what was in the way.
        """
        self.began_ns = self._platform.boot_ns()
        if self.published[0] == standing.index:
            return
        tensors = local_tensors(state, self._specs)
        if self._saver.save(standing.index, tensors, self._meta(state, standing), deadline_s) is None:
            self._skipped(standing.index)

    @property
    def round_ended(self) -> int:
        """As `Saver.round_ended`."""
        return self._saver.round_ended

    def remember(self, state: State, standing: Standing, begins: Round | None = None) -> None:
        """Copy the state into memory, where there is a tier for that; one that finds no room is counted. `begins`: as
        in `Saver.remember`."""
        if not self._saver.remembers:
            return
        tensors = local_tensors(state, self._specs)
        stall_s = self._saver.remember(standing.index, tensors, self._meta(state, standing), begins)
        if self._speaks:
            size = sum(tensor.array.nbytes for tensor in tensors)
            copied, took_s = (0, 0.0) if stall_s is None else (size, stall_s)
            sent, lost = self._saver.peer_news()
            self._journal.write(MemorySaved(
                step=standing.index, bytes=copied, stall_s=took_s, at_peer=sent, not_at_peer=lost,
            ))

    def forget(self) -> None:
        """No attempt begins from what this one holds in memory."""
        self._saver.forget()

    def _meta(self, state: State, standing: Standing) -> dict[str, Any]:
        guard = {name: float(value) for name, value in jax.device_get(state.guard)._asdict().items()}
        return self._facts | standing.meta() | {"guard": guard}

    def poll(self) -> None:
        """Say how saves ended. Raises CommitStale: a newer attempt began, so this one stops at once."""
        self._note(self._saver.poll())

    def finish(self, state: State, standing: Standing, deadline_s: float) -> int:
        """Publish this step and return its commit, trying until the deadline. Raises SaveFailed then, and CommitStale.

        0 when no batch was consumed since the beginning of the run: there is nothing to save.
        """
        end_ns = self._platform.boot_ns() + round(deadline_s * NS)
        while standing.index and self.published[0] != standing.index:
            left_s = max(0.0, (end_ns - self._platform.boot_ns()) / NS)
            self.begin(state, standing, CARRIER_SHARE * left_s or None)
            self._note(self._saver.wait_all(max(0.0, (end_ns - self._platform.boot_ns()) / NS)))
            if self.published[0] == standing.index:
                break
            if self._platform.boot_ns() + RETRY_S * NS >= end_ns:
                raise self._failed(standing.index, deadline_s)
            self._platform.sleep(RETRY_S)
        return self.published[1]

    def _note(self, results: list[SaveResult]) -> None:
        for result in results:
            error = result.error or {}
            if self._speaks:
                self._journal.write(SaveDone(
                    step=result.step, commit=result.commit, bytes=result.bytes, stall_s=result.stall_s,
                    write_s=result.write_s, error=error.get("name", ""),
                ))
            if error.get("name") == CommitStale.name:
                raise CommitStale(
                    "a newer attempt of this run began, so this one stops", where=error["where"], fix="let it run"
                )
            if error:
                self._failure = error
                self._journal.write(warning(error))
            else:
                self.published = max(self.published, (result.step, result.commit))
                if result.write_s > 0:  # of a step that was published already nothing was written
                    self.costs.append(Cost(result.stall_s, result.write_s))

    def _skipped(self, step: int) -> None:
        """No free buffer, or the carrier is busy or gone: the next occasion will do."""
        self._failure = {"what": self._saver.skip_reason}
        if self._speaks:
            self._journal.write(SaveDone(step=step, commit=0, bytes=0, stall_s=0.0, write_s=0.0, error=SKIPPED))

    def _failed(self, step: int, deadline_s: float) -> SaveFailed:
        at, commit = self.published
        kept = f"the last published step is {at} (commit {commit})" if commit else "no step was published yet"
        why = self._failure.get("what", "the carrier gave no answer")
        return SaveFailed(
            f"the last save, of step {step}, found no home within {duration_text(deadline_s)}: {why}; {kept}",
            where=self._failure.get("where", ""),
            fix=self._failure.get("fix") or "run the command again: it goes on from there",
        )
