"""The fault table: what can befall a run, what follows, and where each is tried. docs/FAULTS.md is made from it.

Four ways to try a fault, each a column:

    fake        in virtual time: the shipped decisions against a made-up machine or a simulated cluster
    process     real processes, broken for real
    namespace   real processes in a namespace of the kernel of their own: network, time
    replayed    a recorded signal through the real parser

A marked cell names its tests: a file, a function, and for one of several cases the case in brackets.
test_fault_table.py sees that every one of them is there.
"""

from __future__ import annotations

from typing import NamedTuple

from packtrain.supervise.faults import KINDS

COLUMNS = ("fake", "process", "namespace", "replayed")
SIM = "tests/supervise/test_simulated.py::test_each_fault_alone_heals"
LIVE = "tests/supervise/test_faults_live.py::test_a_run_that_is_broken"
SOME = "tests/supervise/test_faults_live.py::test_a_run_is_broken_again_and_again_and_ends_well"
POLICY, NODES = "tests/supervise/test_policy.py", "tests/supervise/test_policy_nodes.py"
HARDWARE, KERNEL = "tests/supervise/test_hardware.py", "tests/monitor/test_kernel.py"
DISKS = "tests/soak/test_real_disks.py"
FALL_BACK, READER = "tests/checkpoint/test_fall_back.py", "tests/checkpoint/test_reader.py"
DETECT, DELIVERY = "tests/supervise/test_detect.py", "tests/supervise/test_delivery.py"
AGENT = "tests/supervise/test_agent_process.py"
TORCH = "tests/soak/test_programs.py::test_killed_and_hung_ranks_change_nothing"
Cell = tuple[str, ...]


class Row(NamedTuple):
    """`verbs`: how `packtrain break` does it; none: a person cannot."""

    fault: str
    remedy: str
    fake: Cell = ()
    process: Cell = ()
    namespace: Cell = ()
    replayed: Cell = ()
    verbs: tuple[str, ...] = ()


TABLE = (
    Row("kill", "all ranks are killed, another attempt at once",
        (f"{SIM}[kill]", f"{POLICY}::test_any_death_ends_all"), (SOME, TORCH), verbs=("kill",)),
    Row("stop (SIGSTOP)", "silent: stacks, SIGKILL at `beat_overdue_s` (a program of anybody: at `stopped_s`), another "
        "attempt", (f"{SIM}[stop (SIGSTOP)]", f"{POLICY}::test_an_idle_program_is_started_again"),
        (f"{LIVE}[workers]",), verbs=("stop",)),
    Row("hang that holds the interpreter lock", "silent: the same",
        (f"{NODES}::test_a_silent_rank_is_told_early_and_ended_when_it_is_certain",),
        (f"{LIVE}[workers]", "tests/core/test_breaking.py::test_a_hang_holds_the_interpreter_lock"), verbs=("hang",)),
    Row("hang of one, or of all",
        "beats, but no step: stacks, the odd one out is blamed, another attempt at `progress_s`",
        (f"{SIM}[hang of one]", f"{SIM}[hang of all]", f"{NODES}::test_a_world_without_a_step"),
        (TORCH,)),
    Row("segfault", "the likely cause is named, another attempt at once", (f"{SIM}[segfault]",), (f"{LIVE}[workers]",),
        verbs=("segfault",)),
    Row("out of memory", "the same; where the kernel killed it, in the kernel's words", (f"{SIM}[out of memory]",),
        (SOME,), replayed=(f"{HARDWARE}::test_a_worker_that_the_kernel_killed_for_want_of_memory",), verbs=("oom",)),
    Row("exit 1", "the same", (f"{SIM}[exit 1]",), (f"{LIVE}[workers]",), verbs=("exit-1",)),
    Row("exit 75", "another attempt at once, nobody is blamed", (f"{SIM}[exit 75]",), (f"{LIVE}[workers]",),
        verbs=("exit-75",)),
    Row("exit 78", "the run ends, never again", (f"{POLICY}::test_78_of_any_rank_ends_the_run",), (f"{LIVE}[refused]",),
        verbs=("exit-78",)),
    Row("slow by X", "told when it is below 70% of the median speed for 30 s", (f"{SIM}[slow]",),
        (f"{LIVE}[straggler]",), verbs=("slow",)),
    Row("straggler at 70%", "told; with `replace_stragglers` a spare takes its place, after a save",
        (f"{SIM}[straggler at 70%]", f"{DETECT}::test_a_straggler_at_70_percent",
         f"{NODES}::test_a_straggler_is_told"), (f"{LIVE}[straggler]",), verbs=("slow",)),
    Row("NaN, transient",
        "the step is not applied, its batch runs again and that is used; the journal suspects the hardware",
        ("tests/train/test_loop_guard.py::test_transient_nan_is_rerun",),
        ("tests/train/test_breaking.py::test_nan_on_purpose_is_rerun_and_leaves_no_trace_in_the_state",),
        verbs=("nan",)),
    Row("disk full",
        "the save goes to the next home, or fails with a warning; training goes on, the next save is tried",
        (f"{FALL_BACK}::test_the_next_disk_takes_it[full]",),
        (f"{LIVE}[disks]", f"{DISKS}::test_full"), verbs=("disk-full",)),
    Row("disk read-only", "the same", (f"{FALL_BACK}::test_the_next_disk_takes_it[ro]",),
        (f"{LIVE}[disks]", f"{DISKS}::test_read_only"), verbs=("disk-read-only",)),
    Row("storage stalled for 20 minutes", "each save fails at its deadline, nothing of it is published later; a "
        "carrier that hangs is given up; saves go on when the disk is back",
        (f"{FALL_BACK}::test_a_disk_that_stalls_for_twenty_minutes",)),
    Row("storage stalled for 30 s", "the save is late, training goes on", (),
        (f"{LIVE}[disks]", f"{DISKS}::test_hung"), verbs=("disk-stall",)),
    Row("log of decisions on a full disk", "the attempt runs on, nothing is decided until it can be written",
        (f"{SIM}[disk of decisions full]",)),
    Row("corrupt block", "a restart finds it: once more from the same, then from the save before",
        (f"{SIM}[checkpoint damaged]", f"{READER}::test_any_flipped_byte_is_found_by_tensor_and_file"),
        (f"{LIVE}[checkpoints]",), verbs=("corrupt",)),
    Row("folder of a checkpoint deleted", "a mirror brings it back; without one as a corrupt block",
        ("tests/checkpoint/test_mirroring.py::test_a_deleted_folder_comes_back",
         f"{POLICY}::test_what_was_taken_away_is_brought_back_first"), (f"{LIVE}[checkpoints]",), verbs=("delete",)),
    Row("checkpoint unreadable", "again after a pause, eight times", (f"{SIM}[checkpoint unreadable]",)),
    Row("network cut", "the node is lost at `node_lost_s`, a spare takes its place; back, it puts away what it had",
        (f"{SIM}[network cut]", "tests/supervise/test_faults.py::test_a_cut_agent_says_nothing_and_comes_back"),
        (f"{LIVE}[links]",), ("tests/soak/test_cut_off.py::test_a_node_cut_off_for_half_a_minute_does_no_harm",),
        verbs=("cut",)),
    Row("link flap", "nothing is lost or done twice, and no node either", (f"{SIM}[link flap]",), (f"{LIVE}[links]",),
        verbs=("flap",)),
    Row("kill agent", "workers and carrier die with it; the attempt ends, a spare takes its place",
        (f"{SIM}[kill agent]",), (SOME, f"{AGENT}::test_the_death_of_an_agent_is_the_death_of_all_it_started"),
        verbs=("kill-agent",)),
    Row("machine lost", "the same; what was in its memory comes from the peer that kept it", (f"{SIM}[lose machine]",)),
    Row("kill carrier", "another one comes, the worker is not touched", (f"{SIM}[kill carrier]",), (f"{LIVE}[disks]",),
        verbs=("kill-carrier",)),
    Row("kill coordinator", "the next one replays its log; no worker is touched, nothing is done twice",
        (f"{SIM}[kill coordinator]", "tests/supervise/test_simulated.py::test_a_killed_coordinator_disturbs_no_worker"),
        (SOME,), verbs=("kill-coordinator",)),
    Row("two leaders", "agents obey the higher term; the other stops when it hears of it",
        (f"{SIM}[two leaders]", f"{DELIVERY}::test_of_two_coordinators_the_higher_term_is_obeyed"),
        (f"{AGENT}::test_another_coordinator_disturbs_no_worker",
         "tests/soak/test_alone.py::test_of_two_coordinators_one_is_obeyed[True]")),
    Row("clock jump", "no limit is of the wall clock; time nobody watched counts against nobody; clocks of two "
        "machines are never compared",
        (f"{NODES}::test_a_clock_that_jumps_ends_nothing",
         f"{DETECT}::test_the_clock_counts_what_is_watched",
         "tests/checkpoint/test_mirroring.py::test_a_clock_that_was_set_back_holds_nothing_up"),
        namespace=("tests/supervise/test_clocks.py::test_a_node_whose_clock_is_a_day_ahead",)),
    Row("GPU off the bus", "the attempt ends at once, the node is cordoned where a spare is there, and told",
        (f"{SIM}[GPU off the bus]", f"{HARDWARE}::test_a_node_whose_gpu_is_gone_is_left_at_once"),
        replayed=(f"{KERNEL}::test_recorded_lines", f"{HARDWARE}::test_an_agent_tells_what_its_kernel_says")),
    Row("ECC burst", "a save, and on without the node, which is cordoned",
        (f"{SIM}[ECC burst]", f"{HARDWARE}::test_a_node_whose_memory_grows_weak_is_left_with_a_save"),
        replayed=(f"{KERNEL}::test_a_burst_of_corrected_errors", f"{HARDWARE}::test_a_burst_of_ecc_errors_is_told")),
    Row("Xid", "by its number: nothing (a program's own), told, left, or lost",
        (f"{SIM}[Xid]", f"{HARDWARE}::test_what_is_only_told"),
        replayed=(f"{KERNEL}::test_recorded_lines", f"{HARDWARE}::test_an_agent_tells_what_its_kernel_says")),
)

MARK = "<!-- made from tests/supervise/fault_table.py; PACKTRAIN_UPDATE_GOLDEN=1 makes it anew -->"


def page() -> str:
    """docs/FAULTS.md."""
    rows = [
        f"| {row.fault} | {row.remedy} | {' | '.join('x' if cell else '' for cell in row[2:6])} | "
        f"{', '.join(f'`{verb}`' for verb in row.verbs)} |"
        for row in TABLE
    ]
    head = f"| fault | what follows | {' | '.join(COLUMNS)} | `packtrain break` |\n|---|---|{'---|' * len(COLUMNS)}---|"
    return f"{INTRODUCTION}\n{MARK}\n\n{head}\n" + "\n".join(rows) + "\n"


INTRODUCTION = """# Faults: what can befall a run, what follows, where it is tried

An x marks a cell with a test: `fake` in virtual time, `process` with real processes that are really broken, `namespace`
in a network or a clock of their own, `replayed` from recorded signals through the real parser. The tests of each cell
are named in `tests/supervise/fault_table.py`, and a test fails where one of them is gone. `packtrain break` does what
stands in the last column to a run that allows it ([cli](cli.md)). How each is decided: [supervise](supervise.md).
"""


def verbs() -> set[str]:
    """All that `packtrain break` knows and the table names."""
    return {verb for row in TABLE for verb in row.verbs if verb in KINDS}
