"""`packtrain data build`: from files to a training store and a held-out store, with their tokenizer.

    1 read         units of files -> spool: documents, content hashes, MinHash band keys         (all workers)
    2 deduplicate  a range of content hashes at a time -> documents to drop                      (all workers)
    3 split        held-out documents and their near-duplicates                                  (scans: all workers)
    4 tokenizer    trained on a sample of the training side, or copied
    5 encode       parts of the spool -> token ids                                               (all workers)
    6 write        parts end to end -> OUT/train, OUT/held_out; one rename makes OUT exist

Everything before the rename happens in `OUT.building-<hash of the request>`, where finished units stay finished: after
a kill the same command goes on from there. What a unit holds depends on the request alone, and every later choice on
content and reading order, so the bytes of OUT depend neither on the number of workers, nor on memory, nor on kills.
OUT/request.json, which says which files were asked for, is the one thing in it that is about this machine.

Memory: at most `memory_bytes_max`, by choosing how many workers run and how many ranges the hashes are dealt into.
Disk, for a while: about 40% of the text for the spool and two copies of the tokens.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np
import psutil

from packtrain.core.errors import (
    BadValue,
    BuildFailed,
    BuildTaken,
    CorpusEmpty,
    CorpusMissing,
    CorruptInput,
    StoppedOnRequest,
)
from packtrain.core.platform import Platform
from packtrain.data.dedup import BYTES_A_RECORD, RangeCard, RangeTask, drop_repeats
from packtrain.data.encode import EncodeTask, encode, encode_part, train_texts, unpack
from packtrain.data.holdout import ScanTask, Split, scan_parts, split, text_of, xz_bits_per_byte
from packtrain.data.keys import U64, key64, mix64
from packtrain.data.listing import Listing, units
from packtrain.data.pool import Pool
from packtrain.data.readers import SKIPS_NAMED
from packtrain.data.recent import Recent
from packtrain.data.signed import read_card, seal
from packtrain.data.spool import ReadTask, Spool, UnitCard, numbered, read_unit, write_parts_table
from packtrain.data.store import CARD, Card, StoreWriter, token_dtype
from packtrain.data.tokenizer import FILE, Tokenizer, byte_tokenizer, read_tokenizer, train_bpe

TRAINED = ("bpe", "byte")
"""Tokenizers by name; anything else is the path of one."""
Progress = Callable[[str, int, int], None]
"""Stage, how much of it is done, and of how much (0: not known yet)."""

VERSION = 1
UNIT_PARTS = 4
WORKER_BYTES = 160 << 20
"""Memory of a worker: interpreter and libraries 90 MiB, a part of text, its token objects."""
MEMORY_BYTES_MIN = 512 << 20
HELD_OUT_BYTES_MAX = 64 << 20
SCAN_PARTS = 64
REQUEST = "request.json"


class BuildOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokenizer: str = "bpe"
    """"bpe" (trained on the corpus), "byte", or the path of a Hugging Face tokenizer.json."""
    vocab: int = 4096
    """Ids of a trained tokenizer."""
    sample_bytes_max: int = 32 << 20
    """Text a tokenizer is trained on: documents drawn by content hash and `seed`."""
    seed: int = 0
    lossless: bool = True
    """Refuse a tokenizer that does not keep every byte of the text."""
    field: str = "text"
    """Of JSON lines and parquet."""
    suffixes: tuple[str, ...] = ()
    """Which files of folders are text, for example (".py", ".txt"); none: `listing.TEXT_SUFFIXES`."""
    skip_max: int = 0
    """Corrupt files, lines or rows that may be left out; each is counted in the card."""
    document_bytes_max: int = 1 << 20
    """Longer documents are cut near multiples of this."""
    held_out_fraction: float = 0.05
    held_out_bytes_max: int = 500_000
    memory_bytes_max: int = 0
    """Of all processes together; 0: half of what is free. Does not change the result."""
    workers: int = 0
    """Processes; 0: one a core, as far as memory allows. Does not change the result."""
    part_bytes: int = 2 << 20
    """Text per unit of work. Does not change the result."""
    range_bytes_max: int = 0
    """Memory for one range of content hashes; 0: half of what a process may use. Does not change the result."""

    def __post_init__(self) -> None:
        bounds = {
            "vocab": 257, "sample_bytes_max": 1, "skip_max": 0, "document_bytes_max": 1024, "held_out_fraction": 0,
            "held_out_bytes_max": 0, "workers": 0, "part_bytes": 1024, "range_bytes_max": 0,
        }
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise BadValue(f"{name} is at least {least}", where=f"data build: {name}", fix="raise it")
        if self.held_out_bytes_max > HELD_OUT_BYTES_MAX:
            raise BadValue(
                f"at most {HELD_OUT_BYTES_MAX} bytes can be held out: they are in memory at once, and in xz",
                where="data build: held_out_bytes_max", fix="lower it (--held-out-bytes-max)",
            )
        if self.held_out_fraction > 0.5:
            raise BadValue("at most half can be held out", where="data build: held_out_fraction", fix="lower it")
        if 0 < self.memory_bytes_max < MEMORY_BYTES_MIN:
            raise BadValue(
                f"memory_bytes_max is at least {MEMORY_BYTES_MIN} (one worker and the libraries)",
                where="data build: memory_bytes_max", fix="raise it, or leave it at 0: half of what is free",
            )


RESULT_OPTIONS = (
    "tokenizer", "vocab", "sample_bytes_max", "seed", "lossless", "field", "suffixes", "skip_max", "document_bytes_max",
    "held_out_fraction", "held_out_bytes_max", "part_bytes",
)
"""Options a build must share with an earlier one to go on from it or to be taken for the same."""


class BuildCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What went in and what came of it; the stores have cards of their own."""

    format: int = VERSION
    read_documents: int
    read_bytes: int
    repeated_documents: int
    """Left out because an equal one came before."""
    repeated_bytes: int
    ignored_files: int
    """Files of folders that do not look like text by their suffix."""
    skipped: int
    skipped_named: tuple[str, ...]
    held_out_limit_bytes: int
    held_out_clusters: int
    held_out_passed_over: int
    train: Card
    held_out: Card
    tokenizer_hash: str


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Which files, of which size and date, with which options; `units` of work they are dealt into."""

    fingerprint: str
    files: int
    bytes: int
    units: int
    ignored: int


def build(platform: Platform, paths: Sequence[str], out: str, options: BuildOptions, progress: Progress) -> BuildCard:
    """Make OUT from the files of `paths`, or go on making it; where it is there already its card is returned.

    Raises CorpusMissing, CorpusEmpty, CorruptInput, BadValue, BuildTaken, BuildFailed; StoppedOnRequest at Ctrl-C.
    """
    out = os.path.abspath(out)
    try:
        if options.tokenizer not in TRAINED:
            _check_tokenizer(platform, options.tokenizer)
        request = _request(paths, options, progress)
        work = f"{out}.building-{request.fingerprint[:12]}"
        finished = _finished(platform, out, request)
        if finished is None:
            platform.mkdir(work)
            finished = _hold_and_build(platform, paths, out, work, request, options, progress)
        _remove_work(platform, work)
        return finished
    except KeyboardInterrupt:
        raise StoppedOnRequest("the build was stopped", where=out, fix="the same command goes on from here") from None
    except OSError as error:
        raise BuildFailed(
            f"the build cannot go on: {error.strerror or error}", where=str(error.filename or out),
            fix="free what is missing (see `df -h`); the same command goes on from what is finished",
        ) from error


def _check_tokenizer(platform: Platform, path: str) -> None:
    """A wrong path is told at once, not after the reading. Raises BadValue, CorpusMissing."""
    if os.path.isdir(path):
        raise BadValue("a tokenizer is a file, this is a folder", where=path, fix=f"give {os.path.join(path, FILE)}")
    if not platform.exists(path):
        near = f"did you mean {path.lower()}? " if path.lower() in TRAINED else ""
        raise CorpusMissing(
            f"there is no tokenizer {path!r}", where=path or "tokenizer",
            fix=f"{near}bpe trains one on the text, byte has an id for each byte, or give the path of a {FILE}",
        )
    read_tokenizer(platform, path)


def _request(paths: Sequence[str], options: BuildOptions, progress: Progress) -> Request:
    """One walk over the names of all files. Raises CorpusMissing, CorpusEmpty, CorruptInput."""
    progress("list", 0, 0)
    listing = Listing(paths, options.suffixes)
    chosen = [getattr(options, name) for name in RESULT_OPTIONS]
    digest = hashlib.sha256(msgspec.json.encode([VERSION, UNIT_PARTS, chosen]))
    if os.path.isfile(options.tokenizer):
        with open(options.tokenizer, "rb") as file:
            digest.update(file.read())
    n_files = n_bytes = 0

    def counted() -> Iterator:
        nonlocal n_files, n_bytes
        for found in listing:
            digest.update(msgspec.json.encode(found))
            n_files += 1
            n_bytes += found.bytes
            yield found

    n_units = sum(1 for _ in units(counted(), UNIT_PARTS * options.part_bytes, options.document_bytes_max))
    if n_files == 0:
        raise CorpusEmpty(
            f"no file here looks like text ({listing.ignored} passed over by their suffix)", where=", ".join(paths),
            fix="name other paths, or say which suffixes are text (--suffix .ext)",
        )
    return Request(
        fingerprint=digest.hexdigest(), files=n_files, bytes=n_bytes, units=n_units, ignored=listing.ignored
    )


def _finished(platform: Platform, out: str, request: Request) -> BuildCard | None:
    """The card of OUT if this very request made it. Raises BuildTaken where OUT holds something else."""
    if not platform.exists(out) or (platform.is_dir(out) and not platform.listdir(out)):
        return None
    made_by = os.path.join(out, REQUEST)
    if not platform.exists(made_by) or read_card(platform, made_by, Request)[0] != request:
        raise BuildTaken(
            "this folder is there already and holds something else", where=out,
            fix="give another --out, or remove the folder yourself if nobody needs it",
        )
    return read_card(platform, os.path.join(out, CARD), BuildCard)[0]


def _hold_and_build(
    platform: Platform, paths: Sequence[str], out: str, work: str, request: Request, options: BuildOptions,
    progress: Progress,
) -> BuildCard:
    lock = platform.lock(os.path.join(work, "lock"), "")
    if lock is None:
        raise BuildTaken("another process is making it just now", where=work, fix="wait for it, or stop it")
    try:
        workers, memory = _size(options, request.bytes)
        with Pool(workers) as pool:
            job = _Job(platform, work, options, progress, pool, memory // max(2, workers + 1))
            return job.run(paths, out, request)
    finally:
        lock.release()


def _size(options: BuildOptions, corpus_bytes: int) -> tuple[int, int]:
    """Workers and bytes of memory to use: no more workers than fit, or than there are parts of text to work on.

    The parent takes as much memory as a worker; where only one is left, it does the work itself.
    """
    memory = options.memory_bytes_max or max(MEMORY_BYTES_MIN, psutil.virtual_memory().available // 2)
    cores = len(os.sched_getaffinity(0))
    fit = memory // WORKER_BYTES - 1
    return max(1, min(options.workers or cores, fit, corpus_bytes // options.part_bytes)), memory


class _Job:
    """One build under way. `share_bytes`: memory that one process may use for what grows with the corpus."""

    def __init__(
        self, platform: Platform, work: str, options: BuildOptions, progress: Progress, pool: Pool, share_bytes: int
    ) -> None:
        self._platform, self._work, self._options, self._progress = platform, work, options, progress
        self._pool, self._share_bytes = pool, share_bytes
        self._spool_folder = os.path.join(work, "spool")

    def run(self, paths: Sequence[str], out: str, request: Request) -> BuildCard:
        skipped, named = self._read(paths, request)
        spool = Spool(self._spool_folder)
        n = int(spool.table["records"].sum(dtype=np.int64))
        if n == 0:
            raise CorpusEmpty("the files hold no text", where=", ".join(paths), fix="name files with text in them")
        ranges = max(1, -(-n * BYTES_A_RECORD // (self._options.range_bytes_max or self._share_bytes // 2)))
        dropped = self._deduplicate(ranges)
        distinct = sum(card.bytes - card.dropped_bytes for card in dropped)
        chosen = self._split(spool, ranges, distinct)
        tokenizer = self._tokenizer(spool, ranges, distinct)
        self._encode(spool, ranges)
        train, held_out = self._write(spool, chosen, tokenizer)
        card = BuildCard(
            read_documents=n, read_bytes=sum(c.bytes for c in dropped),
            repeated_documents=sum(c.dropped_documents for c in dropped),
            repeated_bytes=sum(c.dropped_bytes for c in dropped), ignored_files=request.ignored, skipped=skipped,
            skipped_named=named, held_out_limit_bytes=chosen.limit_bytes, held_out_clusters=chosen.clusters,
            held_out_passed_over=chosen.passed_over, train=train, held_out=held_out, tokenizer_hash=tokenizer.hash,
        )
        self._publish(out, request, card, tokenizer)
        return card

    def _read(self, paths: Sequence[str], request: Request) -> tuple[int, tuple[str, ...]]:
        """Fill the spool and write its table; -> what was skipped in all. Raises CorruptInput."""
        options = self._options
        files = iter(Listing(paths, options.suffixes))
        dealt = units(files, UNIT_PARTS * options.part_bytes, options.document_bytes_max)
        tasks = (
            ReadTask(
                folder=self._spool_folder, unit=number, items=items, field=options.field, skip_max=options.skip_max,
                piece_bytes=options.document_bytes_max, part_bytes=options.part_bytes,
            )
            for number, items in enumerate(dealt)
        )
        self._platform.mkdir(self._spool_folder)
        skipped = 0
        named: list[str] = []

        def cards() -> Iterator[UnitCard]:
            nonlocal skipped
            for card in self._stage("read", self._pool.map(read_unit, tasks), request.units):
                skipped += card.skipped
                named.extend(card.skipped_named[: SKIPS_NAMED - len(named)])
                if skipped > options.skip_max:
                    raise CorruptInput(
                        f"{skipped} corrupt inputs where {options.skip_max} may be skipped", where="; ".join(named),
                        fix="mend or leave out the input, or raise skip_max (--skip-max N)",
                    )
                yield card

        write_parts_table(self._platform, self._spool_folder, cards())
        return skipped, tuple(named)

    def _stage(self, name: str, results: Iterable, total: int) -> Iterator:
        """Pass results on and tell how far the stage is."""
        self._progress(name, 0, total)
        for done, result in enumerate(results, 1):
            yield result
            self._progress(name, done, total)

    def _deduplicate(self, ranges: int) -> list[RangeCard]:
        folder = os.path.join(self._work, f"drops-{ranges}")
        self._platform.mkdir(folder)
        tasks = (
            RangeTask(spool=self._spool_folder, folder=folder, number=k, count=ranges) for k in range(ranges)
        )
        return list(self._stage("deduplicate", self._pool.map(drop_repeats, tasks), ranges))

    def _split(self, spool: Spool, ranges: int, distinct_bytes: int) -> Split:
        path = os.path.join(self._work, "split.json")
        if not self._platform.exists(path):
            fraction = int(self._options.held_out_fraction * distinct_bytes)
            limit = min(self._options.held_out_bytes_max, max(fraction, 1 if self._options.held_out_fraction else 0))
            chosen = split(spool, ranges, distinct_bytes, limit, lambda keys: self._scan(spool, keys))
            if limit and not chosen.held:
                raise CorpusEmpty(
                    "the corpus cannot be split: no document, with its near-duplicates, is at most half of it",
                    where=f"{distinct_bytes} bytes of distinct text",
                    fix="add documents, lower --document-bytes-max, or hold nothing out: --held-out-fraction 0",
                )
            self._platform.write_replacing(path, seal(chosen))
        return read_card(self._platform, path, Split)[0]

    def _scan(self, spool: Spool, keys: U64) -> Iterator[tuple[int, np.ndarray]]:
        """Records of the whole spool with one of these band keys."""
        starts = range(0, len(spool), SCAN_PARTS)
        tasks = (
            ScanTask(spool=self._spool_folder, first=i, last=min(i + SCAN_PARTS, len(spool)), keys=keys.tobytes())
            for i in starts
        )
        for found in self._stage("split", self._pool.map(scan_parts, tasks), len(starts)):
            yield from found

    def _tokenizer(self, spool: Spool, ranges: int, distinct_bytes: int) -> Tokenizer:
        path = os.path.join(self._work, FILE)
        if not self._platform.exists(path):
            self._progress("tokenizer", 0, 1)
            if self._options.tokenizer == "bpe":
                tokenizer = train_bpe(self._sample(spool, ranges, distinct_bytes), self._options.vocab)
            elif self._options.tokenizer == "byte":
                tokenizer = byte_tokenizer()
            else:
                tokenizer = read_tokenizer(self._platform, self._options.tokenizer)
            self._platform.write_replacing(path, tokenizer.text.encode())
            self._progress("tokenizer", 1, 1)
        return read_tokenizer(self._platform, path)

    def _sample(self, spool: Spool, ranges: int, distinct_bytes: int) -> Iterator[str]:
        """Training documents, each drawn with one probability by a keyed hash of its content; never over the bound."""
        share = min(1.0, self._options.sample_bytes_max / distinct_bytes)
        key = np.uint64(key64(self._options.seed, "tokenizer sample"))
        left = self._options.sample_bytes_max
        for part in range(len(spool)):
            for text in train_texts(self._platform, self._work, part, ranges):
                word = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8")
                if int(mix64(word ^ key)[0]) <= share * 2**64 and len(text) <= left:
                    left -= len(text)
                    yield text.decode()

    def _encode(self, spool: Spool, ranges: int) -> None:
        tasks = (
            EncodeTask(folder=self._work, part=part, ranges=ranges, lossless=self._options.lossless)
            for part in range(len(spool))
        )
        for _ in self._stage("encode", self._pool.map(encode_part, tasks), len(spool)):
            pass

    def _write(self, spool: Spool, chosen: Split, tokenizer: Tokenizer) -> tuple[Card, Card]:
        """The two stores under `work/out`, from the start if an earlier try was killed here."""
        folder = os.path.join(self._work, "out")
        _remove_tree(self._platform, folder)
        identity = (tokenizer.hash, tokenizer.size, tokenizer.end_of_document)
        train = StoreWriter(self._platform, os.path.join(folder, "train"), token_dtype(tokenizer.size))
        for part in self._stage("write", range(len(spool)), len(spool)):
            path = numbered(os.path.join(self._work, "tokens"), part, ".tok")
            ids = unpack(self._platform.read(path), path)
            train.append(ids.tokens, ids.lengths, ids.hashes, ids.bytes)
        held_out = StoreWriter(self._platform, os.path.join(folder, "held_out"), token_dtype(tokenizer.size))
        kept: Recent[bytes] = Recent(4)
        texts = [text_of(spool, document, kept) for document in chosen.held]
        ids = encode(tokenizer, texts, self._options.lossless)
        held_out.append(ids.tokens, ids.lengths, ids.hashes, ids.bytes)
        xz = xz_bits_per_byte(texts) if texts else None
        return train.finish(*identity), held_out.finish(*identity, xz)

    def _publish(self, out: str, request: Request, card: BuildCard, tokenizer: Tokenizer) -> None:
        folder = os.path.join(self._work, "out")
        for name, data in ((FILE, tokenizer.text.encode()), (REQUEST, seal(request)), (CARD, seal(card))):
            self._platform.write_new(os.path.join(folder, name), data)
        self._platform.fsync_dir(folder)
        self._platform.replace(folder, out)
        self._platform.fsync_dir(os.path.dirname(out))


def _remove_work(platform: Platform, work: str) -> None:
    """The build's own working folder, when OUT is there."""
    assert ".building-" in os.path.basename(work)
    _remove_tree(platform, work)


def _remove_tree(platform: Platform, folder: str) -> None:
    if not platform.exists(folder):
        return
    for name in platform.listdir(folder):
        path = os.path.join(folder, name)
        if platform.is_dir(path):
            _remove_tree(platform, path)
        else:
            platform.unlink(path)
    platform.rmdir(folder)
