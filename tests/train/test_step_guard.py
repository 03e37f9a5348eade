"""The guard inside the compiled step: what a bad batch, a no-op and each command do to the state, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packtrain.train import axes
from packtrain.train.axes import ParamSpec
from packtrain.train.config import GuardConfig, TrainConfig
from packtrain.train.guard import GuardStats, Verdict, judge, learn, summary
from packtrain.train.orders import SILENCE
from packtrain.train.state import State
from packtrain.train.step import Command, Out, make_step, place_batch, place_orders
from tests.train.tiny import MODEL, OPTIM, Rows, fresh, host, mesh_of, packed_rows, placed

WARM = 4


@functools.cache
def program() -> Any:
    guard = GuardConfig(warmup_updates=WARM, spike_sigmas=6.0)
    return make_step(MODEL, OPTIM, guard, TrainConfig(steps=20), mesh_of())


def poisoned(index: int) -> Rows:
    rows = packed_rows(index)
    rows.weights_BL[3, 2] = np.nan
    return rows


def take(state: State, rows: Rows, command: Command = Command.RUN) -> tuple[State, Out]:
    state, out = program()(state, place_batch(rows, mesh_of(), 1), place_orders(SILENCE, mesh_of()), int(command))
    return state, jax.device_get(out)


def after(*indices: int) -> State:
    state = placed(fresh(), mesh_of())
    for index in indices:
        state, out = take(state, packed_rows(index))
        assert out.verdict == Verdict.OK and out.ran
    return state


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], but: tuple[str, ...] = ()) -> None:
    assert found.keys() == wanted.keys()
    for name in found.keys() - set(but):
        assert found[name].tobytes() == wanted[name].tobytes(), name


def test_a_planted_nan_leaves_every_buffer_alone() -> None:
    """The state after a NaN batch is that before it, bit for bit, but for the flag that stops later steps."""
    state = after(0, 1)
    before = host(state)
    state, out = take(state, poisoned(2))
    assert out.verdict == Verdict.NON_FINITE and out.ran and out.step == 2
    same(host(state), before, but=("tripped",))
    assert state.tripped


def test_steps_behind_a_bad_one_are_no_ops() -> None:
    """Steps already dispatched change nothing, say so, and report no verdict of their own."""
    state, _ = take(after(0, 1), poisoned(2))
    before = host(state)
    for index in (3, 4):
        state, out = take(state, packed_rows(index))
        assert not out.ran and out.verdict == Verdict.OK and out.step == 2
    same(host(state), before)


def test_a_rerun_gives_the_bits_of_an_undisturbed_run() -> None:
    """A transient NaN, rerun from unchanged state, leaves no trace: statistics and counters included."""
    state, _ = take(after(0, 1), poisoned(2))
    state, _ = take(state, packed_rows(3))
    for index, command in ((2, Command.RERUN), (3, Command.RUN)):
        state, out = take(state, packed_rows(index), command)
        assert out.ran and out.verdict == Verdict.OK
    same(host(state), host(after(0, 1, 2, 3)))


def test_a_bad_rerun_trips_again() -> None:
    """A batch that is bad twice gives one digest twice and changes nothing."""
    state = after(0)
    before = host(state)
    state, first = take(state, poisoned(1))
    state, second = take(state, poisoned(1), Command.RERUN)
    assert second.ran and second.verdict == Verdict.NON_FINITE and second.digest == first.digest
    same(host(state), before, but=("tripped",))


def test_skip_consumes_the_batch_and_nothing_else() -> None:
    """SKIP advances step and updates_skipped, clears tripped, and leaves parameters, moments and statistics."""
    state, _ = take(after(0), poisoned(1))
    before = host(state)
    state, out = take(state, poisoned(1), Command.SKIP)
    assert out.step == 2 and (state.step, state.updates, state.updates_skipped) == (2, 1, 1) and not state.tripped
    same(host(state), before, but=("tripped", "step", "updates_skipped"))


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("tripped", [False, True])
def test_probe_returns_the_state_bit_for_bit(tripped: bool, bad: bool) -> None:
    """PROBE tells digest and verdict, also while tripped, and is free of effects."""
    state = after(0)
    if tripped:
        state, _ = take(state, poisoned(1))
    before, rows = host(state), poisoned(2) if bad else packed_rows(2)
    state, first = take(state, rows, Command.PROBE)
    state, second = take(state, rows, Command.PROBE)
    same(host(state), before)
    assert first.digest == second.digest and first.ran
    assert first.verdict == second.verdict == (Verdict.NON_FINITE if bad else Verdict.OK)


def test_the_digest_is_of_the_gradient_the_step_used() -> None:
    """A probe and the run of the same batch have one digest; another batch has another."""
    state, probe = take(after(0), packed_rows(1), Command.PROBE)
    state, run = take(state, packed_rows(1))
    assert probe.digest == run.digest
    assert take(state, packed_rows(2), Command.PROBE)[1].digest != run.digest


def test_bias_correction_counts_applied_updates() -> None:
    """After a skip the next update is Adam's second, not its third, while step has moved on."""
    state, _ = take(after(0), packed_rows(1), Command.SKIP)
    state, _ = take(state, packed_rows(2))
    assert (state.step, state.updates, state.opt["count"]) == (3, 2, 2)


def test_schedules_read_step() -> None:
    """A skipped batch uses up its place in the schedule: after one, the first update is past half the warmup of 2."""
    state, _ = take(placed(fresh(), mesh_of()), packed_rows(0), Command.SKIP)
    state, out = take(state, packed_rows(1))
    assert state.updates == 1
    np.testing.assert_allclose(out.learning_rate, 1e-2, rtol=1e-6)


def test_a_spike_is_judged_after_warmup_only() -> None:
    """Batches of nonsense weights raise the gradient; the guard speaks once it has seen `warmup_updates`."""
    rows = packed_rows(9)
    loud = rows._replace(targets_BL=np.full_like(rows.targets_BL, 7))
    assert take(after(0), loud, Command.PROBE)[1].verdict == Verdict.OK
    state, out = take(after(*range(WARM)), loud)
    assert out.verdict == Verdict.SPIKE and state.tripped and state.updates == WARM


# --- the pure pieces ---------------------------------------------------------------------------------


def statistics(losses: list[float]) -> GuardStats:
    stats = GuardStats.start()
    for updates, loss in enumerate(losses):
        stats = learn(stats, jnp.float32(loss), jnp.float32(1.0), jnp.int32(updates))
    return stats


def test_statistics_are_the_plain_mean_and_variance_at_first() -> None:
    """Until their memory is full, running statistics equal numpy's over all losses so far."""
    losses = list(np.random.default_rng(0).normal(3.0, 0.5, 40))
    stats = statistics(losses)
    np.testing.assert_allclose(stats.loss_mean, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(stats.loss_variance, np.var(losses), rtol=1e-4)
    assert stats.norm_variance == 0


@pytest.mark.parametrize(("sigmas", "loss", "verdict"), [
    (6.0, 3.0 + 5 * 0.5, Verdict.OK), (6.0, 3.0 + 7 * 0.5, Verdict.SPIKE), (6.0, 0.1, Verdict.OK),
    (0.0, 1e9, Verdict.OK), (0.0, np.inf, Verdict.NON_FINITE), (6.0, np.nan, Verdict.NON_FINITE),
])
def test_verdicts(sigmas: float, loss: float, verdict: Verdict) -> None:
    """Only upwards counts; 0 sigmas leaves the finite check; NaN and inf are never good."""
    stats = GuardStats(*(jnp.float32(x) for x in (3.0, 0.25, 1.0, 0.01)))
    guard = GuardConfig(spike_sigmas=sigmas, warmup_updates=10)
    assert judge(jnp.float32(loss), jnp.float32(1.0), stats, jnp.int32(10), guard) == verdict


def test_copies_that_differ_are_a_verdict() -> None:
    """Whatever loss and norm are: no batch makes two copies of one gradient differ."""
    for norm in (1.0, np.inf):
        found = judge(jnp.float32(1.0), jnp.float32(norm), GuardStats.start(), jnp.int32(0), GuardConfig(), False)
        assert found == Verdict.COPIES_DIFFER


def test_a_non_finite_norm_is_enough() -> None:
    """A gradient can overflow where the loss does not."""
    stats = GuardStats.start()
    assert judge(jnp.float32(1.0), jnp.float32(np.inf), stats, jnp.int32(0), GuardConfig()) == Verdict.NON_FINITE


SPECS = {"a": ParamSpec((32, 8), ("vocab", "embed"), 1.0), "b": ParamSpec((4,), ("embed",), "ones")}


def test_digest_is_the_wrap_around_sum_of_bits() -> None:
    """u32 sum modulo 2^32 over all elements, so any single flipped bit shows; the same on a mesh as on one device."""
    draw = np.random.default_rng(1)
    tree = {name: draw.normal(size=spec.shape).astype(np.float32) for name, spec in SPECS.items()}
    for flip in (0, 1 << 17):
        tree["a"].view(np.uint32)[5, 5] ^= flip
        bits = np.concatenate([x.view(np.uint32).ravel() for x in tree.values()]).astype(np.uint64)
        for mesh in (mesh_of(), mesh_of(replica=2, fsdp=2, tensor=2)):
            found = jax.jit(lambda tree, mesh=mesh: summary(tree, SPECS, mesh, jnp.float32(2)))(tree)
            assert found.digest == bits.sum() % 2**32 and found.agree
            np.testing.assert_allclose(found.norm, np.sqrt(sum(np.square(x).sum() for x in tree.values())), rtol=1e-6)


@pytest.mark.parametrize("damage", [1.5, np.nan])
def test_copies_of_the_loss_that_differ_are_seen_by_all(damage: float) -> None:
    """One device's loss is damaged and no gradient: all come to the one verdict, so none updates alone."""
    mesh = mesh_of(tensor=2, fsdp=2)
    whole = axes.sharding((), (), mesh)
    copies = [jax.device_put(np.float32(2), device) for device in mesh.devices.flat]
    copies[3] = copies[3] * damage
    loss = jax.make_array_from_single_device_arrays((), whole, copies)
    tree = {"b": jax.device_put(np.ones(4, np.float32), axes.sharding(("embed",), (4,), mesh))}
    found = jax.jit(lambda tree, loss: summary(tree, {"b": SPECS["b"]}, mesh, loss))(tree, loss)
    assert [bool(shard.data) for shard in found.agree.addressable_shards] == [False] * 4


@pytest.mark.parametrize("damage", [1.5, np.inf])
def test_copies_that_differ_are_seen_by_all(damage: float) -> None:
    """One device's copy of a piece is damaged: every device hears of it, and all of one norm."""
    mesh = mesh_of(replica=2, fsdp=2)
    at = axes.sharding(("embed",), (4,), mesh)
    pieces = [jax.device_put(np.ones(2, np.float32), device) for device in mesh.devices.flat]
    pieces[3] = pieces[3] * damage
    tree = {"b": jax.make_array_from_single_device_arrays((4,), at, pieces)}
    found = jax.jit(lambda tree: summary(tree, {"b": SPECS["b"]}, mesh, jnp.float32(2)))(tree)
    assert [bool(shard.data) for shard in found.agree.addressable_shards] == [False] * 4
    norms = {float(shard.data) for shard in found.norm.addressable_shards}
    assert norms == {float(np.sqrt(np.float32(2 + 2 * damage**2)))}
