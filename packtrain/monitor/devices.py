"""Who holds the memory of a machine's devices, from what `nvidia-smi` prints. Pure; hostile text.

    nvidia-smi --format=csv,noheader,nounits --query-gpu=uuid,memory.used                             GPU-..., 1234
    nvidia-smi --format=csv,noheader,nounits --query-compute-apps=pid,gpu_uuid,used_memory      4711, GPU-..., 1200

A field may also be `[N/A]`, `[Not Supported]`, `[Insufficient Permissions]` and the like: unknown, never free. In a
container processes of others are not listed, or under numbers of the machine. Source: `nvidia-smi --help-query-gpu` and
`--help-query-compute-apps`; not read on hardware.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HELD = "held"
"""Verdict on a node, beside those of kernel.py: it is to be chosen last while others are there."""
UNKNOWN = "unknown"
"""Another one: nobody can say whether memory is held; it is told, and nothing follows."""
FREE_MIB_MAX = 1024
"""So much may be in use where nobody computes: a driver's own part, a desktop, a daemon that measures."""
ROWS_MAX = 4096
DEVICE = re.compile(r"([A-Za-z0-9-]{1,64}), *(\d{1,9}|\[[^\]]{0,40}\])")
HOLDER = re.compile(r"(\d{1,10}), *([A-Za-z0-9-]{1,64}), *(\d{1,9}|\[[^\]]{0,40}\])")


class Device(NamedTuple):
    """`used_mib` None: unknown."""

    uuid: str
    used_mib: int | None


class Holder(NamedTuple):
    """A process that computes on a device."""

    pid: int
    uuid: str
    used_mib: int | None


def devices(text: str) -> list[Device]:
    """Lines that are none are passed over."""
    rows = [DEVICE.fullmatch(line.strip()) for line in text.splitlines()[:ROWS_MAX]]
    return [Device(row[1], _mib(row[2])) for row in rows if row is not None]


def holders(text: str) -> list[Holder]:
    rows = [HOLDER.fullmatch(line.strip()) for line in text.splitlines()[:ROWS_MAX]]
    return [Holder(int(row[1]), row[2], _mib(row[3])) for row in rows if row is not None]


def _mib(field: str) -> int | None:
    return int(field) if field.isdecimal() else None
