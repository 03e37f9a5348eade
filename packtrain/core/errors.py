"""The one tree of errors a misbehaving world can raise, and the exit codes they end a program with.

A broken invariant is an `assert`; everything the outside can cause is a `PacktrainError`. Each leaf has one
stable `name` that is printed and journalled, so nobody has to search logs for wording.
Every error answers three questions: what happened, where, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_DONE = 0
EXIT_USAGE = 2
EXIT_OURS = 70
EXIT_AGAIN = 75
EXIT_CONFIG = 78
INTERRUPTED = "interrupted; the same command goes on from what is done"
"""Said at Ctrl-C where there is no run to ask to stop."""


class PacktrainError(Exception):
    """Base of the tree: `what` happened, `where` (node, rank, path, key), `fix`: what to do next."""

    name: ClassVar[str] = "error"
    exit_code: ClassVar[int] = EXIT_OURS

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return self.render()

    def render(self) -> str:
        """The message a person reads: name and what, then where, then next, one line each."""
        lines = [f"[{self.name}] {self.what}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  next:  {self.fix}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        """The same four fields as plain strings, for a journal record or a wire message."""
        return {"name": self.name, "what": self.what, "where": self.where, "fix": self.fix}


def error_named(name: str, what: str, where: str = "", fix: str = "") -> PacktrainError:
    """The error a record or a message tells of: the leaf of that name, or the base where this version has none."""
    kinds: list[type[PacktrainError]] = [PacktrainError]
    for kind in kinds:
        if kind.name == name:
            return kind(what, where=where, fix=fix)
        kinds += kind.__subclasses__()
    return PacktrainError(what, where=where, fix=fix)


# --- families: choose the exit code ----------------------------------------------------------------


class UsageError(PacktrainError):
    name, exit_code = "usage", EXIT_USAGE


class ConfigError(PacktrainError):
    """A configuration or an input that cannot work however often it is retried."""

    name, exit_code = "config", EXIT_CONFIG


class AgainError(PacktrainError):
    """The world got in the way; the same command may work later."""

    name, exit_code = "again", EXIT_AGAIN


class OurError(PacktrainError):
    name, exit_code = "ours", EXIT_OURS


# --- configuration ---------------------------------------------------------------------------------


class UnknownKey(ConfigError):
    name = "config.unknown_key"


class BadValue(ConfigError):
    name = "config.bad_value"


class Contradiction(ConfigError):
    name = "config.contradiction"


class SpecDiffers(ConfigError):
    name = "config.spec_differs"


class MissingExtra(ConfigError):
    name = "config.missing_extra"


class LayoutError(ConfigError):
    name = "layout.indivisible"


# --- data ------------------------------------------------------------------------------------------


class CorpusMissing(ConfigError):
    name = "data.corpus_missing"


class CorpusEmpty(ConfigError):
    name = "data.corpus_empty"


class CorruptInput(ConfigError):
    name = "data.corrupt_input"


class TokenizerMismatch(ConfigError):
    name = "data.tokenizer_mismatch"


class StoreDamaged(ConfigError):
    name = "data.store_damaged"


class BuildTaken(ConfigError):
    """The folder asked for holds something else, or another build is writing it."""

    name = "data.build_taken"


class BuildFailed(AgainError):
    """The machine got in the way of a build; the same command goes on from what is finished."""

    name = "data.build_failed"


# --- checkpoints and commits -----------------------------------------------------------------------


class WrongModel(ConfigError):
    name = "checkpoint.other_model"


class HfUnusable(ConfigError):
    """A folder of Hugging Face's that is not whole, or a model one side knows and the other does not."""

    name = "checkpoint.hf_unusable"


class TorchUnusable(ConfigError):
    """A PyTorch state dict that cannot be kept, or is not the one that was saved."""

    name = "checkpoint.torch_unusable"


class ExportFailed(AgainError):
    """The machine refuses to write what is exported; nothing of it stays."""

    name = "checkpoint.export_failed"


class NeitherRestoreNorFresh(ConfigError):
    name = "checkpoint.neither_restore_nor_fresh"


class CheckpointDamaged(AgainError):
    name = "checkpoint.damaged"


class SlotDamaged(AgainError):
    """What an attempt began from in memory is gone or has changed; saves on disk are not concerned."""

    name = "checkpoint.slot_damaged"


class CheckpointUnreadable(AgainError):
    """The disk refuses to be read just now; that says nothing about the checkpoint on it."""

    name = "checkpoint.unreadable"


class FormatUnknown(ConfigError):
    """Written by a later version of this format."""

    name = "checkpoint.format_unknown"


class SaveFailed(AgainError):
    name = "checkpoint.save_failed"


class SaveFellBack(AgainError):
    """The run's own disk would not take a save, which is published all the same, on another."""

    name = "checkpoint.fell_back"


class PurgeRefused(AgainError):
    """A deletion that is no longer right, or never was; the folder stays."""

    name = "checkpoint.purge_refused"


class CheckpointGone(ConfigError):
    """A checkpoint that was named is deleted, or is being deleted."""

    name = "checkpoint.gone"


class CheckpointKept(ConfigError):
    """A checkpoint that a person wants to let go of, and that must stay."""

    name = "checkpoint.kept"


class CheckpointLost(AgainError):
    """A published checkpoint was deleted, or files of it, by something else than retention."""

    name = "checkpoint.lost"


class MirrorFailed(AgainError):
    """A checkpoint could not be brought to a mirror; a warning, and it is tried again."""

    name = "checkpoint.mirror_failed"


class NotLocked(ConfigError):
    """A mirror is to lock what is brought there, and does not; a warning."""

    name = "checkpoint.not_locked"


class DamageFound(ConfigError):
    """What `packtrain ckpt verify` was asked to look at is not whole."""

    name = "checkpoint.damage_found"


class NotMended(ConfigError):
    """What `packtrain ckpt repair` found damaged is whole in no place that it knows."""

    name = "checkpoint.not_mended"


class PromoteRefused(ConfigError):
    """A place of copies that cannot be made the run: what is there, or what still goes on elsewhere, forbids it."""

    name = "checkpoint.promote_refused"


class CarrierLost(AgainError):
    """The process that carries checkpoints away ended, does not answer or cannot be reached."""

    name = "checkpoint.carrier_lost"


class PeerLost(AgainError):
    """The carrier of another node cannot be reached, does not answer, or answers nonsense."""

    name = "checkpoint.peer_lost"


class PeerCopyFailed(AgainError):
    """A copy in memory could not be brought to another node, or back from there; saves on disk are not concerned."""

    name = "checkpoint.peer_copy_failed"


class CarrierHung(AgainError):
    """The process that carries checkpoints away answered nothing, or hung in a dead file system; it was given up."""

    name = "checkpoint.carrier_hung"


class CommitUnknown(AgainError):
    """The state of the commit log cannot be known now; no attempt may begin on it."""

    name = "commits.unknown"


class CommitStale(AgainError):
    """A newer attempt began (or this step is already published): this writer must stop."""

    name = "commits.stale"


class CommitsUnfit(ConfigError):
    """The directory cannot hold the log: exclusive link was refused there."""

    name = "commits.unfit"


# --- stores and transfers --------------------------------------------------------------------------


class NameAbsent(ConfigError):
    """The store answered, and says itself that it has no such name: nothing else may be taken for that."""

    name = "store.absent"


class NameTaken(ConfigError):
    """What was to be created is there already."""

    name = "store.taken"


class StoreRefused(ConfigError):
    """The store answers and will not do it: credentials, rights, a bucket that is not there, a name it cannot hold."""

    name = "store.refused"


class StoreUnreachable(AgainError):
    """No usable answer by our deadline. What was asked may have been done all the same."""

    name = "store.unreachable"


class UploadLost(AgainError):
    """The store knows nothing any more of a large object that was on its way into it."""

    name = "store.upload_lost"


class StoreHeld(AgainError):
    """Somebody else is writing the same name just now."""

    name = "store.held"


class TransferDamaged(ConfigError):
    """Bytes at one end are not those that were promised, however often they are read or sent."""

    name = "transfer.damaged"


class TransferLate(AgainError):
    name = "transfer.late"


class TransferStopped(AgainError):
    name = "transfer.stopped"


# --- runs ------------------------------------------------------------------------------------------


class RunHeld(ConfigError):
    name = "run.held"


class RunMoved(ConfigError):
    """The commit log of this run was closed: it goes on in another place."""

    name = "run.moved"


class RunMissing(ConfigError):
    name = "run.missing"


class RunUnusable(AgainError):
    """The run folder, or the folder for sockets, cannot be read or written now."""

    name = "run.unusable"


class TooFewFiles(ConfigError):
    """This process may not have as many files open as the nodes of the run need connections."""

    name = "run.too_few_files"


class NoProgress(OurError):
    name = "run.no_progress"


class StoppedOnRequest(AgainError):
    name = "run.stopped_on_request"


class StormIncomplete(AgainError):
    """The demo's run was over before it was broken in every way."""

    name = "storm.incomplete"


class WorkerCrashed(AgainError):
    name = "run.worker_crashed"


class WorkerSilent(AgainError):
    name = "run.worker_silent"


class ProcessHangs(AgainError):
    """A process that was killed does not end: it waits inside the kernel, mostly for a dead file system."""

    name = "run.process_hangs"


class WorkerRefused(ConfigError):
    name = "run.worker_refused"


class NodeGone(AgainError):
    """A node of an attempt is not heard from, lost its agent, or could not start its workers."""

    name = "run.node_gone"


class NodesMissing(AgainError):
    """Too few nodes came for any world that the job can run on."""

    name = "run.nodes_missing"


class RanksDiffer(ConfigError):
    """Ranks that were about to begin together are not of one mind about where, or about the code."""

    name = "run.ranks_differ"


class SharedCause(AgainError):
    """The same went wrong on many nodes at once: a warning, no node is blamed."""

    name = "run.shared_cause"


class DecisionsDamaged(OurError):
    """The log of a coordinator is damaged in its middle: what it decided cannot be known."""

    name = "run.decisions_damaged"


class TermLost(AgainError):
    """Another coordinator leads this run now."""

    name = "run.term_lost"


class LogMoved(AgainError):
    """A warning: the coordinator's log could not be written where it was, and goes on in its second place."""

    name = "run.log_moved"


class CoordinatorGone(AgainError):
    """Whoever decides for a run does not answer; agents and workers go on without it."""

    name = "run.coordinator_gone"


class FaultsForbidden(ConfigError):
    """Asked to break something of a run that does not allow it."""

    name = "run.faults_forbidden"


class NotLive(ConfigError):
    """Asked of a run that nobody runs on this machine now."""

    name = "run.not_live"


# --- worlds ----------------------------------------------------------------------------------------


class NoGo(AgainError):
    """A rank was ready, and the rest of the world was not in time."""

    name = "world.no_go"


class WorldNotFormed(AgainError):
    """The processes of a world did not find each other."""

    name = "world.not_formed"


class WorldBroken(AgainError):
    """A collective failed: another rank ended, or the network did. Whoever ended first says why."""

    name = "world.broken"


# --- train -----------------------------------------------------------------------------------------


class AttentionWrong(ConfigError):
    """The kernel chosen computes something else than the reference; every step would be subtly wrong."""

    name = "attention.wrong"


# --- guard -----------------------------------------------------------------------------------------


class GuardStopped(ConfigError):
    """A batch was bad twice and the policy is to stop; the same batch comes again, so nobody restarts by itself."""

    name = "guard.stopped"


class GuardRollback(AgainError):
    """A batch was bad twice and the policy is to go back to a published step."""

    name = "guard.rollback"


class StormUnequal(OurError):
    """A run that was broken on purpose did not end with the bits of one that nobody touched."""

    name = "storm.bits_differ"
