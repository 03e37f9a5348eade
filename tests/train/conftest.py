"""Eight virtual CPU devices for this folder, and quick compilation; set before JAX looks for devices.

Set for this process alone: child processes see nothing of it.
"""

from __future__ import annotations

import os

import jax

from tests.train.lowering import AS_USERS, QUICK_FLAGS

jax.config.update("jax_num_cpu_devices", 8)
# LLVM's dear passes off, and XLA's own emitters of loops instead of those through MLIR: the same program, compiled
# many times faster (measured on a step of the rig: 7.0, 3.1, 1.4 s) and run slower. Tests compile more than they run.
# What is judged by memory or by text of the program has the shipped emitters again: see `lowering.SHIPPED`.
QUICK = AS_USERS not in os.environ
jax.config.update("jax_disable_most_optimizations", QUICK)
before = os.environ.get("XLA_FLAGS")
if QUICK:
    os.environ["XLA_FLAGS"] = f"{before or ''} {QUICK_FLAGS}"
jax.devices()  # XLA reads its flags here, once
if before is None:
    os.environ.pop("XLA_FLAGS", None)
else:
    os.environ["XLA_FLAGS"] = before


def pytest_report_header() -> str:
    return f"tests/train: programs are compiled {'quickly' if QUICK else 'as users run them'}"
