"""What `packtrain data show` prints of a store, or of a folder that `packtrain data build` made."""

from __future__ import annotations

import os

from packtrain.core.errors import CorpusMissing
from packtrain.core.platform import Platform
from packtrain.core.units import bytes_text, count_text
from packtrain.data.build import BuildCard
from packtrain.data.signed import read_card
from packtrain.data.store import CARD, TOKENS, Store
from packtrain.data.tokenizer import load_tokenizer

EXCERPT_TOKENS = 48


def show(platform: Platform, folder: str, verify: bool = False) -> str:
    """Counts, hashes and the start of the first document; with `verify`, every block is read and damage is listed.

    Raises CorpusMissing, StoreDamaged, TokenizerMismatch.
    """
    if platform.exists(os.path.join(folder, TOKENS)):
        return "\n".join(_store(platform, folder, verify))
    if not platform.exists(os.path.join(folder, CARD)):
        raise CorpusMissing(
            "there is no store here", where=folder, fix="make one with `packtrain data build PATH... --out DIR`"
        )
    card, _ = read_card(platform, os.path.join(folder, CARD), BuildCard)
    lines = [
        folder,
        f"  read        {count_text(card.read_documents)} documents, {bytes_text(card.read_bytes)}",
        f"  repeated    {count_text(card.repeated_documents)} documents, {bytes_text(card.repeated_bytes)} left out",
        f"  skipped     {card.skipped} corrupt inputs; {card.ignored_files} files passed over by their suffix",
        f"  held out    until {bytes_text(card.held_out_limit_bytes)}: {card.held_out_clusters} documents with their "
        f"near-duplicates; {card.held_out_passed_over} passed over as too large",
        *(f"              {named}" for named in card.skipped_named),
    ]
    for name in ("train", "held_out"):
        lines += _store(platform, os.path.join(folder, name), verify)
    return "\n".join(lines)


def _store(platform: Platform, folder: str, verify: bool) -> list[str]:
    store = Store(folder, platform)
    card = store.card
    lines = [
        folder,
        f"  documents   {count_text(card.documents)}",
        f"  text        {bytes_text(card.bytes)} ({card.bytes} bytes)",
        f"  tokens      {count_text(card.tokens)} ({card.tokens}, {card.bytes / max(1, card.tokens):.2f} bytes each)",
        f"  tokenizer   {card.tokenizer_size} ids, {card.tokenizer_hash[:12]}",
        f"  store hash  {store.hash[:12]}",
    ]
    if card.xz_files_bits_per_byte is not None and card.xz_stream_bits_per_byte is not None:
        lines.append(
            f"  xz -9e      {card.xz_files_bits_per_byte:.3f} bits per byte file by file, "
            f"{card.xz_stream_bits_per_byte:.3f} as one stream"
        )
    if card.documents:
        ids = store.read(0, min(int(store.document_starts[1]), EXCERPT_TOKENS)).tolist()
        lines.append(f"  begins      {load_tokenizer(folder, platform).decode(ids)!r}")
    if verify:
        damage = store.verify()
        lines += [f"  DAMAGED     {line}" for line in damage] or ["  verified    every block matches its checksum"]
    return lines
