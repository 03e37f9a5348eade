"""The log that decides what exists: one small file per number in `commits/`, created once, never changed.

Numbers are dense and start at 1, so the log is read by number and never by listing. A record is published by link(2)
to the next number, which either succeeds for exactly one writer or fails with EEXIST. From this follow three rules:
- at most one record has each number, and whoever reads a number ever again reads the same record;
- the last record belongs to the last begun attempt: a writer looks at it right before it links the next number, and
  when the number was taken meanwhile it looks again, so after `begin` no earlier attempt can publish;
- a number is linked only after all before it are durable, so a crash of the machine leaves no hole.
Anything but a whole record or "no such name" is CommitUnknown, and nobody acts on it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

import google_crc32c
import msgspec

from packtrain.core.errors import CommitStale, CommitsUnfit, CommitUnknown, RunMoved, TermLost
from packtrain.core.platform import Platform

DIGITS = 12
RECORD_BYTES_MAX = 4 << 20
RACES_MAX = 64
"""Numbers lost to other writers before this one gives up: each of them published in between."""
_CRC = b',"crc":"'
_REFUSED = (errno.EPERM, errno.ENOTSUP, errno.EXDEV, errno.ENOSYS, errno.EMLINK)


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One record. `begin`: an attempt starts from what `parent` leads to. `save`: a checkpoint was published. `moved`:
    with a place, the last one ever, because the log goes on there; without one, what goes on here was a copy before.
    `term`: a coordinator leads from here on; it says nothing of checkpoints, and what reads those passes over it."""

    v: int = 1
    number: int
    kind: Literal["begin", "save", "moved", "term"]
    attempt: int
    step: int
    """save: batches consumed. begin: step it restores, -1 when it starts from nothing."""
    parent: int
    """The record this one follows: for a save, the attempt's save before it or its begin; never a `term`. 0: none."""
    nonce: str
    digest: str = ""
    """save: SHA-256 of manifest.json."""
    folder: str = ""
    """save: name under checkpoints/."""
    writers: tuple[str, ...] = ()
    """begin: whose parts make a whole save."""
    node: str = ""
    """begin: where saves are published, the node of rank 0. term: where the coordinator runs."""
    memory: tuple[int, int, str] | None = None
    """begin: (attempt, step, digest) held in memory, which restore prefers to `parent`."""
    place: str = ""
    """moved: the run folder in which the log goes on; "" in that folder itself. save: under which `checkpoints` lies
    that holds it, where that is not the run folder's. term: folder in which its coordinator writes down decisions."""
    term: int = 0
    """The highest so far: every record carries it on. 0: nobody has led by a term yet."""


class CommitLog:
    """The log in one directory. Every error is CommitStale, TermLost or CommitUnknown. Safe to use from several
    processes."""

    def __init__(self, platform: Platform, folder: str) -> None:
        self._platform = platform
        self._folder = folder
        self._known = 0
        self._nonces: set[str] = set()
        self.links_tried = 0
        """So often a record may have come to be, whatever was answered; never before its number is linked."""

    # --- reading ---

    def path(self, number: int) -> str:
        return f"{self._folder}/{number:0{DIGITS}d}"

    def read(self, number: int) -> Commit | None:
        """The record, or None when there is no such name. Raises CommitUnknown for all else."""
        path = self.path(number)
        try:
            data = self._platform.read(path, 0, RECORD_BYTES_MAX)
        except FileNotFoundError:
            self._require_folder()
            return None
        except OSError as error:
            raise self._unknown(f"record {number} cannot be read: {error}", path) from error
        record = parse_record(data)
        if record is None or record.number != number:
            raise self._damaged(f"record {number} is damaged", path)
        return record

    def head(self) -> int:
        """The last number; 0 for an empty log. Doubling steps from the last number known, then bisection."""
        low, step = self._known, 1
        while self.read(low + step) is not None:
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if self.read(middle) is None:
                high = middle
            else:
                low = middle
        self._known = low
        return low

    def last(self) -> Commit | None:
        """The last record that is no `term`; None where there is none."""
        return next(self.follow(self.head()), None)

    def term(self) -> int:
        """The highest term taken; 0: none."""
        number = self.head()
        return self._must_read(number).term if number else 0

    def last_term(self) -> Commit | None:
        """The record by which the highest term was taken; None: nobody has led by one. It is the first that carries its
        term, so bisection finds it."""
        head = self.head()
        highest = self._must_read(head).term if head else 0
        low, high = 0, head  # the term of `low` is lower, that of `high` is not
        while highest and high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._must_read(middle).term == highest else (middle, high)
        return self._must_read(high) if highest else None

    def begun(self) -> Commit | None:
        """The record that began the last attempt; None for an empty log."""
        return next((commit for commit in self.follow(self.head()) if commit.kind == "begin"), None)

    def all(self) -> list[Commit]:
        return [self._must_read(number) for number in range(1, self.head() + 1)]

    def follow(self, number: int) -> Iterator[Commit]:
        """The record and its ancestors, latest first; a `term` is passed over."""
        while number:
            commit = self._must_read(number)
            if not 0 <= commit.parent < number:
                raise self._damaged(f"record {number} claims to follow {commit.parent}", self.path(number))
            if commit.kind != "term":
                yield commit
            number = commit.parent

    def lineage(self, number: int) -> list[Commit]:
        return list(self.follow(number))

    def restore_point(self) -> Commit | None:
        """The save that the last record leads to; None when it leads to none."""
        return self._save_before(self.head())

    def _save_before(self, number: int) -> Commit | None:
        return next((commit for commit in self.follow(number) if commit.kind == "save"), None)

    def _must_read(self, number: int) -> Commit:
        commit = self.read(number)
        if commit is None:
            raise self._damaged(f"record {number} is gone", self.path(number))
        return commit

    def _require_folder(self) -> None:
        """A file is absent only where its folder is present: an unmounted disk must not look like an empty log."""
        try:
            present = self._platform.exists(self._folder)
        except OSError as error:
            raise self._unknown(f"the commit log cannot be reached: {error}", self._folder) from error
        if not present:
            raise self._unknown("the folder of the commit log does not exist", self._folder)

    # --- writing ---

    def probe(self) -> None:
        """Create the folder and try to publish in it. Raises CommitsUnfit where link(2) is no exclusive create."""
        try:
            self._platform.mkdir(self._folder)
            self._platform.fsync_dir(_parent(self._folder))
            exclusive = self._try_link()
        except OSError as error:
            if error.errno in _REFUSED:
                raise self._unfit(f"this directory cannot hold the commit log: {error}") from error
            raise self._unknown(f"the commit log cannot be written: {error}", self._folder) from error
        if not exclusive:
            raise self._unfit("this directory cannot hold the commit log: a second link to one name was not refused")

    def begin(
        self, parent: int | None, writers: Sequence[str], node: str, attempt: int | None = None,
        memory: tuple[int, int, str] | None = None, term: int | None = None,
    ) -> Commit:
        """Begin an attempt that restores what record `parent` leads to; from here on no earlier attempt can publish.

        `parent` None: whatever the log leads to at that moment. 0: from nothing, allowed only where no save would be
        abandoned by it. Raises CommitStale when another attempt began meanwhile, or `attempt` is not above all others,
        TermLost when somebody leads with a higher term than `term`, RunMoved where the log is closed.
        """
        seen = [-1]

        def decide(last: Commit | None, nonce: str) -> Commit:
            self._require_open(last)
            begun = last.attempt if last else 0
            seen[0] = begun if seen[0] < 0 else seen[0]
            if begun != seen[0] or (attempt is not None and attempt <= begun):
                raise self._stale(f"attempt {begun} has begun already", "let it run, or start again")
            chosen = self._chosen_parent(parent, last)
            restored = self._save_before(chosen)
            step = memory[1] if memory else restored.step if restored else -1
            return Commit(
                number=0, kind="begin", attempt=attempt or begun + 1, step=step,
                parent=chosen, nonce=nonce, writers=tuple(writers), node=node, memory=memory,
            )

        return self._append(decide, term)

    def take_term(self, node: str, place: str, after: int | None = None) -> Commit:
        """Lead from here on: coordinators of lower terms begin nothing any more. `place`: folder of its decisions.
        `after`: only where nobody has taken a higher term than this one.

        Raises RunMoved where the log is closed, TermLost.
        """

        def decide(last: Commit | None, nonce: str) -> Commit:
            self._require_open(last)
            return Commit(
                number=0, kind="term", attempt=last.attempt if last else 0, step=-1, parent=last.number if last else 0,
                nonce=nonce, node=node, place=place,
            )

        return self._append(decide, after)

    def publish(self, attempt: int, step: int, digest: str, folder: str, place: str = "") -> Commit:
        """Publish a checkpoint whose files and folder are durable. Returns the record, durable too.

        Raises CommitStale when a newer attempt began or this attempt published this step or a later one: stop. Calling
        again after CommitUnknown is safe: what this log object linked before is recognized and not published twice.
        """

        def decide(last: Commit | None, nonce: str) -> Commit:
            if last is not None and self._is_mine(last, attempt, step):
                return last
            if last is None or last.attempt < attempt:
                raise self._unknown(f"attempt {attempt} is not in the log", self._folder)
            if last.kind == "moved":
                raise self._stale("the log was closed, or taken over", "stop this process")
            if last.attempt > attempt:
                raise self._stale(f"attempt {last.attempt} began, so attempt {attempt} is over", "stop this process")
            if last.kind == "save" and last.step >= step:
                raise self._stale(f"step {last.step} is published, so step {step} is late", "stop this process")
            return Commit(
                number=0, kind="save", attempt=attempt, step=step, parent=last.number, nonce=nonce,
                digest=digest, folder=folder, place=place,
            )

        return self._append(decide)

    def close(self, place: str, parent: int = 0) -> Commit:
        """End this log for good: it goes on in the run folder `place`. From here on nobody begins or publishes here.

        `parent`: the record that the end leads to; 0: the last one. Called again for the same place it returns the
        record that is there. Raises RunMoved for another one.
        """

        def decide(last: Commit | None, nonce: str) -> Commit:
            if last is not None and last.kind == "moved" and last.place == place:
                return last
            self._require_open(last)
            return self._moved(last, nonce, parent or (last.number if last else 0), 0, place)

        return self._append(decide)

    def take_over(self, parent: int, attempt: int) -> Commit:
        """Go on in this log, which was a copy, from record `parent`; attempts that begin are above `attempt`."""

        def decide(last: Commit | None, nonce: str) -> Commit:
            self._require_open(last)
            return self._moved(last, nonce, parent, attempt, "")

        return self._append(decide)

    def _moved(self, last: Commit | None, nonce: str, parent: int, attempt: int, place: str) -> Commit:
        return Commit(
            number=0, kind="moved", attempt=max(attempt, last.attempt if last else 0),
            step=-1, parent=parent, nonce=nonce, place=place,
        )

    def require_open(self) -> None:
        """Raises RunMoved where this log is closed."""
        self._require_open(self.last())

    def _require_open(self, last: Commit | None) -> None:
        if last is not None and last.kind == "moved" and last.place:
            raise RunMoved(
                f"this run goes on in {last.place}, and nowhere else", where=self._folder,
                fix="use the run in that folder; to go on from here as another run, copy a checkpoint of it",
            )

    def _chosen_parent(self, parent: int | None, last: Commit | None) -> int:
        newest = last.number if last else 0
        if parent is not None and not 0 <= parent <= newest:
            raise self._unknown(f"record {parent} does not exist", self._folder)
        if parent == 0 and newest and self._save_before(newest) is not None:
            raise self._stale("the log holds a save, so nothing may start from nothing", "restore it, or use a new run")
        return parent or newest

    def _is_mine(self, last: Commit, attempt: int, step: int) -> bool:
        return last.nonce in self._nonces and (last.kind, last.attempt, last.step) == ("save", attempt, step)

    def _append(self, decide: Callable[[Commit | None, str], Commit], term: int | None = None) -> Commit:
        """Link the record that `decide` makes of the last one; when its number is taken first, decide again."""
        for _ in range(RACES_MAX):
            head = self._must_read(self._known) if self.head() else None
            last = head if head is None or head.kind != "term" else next(self.follow(head.parent), None)
            record = decide(last, self._platform.token(16))
            if record is last:
                self._sync()
                return record
            record = self._numbered(record, head, term)
            if self._linked(record):
                self._known = record.number
                return record
        raise self._unknown(f"{RACES_MAX} numbers in a row were taken by other writers", self._folder)

    def _numbered(self, record: Commit, head: Commit | None, term: int | None) -> Commit:
        """After `head`, in its term or the next."""
        highest = head.term if head else 0
        if term is not None and highest > term:
            raise TermLost(
                f"another coordinator leads this run, with term {highest}; this one has {term}", where=self._folder,
                fix="nothing: this one stops",
            )
        return msgspec.structs.replace(
            record, number=head.number + 1 if head else 1, term=highest + (record.kind == "term")
        )

    def _linked(self, record: Commit) -> bool:
        """True: the record has its number, durably. False: another has it."""
        temp = f"{self._folder}/.new-{record.nonce}"
        self._nonces.add(record.nonce)
        try:
            self._platform.write_new(temp, render_record(record))
            self._platform.fsync_dir(self._folder)  # numbers before this one are durable before this one exists
            linked = self._claimed(temp, record)
            if linked:
                self._sync()
            return linked
        except OSError as error:
            raise self._unknown(f"record {record.number} could not be written: {error}", self._folder) from error
        finally:
            with suppress(OSError):
                self._platform.unlink(temp)

    def _claimed(self, temp: str, record: Commit) -> bool:
        """Link; whatever it answers, the number itself says whose it is: a reply may be lost, or come from a repeat."""
        self.links_tried += 1
        try:
            self._platform.link(temp, self.path(record.number))
        except OSError as error:
            found = self.read(record.number)
            if found is not None and found.nonce == record.nonce:
                return True
            if error.errno == errno.EEXIST and found is not None:
                return False
            raise
        return True

    def _sync(self) -> None:
        try:
            self._platform.fsync_dir(self._folder)
        except OSError as error:
            raise self._unknown(f"a record was linked, but may not outlive a crash: {error}", self._folder) from error

    def _try_link(self) -> bool:
        """Whether a second link to one name is refused. Unlinks its own two names."""
        first = f"{self._folder}/.probe-{self._platform.token()}"
        second = f"{first}.linked"
        try:
            self._platform.write_new(first, b"probe\n")
            self._platform.link(first, second)
            self._platform.fsync_dir(self._folder)
            try:
                self._platform.link(first, second)
            except FileExistsError:
                return True
            return False
        finally:
            for name in (first, second):
                with suppress(OSError):
                    self._platform.unlink(name)

    # --- errors ---

    def _unknown(self, what: str, where: str) -> CommitUnknown:
        return CommitUnknown(what, where=where, fix="see that the disk is there, writable and not full; then try again")

    def _damaged(self, what: str, where: str) -> CommitUnknown:
        return CommitUnknown(
            what, where=where, fix="restore this file from a copy of the run folder, or start another run with --new"
        )

    def _stale(self, what: str, fix: str) -> CommitStale:
        return CommitStale(what, where=self._folder, fix=fix)

    def _unfit(self, what: str) -> CommitsUnfit:
        return CommitsUnfit(what, where=self._folder, fix="use a file system with hard links: ext4, xfs, btrfs, NFS")


def render_record(commit: Commit) -> bytes:
    """One line of JSON whose last field is the crc32c, in hex, of the bytes before `,"crc":`."""
    body = msgspec.json.encode(commit)[:-1]
    return b'%s%s%08x"}\n' % (body, _CRC, google_crc32c.value(body))


def parse_record(data: bytes) -> Commit | None:
    """None for anything but exactly one whole record."""
    body, found, tail = data.rpartition(_CRC)
    if not found or tail != b'%08x"}\n' % google_crc32c.value(body):
        return None
    try:
        return msgspec.json.decode(body + b"}", type=Commit)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _parent(path: str) -> str:
    return path.rstrip("/").rpartition("/")[0] or "."
