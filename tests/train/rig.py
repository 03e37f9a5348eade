"""What the loop's tests share: a tiny model, batches that follow from their index, saves kept or really published."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.format import LocalTensor, PlacedBox, TensorSpec
from packtrain.checkpoint.publish import Gate, Part, Save, carry
from packtrain.checkpoint.reader import open_restore
from packtrain.checkpoint.rounds import Round
from packtrain.checkpoint.saver import Saver, SaveResult
from packtrain.core.contract import Beats, Order
from packtrain.core.errors import PacktrainError
from packtrain.core.journal import Journal, read_folder
from packtrain.core.platform import LocalPlatform, Platform
from packtrain.core.records import AnyRecord
from packtrain.core.units import NS
from packtrain.data.config import DataConfig
from packtrain.data.loader import Batch
from packtrain.data.tokenizer import byte_tokenizer
from packtrain.train.config import GuardConfig, ModelConfig, OptimConfig, TrainConfig
from packtrain.train.heldout import HeldOut
from packtrain.train.loop import Loop, Parts
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import Orders, Wire
from packtrain.train.profile import Profiler
from packtrain.train.sample import Sampler
from packtrain.train.saving import Offering, Saves, Standing, restore_state
from packtrain.train.sections import Sections
from packtrain.train.state import LeafSpec, State, flatten, shardings, state_specs, unflatten
from packtrain.train.step import Step, make_step
from tests.train.lowering import AS_USERS

SPEC = Sections(
    seed=7,
    model=ModelConfig(vocab=384, layers=1, embed=16, heads=2, kv_heads=2, head=8, mlp=16, qk_norm=False),
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=2),
    guard=GuardConfig(warmup_updates=2, spike_sigmas=50.0),
    train=TrainConfig(steps=6, eval_every_steps=0, attention="blockwise"),
    data=DataConfig(batch_rows=4, length=16),
    checkpoint=CheckpointConfig(every_s=0, deadline_s=5.0),
)

@functools.cache
def specs() -> dict[str, LeafSpec]:
    return state_specs(SPEC.model, SPEC.optim)


def with_train(spec: Sections, **changes: Any) -> Sections:
    return replace(spec, train=msgspec.structs.replace(spec.train, **changes))


class Feed:
    """Synthetic batches. `poison`: data index -> how many of its fetches, once `armed`, carry a NaN weight."""

    def __init__(self, poison: dict[int, int] | None = None, spec: Sections = SPEC) -> None:
        self._poison, self._spec = dict(poison or {}), spec
        self.armed = False
        """Off while the loop probes its first batch."""

    def get(self, index: int) -> Batch:
        batch = synthetic(self._spec, index)
        left = self._poison.get(index, 0)
        if left and self.armed:
            self._poison[index] = left - 1
            batch.weights_BL[1, 2] = np.nan
        return batch


def synthetic(spec: Sections, index: int) -> Batch:
    chance = np.random.default_rng([spec.seed, index])
    rows, length = spec.data.batch_rows, spec.data.length
    text_BL = chance.integers(0, 16, (rows, length + 1), dtype=np.int32)
    at_BL = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    weights_BL = np.ones((rows, length), np.float32)
    return Batch(
        text_BL[:, :-1], text_BL[:, 1:], weights_BL, at_BL, np.zeros_like(at_BL), at_BL + 1, n_bytes=rows * length,
        n_tokens=rows * length,
    )


class Script:
    """A control file: at the n-th poll (from 1) and after it the order of the highest n so far is there."""

    def __init__(self, orders: dict[int, Order] | None = None) -> None:
        self._orders, self.polls = orders or {}, 0

    def poll(self) -> Order | None:
        self.polls += 1
        due = [n for n in self._orders if n <= self.polls]
        return self._orders[max(due)] if due else None


class Kept:
    """Saves that go nowhere: copies of the arrays, by step. `errors`: what comes of each save in turn; None: saved.
    `ends`: how the round of a step ends, at once; one that is not there does not."""

    def __init__(
        self, errors: Sequence[PacktrainError | None] = (), busy: Sequence[int] = (), remembers: bool = False,
        ends: Mapping[int, int] | None = None,
    ) -> None:
        self.saved: dict[int, list[LocalTensor]] = {}
        self.skip_reason = "busy as scripted"
        self._errors, self._busy = list(errors), set(busy)
        self._results: list[SaveResult] = []
        self.offers: list[int] = []
        self.remembers = remembers
        self.remembered: list[int] = []
        self.rounds: list[Round] = []
        self.round_ended, self.ends = 0, ends or {}
        self.deadlines: list[float | None] = []

    def save(
        self, step: int, tensors: list[LocalTensor], meta: dict[str, Any], deadline_s: float | None = None
    ) -> int | None:
        self.deadlines.append(deadline_s)
        if step in self.saved:
            return 0  # as Saver: a step on its way or published is not saved twice
        self.offers.append(step)
        n = len(self.offers)
        if n in self._busy:
            return None
        error = self._errors.pop(0) if self._errors else None
        if error is None:
            self.saved[step] = [t._replace(array=t.array.copy()) for t in tensors]
        self._results.append(SaveResult(step, 0 if error else n, 1, 0.0, 0.0, error.as_dict() if error else None, n))
        return n

    def peer_news(self) -> tuple[int, int]:
        return 0, 0

    def remember(
        self, step: int, tensors: list[LocalTensor], meta: dict[str, Any], begins: Round | None = None
    ) -> float | None:
        self.remembered.append(step)
        if begins is not None:
            self.rounds.append(begins)
            self.round_ended = self.ends.get(begins.step, self.round_ended)
        return None if step in self._busy else 0.5

    def forget(self) -> None:
        self.remembered.clear()

    def poll(self) -> list[SaveResult]:
        results, self._results = self._results, []
        return results

    def wait_all(self, deadline_s: float) -> list[SaveResult]:
        return self.poll()


class InlineCarrier:
    """The carrier's work done at once in the caller's thread, through the code that the carrier runs."""

    def __init__(self, platform: Platform, run: str) -> None:
        self._platform, self._run = platform, run
        self._log = CommitLog(platform, f"{run}/commits")
        self._outcomes: list[dict[str, Any]] = []

    def offer(self, message: dict[str, Any]) -> Literal["accepted", "busy"]:
        specs = msgspec.convert(message["tensors"], tuple[TensorSpec, ...])
        boxes = msgspec.convert(message["boxes"], tuple[PlacedBox, ...])
        part = Part(message["writer"], message["buffer"], message["bytes"], specs, boxes)
        about = {key: message[key] for key in ("data_index", "plan_hash", "seed", "code_hash", "meta")}
        end_ns = self._platform.boot_ns() + round(message["deadline_s"] * NS)
        outcome: dict[str, Any] = {"re": "outcome", "id": message["id"]}
        save = Save(message["step"], message["attempt"], (part,), about, end_ns)
        try:
            commit = carry(self._platform, self._log, self._run, save, Gate())
            outcome |= {"ok": True, "commit": commit.number}
        except PacktrainError as error:
            outcome |= {"ok": False, "error": error.as_dict()}
        self._outcomes.append(outcome)
        return "accepted"

    def outcomes(self) -> list[dict[str, Any]]:
        arrived, self._outcomes = self._outcomes, []
        return arrived

    def wait(self, ticket: int, timeout_s: float) -> dict[str, Any] | None:
        return next((o for o in self._outcomes if o["id"] == ticket), None)

    def close(self) -> None:
        return None


QUICK: Any = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


class Quick:
    """A jitted program, compiled at its first call without the compiler's costly passes: a fifth of the time."""

    def __init__(self, program: Any) -> None:
        self._program, self._compiled = program, None

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._program.lower(*args).compile(None if AS_USERS in os.environ else QUICK)
        return self._compiled(*args)

    def text(self) -> str:
        return self._compiled.as_text()


@dataclass(frozen=True)
class Programs:
    """What compiles once and is used by many loops."""

    step: Any
    held_out: HeldOut
    sampler: Sampler
    wire: Wire
    mesh: jax.sharding.Mesh


@functools.cache
def programs(steps: int = 6) -> Programs:
    spec, mesh = with_train(SPEC, steps=steps), make_mesh({}, jax.devices()[:1])
    step = Quick(make_step(spec.model, spec.optim, spec.guard, spec.train, mesh))
    return Programs(step, HeldOut(spec, mesh), Sampler(spec, mesh, byte_tokenizer()), Wire(mesh), mesh)


def fresh_state(mesh: jax.sharding.Mesh) -> State:
    """A state to start from, the same on every mesh, without a program to compile for it."""
    leaves, places = {}, flatten(shardings(SPEC.model, SPEC.optim, mesh))
    for number, (name, (shape, dtype, _)) in enumerate(specs().items()):
        drawn = np.random.default_rng([SPEC.seed, number]).normal(0, 0.3, shape).astype(dtype)
        value = np.ones_like(drawn) if "norm" in name else drawn
        whole = value if name.startswith("params/") else np.zeros(shape, dtype)
        leaves[name] = jax.make_array_from_callback(shape, places[name], lambda index, whole=whole: whole[index])
    return unflatten(leaves, SPEC.model, SPEC.optim)


class ArmedStep:
    """The compiled step; arms the feed once the two probes are over."""

    def __init__(self, step: Step, feed: Feed) -> None:
        self._step, self._feed, self._calls = step, feed, 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        self._feed.armed = self._calls >= 2
        return self._step(*args)


@dataclass
class Attempt:
    """One attempt of one rank over a folder, in this process."""

    folder: str
    spec: Sections = SPEC
    feed: Feed = field(default_factory=Feed)
    orders: Orders = field(default_factory=lambda: Orders(None))
    offering: Offering = field(default_factory=Kept)
    platform: Platform = field(default_factory=LocalPlatform)
    attempt: int = 1
    grace_s: float = 60.0
    published: tuple[int, int] = (-1, 0)
    state: State | None = None
    standing: Standing = Standing()
    loop: Loop | None = None
    held_out: Any = None
    sampler: Any = None
    profile_steps: int = 0
    peer_every: int = 0
    around: Callable[[Step], Step] = lambda step: step
    """What stands between the loop and the compiled step."""

    def run(self) -> State:
        """The final state. Raises what the loop raises; the journal is closed either way."""
        made = programs(self.spec.train.steps)
        journal = Journal(self.platform, f"{self.folder}/journal")
        facts = {"plan_hash": "synthetic", "seed": self.spec.seed, "tokenizer_hash": "bytes", "code_hash": "test"}
        saves = Saves(self.offering, specs(), self.platform, journal, facts, self.published)
        traces = f"{self.folder}/profile", self.profile_steps, made.step.text
        profiler = Profiler(*traces) if self.profile_steps else None
        parts = Parts(
            spec=self.spec, mesh=made.mesh, platform=self.platform, journal=journal, beats=Beats(None),
            orders=self.orders, wire=made.wire, feed=self.feed, step=self.around(ArmedStep(made.step, self.feed)),
            held_out=self.held_out or made.held_out, sampler=self.sampler or made.sampler, saves=saves,
            attempt=self.attempt, grace_s=self.grace_s, profiler=profiler, peer_every=self.peer_every,
        )
        state = self.state or fresh_state(made.mesh)
        self.loop = Loop(parts, state, self.standing)
        try:
            self.loop.run()
            return self.loop.state
        finally:
            journal.close()


def begin(folder: str, run: str, parent: int | None = None, **changes: Any) -> Attempt:
    """An attempt that publishes in `run`, from commit `parent` (None: where the log leads); journal in `folder`."""
    platform = LocalPlatform()
    log = CommitLog(platform, f"{run}/commits")
    log.probe()
    platform.mkdir(f"{run}/checkpoints")
    point = log.restore_point() if parent is None else log.read(parent)
    record = log.begin(parent, ("r00000",), platform.node())
    saver = Saver(platform, f"{run}/buffers", InlineCarrier(platform, run), record.attempt, "r00000", 5.0)
    made = Attempt(folder, offering=saver, attempt=record.attempt, **changes)
    return _restored(made, platform, run, point) if point is not None else made


def _restored(made: Attempt, platform: Platform, run: str, point: Commit) -> Attempt:
    checkpoint = open_restore(platform, run, point.number, point.digest)
    made.state = restore_state(checkpoint, made.spec, programs(made.spec.train.steps).mesh)
    made.standing = Standing.of(checkpoint.manifest)
    made.published = (point.step, point.number)
    return made


def records(folder: str, kind: type[Any]) -> list[Any]:
    reading = read_folder(LocalPlatform(), f"{folder}/journal")
    assert not reading.damage
    return [entry.record for entry in reading.entries if isinstance(entry.record, kind)]


def losses(found: Sequence[AnyRecord]) -> dict[int, tuple[float, float]]:
    """step -> (loss, gradient norm)."""
    return {r.step: (r.loss, r.grad_norm) for r in found}  # type: ignore[union-attr]


def bits(state: State) -> dict[str, bytes]:
    """Every leaf, guard statistics included."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in flatten(state).items()}


def saved_commits(run: str) -> dict[int, Commit]:
    """step -> the first commit that published it."""
    commits = CommitLog(LocalPlatform(), f"{run}/commits").all()
    return {commit.step: commit for commit in reversed(commits) if commit.kind == "save"}


def fresh_folder(tmp: Any, name: str) -> str:
    path = os.path.join(str(tmp), name)
    os.makedirs(path)
    return path

