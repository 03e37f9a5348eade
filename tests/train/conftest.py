"""Eight virtual CPU devices for this folder, and quick compilation; set before JAX looks for devices.

Set for this process alone: child processes see nothing of it.
"""

from __future__ import annotations

import os

import jax

from tests.train.lowering import QUICK_FLAGS

jax.config.update("jax_num_cpu_devices", 8)
# LLVM's dear passes off, and XLA's own emitters of loops instead of those through MLIR: the same program, compiled
# many times faster (measured on a step of the rig: 7.0, 3.1, 1.4 s) and run slower. Tests compile more than they run.
# What is judged by memory or by text of the program has the shipped emitters again: see `lowering.SHIPPED`.
jax.config.update("jax_disable_most_optimizations", True)
before = os.environ.get("XLA_FLAGS")
os.environ["XLA_FLAGS"] = f"{before or ''} {QUICK_FLAGS}"
jax.devices()  # XLA reads its flags here, once
if before is None:
    del os.environ["XLA_FLAGS"]
else:
    os.environ["XLA_FLAGS"] = before
