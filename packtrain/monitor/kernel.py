"""Lines of the kernel's log that say something of hardware: what it is, and what follows. Pure; hostile text.

Formats: NVIDIA's driver (`NVRM: Xid (PCI:...): CODE, ...`, docs.nvidia.com/deploy/xid-errors), the EDAC core of Linux
(drivers/edac/edac_mc.c). What follows an Xid is NVIDIA's catalog as far as a supervisor can do it: it resets no GPU and
boots no machine, so whatever asks for that is a node to do without.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

LOST, LEAVE, TELL = "lost", "leave", "tell"
"""The node is of no use now; it is to be left at the next save; it is told."""
TEXT_CHARS_MAX = 300
XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]{7,16})[^)]{0,32}\): (\d{1,4})\b")
OFF_BUS = re.compile(r"NVRM: GPU (?:at )?(?:PCI:)?([0-9a-fA-F:.]{7,16}):? .{0,80}?fallen off the bus")
EDAC = re.compile(r"EDAC MC(\d{1,3}): (\d{1,9}) (CE|UE)\b.{0,80}?(?: on (\S{1,64}))?(?: \(|$)")
XIDS = {
    46: (LOST, "it stopped"), 48: (LOST, "double-bit ECC error"), 54: (LOST, "it has no auxiliary power"),
    62: (LOST, "its micro-controller halted"), 63: (TELL, "a row of memory waits to be remapped"),
    64: (LOST, "a row of memory could not be remapped"), 74: (LEAVE, "NVLink error"), 79: (LOST, "fell off the bus"),
    92: (LEAVE, "many single-bit ECC errors"), 94: (TELL, "contained memory error"),
    95: (LOST, "uncontained memory error"), 109: (LOST, "context switch timeout"), 110: (LOST, "security fault"),
    119: (LOST, "its system processor does not answer"), 120: (LOST, "its system processor failed"),
    136: (LOST, "link training failed"), 140: (LOST, "unrecovered ECC error"), 143: (LOST, "it could not be started"),
    154: (TELL, "it asks for another remedy"), 155: (LOST, "NVLink is down"), 156: (LOST, "a part was retired"),
    158: (LOST, "timeout"), 167: (LOST, "PCIe timeout"),
}
PROGRAMS = (8, 11, 13, 25, 31, 32, 43, 45, 69, 80)
"""Xids that a program causes, or that follow from another one: they say nothing of the node."""
BURST_ERRORS, BURST_S = 10, 60.0
"""So many corrected errors of one memory controller in so short a time are no single upset any more."""


OUT_OF_MEMORY = re.compile(r"[Oo]ut of memory: Killed process (\d{1,9}) ")


def killed(line: str) -> tuple[int, str] | None:
    """(process, line) where the kernel says that it killed one for want of memory, the machine's or a container's.
    Source: mm/oom_kill.c of Linux."""
    found = OUT_OF_MEMORY.search(line)
    return (int(found[1]), "".join(c for c in line if c.isprintable())[:TEXT_CHARS_MAX]) if found is not None else None


class Sign(NamedTuple):
    """`where`: PCI address, or memory controller. `errors`: how many, where a line tells of several."""

    kind: str
    """xid, bus, ecc (corrected), ue (not corrected)."""
    where: str
    text: str
    code: int = 0
    errors: int = 1


class Finding(NamedTuple):
    """What is told of a node."""

    verdict: str
    what: str
    where: str
    text: str


def parse(line: str) -> Sign | None:
    """What a line says of hardware; None: nothing."""
    text = "".join(c for c in line if c.isprintable())[:TEXT_CHARS_MAX]
    if (found := XID.search(line)) is not None:
        return Sign("xid", found[1], text, int(found[2]))
    if (found := OFF_BUS.search(line)) is not None:
        return Sign("bus", found[1].rstrip(":."), text, 79)
    if (found := EDAC.search(line)) is not None:
        where = f"MC{found[1]}" + (f" {found[4]}" if found[4] else "")
        return Sign("ecc" if found[3] == "CE" else "ue", where, text, errors=int(found[2]))
    return None


class Signs:
    """Of one machine: what its lines amount to. Each thing is told once in `BURST_S`."""

    def __init__(self) -> None:
        self._errors: dict[str, deque[tuple[float, int]]] = {}
        """Memory controller -> when it corrected how many errors."""
        self._told: dict[tuple[str, str], float] = {}

    def seen(self, now_s: float, line: str) -> Finding | None:
        """What follows from this line; None: nothing, or nothing new."""
        sign = parse(line)
        found = self._judged(now_s, sign) if sign is not None else None
        if found is None or now_s - self._told.get((found.what, found.where), -BURST_S) < BURST_S:
            return None
        self._told[found.what, found.where] = now_s
        return found

    def _judged(self, now_s: float, sign: Sign) -> Finding | None:
        if sign.kind in ("xid", "bus"):
            verdict, what = XIDS.get(sign.code, (TELL, "unknown"))
            found = Finding(verdict, f"Xid {sign.code}: {what}", sign.where, sign.text)
            return None if sign.code in PROGRAMS else found
        if sign.kind == "ue":
            return Finding(LOST, "memory error that was not corrected", sign.where, sign.text)
        recent = self._errors.setdefault(sign.where, deque(maxlen=BURST_ERRORS))
        recent.append((now_s, sign.errors))
        count = sum(n for at_s, n in recent if now_s - at_s < BURST_S)
        return Finding(LEAVE, "burst of ECC errors", sign.where, sign.text) if count >= BURST_ERRORS else None
