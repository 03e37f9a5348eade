"""What lines of the kernel's log say of hardware: recorded lines through the real parser."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.monitor.kernel import (
    BURST_ERRORS,
    BURST_S,
    EDAC,
    LEAVE,
    OFF_BUS,
    PROGRAMS,
    TELL,
    TEXT_CHARS_MAX,
    XID,
    XIDS,
    Signs,
    killed,
    parse,
)

RECORDED = pathlib.Path(__file__).parent / "recorded" / "kernel.txt"
CE = "EDAC MC0: {} CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x12345 offset:0x0)"


def recorded() -> list[tuple[str, str, str, str]]:
    """(verdict, what, where, line)"""
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    found = [tuple(part.strip() for part in line.split("|", 3)) for line in lines]
    return [(one[0], one[1], one[2], one[3]) for one in found]


@pytest.mark.parametrize(("verdict", "what", "where", "line"), recorded())
def test_recorded_lines(verdict: str, what: str, where: str, line: str) -> None:
    """Each says what is recorded beside it, and nothing where that is empty."""
    found = Signs().seen(0.0, line)
    assert (found is None) == (not verdict)
    if found is not None:
        assert (found.verdict, found.what, found.where) == (verdict, what, where)
        assert found.text == line[:TEXT_CHARS_MAX]


def test_an_unknown_xid_is_told() -> None:
    """Nothing is concluded from a number that nobody knows, and it is not kept back."""
    found = Signs().seen(0.0, "NVRM: Xid (PCI:0000:01:00): 999, something new")
    assert found is not None and (found.verdict, found.what) == (TELL, "Xid 999: unknown")
    assert not set(PROGRAMS) & set(XIDS)


def test_a_burst_of_corrected_errors() -> None:
    """So many in a minute on one memory controller; as many over a longer time, or on several, are single upsets."""
    signs = Signs()
    found = [signs.seen(second, CE.format(2)) for second in range(BURST_ERRORS)]
    assert [one is not None for one in found] == [second == BURST_ERRORS // 2 - 1 for second in range(BURST_ERRORS)]
    told = found[BURST_ERRORS // 2 - 1]
    assert told is not None and (told.verdict, told.what) == (LEAVE, "burst of ECC errors")
    slow, spread = Signs(), Signs()
    assert not any(slow.seen(n * 1.01 * BURST_S / (BURST_ERRORS - 1), CE.format(1)) for n in range(100))
    assert not any(spread.seen(n / 10, CE.format(1).replace("MC0", f"MC{n % 4}")) for n in range(BURST_ERRORS * 3))


def test_one_thing_is_told_once_a_minute() -> None:
    """A driver that says the same a thousand times is heard once; another device, and another minute, are news."""
    signs, line = Signs(), "NVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off the bus."
    found = [signs.seen(second, line) for second in range(int(BURST_S) + 1)]
    assert [second for second, one in enumerate(found) if one is not None] == [0, int(BURST_S)]
    assert signs.seen(61.0, line.replace("0000:01", "0000:02")) is not None


@given(st.text(max_size=400), st.sampled_from([line for *_, line in recorded()]))
def test_any_text_is_taken(text: str, line: str) -> None:
    """Whatever a log says, nothing is raised, and what is told prints and is short."""
    for one in (text, text + line, line + text, line[: len(text)]):
        found = parse(one)
        assert found is None or (found.text.isprintable() and len(found.text) <= TEXT_CHARS_MAX)


@pytest.mark.parametrize("where", ["Out", "Memory cgroup out"])
def test_who_was_killed_for_want_of_memory(where: str) -> None:
    """The process by its number, of the machine and of a container; other lines that name one are none."""
    line = (
        f"{where} of memory: Killed process 4711 (python) total-vm:81266312kB, anon-rss:64713848kB, file-rss:0kB, "
        "shmem-rss:0kB, UID:1000 pgtables:127484kB oom_score_adj:0"
    )
    assert killed(line) == (4711, line)
    assert killed("oom_reaper: reaped process 4711 (python), now anon-rss:0kB") is None
    assert killed("python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0") is None


def test_a_long_line_takes_no_long_time() -> None:
    """Patterns have bounds: no line makes them try for ever."""
    assert parse("NVRM: GPU 0000:01:00 " + "a" * 100_000) is None
    assert not any(sign in one.pattern for one in (XID, OFF_BUS, EDAC) for sign in "*+")
