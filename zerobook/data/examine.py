"""Examination of a data file before any run: formats, lengths before cutting, samples that are cut or lost, duplicates."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import xxhash

from zerobook.constants import IGNORE
from zerobook.data import formats
from zerobook.data.formats import BadSample
from zerobook.data.sampler import held_out_mask
from zerobook.data.source import Source
from zerobook.data.templates import CausalEncoder, Encoded
from zerobook.data.tokenize import Reading, chunks, detect, parsed, read_sample
from zerobook.errors import DataError
from zerobook.objective import NextToken
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain

LISTED = 20
"""Places that are listed; the others are counted."""


@dataclass
class Places:
    """Places in a file: all are counted, and the first ones are listed."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.count += 1
        if len(self.first) < LISTED:
            self.first.append(plain(place, lines=False))


@dataclass
class BadSamples(Places):
    """Places of samples that cannot be used, also by reason. The reasons after the first ``LISTED`` are counted as one."""

    by_reason: dict[str, Places] = field(default_factory=dict)

    def add_reason(self, place: str, reason: str) -> None:
        self.add(f"{place}: {reason}")
        reason = plain(reason, lines=False)
        if reason not in self.by_reason and len(self.by_reason) >= LISTED:
            reason = "other reasons"
        self.by_reason.setdefault(reason, Places()).add(place)


@dataclass
class Examined:
    """Contents of a source. ``lengths`` are tokens of each good sample before cutting, int32 [samples]."""

    name: str
    format: str
    unread: list[str]
    lengths: np.ndarray
    supervised: int
    """supervised tokens before cutting"""
    cut: Places
    """samples that lose tokens, and keep supervised ones"""
    dropped: Places
    """samples that keep no supervised token within the maximum length, or have none at all"""
    bad: BadSamples
    duplicates: Places
    """samples that are equal to an earlier one"""
    digests: np.ndarray
    """uint64 [samples], of the contents"""
    first: list[tuple[str, Encoded]]
    """the first rows, with their places"""
    is_kept: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool [samples], which of them a run keeps"""
    has_chats: bool = False

    def summary(self) -> dict[str, Any]:
        """Return JSON-ready facts. ``needed_length`` is the maximum length that keeps every sample whole."""
        places = {name: asdict(getattr(self, name)) for name in ("cut", "dropped", "bad", "duplicates")}
        shares = np.percentile(self.lengths, [0, 50, 90, 99, 100]).astype(int).tolist() if len(self.lengths) else []
        return {
            "name": self.name, "format": self.format, "columns_not_read": self.unread, "samples": len(self.lengths),
            "tokens": int(self.lengths.sum()), "supervised_tokens": self.supervised,
            "lengths": dict(zip(("shortest", "median", "p90", "p99", "longest"), shares, strict=False)),
            "needed_length": int(self.lengths.max(initial=0)), **places,
        }  # fmt: skip


def examine(
    source: Source,
    encoder: CausalEncoder,
    *,
    length: int,
    format: str | None = None,
    columns: dict[str, str | None] | None = None,
    rows: int = 0,
) -> Examined:
    """Read a source to its end. It takes about 200 bytes of memory a sample, however long they are.

    Args:
        encoder: without a maximum length.
        length: maximum length of a run, in tokens. Running text is cut into blocks and loses nothing.
        columns: the columns of a pair that the user named.
        rows: first rows that are kept.

    Raises:
        DataError: no sample fits a format.
    """
    short = copy.copy(encoder)
    short.length = length
    found = Examined(source.name, "", [], np.zeros(0, np.int32), 0, Places(), Places(), BadSamples(), Places(),
                     np.zeros(0, np.uint64), [])  # fmt: skip
    lengths, digests, seen = list[int](), list[int](), dict[int, str]()
    is_kept = list[bool]()
    reading: Reading | None = None
    bar = tqdm(total=source.total, desc=f"reading {source.name}", unit=source.unit.strip(), unit_scale=True, leave=False)
    for chunk in chunks(source.read(), bar):
        if reading is None:
            found.format = format or detect(chunk, columns or {}, {}, skip=True)
            reading = Reading(
                found.format, columns or {}, encoder, NextToken(), detected=format is None, is_held_out=source.is_held_out
            )
            parsed_rows = [parsed(raw) for _, raw in chunk]
            readable = [row for row in parsed_rows if isinstance(row, dict)]
            found.unread = formats.ignored(found.format, readable, encoder_formats={}, **reading.columns)
        for where, sample, result in _encoded(chunk, reading):
            if isinstance(result, BadSample):
                found.bad.add_reason(where, str(result))
                continue
            found.has_chats |= isinstance(sample, formats.Chat)
            one = [result, *result.others]
            longest = max(len(row.input_ids) for row in one)
            digest = xxhash.xxh3_64_intdigest(repr(sample).encode(errors="replace"))
            if digest in seen:
                found.duplicates.add(f"{where} (as {seen[digest]})")
            seen.setdefault(digest, where)
            lengths.append(longest)
            digests.append(digest)
            found.supervised += sum(int((row.labels != IGNORE).sum()) for row in one)
            if len(found.first) < rows:
                found.first.append((where, result))
            is_kept.append(True)
            if found.format == "text":
                continue
            kept = short.encode([sample])[0] if longest > length else result
            if not isinstance(kept, Encoded) or not any(map(reading.weigh, (kept, *kept.others))):
                is_kept[-1] = False
                found.dropped.add(f"{where} ({longest} tokens)")
            elif longest > length:
                found.cut.add(f"{where} ({longest} tokens)")
    bar.close()
    if not found.format:
        raise DataError(f"{source.name}: the dataset is empty, there is nothing to train on.")
    found.lengths, found.digests = np.array(lengths, np.int32), np.array(digests, np.uint64)
    found.is_kept = np.array(is_kept, bool)
    return found


def _encoded(chunk: Sequence[tuple[str, Any]], reading: Reading) -> Iterator[tuple[str, Any, Any]]:
    """Yield (place, sample, its row or the `BadSample`) of each sample that is not empty."""
    places, samples = list[str](), list[Any]()
    for where, raw in chunk:
        try:
            sample = read_sample(reading, raw)
        except formats.EmptyText:
            continue
        except BadSample as error:
            yield where, None, error
            continue
        places.append(where)
        samples.append(sample)
    yield from zip(places, samples, reading.encoder.encode(samples), strict=True)


def in_both(train: Examined, held_out: Examined) -> Places:
    """Return the held-out samples that are training samples too, by their number in the held-out data."""
    places = Places()
    for number in np.flatnonzero(np.isin(held_out.digests, train.digests)):
        places.add(f"sample {number + 1}")
    return places


def held_out_twice(examined: Examined, share: float, seed: int) -> tuple[int, Places]:
    """Return (how many samples a run holds out at random, which of them are equal to training samples).

    Args:
        share: of the samples, as ``--validation_split_percentage`` gives it, divided by 100.
    """
    digests = examined.digests[examined.is_kept]
    mask = held_out_mask(len(digests), share, seed)
    places = Places()
    for number in np.flatnonzero(mask & np.isin(digests, digests[~mask])):
        places.add(f"sample {number + 1}")
    return int(mask.sum()), places
