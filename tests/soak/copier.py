"""A program that copies and says how far it is, to be killed: ID and SECRET in the environment, the rest as words."""

from __future__ import annotations

import sys

import msgspec

from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import StoreConfig, open_store
from packtrain.core.transfer import Item, Progress, TransferConfig, copy


def say(progress: Progress) -> None:
    print(f"{progress.bytes_done} {progress.bytes_per_s:.0f}", flush=True)


def main() -> None:
    """SOURCE-CONFIG TARGET-CONFIG ITEMS BYTES-A-SECOND THREADS, the first three as JSON."""
    platform = LocalPlatform()
    source, target = (open_store(platform, msgspec.json.decode(word, type=StoreConfig)) for word in sys.argv[1:3])
    items = msgspec.json.decode(sys.argv[3], type=list[Item])
    config = TransferConfig(threads=int(sys.argv[5]), copy_bytes_per_s_max=float(sys.argv[4]))
    began_ns = platform.boot_ns()
    done = copy(platform, source, target, items, config, progress=say)
    print(f"done {done.bytes_sent} {done.bytes_checked} {(platform.boot_ns() - began_ns) / 1e9:.3f}", flush=True)


if __name__ == "__main__":
    main()
