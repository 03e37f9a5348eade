"""What is held out is decided by content alone, and near-duplicates stay on one side."""

from __future__ import annotations

import hashlib
import itertools
import lzma
import pathlib
import random
import shutil
import subprocess
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.data.dedup import Drops, RangeTask, drop_repeats, hash_range
from packtrain.data.holdout import ScanTask, Split, scan_parts, split, text_of, xz_bits_per_byte
from packtrain.data.listing import Item
from packtrain.data.recent import Recent
from packtrain.data.spool import PART_RECORDS_MAX, ReadTask, Spool, parts_of, read_unit, write_parts_table
from tests.data.makers import PLATFORM, source_text


def spool_of(folder: pathlib.Path, texts: Sequence[bytes], part_bytes: int = 3000) -> Spool:
    """These documents, in this order, through the first pass of a build."""
    folder.mkdir()
    path = folder / "corpus.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({"text": text.decode()}) + b"\n" for text in texts))
    task = ReadTask(
        folder=str(folder), unit=0, items=(Item(str(path), "jsonl"),), field="text", piece_bytes=1 << 20,
        part_bytes=part_bytes, skip_max=0,
    )
    write_parts_table(PLATFORM, str(folder), [read_unit(task)])
    return Spool(str(folder))


def scan(spool: Spool, folder: pathlib.Path, keys: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
    for part in range(0, len(spool), 2):
        task = ScanTask(spool=str(folder), first=part, last=min(part + 2, len(spool)), keys=keys.tobytes())
        yield from scan_parts(task)


def held_of(folder: pathlib.Path, texts: Sequence[bytes], limit: int, ranges: int = 1) -> tuple[list[bytes], Split]:
    spool = spool_of(folder, texts)
    total = sum(map(len, set(texts)))
    chosen = split(spool, ranges, total, limit, lambda keys: scan(spool, folder, keys))
    return [text_of(spool, d, Recent(2)) for d in chosen.held], chosen


# --- the same rule, written for a corpus that fits in memory ------------------------------------------


def windows_of(text: bytes) -> set[tuple[bytes, ...]]:
    lines = [line.strip() for line in text.split(b"\n") if line.strip()]
    return {tuple(lines[i : i + 8]) for i in range(max(1, len(lines) - 7))} if lines else set()


def clusters_of(texts: Sequence[bytes]) -> dict[bytes, set[bytes]]:
    sets = {text: windows_of(text) for text in texts}
    cluster = {text: {text} for text in texts}
    for a, b in itertools.combinations(texts, 2):
        if 2 * len(sets[a] & sets[b]) > len(sets[a] | sets[b]) and cluster[a] is not cluster[b]:
            cluster[a] |= cluster[b]
            for text in cluster[b]:
                cluster[text] = cluster[a]
    return cluster


def content_order(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def expected(texts: Sequence[bytes], limit: int) -> list[bytes]:
    """Held-out documents in order of content hash."""
    distinct = sorted(set(texts), key=content_order)
    cluster = clusters_of(distinct)

    def walk(cap: int, until: int) -> set[bytes]:
        taken: set[bytes] = set()
        for text in distinct:
            if sum(map(len, taken)) >= until:
                break
            if text not in taken and sum(map(len, cluster[text])) <= cap:
                taken |= cluster[text]
        return taken

    few = min(sum(map(len, distinct)) // 2, max(4 * limit, 4 << 20))
    return sorted(walk(limit, limit) or walk(few, 1), key=content_order)


def families(seed: int, n: int) -> list[bytes]:
    """Texts of which some are versions of others: lines changed, added, or a chain of small changes."""
    chance = random.Random(seed)
    texts: list[bytes] = []
    for i in range(n):
        lines = source_text(1000 * seed + i, chance.randint(1, 60)).splitlines()
        texts.append(b"\n".join(lines) + b"\n")
        for _ in range(chance.choice([0, 0, 1, 3])):
            lines = list(lines)
            for _ in range(chance.choice([0, 1, 2, 9])):
                lines.insert(chance.randint(0, len(lines)), b"changed %d" % chance.randint(0, 10**9))
            texts.append(b"\n".join(lines) + b"\n")
    chance.shuffle(texts)
    return texts


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 10), st.sampled_from([0.02, 0.05, 0.3]), st.integers(1, 4))
def test_the_split_is_the_rule(
    tmp_path_factory: pytest.TempPathFactory, seed: int, n: int, share: float, ranges: int
) -> None:
    """The split of a spooled corpus is what the rule gives when every pair is compared, whatever the ranges of
    hashes."""
    texts = families(seed, n)
    limit = max(1, int(share * sum(map(len, set(texts)))))
    held, chosen = held_of(tmp_path_factory.mktemp("split") / "s", texts, limit, ranges)
    assert held == expected(texts, limit)
    assert chosen.limit_bytes == limit
    kept = set(texts) - set(held)
    assert not any(near_text(a, b) for a in held for b in kept)


def near_text(a: bytes, b: bytes) -> bool:
    x, y = windows_of(a), windows_of(b)
    return 2 * len(x & y) > len(x | y)


def test_order_of_reading_does_not_matter(tmp_path: pathlib.Path) -> None:
    """The same documents in another order, and some of them twice, give the same held-out documents."""
    texts = families(4, 12)
    one, _ = held_of(tmp_path / "a", texts, 3000)
    two, _ = held_of(tmp_path / "b", texts[::-1] + texts[:3], 3000)
    assert one == two and one


def chain_of(seed: int) -> list[bytes]:
    """Six texts of which each shares most with the next, and the first nothing with the last."""
    lines = source_text(seed, 100).splitlines()
    return [b"\n".join(lines[i : i + 40]) for i in range(0, 60, 10)]


def test_a_chain_moves_whole(tmp_path: pathlib.Path) -> None:
    """Documents linked only through others go together, however far back in the order of content hashes they are."""
    others = [source_text(10_000 + i, 40) for i in range(200)]
    chain = chain_of(720)
    front = sorted(chain + others, key=content_order)[:50]
    assert chain[0] in front[:4] and not set(chain[1:]) & set(front), "the rest is found through the first alone"
    assert not near_text(chain[0], chain[-1]) and near_text(chain[0], chain[1])
    size = sum(map(len, chain))
    for limit, together in ((size, 6), (size - 1, 0)):
        held, _ = held_of(tmp_path / str(limit), chain + others, limit)
        assert len(set(held) & set(chain)) == together
        assert held == expected(chain + others, limit)


def test_a_cluster_too_large_is_passed_over(tmp_path: pathlib.Path) -> None:
    """A cluster larger than the limit stays in training, is counted, and the next documents are held out instead."""
    lines = source_text(0, 60).splitlines()
    versions = [b"\n".join([*lines, b"version %d" % i]) for i in range(40)]
    others = [source_text(100 + i, 40) for i in range(40)]
    held, chosen = held_of(tmp_path / "s", versions + others, 4000)
    assert held and not set(held) & set(versions) and held == expected(versions + others, 4000)
    assert chosen.passed_over == 1 and 4000 <= sum(map(len, held)) < 8000


def test_few_documents(tmp_path: pathlib.Path) -> None:
    """Where every document is larger than the limit, one is held out all the same; of a single document, none."""
    texts = [source_text(i, 50) for i in range(4)]
    held, _ = held_of(tmp_path / "four", texts, 10)
    assert held == [min(texts, key=content_order)]
    assert held_of(tmp_path / "one", texts[:1], 10)[0] == []
    assert held_of(tmp_path / "none", texts, 0)[0] == []


def test_repeats_are_dropped_in_reading_order(tmp_path: pathlib.Path) -> None:
    """Of equal documents the first read is kept, over parts and however the hashes are dealt into ranges."""
    texts = [b"text %03d\n" % (i % 7) * 20 for i in range(30)]
    spool = spool_of(tmp_path / "s", texts, part_bytes=1900)
    assert len(spool) > 2
    for ranges in (1, 3):
        folder = tmp_path / f"drops{ranges}"
        folder.mkdir()
        cards = [
            drop_repeats(RangeTask(spool=str(tmp_path / "s"), folder=str(folder), number=k, count=ranges))
            for k in range(ranges)
        ]
        assert sum(c.dropped_documents for c in cards) == 23 and sum(c.documents for c in cards) == 30
        assert sum(c.dropped_bytes for c in cards) == sum(map(len, texts[7:]))
        drops = Drops(str(folder), ranges)
        places = itertools.count()
        kept = []
        for part in range(len(spool)):
            dropped = set(drops.of(part).tolist())
            kept += [n for i, n in zip(range(len(spool.records(part))), places) if i not in dropped]
        assert kept == list(range(7))
        found = [hash_range(spool, k, ranges).found for k in range(ranges)]
        held = [(r["part"], r["high"]) for some in found for r in some]
        assert len(held) == len(set(held)) < 30, "more than one record a part and hash is held in memory"


def test_short_documents_fill_a_part_by_their_number() -> None:
    """However short documents are, a part has a bounded number of records; none is lost."""
    sizes = [len(part) for part in parts_of(itertools.repeat(b"x", 2 * PART_RECORDS_MAX + 5), part_bytes=2 << 20)]
    assert sizes == [PART_RECORDS_MAX, PART_RECORDS_MAX, 5]


def test_xz_figures(notes: list[str]) -> None:
    """Bits per byte are those of `xz -9e` itself, file by file and as one stream."""
    texts = [source_text(i, 2000) for i in range(3)] + [source_text(0, 2000)]
    files, stream = xz_bits_per_byte(texts)
    assert stream < files
    n = sum(map(len, texts))
    if not shutil.which("xz"):
        notes.append("xz figures against the program: not run, there is no xz here")
        assert stream == 8 * len(lzma.compress(b"".join(texts), preset=9 | lzma.PRESET_EXTREME)) / n
        return

    def program(data: bytes) -> int:
        return len(subprocess.run(["xz", "-9e", "-T1", "-c"], input=data, capture_output=True, check=True).stdout)

    assert files == 8 * sum(map(program, texts)) / n
    assert stream == 8 * program(b"".join(texts)) / n
