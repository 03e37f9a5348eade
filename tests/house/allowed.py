"""Who may reach outside, and why. Everything else gets a `Platform` handed in."""

from __future__ import annotations

# (file, effect) -> reason
EFFECTS = {
    ("packtrain/core/platform.py", "clock"): "the door itself",
    ("packtrain/core/platform.py", "chance"): "the door itself",
    ("packtrain/core/platform.py", "processes"): "the door itself",
    ("packtrain/core/platform.py", "deletes"): "the door itself",
    ("packtrain/core/shim.py", "processes"): "becomes the command it was given",
    ("packtrain/data/pool.py", "processes"): "worker processes of a build, all of them ended by it",
    ("packtrain/data/build.py", "deletes"): "its own working folder, never a store",
    ("packtrain/core/contract.py", "clock"): "the client runs in anybody's job and has no Platform there",
}

# tests that wait for real time, and why nothing else would do
SLEEPS: dict[str, str] = {}
