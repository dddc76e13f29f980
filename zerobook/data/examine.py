"""Examination of data before any run: format, lengths before cutting, samples that are cut or dropped, duplicates."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np
import xxhash

from zerobook.constants import IGNORE
from zerobook.data import formats
from zerobook.data.formats import BadSample
from zerobook.data.sampler import held_out_mask
from zerobook.data.source import Source
from zerobook.data.templates import CausalEncoder, Encoded
from zerobook.data.tokenize import Chunk, Reading, chunks, detect, list_unread, read_sample
from zerobook.errors import DataError
from zerobook.objective import NextToken
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain

# Locations that are listed; the others are counted.
LISTED = 20


@dataclass
class Locations:
    """Locations of samples in a file: all are counted, and the first ones are listed."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, location: str) -> None:
        self.count += 1
        if len(self.first) < LISTED:
            self.first.append(plain(location, lines=False))


@dataclass
class BadSamples(Locations):
    """Locations of samples that cannot be used, also by reason. The reasons after the first ``LISTED`` are counted as one."""

    by_reason: dict[str, Locations] = field(default_factory=dict)

    def add_reason(self, location: str, reason: str) -> None:
        self.add(f"{location}: {reason}")
        # A reason may quote the sample, and is shown on a terminal.
        reason = plain(reason, lines=False)
        if reason not in self.by_reason and len(self.by_reason) >= LISTED:
            reason = "other reasons"
        self.by_reason.setdefault(reason, Locations()).add(location)


@dataclass
class Examined:
    """Contents of a source."""

    name: str
    format: str = ""
    unread: list[str] = field(default_factory=list)
    """columns, and keys of turns, that the format does not read"""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [samples], tokens of each good sample before cutting"""
    supervised: int = 0
    """supervised tokens before cutting"""
    cut: Locations = field(default_factory=Locations)
    """samples that lose tokens, and keep supervised ones"""
    dropped: Locations = field(default_factory=Locations)
    """samples that keep no supervised token within the maximum length, or have none at all"""
    bad: BadSamples = field(default_factory=BadSamples)
    duplicates: Locations = field(default_factory=Locations)
    """samples that are equal to an earlier one"""
    digests: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64 [samples], of the contents"""
    first: list[tuple[str, Encoded]] = field(default_factory=list)
    """the first rows, with their locations"""
    is_kept: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    """bool [samples], whether a run keeps the sample"""
    has_chats: bool = False

    def summary(self) -> dict[str, Any]:
        """Return JSON-ready facts. ``needed_length`` is the smallest maximum length that cuts no sample."""
        lengths = {}
        if len(self.lengths):
            percentiles = np.percentile(self.lengths, [0, 50, 90, 99, 100]).astype(int).tolist()
            lengths = dict(zip(("shortest", "median", "p90", "p99", "longest"), percentiles, strict=True))
        return {
            "name": self.name,
            "format": self.format,
            "columns_not_read": self.unread,
            "samples": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "supervised_tokens": self.supervised,
            "lengths": lengths,
            "needed_length": int(self.lengths.max(initial=0)),
            "cut": asdict(self.cut),
            "dropped": asdict(self.dropped),
            "bad": asdict(self.bad),
            "duplicates": asdict(self.duplicates),
        }


def examine(
    source: Source,
    encoder: CausalEncoder,
    *,
    length: int,
    format: str | None = None,
    columns: dict[str, str | None] | None = None,
    rows: int = 0,
) -> Examined:
    """Read a source to its end, and return what it contains. This takes about 200 bytes of memory per sample of any length.

    Args:
        encoder: without a maximum length.
        length: maximum length of a run, in tokens. Running text is cut into blocks and loses nothing.
        format: name of the format; None: that of the first samples.
        columns: the columns of a pair that the user named.
        rows: number of first rows to return.

    Raises:
        DataError: no sample fits a format.
    """
    examined = Examined(source.name)
    examiner: _Examiner | None = None
    bar = tqdm(total=source.total, desc=f"reading {source.name}", unit=source.unit.strip(), unit_scale=True, leave=False)
    for chunk in chunks(source.read(), bar):
        if examiner is None:
            # The format is that of the first chunk, as in a run.
            examined.format = format or detect(chunk, columns or {}, {}, skip=True)
            reading = Reading(
                examined.format, columns or {}, encoder, NextToken(), detected=format is None, is_held_out=source.is_held_out
            )
            examined.unread = list_unread(chunk, reading)
            examiner = _Examiner(examined, reading, encoder, length, rows)
        examiner.add_chunk(chunk)
    bar.close()
    if examiner is None:
        raise DataError(f"{source.name}: the dataset is empty, there is nothing to train on.")
    examiner.finish()
    return examined


class _Examiner:
    """Adds the samples of a source to an `Examined`."""

    def __init__(self, examined: Examined, reading: Reading, encoder: CausalEncoder, length: int, rows: int):
        self.examined = examined
        self.reading = reading
        self.length = length
        self.rows = rows
        # The encoder of ``reading`` has no maximum length, and gives the lengths before cutting. This one has that of the run.
        self.cutting_encoder = copy.copy(encoder)
        self.cutting_encoder.length = length
        self.lengths: list[int] = []
        self.digests: list[int] = []
        self.is_kept: list[bool] = []
        self.locations: dict[int, str] = {}  # digest -> the first sample with that content

    def add_chunk(self, chunk: Chunk) -> None:
        for location, sample, encoded in _encode_samples(chunk, self.reading):
            if isinstance(encoded, BadSample):
                self.examined.bad.add_reason(location, str(encoded))
            else:
                self._add_sample(location, sample, encoded)

    # Count a good sample: its tokens, whether it is a duplicate, and whether a run cuts or drops it.
    def _add_sample(self, location: str, sample: formats.Sample, encoded: Encoded) -> None:
        examined = self.examined
        examined.has_chats |= isinstance(sample, formats.Chat)
        if len(examined.first) < self.rows:
            examined.first.append((location, encoded))

        # Samples are compared by digests, so that memory does not grow with their length. Unpaired surrogates, which cannot be
        # encoded, are replaced.
        digest = xxhash.xxh3_64_intdigest(repr(sample).encode(errors="replace"))
        self.digests.append(digest)
        if digest in self.locations:
            examined.duplicates.add(f"{location} (as {self.locations[digest]})")
        self.locations.setdefault(digest, location)

        documents = [encoded, *encoded.others]
        longest = max(len(document.input_ids) for document in documents)
        self.lengths.append(longest)
        for document in documents:
            examined.supervised += int((document.labels != IGNORE).sum())

        # Running text is cut into blocks, and loses nothing.
        if examined.format == "text":
            self.is_kept.append(True)
            return
        # A run drops a sample if cutting leaves it no supervised token. So weigh the sample as the run cuts it.
        result = encoded
        if longest > self.length:
            result = cast("Encoded", self.cutting_encoder.encode([sample])[0])
        self.is_kept.append(any(self.reading.weigh(document) for document in (result, *result.others)))
        if not self.is_kept[-1]:
            examined.dropped.add(f"{location} ({longest} tokens)")
        elif longest > self.length:
            examined.cut.add(f"{location} ({longest} tokens)")

    def finish(self) -> None:
        self.examined.lengths = np.array(self.lengths, np.int32)
        self.examined.digests = np.array(self.digests, np.uint64)
        self.examined.is_kept = np.array(self.is_kept, bool)


def _encode_samples(chunk: Chunk, reading: Reading) -> Iterator[tuple[str, Any, Any]]:
    """Yield (location, sample, its `Encoded` row or its `BadSample`) of each sample that is not empty."""
    locations: list[str] = []
    samples: list[Any] = []
    for location, raw in chunk:
        try:
            sample = read_sample(reading, raw)
        except formats.EmptyText:
            continue
        except BadSample as error:
            yield location, None, error
            continue
        locations.append(location)
        samples.append(sample)
    # One call for the whole chunk: a fast tokenizer works on its texts in parallel.
    yield from zip(locations, samples, reading.encoder.encode(samples), strict=True)


def find_shared_samples(train: Examined, held_out: Examined) -> Locations:
    """Return the held-out samples that are also training samples. Their locations are numbers among the good samples."""
    locations = Locations()
    # A run neither trains on samples that it drops, nor measures a loss on them.
    for number in np.flatnonzero(held_out.is_kept & np.isin(held_out.digests, train.digests[train.is_kept])):
        locations.add(f"sample {number + 1}")
    return locations


def find_repeated_held_out(examined: Examined, share: float, seed: int) -> tuple[int, Locations]:
    """Return the number of samples that a run holds out at random, and those among them that are equal to training samples.

    Their locations are numbers among the samples that the run keeps.

    Args:
        share: the share of the samples that is held out: ``--validation_split_percentage`` divided by 100.
    """
    digests = examined.digests[examined.is_kept]
    # The split of a run is over the samples that the run keeps.
    mask = held_out_mask(len(digests), share, seed)
    locations = Locations()
    for number in np.flatnonzero(mask & np.isin(digests, digests[~mask])):
        locations.add(f"sample {number + 1}")
    return int(mask.sum()), locations
