"""What befell a run, told from its journal."""

from __future__ import annotations

from packtrain.core.journal import Entry
from packtrain.core.records import (
    AttemptBegan,
    AttemptEnded,
    CoordinatorBegan,
    ErrorSeen,
    FaultInjected,
    FaultMissed,
    GuardVerdict,
    NodeLost,
    NodeSuspected,
    OrderGiven,
    Record,
    RunFinished,
    SaveDone,
    StacksTaken,
    StepDone,
    TrainerStarted,
    WorldChosen,
)
from packtrain.core.units import NS
from packtrain.monitor.incidents import fold, lines


def said(*records: tuple[float, Record] | tuple[float, Record, str], boot: str = "b") -> list[Entry]:
    """Entries, each at so many seconds since boot; a third part names another writer than the coordinator."""
    rows = [(row[0], row[1], row[2] if len(row) == 3 else "c") for row in records]
    return [Entry(record, writer, boot, round(s * NS), n) for n, (s, record, writer) in enumerate(rows)]


def fault(name: str, node: str = "", rank: int = -1, seconds: float = 0.0) -> FaultInjected:
    return FaultInjected(fault=name, attempt=1, node=node, rank=rank, seconds=seconds, factor=0.0, by="storm")


def began(attempt: int, step: int = -1, note: str = "") -> AttemptBegan:
    return AttemptBegan(attempt=attempt, commit=attempt, parent=0, restore_step=step, note=note)


def chosen(attempt: int, *nodes: str) -> WorldChosen:
    return WorldChosen(attempt=attempt, nodes=list(nodes), procs=1, spares=[], wanted=len(nodes))


def trainer(attempt: int) -> TrainerStarted:
    return TrainerStarted(
        attempt=attempt, rank=0, parameters=1, mesh={}, attention="", precision="f32", peak_flops_per_s=0.0,
        digest_repeats=True,
    )


def step(n: int) -> StepDone:
    return StepDone(
        step=n, loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=0.1, mfu=0.0
    )


def save(n: int) -> SaveDone:
    return SaveDone(step=n, commit=n, bytes=1, stall_s=0.0, write_s=0.1)


def lost_carrier(what: str = "the carrier of node n1 ended") -> ErrorSeen:
    return ErrorSeen(severity="warning", name="checkpoint.carrier_lost", what=what)


FIRST = (
    (0.0, CoordinatorBegan(term=1, log="")), (0.1, began(1)), (0.1, chosen(1, "n0", "n1")), (2.0, trainer(1), "t1"),
)
KILLED = (
    (10.0, fault("kill", "n1", 1), "f"),
    (10.5, AttemptEnded(attempt=1, exit_code=-9, reason="killed by SIGKILL")),
    (10.6, began(2, 40, "step 40 from memory: ahead of the disk")), (10.6, chosen(2, "n0", "n2")),
    (13.0, trainer(2), "t2"), (14.0, step(41), "t2"),
)


def test_a_killed_worker() -> None:
    """From the fault to the end of the attempt it was found, to the first step of the next one it was healed; nodes and
    restore are told."""
    (one,) = fold(said(*FIRST, (9.0, step(43), "t1"), *KILLED))
    assert (one.what, one.found_s, one.healed_s) == ("a worker is killed, rank 1 on n1", 0.5, 4.0)
    assert one.remedy == "attempt 2 on n0, n2, from step 40 in memory"


def test_a_late_step_of_the_broken_attempt_heals_nothing() -> None:
    """Metrics reach the journal late: a step of the attempt that ended is known by its writer."""
    (one,) = fold(said(*FIRST, *KILLED[:3], (10.7, step(44), "t1")))
    assert one.found is not None and one.healed is None


def test_the_first_sign_is_when_it_was_found() -> None:
    """Stacks are taken long before an attempt ends of a silent rank."""
    stacks = StacksTaken(attempt=1, rank=1, node="n1", how="faulthandler", text="")
    (one,) = fold(said(*FIRST, KILLED[0], (13.2, stacks), (18.0, KILLED[1][1]), (19.0, KILLED[2][1])))
    assert one.found_s is not None and abs(one.found_s - 3.2) < 1e-9 and one.healed_s is None


def test_a_fault_that_nobody_injected() -> None:
    """It is known from the end of its attempt on, by the reason that was given."""
    (one,) = fold(said(*FIRST, *KILLED[1:]))
    assert (one.what, one.found_s, one.healed_s) == ("killed by SIGKILL", None, 3.5)


def test_ends_that_were_asked_for_are_no_incidents() -> None:
    """A stop, a drained node, and the end of the run."""
    told = OrderGiven(order=2, word="stop", reason="SIGINT")
    again = AttemptEnded(attempt=1, exit_code=75, reason="stopped")
    done = AttemptEnded(attempt=2, exit_code=0, reason="done")
    assert fold(said(*FIRST, (5.0, told), (6.0, again), (7.0, began(2, 40)), (9.0, done))) == []


def test_a_sign_alone_is_no_incident() -> None:
    """A node that is suspected, and goes on, broke nothing."""
    assert fold(said(*FIRST, (5.0, NodeSuspected(node="n1", reason="slow", in_row=1, done="it is told")))) == []


def test_a_carrier_is_healed_by_the_next_save() -> None:
    """No attempt ends of it; a save that was published before it was missed says nothing."""
    (one,) = fold(said(
        *FIRST, (10.0, fault("kill-carrier", "n1"), "f"), (10.1, save(40), "t1"), (10.4, lost_carrier()),
        (12.0, save(60), "t1"),
    ))
    assert (one.what, one.found_s, one.healed_s) == ("a carrier is killed, n1", 0.4, 2.0)
    assert one.remedy == "another carrier: step 60 was saved; no worker was touched"


def test_a_coordinator_is_healed_by_the_next_one() -> None:
    """It is found and healed at once, by the term that follows."""
    (one,) = fold(said(*FIRST, (10.0, fault("kill-coordinator"), "f"), (11.5, CoordinatorBegan(term=2, log=""))))
    assert (one.found_s, one.healed_s) == (1.5, 1.5) and "term 2" in one.remedy


def test_a_run_that_is_started_again_has_lost_no_coordinator() -> None:
    """One that said how the run ended was not lost."""
    over = RunFinished(exit_code=75, reason="stopped on request")
    assert fold(said(*FIRST, (5.0, over), (60.0, CoordinatorBegan(term=2, log="")))) == []


def test_a_step_that_is_not_finite_is_healed_by_the_guard() -> None:
    """The verdict is both: it was found, and the batch was run again."""
    verdict = GuardVerdict(step=50, reason="non_finite", rerun="clean", policy="used", digest=1, rerun_digest=2)
    (one,) = fold(said(*FIRST, (10.0, fault("nan", "n1", 1), "f"), (10.8, verdict, "t1")))
    assert (one.found_s, one.healed_s, one.remedy) == (0.8, 0.8, "step 50 was run again: clean, used")


def test_faults_that_overlap_are_healed_together() -> None:
    """One end of an attempt is what came of both, and each counts from its own moment."""
    second = (10.2, fault("stop", "n0", 0), "f")
    both = fold(said(*FIRST, KILLED[0], second, *KILLED[1:]))
    assert [round(one.healed_s or 0, 6) for one in both] == [4.0, 3.8] and len({one.remedy for one in both}) == 1


def test_what_ends_no_attempt_is_not_told_to_have_ended_one() -> None:
    """A worker that was slow, and one that was killed in the attempt before, have nothing to do with a later end."""
    slow, before, killed = fold(said(
        (0.0, began(0)), (0.5, fault("slow", "n0", 0)), (0.6, fault("kill", "n9", 9)), *FIRST, *KILLED
    ))
    assert slow.found is None and before.found is None and killed.healed_s == 4.0


def test_a_disk_is_healed_by_the_first_save_after_it() -> None:
    """A save that failed is the first word of it; one that was published while it lasted says nothing."""
    failed = SaveDone(step=60, commit=0, bytes=1, stall_s=0.0, write_s=0.0, error="no space")
    full = (10.0, fault("disk-full", "n1", seconds=10.0), "f")
    (one,) = fold(said(*FIRST, full, (12.0, failed, "t1"), (15.0, save(61), "t1"), (21.0, save(80), "t1")))
    assert (one.found_s, one.healed_s) == (2.0, 11.0)
    (quiet,) = fold(said(*FIRST, full, (21.0, save(80), "t1")))
    assert list(lines([quiet]))[2] == "    healed after 11s, step 80 was saved; no worker was touched"


def test_clocks_of_two_boots_are_not_compared() -> None:
    """A fault on one machine that is noted on another has no time that anybody knows."""
    (one,) = fold([*said(*FIRST, KILLED[0]), *said(*KILLED[1:], boot="other")])
    assert one.healed is not None and one.found_s is None and one.healed_s is None


def test_a_fault_that_was_not_done_ended_nothing() -> None:
    """What ends later is another incident."""
    missed = FaultMissed(fault="kill", node="n1", rank=1, why="rank 1 does not run here")
    first, second = fold(said(*FIRST, KILLED[0], (10.1, missed), *KILLED[1:]))
    assert first.missed and first.found is None and second.struck is None and second.healed_s == 3.5


def test_how_they_are_told() -> None:
    """What broke on one line; when it was found and healed, and by what, on the next; what is not known is left out."""
    missed = FaultMissed(fault="corrupt", node="n0", rank=-1, why="there is no checkpoint yet")
    told = list(lines(fold(said(
        *FIRST, *KILLED, (20.0, fault("cut", "n0", seconds=30.0)), (21.0, fault("corrupt", "n0")), (22.0, missed)
    ))))
    assert told[1:] == [
        "  a worker is killed, rank 1 on n1",
        "    found after 0.5s, healed after 4.0s, attempt 2 on n0, n2, from step 40 in memory",
        "  a node is cut off, n0, for 30 s", "    nothing came of it",
        "  a checkpoint is damaged, n0", "    it was not done: there is no checkpoint yet",
    ]
    assert list(lines([])) == []


def test_a_program_that_tells_no_steps_is_well_when_it_is_done() -> None:
    """Nothing is heard of it but its end: that is the end of the trouble before it, and of no trouble of its own."""
    crash = AttemptEnded(attempt=1, exit_code=1, reason="exit code 1")
    done = (3.0, AttemptEnded(attempt=2, exit_code=0, reason="done"))
    (one,) = fold(said(*FIRST[:3], (1.0, crash), (1.1, began(2)), done))
    assert (one.what, one.found_s, one.healed_s) == ("exit code 1", None, 2.0)
    (two,) = fold(said(*FIRST[:3], (1.0, crash), (1.1, began(2))))
    assert two.healed_s is None


STOP = OrderGiven(order=2, word="stop", reason="SIGINT")
OVER = RunFinished(exit_code=75, reason="stopped", error={"name": "run.stopped_on_request"})
LOST = NodeLost(node="n1", reason="its agent is silent for 20 s")


def test_a_run_that_is_stopped_before_a_lost_node_is_replaced() -> None:
    """That is what came of the loss: whether it was found before, the attempt had ended of it, or the order to stop
    came before either; and what begins a day later has not healed it."""
    gone = AttemptEnded(attempt=1, exit_code=-9, reason="node n1 is lost")
    struck, later = (10.0, fault("kill-agent", "n1"), "f"), ((99.0, began(2, 40)), (99.5, trainer(2), "t2"))
    for course in (((12.0, LOST), (12.1, gone)), ((12.0, LOST), (12.1, STOP), (12.2, gone))):
        (one,) = fold(said(*FIRST, struck, *course, (13.0, OVER), *later, (100.0, step(41), "t2")))
        assert one.found_s == 2.0 and one.healed is None
        assert list(lines([one]))[-1] == "    found after 2.0s, the run was stopped before the node was replaced"
    (one,) = fold(said(*FIRST, struck, (10.1, STOP), (10.3, gone), (11.0, OVER)))
    assert list(lines([one]))[-1] == "    the run was stopped before the node was replaced"


def test_a_run_that_is_stopped_after_a_lost_node_was_replaced() -> None:
    """The next attempt is told, and that no step of it was seen: a program tells none."""
    gone = (12.1, AttemptEnded(attempt=1, exit_code=-9, reason="node n1 is lost"))
    next_ = ((12.2, began(2, 40)), (12.3, chosen(2, "n0", "n2")))
    (one,) = fold(said(*FIRST, (10.0, fault("kill-agent", "n1"), "f"), (12.0, LOST), gone, *next_, (14.0, OVER)))
    told = "attempt 2 on n0, n2, from step 40 on disk; the run was stopped before a step of it was seen"
    assert list(lines([one]))[-1] == f"    found after 2.0s, {told}"


def test_a_loss_that_nobody_injected_while_a_run_stops() -> None:
    """It is told as well, by the first word of it; an agent that leaves with the run is no loss."""
    again = AttemptEnded(attempt=1, exit_code=-9, reason="node n1 is gone")
    (one,) = fold(said(*FIRST, (10.0, STOP), (10.2, LOST), (10.3, again), (11.0, OVER)))
    assert (one.what, one.remedy) == ("node n1 was lost", "the run was stopped before the node was replaced")
    spare = NodeLost(node="n9", reason="its agent is silent")
    assert fold(said(*FIRST, (10.0, STOP), (10.2, spare), (10.3, again), (11.0, OVER))) == []


def test_other_trouble_of_a_run_that_is_stopped() -> None:
    """A worker is started again, not replaced; what lasted and was over came to nothing; and a run that ends otherwise
    was not stopped."""
    (one,) = fold(said(*FIRST, KILLED[0], KILLED[1], (11.0, OVER)))
    assert list(lines([one]))[-1] == "    found after 0.5s, the run was stopped before it went on"
    cut = (10.0, fault("cut", "n1", seconds=30.0), "f")
    (one,) = fold(said(*FIRST, cut, (60.0, STOP), (61.0, OVER)))
    assert list(lines([one]))[-1] == "    nothing came of it"
    (one,) = fold(said(*FIRST, cut, (20.0, STOP), (21.0, OVER)))
    assert one.stopped
    failed = RunFinished(exit_code=70, reason="no progress", error={"name": "run.no_progress"})
    (one,) = fold(said(*FIRST, KILLED[0], KILLED[1], (11.0, failed)))
    assert list(lines([one]))[-1] == "    found after 0.5s, not healed"
