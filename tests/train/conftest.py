"""Eight virtual CPU devices for this folder, and quick compilation; set before JAX looks for devices.

Set through JAX, not through the environment: child processes see nothing of it.
"""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 8)
# LLVM's dear passes off: the same fused program, compiled three times faster and run slower. Tests compile more than
# they run.
jax.config.update("jax_disable_most_optimizations", True)
