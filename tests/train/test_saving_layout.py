"""A checkpoint knows no mesh: saved under any, it is restored under any other, bit for bit."""

from __future__ import annotations

import itertools
import pathlib

import jax
import numpy as np
import pytest

from packtrain.checkpoint import format as fmt
from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.reader import open_checkpoint, restoring
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import BufferFolder, look, memory_folder
from packtrain.core.errors import WrongModel
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.platform import LocalPlatform
from packtrain.train.config import OptimConfig
from packtrain.train.mesh import make_mesh
from packtrain.train.saving import local_bytes, local_tensors, restore_params, restore_state
from packtrain.train.state import State, flatten, shardings, state_specs, unflatten
from tests.train import rig

MESHES = {1: {}, 2: {"fsdp": 2}, 4: {"fsdp": 2, "tensor": 2}, 8: {"replica": 2, "fsdp": 2, "tensor": 2}}


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return make_mesh(MESHES[devices], jax.devices()[:devices])


def scrambled(devices: int, optim: OptimConfig = rig.SPEC.optim) -> State:
    """A state whose every leaf, moments and statistics too, is random bits; the same on every mesh."""
    leaves, places = {}, flatten(shardings(rig.SPEC.model, optim, mesh_of(devices)))
    specs = state_specs(rig.SPEC.model, optim)
    for number, (name, place) in enumerate(places.items()):
        shape, dtype, _ = specs[name]
        chance = np.random.default_rng(number)
        bits = chance.integers(0, 2 if dtype == "bool" else 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
        whole = bits.view(dtype)[..., 0]
        leaves[name] = jax.make_array_from_callback(shape, place, lambda index, whole=whole: whole[index])
    return unflatten(leaves, rig.SPEC.model, optim)


def saved(folder: str, states: dict[int, State], optim: OptimConfig = rig.SPEC.optim) -> str:
    """A run with a checkpoint of each state, by step."""
    platform, specs = LocalPlatform(), state_specs(rig.SPEC.model, optim)
    log = CommitLog(platform, f"{folder}/commits")
    log.probe()
    platform.mkdir(f"{folder}/checkpoints")
    record = log.begin(None, ("r00000",), "node")
    saver = Saver(platform, f"{folder}/buffers", rig.InlineCarrier(platform, folder), record.attempt, "r00000", 5.0)
    for step, state in states.items():
        meta = {"data_index": step, "plan_hash": "", "seed": 0, "code_hash": ""}
        saver.save(step, local_tensors(state, specs), meta)
    assert [result.error for result in saver.poll()] == [None] * len(states)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with one checkpoint saved under each mesh; the step is the number of devices."""
    return saved(str(tmp_path_factory.mktemp("run")), {devices: scrambled(devices) for devices in MESHES})


@pytest.mark.parametrize(("under", "restored"), list(itertools.product(MESHES, MESHES)))
def test_restores_under_every_mesh(run: str, under: int, restored: int) -> None:
    """Every leaf comes back bit for bit and lies where this mesh wants it, whichever mesh it was saved under."""
    checkpoint = open_checkpoint(LocalPlatform(), run, rig.saved_commits(run)[under])
    state = restore_state(checkpoint, rig.SPEC, mesh_of(restored))
    assert rig.bits(state) == rig.bits(scrambled(1))
    places = flatten(shardings(rig.SPEC.model, rig.SPEC.optim, mesh_of(restored)))
    assert all(leaf.sharding == places[name] for name, leaf in flatten(state).items())


def test_memory_restores_under_another_mesh() -> None:
    """What four devices copied into memory comes back bit for bit on eight and on one, of two copies the newer."""
    platform = FakePlatform(FakeDisk(), "a")
    platform.mkdir("/run")
    log = CommitLog(platform, "/run/commits")
    log.probe()
    begin = log.begin(None, ("r00000",), "node")
    where, carrier = BufferFolder(memory_folder("/run", "a"), slots=True), rig.InlineCarrier(platform, "/run")
    saver, specs = Saver(platform, where, carrier, begin.attempt, "r00000", 5.0, begin), rig.specs()
    for step, state in ((1, rig.fresh_state(mesh_of(1))), (2, scrambled(4))):
        assert saver.remember(step, local_tensors(state, specs), {"data_index": step}) is not None
    memory = look(platform, "/run", log).memory
    assert memory is not None and memory[1] == 2
    begin = log.begin(None, ("r00000",), "node", memory=memory)
    with restoring(platform, "/run", begin.number, memory[2]) as checkpoint:
        for devices in (8, 1):
            assert rig.bits(restore_state(checkpoint, rig.SPEC, mesh_of(devices))) == rig.bits(scrambled(1))


@pytest.mark.parametrize("optim", [
    OptimConfig(name="muon", moments="bf16"), OptimConfig(name="adafactor", master="bf16"),
], ids=lambda optim: optim.name)
def test_what_optimizers_keep_restores_under_another_mesh(tmp_path: pathlib.Path, optim: OptimConfig) -> None:
    """Muon's slots and factored statistics, in f32 or bf16, saved on 8 devices, are the same bits on 4 and on 1."""
    run = saved(str(tmp_path), {1: scrambled(8, optim)}, optim)
    checkpoint = open_checkpoint(LocalPlatform(), run, rig.saved_commits(run)[1])
    for devices in (4, 1):
        state = restore_state(checkpoint, rig.replace(rig.SPEC, optim=optim), mesh_of(devices))
        assert rig.bits(state) == rig.bits(scrambled(1, optim))


def test_weights_alone(run: str) -> None:
    """The weights can be restored without the rest of the state."""
    checkpoint = open_checkpoint(LocalPlatform(), run, rig.saved_commits(run)[8])
    other = rig.replace(rig.SPEC, optim=rig.msgspec.structs.replace(rig.SPEC.optim, name="adafactor"))
    params = restore_params(checkpoint, other, mesh_of(2))
    wanted = scrambled(1).params
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(params)] == [
        np.asarray(x).tobytes() for x in jax.tree.leaves(wanted)
    ]


@pytest.mark.parametrize("devices", list(MESHES))
def test_each_element_is_handed_over_once(devices: int) -> None:
    """The pieces tile every tensor: replicated ones come once, and no piece is larger than what a device holds."""
    pieces = local_tensors(scrambled(devices), rig.specs())
    assert local_bytes(scrambled(devices)) == sum(p.array.nbytes for p in pieces)
    by_name = {name: [p for p in pieces if p.spec.name == name] for name in rig.specs()}
    for name, leaf in flatten(scrambled(devices)).items():
        fmt.check_tiling(by_name[name][0].spec, [p.box for p in by_name[name]], name)
        assert {p.array.shape for p in by_name[name]} == {leaf.addressable_shards[0].data.shape}


def test_another_model_is_refused_by_its_first_tensor(run: str) -> None:
    """A checkpoint of another model is refused with the name of the first tensor that differs and both its shapes."""
    checkpoint = open_checkpoint(LocalPlatform(), run, rig.saved_commits(run)[1])
    wider = rig.replace(rig.SPEC, model=rig.msgspec.structs.replace(rig.SPEC.model, embed=32))
    with pytest.raises(WrongModel, match=r"tensor params/embedding is .*embed 16\] there and .*embed 32\]") as refused:
        restore_state(checkpoint, wider, mesh_of(1))
    assert refused.value.exit_code == 78
    untied = rig.replace(rig.SPEC, model=rig.msgspec.structs.replace(rig.SPEC.model, tied=False))
    with pytest.raises(WrongModel, match="unembedding is absent there"):
        restore_state(checkpoint, untied, mesh_of(1))
