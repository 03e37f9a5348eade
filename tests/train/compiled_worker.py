"""One rank that compiles, alone and with the others, and says how often it had to: prints {"asked": n, "hit": m}."""

from __future__ import annotations

import json
import os
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from packtrain.core.contract import Place
from packtrain.core.platform import LocalPlatform
from packtrain.train import assemble, cached, compiled
from packtrain.train.mesh import make_mesh
from packtrain.train.sections import Sections

ASKED, HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"


def together(x: jax.Array) -> jax.Array:
    return x.sum()


def alone(x: jax.Array) -> jax.Array:
    return (x @ x).sum()


def main() -> None:
    counts = Counter[str]()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    place = Place.from_env(os.environ)
    world = cached.world_of(Sections(), place.world_size, place.world_size, "this code", jax.__version__)
    compiled.keep(LocalPlatform(), os.environ, place.world_size > 1, world)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    assemble.join_world(place)
    over = NamedSharding(make_mesh({}), PartitionSpec("fsdp"))
    x = jax.make_array_from_callback((place.world_size,), over, lambda index: jnp.ones(1))
    mine = jax.device_put(jnp.ones((8, 8)), jax.local_devices()[0])
    assert (float(jax.jit(together)(x)), float(jax.jit(alone)(mine))) == (float(place.world_size), 512.0)
    print(json.dumps({"asked": counts[ASKED], "hit": counts[HIT]}), flush=True)
    assemble.leave_world(place)


if __name__ == "__main__":
    main()
