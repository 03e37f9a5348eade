"""What is kept for being the best: the pure plan with evaluations in its survey, and what the journal says of them."""

from __future__ import annotations

import errno
from math import inf, isfinite, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.checkpoint.best import Evaluation, Judged, best
from packtrain.checkpoint.commits import Commit
from packtrain.checkpoint.config import CheckpointConfig
from packtrain.checkpoint.judged import Judging
from packtrain.checkpoint.purge import execute
from packtrain.checkpoint.reader import survey, verify_commit
from packtrain.checkpoint.retention import Action, Survey, Tombstone, kept_folders, lineage_of, owed, plan, reasons
from packtrain.core.errors import Contradiction
from packtrain.core.fake import FakeDisk, FakePlatform, fail
from packtrain.core.journal import Journal
from packtrain.core.records import (
    ErrorSeen,
    EvalDone,
    Record,
    RecordsLost,
    SaveDone,
    StepDone,
    TrainerStarted,
    TrainingDone,
)
from tests.checkpoint.histories import logs, saved, surveys
from tests.checkpoint.worlds import RUN, WRITER, make_run, publish_small

BEGUN = Commit(number=1, kind="begin", attempt=1, step=-1, parent=0, nonce="")
TWO = CheckpointConfig(keep_last=1, keep_best=2)


def said(step: int, loss: float, attempt: int = 1, store: str = "s", tokens: int = 100, final: bool = False):
    return Evaluation(attempt, step, final, store, loss, loss / 2, tokens)


def of(saves, *evaluations: Evaluation, read=(1, 2, 3), commits=None, **more) -> Survey:
    ages = {save.folder: 0.0 for save in saves}
    plain = {"tombstones": {}, "ages_s": ages, "now_s": 0.0, "judged": Judged(evaluations, dict.fromkeys(read, inf))}
    return Survey(commits=commits or (BEGUN, *saves), **plain | more)


def kept_steps(state: Survey, config: CheckpointConfig, why: str = "best") -> list[int]:
    steps = {commit.folder: commit.step for commit in state.commits if commit.kind == "save"}
    told = reasons(state, config)
    return sorted(steps[folder] for folder in told if any(reason.why == why for reason in told[folder]))


# --- the plan, whatever comes ------------------------------------------------------------------------


@st.composite
def judged_surveys(draw):
    state = draw(surveys())
    losses = st.sampled_from([1.0, 1.5, 2.0, 2.5, nan, inf])
    found = [
        said(commit.step, draw(losses), commit.attempt, "s", draw(st.sampled_from([100, 200])), draw(st.booleans()))
        for commit in state.commits if commit.step >= 0 and draw(st.integers(0, 3))
    ]
    steps = st.sampled_from([0, 5, 20, inf])
    read_to = draw(st.dictionaries(st.sampled_from(sorted({commit.attempt for commit in state.commits})), steps))
    return msgspec.structs.replace(state, judged=Judged(tuple(found), read_to))


best_configs = st.builds(CheckpointConfig, keep_last=st.integers(1, 3), keep_best=st.integers(1, 3))


@given(judged_surveys(), best_configs)
def test_the_plan_never_marks_one_of_the_best(state, config):
    """Of the lineage only goes a save of whose every figure, NaN aside, `keep_best` better ones stay; one without a
    figure goes only where the journal of its attempt was read beyond it. And the last ones stay, as ever."""
    lineage = {commit.folder: commit for commit in lineage_of(state.commits) if commit.kind == "save"}
    going = {action.folder for action in plan(state, config) if action.action != "lift"}
    going |= {folder for folder, stone in state.tombstones.items() if folder not in state.ages_s}
    figures = {folder: figures_of(state, commit) for folder, commit in lineage.items()}
    for folder in going & lineage.keys() & state.ages_s.keys():
        assert folder not in list(lineage)[: config.keep_last]
        assert figures[folder] or lineage[folder].step < state.judged.read_to.get(lineage[folder].attempt, 0)
        for tokens, loss in figures[folder].items():
            better = [
                other for other in lineage.keys() - going
                if (figures[other].get(tokens, inf), lineage[other].number) < (loss, lineage[folder].number)
            ]
            assert not isfinite(loss) or len(better) >= config.keep_best


def figures_of(state: Survey, save: Commit) -> dict[int, float]:
    """Tokens -> loss, told by the attempt of the save or by one that began from it; the later attempt counts."""
    begun = {commit.attempt for commit in state.commits if commit.kind == "begin" and restored(state, commit) == save}
    found = [one for one in state.judged.evaluations if one.step == save.step and one.attempt in {save.attempt} | begun]
    return {one.tokens: one.loss for one in sorted(found, key=lambda one: (one.attempt != save.attempt, one.attempt))}


def restored(state: Survey, begin: Commit) -> Commit | None:
    commit = begin
    while commit.parent:
        commit = state.commits[commit.parent - 1]
        if commit.kind == "save":
            return commit
    return None


@given(judged_surveys(), best_configs)
def test_nan_is_never_the_best(state, config):
    """What is kept as one of the best has a figure that is a number; without `keep_best` nothing is."""
    for found in reasons(state, config).values():
        assert not any(reason.why == "best" and ("nan" in reason.words or "inf" in reason.words) for reason in found)
    off = msgspec.structs.replace(config, keep_best=0)
    assert {reason.why for found in reasons(state, off).values() for reason in found} <= {"last"}


@given(logs(), st.integers(1, 3), st.data())
def test_a_better_one_frees_the_worst_and_no_other(commits, keep, data):
    """One more figure takes at most one other save's place, that of the worst, and gives none to anybody else; more
    places take none away."""
    saves = [commit for commit in lineage_of(commits) if commit.kind == "save"]
    losses = [float(data.draw(st.integers(1, 5))) for _ in saves]
    told = tuple(said(save.step, loss, save.attempt) for save, loss in zip(saves, losses, strict=True))
    config = CheckpointConfig(keep_best=keep)
    for n in range(len(saves)):
        before = best(saves, commits, Judged(told[:n]), config)
        after = best(saves, commits, Judged(told[: n + 1]), config)
        freed = before.keys() - after.keys()
        assert after.keys() - before.keys() <= {saves[n].number} and len(freed) <= 1
        assert all(before[number][0].place == keep for number in freed)
        more = best(saves, commits, Judged(told[:n]), msgspec.structs.replace(config, keep_best=keep + 1))
        assert more.keys() >= before.keys() and len(before) == min(keep, n)


# --- which evaluation judges which save -----------------------------------------------------------------


def test_a_save_is_judged_by_an_evaluation_of_its_very_step():
    """Evaluations of steps that nobody saved judge nothing, saves that nobody evaluated are not among the best, and the
    reason tells place, figure and tokens."""
    saves = [saved(number, 1, step) for number, step in ((2, 10), (3, 15), (4, 20), (5, 30), (6, 40))]
    state = of(saves, said(10, 2.0), said(20, 1.0), said(21, 0.1), said(30, 1.5), said(40, 3.0))
    assert kept_steps(state, TWO) == [20, 30]
    (reason,) = reasons(state, TWO)[saves[2].folder]
    assert reason.words == "number 1 of the 2 best by held-out loss 1.0000 (100 tokens)"
    bits = msgspec.structs.replace(TWO, keep_best_by="bits_per_byte")
    words = reasons(state, bits)[saves[2].folder][0].words
    assert words == "number 1 of the 2 best by held-out bits/byte 0.5000 (100 tokens)"
    assert [action.folder for action in plan(state, TWO)] == [saves[0].folder, saves[1].folder]


@pytest.mark.parametrize(
    ("keep", "judged", "words"), [(1, 3, "the best"), (3, 1, "the best"), (3, 2, "number 1 of the 2 best")]
)
def test_as_many_are_told_as_are_kept(keep, judged, words):
    """Not how many may be: of three that are to be kept the two that were judged are two."""
    saves = [saved(number, 1, 10 * number) for number in range(2, 6)]
    state = of(saves, *(said(save.step, 1.0 + n) for n, save in enumerate(saves[:judged])))
    (reason,) = reasons(state, CheckpointConfig(keep_last=1, keep_best=keep))[saves[0].folder]
    assert reason.words == f"{words} by held-out loss 1.0000 (100 tokens)"


def test_a_step_trained_again_is_judged_anew():
    """After a rollback each save has the figure of its own attempt: what was rolled back does not compete, and when the
    line of history leads to it again, it does, with its own."""
    old, again = saved(3, 1, 20), msgspec.structs.replace(saved(5, 2, 20), parent=4)
    first, back = saved(2, 1, 10), Commit(number=4, kind="begin", attempt=2, step=10, parent=2, nonce="")
    head = msgspec.structs.replace(saved(6, 2, 30), parent=5)
    told = (said(10, 3.0), said(20, 1.0), said(20, 2.0, attempt=2), said(30, 4.0, attempt=2))
    one, commits = CheckpointConfig(keep_last=1, keep_best=1), (BEGUN, first, old, back, again, head)
    state = of([first, old, again, head], *told, commits=commits)
    assert "2.0000" in reasons(state, one)[again.folder][0].words and old.folder not in kept_folders(state, one)
    to_old = Commit(number=7, kind="begin", attempt=3, step=20, parent=3, nonce="")
    state = msgspec.structs.replace(state, commits=(*commits, to_old))
    assert "1.0000" in reasons(state, one)[old.folder][1].words and again.folder not in kept_folders(state, one)


def test_an_evaluation_that_was_cut_off_is_ended_by_the_next_attempt():
    """An attempt that begins from a save and evaluates that very step judges that save; at another step it does not."""
    save = saved(2, 1, 10)
    began = Commit(number=3, kind="begin", attempt=2, step=10, parent=2, nonce="")
    config = CheckpointConfig(keep_best=1)
    for step, expected in ((10, [10]), (11, [])):
        state = of([save], said(step, 1.0, attempt=2, final=True), commits=(BEGUN, save, began))
        assert kept_steps(state, config) == expected


def test_of_equals_the_older_is_better():
    """So that nothing that is as good pushes out what is kept already."""
    saves = [saved(number, 1, number * 10) for number in range(2, 7)]
    state = of(saves, *(said(save.step, 1.0) for save in saves))
    assert kept_steps(state, TWO) == [20, 30]


def test_only_what_is_over_the_same_text_compares():
    """The last evaluation is over all rows: its figure competes with those of its kind, not with those in the loop."""
    saves = [saved(number, 1, number * 10) for number in range(2, 6)]
    told = [said(20, 2.0), said(30, 1.9), said(40, 1.8), said(50, 5.0, tokens=900, final=True), said(50, 1.9)]
    assert kept_steps(of(saves, *told), CheckpointConfig(keep_last=1, keep_best=1)) == [40, 50]


@pytest.mark.parametrize(("options", "expected"), [({}, [30]), ({"keep_best_on": "a"}, [20]),
                                                   ({"keep_best_on": "b", "keep_best_by": "bits_per_byte"}, [30])])
def test_several_stores_are_one_text_or_one_of_them_counts(options, expected):
    """Together they weigh by their tokens, bits by their bytes; one that is named decides alone."""
    saves = [saved(2, 1, 20), saved(3, 1, 30)]
    told = [
        said(20, 1.0, store="a", tokens=10), said(20, 3.0, store="b", tokens=90),
        said(30, 2.5, store="a", tokens=10), said(30, 2.7, store="b", tokens=90),
    ]
    config = CheckpointConfig(keep_last=1, keep_best=1, **options)
    assert kept_steps(of(saves, *told), config) == expected
    if not options:
        ranks = best(saves, (BEGUN, *saves), Judged(tuple(told)), config)
        assert ranks[3][0].figure.value == pytest.approx(2.68) and ranks[3][0].figure.tokens == 100


def test_a_text_without_a_token_or_a_byte_judges_nothing():
    """Their figures are 0, which would be the best for good."""
    saves = [saved(2, 1, 20), saved(3, 1, 30)]
    empty = of(saves, said(20, 0.0, tokens=0), said(30, 1.0))
    assert kept_steps(empty, CheckpointConfig(keep_last=1, keep_best=1)) == [30]
    no_bytes = of(saves, Evaluation(1, 20, False, "s", 1.0, 0.0, 100), said(30, 9.0))
    assert kept_steps(no_bytes, CheckpointConfig(keep_last=1, keep_best=1, keep_best_by="bits_per_byte")) == [30]


def test_who_was_marked_or_purged_does_not_compete():
    """A person's mark gives the place to the next best, and so does a purge; a mark of retention's own is lifted."""
    saves = [saved(number, 1, number * 10) for number in range(2, 6)]
    told = [said(20, 1.0), said(30, 2.0), said(40, 3.0), said(50, 4.0)]
    config = CheckpointConfig(keep_last=1, keep_best=1)
    folder = saves[0].folder
    asked = of(saves, *told, tombstones={folder: Tombstone(folder, 0.0, "", asked=True)})
    assert kept_steps(asked, config) == [30]
    planned = of(saves, *told, tombstones={folder: Tombstone(folder, 0.0, "")})
    assert ("lift", folder) in [(action.action, action.folder) for action in plan(planned, config)]
    there = {save.folder: 0.0 for save in saves[1:]}
    assert kept_steps(msgspec.structs.replace(planned, ages_s=there), config) == [30]

def test_what_nothing_can_bring_back_does_not_compete():
    """A best one that was taken from outside is owed while a mirror has it; where none has, the next best on disk is
    kept, and it competes again when its disk is back."""
    saves = [saved(number, 1, number * 10) for number in range(2, 6)]
    told = [said(20, 1.0), said(30, 2.0), said(40, 3.0), said(50, 4.0)]
    config = CheckpointConfig(keep_last=1, keep_best=1)
    lost = of(saves, *told, ages_s={save.folder: 0.0 for save in saves[1:]})
    assert kept_steps(lost, config) == [30] and [commit.step for commit in owed(lost, config)] == [50, 30]
    mirrored = msgspec.structs.replace(lost, mirrored={2: ("b2",)})
    assert [commit.step for commit in owed(mirrored, config)] == [50, 20]
    assert kept_steps(of(saves, *told), config) == [20]


def test_a_purge_cut_short_is_no_save_to_keep():
    """The carrier is killed when the manifest of the third best went; then a person marks the best. What is left of
    the third is not kept in its place: the purge goes on, and the next whole one is kept. Where only the claim was made
    nothing is lost yet, so that mark is lifted."""
    config = CheckpointConfig(keep_last=1, keep_best=2, grace_s=100.0)
    for stays in ("lift", "purge"):
        platform = FakePlatform(FakeDisk(), "a")
        log = make_run(platform)
        log.begin(0, (WRITER,), "node")
        saves = [publish_small(platform, log, 1, step) for step in range(1, 6)]
        losses = dict(zip(saves, (1.0, 1.1, 1.2, 1.3, 9.0), strict=True))
        judged = Judged(tuple(said(save.step, loss) for save, loss in losses.items()), {1: inf})
        stone, claim = (f"{RUN}/tombstones/{saves[2].folder}{end}" for end in (".json", ".purging"))
        platform.mkdir(f"{RUN}/tombstones")
        platform.write_new(stone, msgspec.json.encode(Tombstone(saves[2].folder, platform.wall_s(), "")))
        platform.write_new(claim, b"")
        if stays == "purge":
            platform.unlink(f"{RUN}/checkpoints/{saves[2].folder}/manifest.json")
        mark = Action("tombstone", saves[0].folder, "a person asked for it", asked=True)
        assert [one.error for one in execute(platform, RUN, 1, [mark], config.grace_s)] == [None]
        platform.sleep(101.0)
        for _ in range(2):
            actions = plan(survey(platform, RUN, lambda judged=judged: judged), config)
            assert [one.error for one in execute(platform, RUN, 1, actions, config.grace_s)] == [None] * len(actions)
            assert {one.folder: one.action for one in actions}.get(saves[2].folder, stays) == stays
        left = [commit for commit in saves if commit.folder in platform.listdir(f"{RUN}/checkpoints")]
        kept = [saves[1], saves[2], saves[4]] if stays == "lift" else [saves[1], saves[3], saves[4]]
        marked = set(survey(platform, RUN).tombstones)
        assert [commit for commit in left if commit.folder not in marked] == kept
        assert all(verify_commit(platform, RUN, commit) == [] for commit in kept)


def test_what_may_be_the_best_for_all_that_is_known_stays():
    """Where the journal of its attempt may lack one a save without a figure stays, and says why; one whose figure is
    known goes when better ones are known; what is not there is not owed for that."""
    saves = [saved(number, 1, number * 10) for number in range(2, 7)]
    state = of(saves, said(20, 2.0), said(30, 1.0), said(40, 1.5), read=())
    assert [action.folder for action in plan(state, TWO)] == [saves[0].folder]
    assert kept_steps(state, TWO, "unknown") == [50, 60]
    told = reasons(state, TWO)[saves[3].folder]
    assert [one.words for one in told] == ["perhaps one of the best: the journal of attempt 1 may lack its evaluation"]
    there = {save.folder: 0.0 for save in saves if save.step != 50}
    assert [commit.step for commit in owed(msgspec.structs.replace(state, ages_s=there), TWO)] == [60, 40, 30]


def test_thousands_of_evaluations_are_one_sort():
    """A plan over 5,000 saves and as many evaluations looks at each of them a bounded number of times."""
    saves = [saved(number, 1, number) for number in range(2, 5002)]
    reads = [0]

    class Counted(float):
        def __lt__(self, other: object) -> bool:
            reads[0] += 1
            return float(self) < float(other)  # type: ignore[arg-type]

    told = [said(save.step, Counted(save.step * 7919 % 5003)) for save in saves]
    assert len(kept_steps(of(saves, *told), CheckpointConfig(keep_last=1, keep_best=3))) == 3
    assert reads[0] < 40 * len(saves)


@pytest.mark.parametrize("bad", [{"keep_best": -1}, {"keep_best_on": "a"}, {"keep_best_by": "bits_per_byte"}])
def test_a_configuration_that_keeps_nothing_is_refused(bad):
    """A negative number of them, and a store or a figure that nothing is told by."""
    with pytest.raises(Contradiction, match="checkpoint"):
        CheckpointConfig(**bad)


# --- what the journal says ------------------------------------------------------------------------------


def started(attempt: int, rank: int = 0) -> TrainerStarted:
    return TrainerStarted(
        attempt=attempt, rank=rank, parameters=1, mesh={}, attention="none", precision="f32", peak_flops_per_s=1.0,
        digest_repeats=True,
    )


def done(step: int, loss: float) -> EvalDone:
    return EvalDone(step=step, store="s", loss=loss, bits_per_byte=loss / 2, tokens=100)


def written(platform: FakePlatform, attempt: int, *losses: float, rank: int = 0) -> str:
    """A journal of a trainer, evaluated at 10, 20 and so on. Its file."""
    journal = Journal(platform, f"{RUN}/journal", "trainer", rank)
    evaluated = [done(10 * n, loss) for n, loss in enumerate(losses, 1)]
    for record in (started(attempt, rank), *evaluated, TrainingDone(step=10 * len(losses), updates_skipped=0)):
        journal.write(record, durable=True)
    return f"{RUN}/journal/{journal.writer}.0001.jsonl"


def stepped(step: int) -> StepDone:
    return StepDone(
        step=step, loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1, seconds=1.0, mfu=0.1
    )


def found(judged: Judged) -> list[tuple[int, int, float]]:
    return [(one.attempt, one.step, one.loss) for one in judged.evaluations]


def test_evaluations_are_followed():
    """Of rank 0 alone, each with the attempt that its writer named; the second look reads what came since."""
    platform = FakePlatform(FakeDisk(), "a")
    judging = Judging(platform, RUN, TWO)
    assert judging.look() == Judged(), "no journal yet"
    written(platform, 1, 3.0, 2.0)
    written(platform, 1, 9.0, rank=1)
    assert found(judging.look()) == [(1, 10, 3.0), (1, 20, 2.0)]
    written(platform, 2, nan)
    judged = judging.look()
    assert found(judged)[:2] == [(1, 10, 3.0), (1, 20, 2.0)] and found(judged)[2][:2] == (2, 10)
    assert judged.read_to == {1: inf, 2: inf} and judged.evaluations[2].loss != judged.evaluations[2].loss
    assert Judging(platform, RUN, CheckpointConfig()).look() == Judged(), "nobody asks, so nothing is read"


def test_a_journal_with_a_hole_is_not_whole():
    """A damaged line, a file that is gone, records told to be lost, an evaluation that cannot be read: no silence of
    that attempt is believed, though what is read of it counts, and that of another attempt is."""

    def damaged(platform: FakePlatform, file: str) -> None:
        data = platform.disk.find_file(file).data
        data[data.rfind(b"loss")] ^= 1

    def gone(platform: FakePlatform, file: str) -> None:
        platform.unlink(file)

    for harm, left in ((damaged, [(1, 10, 3.0)]), (gone, [])):
        platform = FakePlatform(FakeDisk(), "a")
        file = written(platform, 1, 3.0, 2.0)
        written(platform, 2, 1.0)
        harm(platform, file)
        judged = Judging(platform, RUN, TWO).look()
        assert judged.read_to.get(1, 0) == 0 and judged.read_to[2] == inf
        assert found(judged) == [*left, (2, 10, 1.0)]
    for last in (RecordsLost(count=2, error="full"), Newer(step="20")):
        platform = FakePlatform(FakeDisk(), "a")
        journal = Journal(platform, f"{RUN}/journal", "trainer")
        for record in (started(1), done(10, 3.0), last, stepped(30)):
            journal.write(record, durable=True)
        judged = Judging(platform, RUN, TWO).look()
        assert judged.read_to == {1: 0} and found(judged) == [(1, 10, 3.0)]


def test_a_writer_that_died_with_its_evaluation_held_keeps_the_save():
    """The disk refuses the evaluation of 20, takes the save of 20, and the writer is killed: nothing is missing in its
    journal, and yet that save may be the best. One before it, which the journal was written beyond, may go."""
    platform = FakePlatform(FakeDisk(), "a")
    journal = Journal(platform, f"{RUN}/journal", "trainer")
    for record in (started(1), done(10, 3.0), stepped(12), stepped(20)):
        assert journal.write(record, durable=True)
    platform.faults = lambda op, path, n: fail(errno.ENOSPC) if op == "write" and "/journal/" in path else None
    assert not journal.write(done(20, 1.0), durable=True)
    platform.faults = lambda op, path, n: None
    saves = [saved(number, 1, step) for number, step in ((2, 10), (3, 11), (4, 20), (5, 21))]
    state = of(saves, judged=Judging(platform, RUN, TWO).look())
    assert kept_steps(state, TWO) == [10] and kept_steps(state, TWO, "unknown") == [20, 21]
    assert [action.folder for action in plan(state, TWO)] == [saves[1].folder]


@pytest.mark.parametrize(("last", "to"), [
    (stepped(30), 30), (SaveDone(step=30, commit=4, bytes=1, stall_s=0.0, write_s=0.0), 30),
    (TrainingDone(step=30, updates_skipped=0), inf), (ErrorSeen(severity="error", name="stopped", what=""), inf),
    (ErrorSeen(severity="warning", name="store.damaged", what=""), 20),
])
def test_a_journal_is_believed_as_far_as_it_goes(last, to):
    """Up to the last step that was told of; to its end where the writer told how it ended, and a warning is no end. A
    later segment that was deleted takes that away again."""
    platform = FakePlatform(FakeDisk(), "a")
    journal = Journal(platform, f"{RUN}/journal", "trainer", segment_bytes=1)
    for record in (started(1), stepped(20), done(20, 1.0), last):
        journal.write(record, durable=True)
    assert Judging(platform, RUN, TWO).look().read_to == {1: to}
    for name in sorted(platform.listdir(f"{RUN}/journal"))[3:]:  # an empty one, the start, step 20
        platform.unlink(f"{RUN}/journal/{name}")
    assert Judging(platform, RUN, TWO).look() == Judged((), {1: 20})


class Newer(Record, tag="eval"):
    """An evaluation as no version so far writes it."""

    step: str


def test_a_disk_that_refused_is_asked_again():
    """While the file cannot be read nothing is known of its attempt; once it can, the same reader says what a new one
    says."""
    platform = FakePlatform(FakeDisk(), "a")
    file = written(platform, 1, 3.0)
    judging = Judging(platform, RUN, TWO)
    platform.faults = lambda op, path, n: fail(errno.EIO) if op == "read" and path == file else None
    assert judging.look() == Judged()
    platform.faults = lambda op, path, n: None
    judged = judging.look()
    assert judged.read_to == {1: inf} and found(judged) == [(1, 10, 3.0)] == found(Judging(platform, RUN, TWO).look())
    platform.faults = lambda op, path, n: fail(errno.EIO) if op == "listdir" and path == f"{RUN}/journal" else None
    with pytest.raises(OSError):
        judging.look()


def test_what_is_known_is_not_read_again():
    """Of other writers nothing is read. A hole has its own writer read anew, with growing pauses, and no other; what
    was known of that one stays known."""
    platform = FakePlatform(FakeDisk(), "a")
    holed, whole = written(platform, 1, 3.0, 2.0), written(platform, 2, 1.0)
    written(platform, 1, 9.0, rank=1)
    Journal(platform, f"{RUN}/journal", "agent").write(stepped(1))
    data = platform.disk.find_file(holed).data
    cut = data.rfind(b'{ "seq":3')
    del data[cut : data.index(b"\n", cut) + 1]
    read: list[str] = []
    platform.faults = lambda op, path, n: read.append(path) if op == "read" and "/journal/" in path else None
    judging = Judging(platform, RUN, TWO)
    told = {found(judging.look()) == [(1, 10, 3.0), (2, 10, 1.0)]}
    for _ in range(600):
        platform.sleep(1.0)
        judged = judging.look()
        told.add(sorted(found(judged)) == [(1, 10, 3.0), (2, 10, 1.0)] and judged.read_to == {1: 0, 2: inf})
    assert told == {True}
    assert set(read) == {holed, whole} and read.count(whole) == 1
    assert read.count(holed) == 1 + 5, "at first, and after 1, 31, 91, 211, 451 s"


def test_the_journal_is_read_after_the_log():
    """An evaluation is on disk before its save is published: who reads the log first knows it for each save there."""
    platform = FakePlatform(FakeDisk(), "a")
    log = make_run(platform)
    log.begin(0, (WRITER,), "node")
    publish_small(platform, log, 1, 10)
    written(platform, 1, 1.0)
    read = []
    platform.faults = lambda op, path, n: read.append(path) if op in ("read", "listdir") else None
    state = survey(platform, RUN, Judging(platform, RUN, TWO).look)
    assert kept_steps(state, TWO) == [10]
    last = max(n for n, path in enumerate(read) if path.startswith(f"{RUN}/commits"))
    assert last < min(n for n, path in enumerate(read) if path.startswith(f"{RUN}/journal"))
