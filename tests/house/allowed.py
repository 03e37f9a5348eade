"""Who may reach outside, and why. Everything else gets a `Platform` handed in."""

from __future__ import annotations

# (file, effect) -> reason
EFFECTS = {
    ("packtrain/core/platform.py", "clock"): "the door itself",
    ("packtrain/core/platform.py", "chance"): "the door itself",
    ("packtrain/core/platform.py", "processes"): "the door itself",
    ("packtrain/core/platform.py", "deletes"): "the door itself",
    ("packtrain/core/stores.py", "deletes"): "`erase` itself, which nobody else may call, and its own temporary names",
    ("packtrain/core/objects.py", "deletes"): "the same for a bucket",
    ("packtrain/core/sick.py", "deletes"): "the door itself, with a disk that is ill on purpose",
    ("packtrain/core/probe.py", "deletes"): "the objects of a probe this call made itself",
    ("packtrain/core/shim.py", "processes"): "becomes the command it was given",
    ("packtrain/data/pool.py", "processes"): "worker processes of a build, all of them ended by it",
    ("packtrain/data/build.py", "deletes"): "its own working folder, never a store",
    ("packtrain/core/contract.py", "clock"): "the client runs in anybody's job and has no Platform there",
    ("packtrain/core/breaking.py", "clock"): "the same, where it may be broken on purpose",
    ("packtrain/core/offers.py", "clock"): "the same client, towards the carrier",
    ("packtrain/checkpoint/purge.py", "deletes"): "the one module that deletes published data, from a plan",
    ("packtrain/checkpoint/commits.py", "deletes"): "temporary names this call made itself",
    ("packtrain/checkpoint/homes.py", "deletes"): "the file of a probe this call made itself",
    ("packtrain/checkpoint/repair.py", "deletes"): "the temporary name of what a repair makes, never a published one",
    ("packtrain/checkpoint/interop/hf.py", "deletes"): "files of an export that failed, which this call made itself",
    ("packtrain/checkpoint/saver.py", "deletes"): "the folder of its buffers, when it is empty",
    ("packtrain/checkpoint/slots.py", "deletes"): "memory buffers of this writer, which are no copies",
    ("packtrain/supervise/decisions.py", "deletes"): "segments of its own log that a later snapshot says all of",
    ("packtrain/supervise/sockets.py", "deletes"): "sockets, in a private folder this process made",
    ("packtrain/supervise/local.py", "deletes"): "the private folder of a run's processes that have ended",
    ("packtrain/train/seat.py", "deletes"): "the same, for a worker run by hand",
    ("packtrain/train/compiled.py", "deletes"): "compiled programs, in a folder of their own, which are made again",
    ("packtrain/cli/spec.py", "deletes"): "the temporary name of a spec this call made itself",
    ("packtrain/cli/checkup.py", "deletes"): "the log of a probe this call made itself",
}

# tests that wait for real time, and why nothing else would do
SLEEPS = {
    "tests/supervise/toy_worker.py": "a program that is watched, no test: its steps take time on purpose",
    "tests/train/test_worker.py": "looks again and again at a real process until it has got somewhere",
}
