"""A copy inside a network namespace of its own: FOLDER CAP. Starts rclone there, says what the copier says."""

from __future__ import annotations

import os
import pathlib
import sys

import google_crc32c

from packtrain.core.platform import LocalPlatform
from packtrain.core.stores import StoreConfig, open_store
from packtrain.core.transfer import Item, TransferConfig, copy
from packtrain.core.units import MIB
from tests.soak.servers import ID, SECRET, running


def main() -> None:
    root, cap = pathlib.Path(sys.argv[1]), float(sys.argv[2])
    os.environ |= {"TEST_STORE_ID": ID, "TEST_STORE_SECRET": SECRET}
    platform, here = LocalPlatform(), open_store(LocalPlatform(), StoreConfig(str(root / "here")))
    with running("rclone", root) as server:
        there = open_store(platform, server.config("shaped"))
        ((name, size),) = here.list_all("")
        sums = tuple(google_crc32c.value(here.read(name, at, 5 * MIB)) for at in range(0, size, 5 * MIB))
        began_ns = platform.boot_ns()
        done = copy(
            platform, here, there, [Item(name, name, size, 0, sums, 5 * MIB)],
            TransferConfig(chunk_bytes=5 * MIB, copy_bytes_per_s_max=cap),
        )
        print(f"done {done.bytes_sent} {done.bytes_checked} {(platform.boot_ns() - began_ns) / 1e9:.3f}", flush=True)


if __name__ == "__main__":
    main()
