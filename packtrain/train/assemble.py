"""Puts one rank together: world, mesh, data, state, and the loop over them. The first file of a worker to load JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from packtrain.checkpoint.commits import Commit, CommitLog
from packtrain.checkpoint.interop import hf
from packtrain.checkpoint.interval import History
from packtrain.checkpoint.reader import Checkpoint, restoring
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, choose_buffer_folder
from packtrain.core.contract import CarrierClient, Control, Place
from packtrain.core.errors import (
    CheckpointDamaged,
    CheckpointUnreadable,
    Contradiction,
    TokenizerMismatch,
    WorldBroken,
    WorldNotFormed,
)
from packtrain.core.platform import Platform
from packtrain.core.records import AttemptReached, RestoreDone
from packtrain.core.units import NS, bytes_text
from packtrain.data.loader import Loader, Prefetcher, check_held_out, open_loader
from packtrain.data.tokenizer import check_foreign
from packtrain.train.breaking import breakable
from packtrain.train.cached import code_hash
from packtrain.train.fabric import between
from packtrain.train.flops import measure_peak
from packtrain.train.gate import Gate
from packtrain.train.heldout import HeldOut
from packtrain.train.kernels import resolved
from packtrain.train.loop import Loop, Parts
from packtrain.train.mesh import make_mesh
from packtrain.train.orders import Orders, Wire
from packtrain.train.profile import Compiled, Profiler
from packtrain.train.sample import Sampler
from packtrain.train.saving import Saves, Standing, Taken, import_params, local_bytes, restore_state, warning
from packtrain.train.seat import Desk, writer_name
from packtrain.train.sections import Sections
from packtrain.train.selfcheck import check_attention
from packtrain.train.state import State, init_state, state_specs
from packtrain.train.step import Step, make_step
from packtrain.train.worlds import mesh_for

FORM_S = 300.0
"""By hand: how long processes wait for each other."""
BROKEN = re.compile("gloo|nccl|connection (closed|reset)|reset by peer|coordination|heartbeat|UNAVAILABLE", re.I)
"""What JAX says when another process of a collective is gone (0.10.2 and 0.12.0.1; NCCL's from its documentation)."""


def join_world(place: Place) -> None:
    """Find the other processes. Raises WorldNotFormed where not all are there within `place.go_s`."""
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    if place.world_size == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            f"{place.master_addr}:{place.master_port}", num_processes=place.world_size, process_id=place.rank,
            local_device_ids=[place.local_rank] if place.local_world_size > 1 else None,
            initialization_timeout=max(1, round(place.go_s or FORM_S)),
            shutdown_timeout_seconds=max(1, round(place.grace_s)),
        )
    except RuntimeError as error:
        raise WorldNotFormed(
            f"{place.world_size} processes did not find each other: {_first_line(error)}",
            where=f"rank {place.rank} at {place.master_addr}:{place.master_port}",
            fix="see in the other ranks' logs which never came, and why",
        ) from error


@contextmanager
def named_when_broken(place: Place) -> Iterator[None]:
    """A collective that failed is the end of another rank, or of the network: no fault of this one. Raises WorldBroken.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if place.world_size == 1 or not BROKEN.search(str(error)):
            raise
        raise WorldBroken(
            f"a collective failed: {_first_line(error)}", where=f"rank {place.rank}",
            fix="see which rank ended first, and why",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def leave_world(place: Place) -> None:
    """Together: rank 0 hosts the coordination service, and who still works when it goes is aborted."""
    if place.world_size > 1:
        try:
            jax.distributed.shutdown()
        except RuntimeError as error:
            print(f"the world did not end together: {error}", flush=True)  # all that was to be done is done


def train(desk: Desk) -> None:
    """From nothing or from a checkpoint to the end. Raises what the loop raises, and what is wrong with the input."""
    control = Control(desk.place.control or None)
    orders = Orders(control)
    desk.on_sigterm(orders.terminate)
    desk, reason = with_kernel(desk)
    spec = desk.spec
    mesh = make_mesh(mesh_for(spec.train, nodes_of(desk.place)))
    loader = open_loader(spec.data, spec.seed, spec.model.vocab, desk.platform)
    check_held_out(spec.data, loader.tokenizer)
    specs, facts = state_specs(spec.model, spec.optim), facts_of(spec, loader, desk.platform)
    gate = Gate(desk, control, lambda: orders.terminated, facts, mesh)
    state, standing, published = _state(desk, mesh, loader, gate)
    desk.journal.write(AttemptReached(attempt=desk.place.attempt, point="state", rank=desk.place.rank))
    sampler = Sampler(spec, mesh, loader.tokenizer)
    sampler.check(spec.train.sample_prompts)
    step, profiler = _step(desk, mesh)
    saver = _saver(desk, local_bytes(state))
    with closing(saver), closing(Prefetcher(loader, standing.index, spec.data.prefetch_batches)) as feed:
        saves = Saves(saver, specs, desk.platform, desk.journal, facts, published, desk.place.rank == 0)
        parts = Parts(
            spec=spec, mesh=mesh, platform=desk.platform, journal=desk.journal, beats=desk.beats, orders=orders,
            wire=Wire(mesh), feed=breakable(feed, desk.place), step=step, held_out=HeldOut(spec, mesh), sampler=sampler,
            saves=saves, attempt=desk.place.attempt, rank=desk.place.rank, grace_s=desk.place.grace_s,
            peak_flops_per_s=_world_peak(desk, spec.train.precision), attention_reason=reason, profiler=profiler,
            history=History(desk.place.failures, 60.0 * desk.place.node_minutes),
            nodes=nodes_of(desk.place), peer_every=_peer_every(desk),
        )
        if standing.index < spec.train.steps:
            with desk.beats.during("compile"):
                batch = feed.get(standing.index)
                check_attention(batch.starts_BL, batch.ends_BL, spec.model, spec.train)
        Loop(parts, state, standing).run()


def nodes_of(place: Place) -> int:
    return max(1, place.world_size // max(1, place.local_world_size))


def with_kernel(desk: Desk) -> tuple[Desk, str]:
    """The desk with a concrete attention kernel in its spec, and the reason for it; everything after sees only that."""
    spec = desk.spec
    choice = resolved(
        spec.train, jax.local_devices()[0],
        packed_causal=spec.data.objective == "causal" and spec.model.window == 0,
    )
    print(f"attention kernel: {choice.name} ({choice.reason})", flush=True)
    train = msgspec.structs.replace(spec.train, attention=choice.name)
    return replace(desk, spec=replace(spec, train=train)), choice.reason


def _step(desk: Desk, mesh: Mesh) -> tuple[Step, Profiler | None]:
    """The step, and what traces it where that was asked for; such a step is compiled ahead, for its text."""
    spec, place = desk.spec, desk.place
    step = make_step(spec.model, spec.optim, spec.guard, spec.train, mesh, seed=spec.seed)
    if not desk.profile_steps:
        return step, None
    compiled, folder = Compiled(step), f"{place.run}/profile/{place.attempt:04d}-rank{place.rank}"
    return compiled, Profiler(folder, desk.profile_steps, compiled.text)


def _state(desk: Desk, mesh: Mesh, loader: Loader, gate: Gate) -> tuple[State, Standing, tuple[int, int]]:
    """State, where its lineage stands, and the (step, commit) it came from; (-1, 0): from nothing on disk.

    Passes the gate once it is known what is to be begun from, and before anything that takes several processes.
    """
    spec, restore = desk.spec, desk.place.restore
    if restore is None:
        gate.pass_to("fresh", 0, 0)
        state = init_state(spec.model, spec.optim, spec.seed, mesh)
        if spec.train.weights:
            with desk.beats.during("restore"):
                weights, tokenizer = hf.Weights(desk.platform, spec.train.weights), loader.tokenizer
                check_foreign(desk.platform, weights.folder, weights.vocab, tokenizer.hash, tokenizer.size)
                state = state._replace(params=())  # what was drawn gives room to what is read
                state = state._replace(params=import_params(weights, spec, mesh))
        return state, Standing(), (-1, 0)
    share = between(sorted({device.process_index for device in mesh.devices.flat})).share
    found = restoring(desk.platform, desk.place.run, restore.commit, restore.digest, share)
    with desk.beats.during("restore"), found as checkpoint:
        check_lineage(checkpoint, gate.facts)
        with desk.beats.during("init"):
            gate.pass_to(restore.digest, checkpoint.manifest.step, checkpoint.manifest.data_index)
        state = _restored(desk, checkpoint, mesh)
    published = (checkpoint.manifest.step, restore.commit) if checkpoint.published else (-1, 0)
    return state, Standing.of(checkpoint.manifest), published


def _restored(desk: Desk, checkpoint: Checkpoint, mesh: Mesh) -> State:
    """The state, and a record of where it came from and what that took."""
    place, restore, began_ns, taken = desk.place, desk.place.restore, desk.platform.boot_ns(), list[Taken]()
    assert restore is not None
    try:
        state = jax.block_until_ready(restore_state(checkpoint, desk.spec, mesh, taken.append))
    except (CheckpointDamaged, CheckpointUnreadable):
        leave_world(place)  # all ranks are here: whoever went first could end the others before they have said why
        raise
    reason = "the save this attempt begins from" if checkpoint.published else "in memory, newer than any save"
    done = RestoreDone(
        step=checkpoint.manifest.step, commit=restore.commit, rank=place.rank, ranks=jax.process_count(),
        source=checkpoint.folder, reason=reason,
        read_bytes=taken[0].read_bytes, read_bytes_all=taken[0].read_bytes_all, sent_bytes=taken[0].sent_bytes,
        seconds=(desk.platform.boot_ns() - began_ns) / NS,
    )
    desk.journal.write(done)
    if place.rank == 0:
        print(restore_line(done), flush=True)
    return state


def restore_line(done: RestoreDone) -> str:
    """A restore in one line for the log."""
    others = f" of {bytes_text(done.read_bytes_all)} by all {done.ranks} ranks" if done.ranks > 1 else ""
    passed = f", {bytes_text(done.sent_bytes)} passed on" if done.sent_bytes else ""
    return (
        f"restored step {done.step} from {done.source} ({done.reason}): {bytes_text(done.read_bytes)} read here{others}"
        f"{passed}, every block checked, {done.seconds:.1f} s"
    )


def _world_peak(desk: Desk, precision: str) -> float:
    """FLOPs/s of all devices of all processes, taken to be like those of this one."""
    return jax.process_count() * measure_peak(jax.local_devices(), desk.platform.boot_ns, precision)


def facts_of(spec: Sections, loader: Loader, platform: Platform) -> dict[str, Any]:
    """What every checkpoint of an attempt says of where it came from."""
    return {
        "plan_hash": loader.plan_hash, "seed": spec.seed, "tokenizer_hash": loader.tokenizer.hash,
        "code_hash": code_hash(platform),
    }


def check_lineage(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """The data and the seed are those the checkpoint was trained with. Raises TokenizerMismatch, Contradiction."""
    manifest, where = checkpoint.manifest, checkpoint.folder
    if manifest.meta.get("tokenizer_hash") != facts["tokenizer_hash"]:
        raise TokenizerMismatch(
            "the checkpoint was trained with another tokenizer than the stores were built with", where=where,
            fix="build the stores with the tokenizer.json of the run, or start another run with --new",
        )
    for name, now in (("seed", facts["seed"]), ("plan_hash", facts["plan_hash"])):
        then = getattr(manifest, name)
        if then != now:
            raise Contradiction(
                f"{name} is {now} now, and the checkpoint was trained with {then}: the batches to come would be others",
                where=where, fix="go back to the data section and the seed of the run, or start another run with --new",
            )


def _saver(desk: Desk, image_bytes: int) -> Saver:
    place, writer = desk.place, writer_name(desk.place.rank)
    begun = _wants_memory(desk)
    peers = _peer_every(desk) > 0
    where = choose_buffer_folder(desk.platform, place.run, image_bytes, writer, begun, peers)
    lack = lack_of_room(where, peers)
    if lack:
        desk.journal.write(warning(lack))
    return Saver(
        desk.platform, where, CarrierClient(place.carrier), place.attempt, writer, desk.spec.checkpoint.deadline_s,
        begun, peers, place.local_world_size,
    )


def _peer_every(desk: Desk) -> int:
    """As `Parts.peer_every`: a world on one node has no peer."""
    place = desk.place
    return desk.spec.checkpoint.peer_memory if place.world_size > place.local_world_size else 0


def lack_of_room(where: BufferFolder, peers: bool) -> dict[str, str]:
    """A warning's fields, where memory has too little; else empty. `peers`: the run wants copies on other nodes."""
    no_rounds = "; so no node of the run has copies on another (checkpoint.peer_memory)" if peers else ""
    if where.fallback:
        return {
            "name": "checkpoint.buffers_on_disk", "what": where.fallback + no_rounds, "where": where.path,
            "fix": "give the machine's memory file system more room; saves are slower until then",
        }
    if where.no_slots:
        return {
            "name": "checkpoint.no_memory_tier", "what": where.no_slots + no_rounds, "where": where.path,
            "fix": "make room there, or set checkpoint.memory_every_steps to 0; restarts begin from disk until then",
        }
    if where.no_lends:
        return {
            "name": "checkpoint.no_peer_copies", "what": where.no_lends, "where": where.path,
            "fix": "make room there, or set checkpoint.peer_memory to 0; until then the loss of a node costs the steps "
            "since the last save on disk",
        }
    return {}


def _wants_memory(desk: Desk) -> Commit | None:
    """The record of this attempt, under which it keeps copies in memory; None: it keeps none."""
    if not desk.spec.checkpoint.memory_every_steps:
        return None
    begun = CommitLog(desk.platform, f"{desk.place.run}/commits").begun()
    return begun if begun is not None and begun.attempt == desk.place.attempt else None
