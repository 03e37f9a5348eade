"""What `packtrain storm-demo` shows, and what it says of two runs that should be one."""

from __future__ import annotations

import io
import signal
from collections.abc import Iterator, Sequence

import pytest
from rich.console import Console

from packtrain.cli.storm import Demo, bits, compared
from packtrain.cli.storm_screen import Blow, Plain, Storm, picture
from packtrain.core.errors import StormIncomplete, StormUnequal
from packtrain.core.fake import FakeDisk, FakePlatform
from packtrain.core.fake_process import FakeProcess
from packtrain.core.journal import Entry, Journal
from packtrain.core.records import Record
from packtrain.core.units import NS
from packtrain.supervise.requests import Requests
from tests.checkpoint.worlds import RUN, WRITER, make_run, publish_small
from tests.monitor.test_incidents import FIRST, KILLED, lost_carrier, said, step

BLOWS = (Blow("kill", 40), Blow("kill-agent", 80))


def storm(*records: tuple[float, Record] | tuple[float, Record, str]) -> Storm:
    made = Storm(240, BLOWS)
    made.quiet.began_ns, made.quiet.ended_ns, made.broken.began_ns = NS, 31 * NS, 32 * NS
    made.take(made.broken, said(*records))
    return made


def drawn(shown: Storm, now_s: float) -> list[str]:
    console = Console(width=120, file=io.StringIO(), force_terminal=False)
    console.print(picture(shown, round(now_s * NS)))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_the_picture() -> None:
    """Both runs with how far they are; a row for each blow, healed, or still to come."""
    lines = drawn(storm(*FIRST, (9.0, step(43), "t1"), *KILLED), 20.0)
    assert lines[0].startswith("quiet run ") and lines[0].endswith(" done in 30s")
    assert lines[1].startswith("storm      ━") and lines[1].endswith("41 of 240 steps  attempt 2, loss 1.000")
    assert lines[3].split("  ")[0] == "✓" and " 40 " in lines[3]
    assert "0.5s" in lines[3] and "4.0s" in lines[3] and "attempt 2 on n0, n2" in lines[3]
    assert lines[4].startswith("·") and "a node is lost" in lines[4]


def test_what_is_not_healed_counts_its_seconds() -> None:
    """In brackets: not found yet, then not healed yet."""
    assert "(3.0s)" in drawn(storm(*FIRST, KILLED[0]), 13.2)[3]
    found = drawn(storm(*FIRST, *KILLED[:2]), 15.0)[3]
    assert found.startswith("●") and "0.5s" in found and "(5.0s)" in found


def test_trouble_that_nobody_made_is_shown_too() -> None:
    """A row of its own, without a step."""
    assert any("killed by SIGKILL" in line for line in drawn(storm(*FIRST, *KILLED[1:]), 20.0))


def test_blows_come_one_after_the_other() -> None:
    """At its step, and not before the one before it is healed; none twice while the journal does not tell of it yet."""
    assert storm(*FIRST, (9.0, step(39), "t1")).due is None
    first = storm(*FIRST, (9.0, step(40), "t1"))
    assert first.due == BLOWS[0]
    first.dealt = 1
    assert first.due is None
    late = (15.0, step(90), "t2")
    unhealed = storm(*FIRST, *KILLED[:4])
    unhealed.dealt = 1
    assert unhealed.due is None
    healed = storm(*FIRST, *KILLED, late)
    healed.dealt = 1
    assert healed.due == BLOWS[1]


def test_a_carrier_that_ended_by_itself_holds_up_no_blow() -> None:
    """It may not be healed before the end of the run, where no other save comes."""
    assert storm(*FIRST, (8.0, lost_carrier()), (9.0, step(40), "t1")).due == BLOWS[0]


def test_plain_lines() -> None:
    """A line for what breaks, and one for what came of it, each once; how far the run is every ten seconds."""
    out, shown = io.StringIO(), storm(*FIRST, (9.0, step(43), "t1"))
    plain = Plain(shown, out)
    entries: list[Entry] = said(*KILLED)
    for n, entry in enumerate(entries):
        shown.take(shown.broken, [entry])
        plain.tick(shown.broken, (40 + n) * NS)
    assert out.getvalue().splitlines() == [
        "at step 40: a worker is killed, rank 1 on n1", "storm: step 43/240, attempt 1, loss 1.000",
        "at step 40: found after 0.5s, healed after 4.0s: attempt 2 on n0, n2, from step 40 in memory",
    ]


# --- the story, in virtual time ------------------------------------------------------------------------


def trains(process: FakeProcess, records: Sequence[Record], code: int) -> Iterator[float]:
    """A command whose run writes one record a second, and ends; SIGINT ends it with 75, the second one with 70."""
    process.catches = {signal.SIGINT}
    journal = Journal(process.platform, "/runs/storm/journal", role="coordinator")
    for record in records:
        journal.write(record, durable=True)
        yield 1.0
        if process.signals:
            yield 5.0
            return 75 if len(process.signals) == 1 else 70
    return code


def demo(shown: Storm, records: Sequence[Record], code: int = 0) -> tuple[Demo, Requests, list[str], FakePlatform]:
    platform = FakePlatform(FakeDisk(), programs=lambda argv: lambda process: trains(process, records, code))
    requests, struck = Requests(), list[str]()

    def strike(fault: str) -> bool:
        struck.append(fault)
        return len(struck) > 1

    return Demo(platform, shown, Plain(shown, io.StringIO()), requests, strike), requests, struck, platform


def test_a_blow_that_hit_nothing_is_tried_again() -> None:
    """Only the run that is to be broken is struck, at the due step, until something was there to be hit; then the
    journal is waited for."""
    shown = Storm(240, BLOWS)
    records = [record for _, record, *_ in (*FIRST, (0, step(43), ""))]
    made, _, struck, _ = demo(shown, [*records, step(44), step(45), step(46)])
    assert made.train("/runs/storm", "/store", shown.quiet) == 0 and struck == []
    assert made.train("/runs/storm", "/store", shown.broken) == 0
    assert struck == ["kill", "kill"] and shown.dealt == 1 and shown.broken.ended_ns > shown.broken.began_ns


def test_ctrl_c_stops_the_run_and_waits_for_it() -> None:
    """It is passed on, and the run's own exit code is what the demo ends with."""
    shown = Storm(240, BLOWS)
    made, requests, _, platform = demo(shown, [step(n) for n in range(100)])
    requests.arrive(signal.SIGINT)
    assert made.train("/runs/storm", "/store", shown.quiet) == 75
    assert shown.quiet.ended_ns == 0 and platform.disk.clock.now_ns < 30 * NS


def test_a_demo_that_breaks_leaves_no_run_behind() -> None:
    """Its processes would live on by themselves: they are told to stop, then at once."""

    class Broken(Plain):
        def tick(self, run: object, now_ns: int) -> None:
            raise ZeroDivisionError("a fault of the display")

    shown = Storm(240, BLOWS)
    _, requests, _, platform = demo(shown, [step(n) for n in range(1000)])
    with pytest.raises(ZeroDivisionError):
        Demo(platform, shown, Broken(shown), requests, lambda fault: True).train("/runs/storm", "/store", shown.quiet)
    assert [child.poll() for child in platform.children] == [75]


# --- the verdict ---------------------------------------------------------------------------------------


def saved(attempt: int, *steps: int) -> FakePlatform:
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    for one in steps:
        publish_small(platform, log, attempt, one)
    return platform


def test_bits_are_those_of_the_last_save() -> None:
    """One more save, or one other bit in it, is another digest; a run without one has none."""
    one = bits(saved(1, 10), RUN)
    assert (one.step, one.tensors) == (10, 2) and one == bits(saved(1, 10), RUN)
    assert one.digest != bits(saved(1, 10, 20), RUN).digest
    assert bits(saved(1), RUN).digest == ""


def test_the_same_bits_after_all_faults_are_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    """Told with the ledger, and both digests."""
    platform = saved(1, 10)
    shown = Storm(240, BLOWS[:1])
    shown.take(shown.broken, said(*FIRST, *KILLED))
    assert compared(platform, shown, RUN, RUN) == 0
    out = capsys.readouterr().out
    assert out.count(bits(platform, RUN).digest) == 2 and "the same bits, through 1 fault" in out
    assert "found after 0.5s, healed after 4.0s" in out


def test_other_bits_are_our_fault() -> None:
    """Exit code 70, by an error with a name."""
    shown = Storm(240, BLOWS[:1])
    shown.take(shown.broken, said(*FIRST, *KILLED))
    platform = saved(1, 10)
    make_run(platform, "/elsewhere")
    with pytest.raises(StormUnequal) as caught:
        compared(platform, shown, RUN, "/elsewhere")
    assert caught.value.exit_code == 70


@pytest.mark.parametrize("records", [FIRST, (*FIRST, *KILLED[:3])])
def test_a_run_that_was_over_too_soon_is_no_success(records: tuple) -> None:
    """Not all faults struck, or one was not healed: the bits say nothing then."""
    shown = Storm(240, BLOWS[:1])
    shown.take(shown.broken, said(*records))
    with pytest.raises(StormIncomplete):
        compared(saved(1, 10), shown, RUN, RUN)
