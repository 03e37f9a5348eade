"""Numbers with units for people: bytes, counts, rates, durations. Pure."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NS = 1_000_000_000


def bytes_text(n: float) -> str:
    """`1536` -> `1.5 KiB`; bytes in, binary units out."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < (1023.5 if unit == "B" else 1023.95) or unit == "TiB":  # what would round to 1024 goes on
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError("unreachable")


def parse_bytes(text: str) -> int | None:
    """`200MB`, `1.5 GiB`, `4096` -> bytes; None for anything else. Decimal units by thousands, binary ones by 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kMGT])(i?))?B?", text.strip())
    if match is None:
        return None
    power = " kMGT".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def count_text(n: float) -> str:
    """`4200000` -> `4.2M`; plain counts, decimal."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.9995 * size:  # what rounds to 1.00 of a unit at three digits is written in it
            return f"{n / size:.3g}{unit}" if abs(n) < 999.5 * size else f"{n / size:.0f}{unit}"
    return f"{n:.0f}" if float(n).is_integer() else f"{n:.3g}"


def duration_text(seconds: float) -> str:
    """`3725` -> `1h02m`; seconds in."""
    if seconds < 59.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{s:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"
