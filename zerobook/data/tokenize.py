"""Conversion of raw samples to token ids, chunk by chunk and in order, on several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from zerobook.data import formats
from zerobook.data.source import Item, Malformed, not_utf8
from zerobook.data.store import Ragged
from zerobook.data.templates import Encoded, Encoder
from zerobook.data.values import json_problem
from zerobook.errors import ConfigError, DataError
from zerobook.objective import Objective
from zerobook.utils.terminal import plain

if TYPE_CHECKING:
    from zerobook.utils.bars import tqdm

CHUNK_BYTES = 1 << 20
CHUNK_SAMPLES = 1000
TEXT_PIECE = 1 << 20
"""Characters. Longer texts are tokenized in pieces, cut at line ends, since a tokenizer needs some 100 bytes a token."""
SAMPLE_LIMIT = 16 << 20
"""Bytes of a JSON line that is not running text."""

CUT = "cut to the maximum length"
"""Count of the samples that lose tokens, and keep supervised ones."""
BY_DEFAULT_TEMPLATE = "rendered by the default chat template"
DROPPED = "dropped, nothing supervised within the maximum length"

Chunk = list[tuple[str, Any]]


@dataclass(frozen=True)
class Reading:
    """Settings that convert the samples of a source to token ids. Sent to worker processes.

    ``detected``: the user did not name the format, so columns that it does not read may be a mistake. ``is_held_out``: no
    sample is trained on.
    """

    format: str
    columns: dict[str, str | None]
    encoder: Encoder
    objective: Objective
    detected: bool = False
    is_held_out: bool = False

    def weigh(self, document: Encoded) -> int:
        """Return the objective's weight of a document. Raises `ConfigError` where it is no integer of at least 0."""
        weight = self.objective.weight({"input_ids": document.input_ids, "labels": document.labels, **document.extra})
        if not isinstance(weight, int | np.integer) or weight < 0:
            raise ConfigError(
                f"{type(self.objective).__name__}.weight gave {weight!r}; it has to be an integer of at least 0, since the "
                "loss of a step is divided by the sum of its rows' weights."
            )
        return int(weight)


@dataclass
class EncodedChunk:
    """Encoded documents: ``ids``, ``labels`` (None: equal to the ids), and ``extra`` arrays by name.

    ``weights``, int32 [documents], are the objective's; ``begins``, bool [documents], marks the first of each sample;
    ``bad`` holds (place, reason) of bad samples; ``counts`` says what was done.
    """

    ids: Ragged
    labels: Ragged | None
    extra: dict[str, Ragged]
    weights: np.ndarray
    begins: np.ndarray
    bad: list[tuple[str, str]]
    counts: Counter


def chunks(items: Iterable[Item], bar: tqdm) -> Iterator[Chunk]:
    """Yield items in chunks of about a megabyte. Advances ``bar`` by the amount that was read."""
    chunk: Chunk = []
    size = 0
    for where, row, cost in items:
        chunk.append((where, row))
        size += _size(row)
        bar.update(cost)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_SAMPLES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _size(row: object) -> int:
    """Return the approximate number of bytes of text."""
    if isinstance(row, dict):
        return sum(len(value) if isinstance(value, str) else 200 for value in row.values())
    return len(row) if isinstance(row, bytes) else 200


def detect(chunk: Chunk, columns: dict[str, str | None], own: Mapping[str, formats.Format], *, skip: bool = False) -> str:
    """Return the format of the first readable sample.

    Args:
        columns: the columns of a pair that the user named.
        own: the formats of the encoder.
        skip: pass over samples that fit no format; if none fits, the error is that of the first one.

    Raises:
        DataError: there is no readable sample, or its columns fit no format.
    """
    refused: DataError | None = None
    for _, raw in chunk:
        row = parsed(raw)
        if not isinstance(row, dict):
            continue
        try:
            return formats.detect(row, own=own, **columns)
        except DataError as error:
            refused = refused or error
            if not skip:
                break
    if refused:
        raise refused
    if chunk:
        raise DataError(f"none of the first {len(chunk)} samples can be read: {_reason(parsed(chunk[0][1]))}.")
    raise DataError("the dataset is empty, there is nothing to train on.")


def ignored(chunk: Chunk, reading: Reading) -> list[str]:
    """Return the columns, and the keys of turns, that the format does not read. A key may be in some samples only."""
    rows = (parsed(raw) for _, raw in chunk)
    readable = [row for row in rows if isinstance(row, dict)]
    return formats.ignored(reading.format, readable, own=formats.own_of(reading.encoder), **reading.columns)


def encode_all(reading: Reading, parts: Iterator[Chunk], workers: int) -> Iterator[EncodedChunk]:
    """Yield encoded chunks in their order. Memory holds about two chunks a worker."""
    if workers == 1:
        yield from (_encode(reading, chunk) for chunk in parts)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    with _one_thread_each(), ProcessPoolExecutor(workers, context, initializer=_start, initargs=(reading,)) as pool:
        waiting: deque[Future] = deque()
        for chunk in parts:
            waiting.append(pool.submit(_work, chunk))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    wanted = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


_READING: list[Reading] = []  # of this worker process


def _start(reading: Reading) -> None:
    _READING[:] = [reading]


def _work(chunk: Chunk) -> EncodedChunk:
    return _encode(_READING[0], chunk)


def parsed(row: object) -> object:
    """Return a sample; the object of a JSON line, or `Malformed`."""
    if not isinstance(row, bytes):
        return row
    import orjson

    try:
        return orjson.loads(row)
    except orjson.JSONDecodeError as error:
        try:
            row.decode()
        except UnicodeDecodeError as wrong:
            return Malformed(not_utf8(wrong.start))
        return Malformed(f"{json_problem(error)} (column {error.colno})")


def _reason(row: object) -> str:
    return row.reason if isinstance(row, Malformed) else f"a {type(row).__name__}, not an object"


def read_sample(reading: Reading, raw: object) -> Any:
    """Return the sample of a row, as every run reads it.

    Raises:
        BadSample: it cannot be used.
        EmptyText: it is a document without text.
    """
    row = parsed(raw)
    own = formats.own_of(reading.encoder)
    if isinstance(row, Malformed):
        raise formats.BadSample(row.reason)
    if isinstance(raw, bytes) and len(raw) > SAMPLE_LIMIT and reading.format != "text":
        raise formats.BadSample(f"{len(raw)} bytes; a sample of more than {SAMPLE_LIMIT} bytes is refused")
    sample = formats.parse(reading.format, row, own=own, **reading.columns)
    if reading.detected and reading.format not in own:
        formats.check_unread(cast("Mapping[str, Any]", row), sample)
        if not reading.is_held_out:
            formats.check_split(cast("Mapping[str, Any]", row))
    return sample


def _encode(reading: Reading, chunk: list[tuple[str, Any]]) -> EncodedChunk:
    """Parse and tokenize one chunk. Bad samples are returned with place and reason."""
    bad: list[tuple[str, str]] = []
    counts: Counter = Counter()
    samples, places = [], []
    for where, raw in chunk:
        try:
            sample = read_sample(reading, raw)
        except formats.EmptyText:
            counts["empty texts left out"] += 1
            continue
        except formats.BadSample as error:
            bad.append(_in_a_line(where, error))
            continue
        samples.append(sample)
        places.append(where)
    pieces = [_pieces(sample) for sample in samples]
    documents: list[Encoded] = []
    weights: list[int] = []
    begins: list[bool] = []
    has_default_template = getattr(reading.encoder, "has_default_template", False)
    encoded = iter(reading.encoder.encode([piece for parts in pieces for piece in parts]))
    for where, parts in zip(places, pieces, strict=True):
        found = [next(encoded) for _ in parts]
        refused = next((f for f in found if isinstance(f, formats.BadSample)), None)
        if refused is not None:
            bad.append(_in_a_line(where, refused))
            continue
        good = [f for f in found if isinstance(f, Encoded)]
        first = good[0] if len(good) == 1 else _join(good)
        counts["texts with the name of a special token, read as characters"] += first.plain
        begin = getattr(parts[0], "begins", True)
        counts[BY_DEFAULT_TEMPLATE] += has_default_template and isinstance(parts[0], formats.Chat)
        counts["rows added for turns that the chat template rewrites later on"] += len(first.others)
        for document in (first, *first.others):
            counts["turns given an end-of-text token"] += document.added_eos
            counts["turns of which the chat template leaves out a part"] += document.shortened
            weight = reading.weigh(document)
            if reading.format == "text" or weight:
                counts[CUT] += document.cut
                documents.append(document)
                weights.append(weight)
                begins.append(begin)
                begin = False
            elif document.cut:
                counts[DROPPED] += 1
            else:
                counts["dropped, nothing supervised"] += 1
    ids = Ragged.join([d.input_ids for d in documents])
    labels = None if reading.format == "text" else Ragged.join([d.labels for d in documents])
    names = set(documents[0].extra) if documents else set()
    if other := next((set(d.extra) for d in documents if set(d.extra) != names), None):
        raise DataError(
            f"the encoder gave documents with the arrays {sorted(names)} and others with {sorted(other)} beside ids and "
            "labels. Every document needs the same arrays; an array may be empty."
        )
    extra = {name: Ragged.join([document.extra[name] for document in documents]) for name in sorted(names)}
    return EncodedChunk(ids, labels, extra, np.array(weights, np.int32), np.array(begins, bool), bad, counts)


def _in_a_line(where: str, reason: Exception) -> tuple[str, str]:
    """Return a bad sample's place and reason, each in one line: a template's reason may quote the sample."""
    return plain(where, lines=False), plain(str(reason), lines=False)


def _pieces(sample: formats.Sample) -> list[formats.Sample]:
    """Return a long text in pieces for the tokenizer, and any other sample whole."""
    if not isinstance(sample, formats.Text) or len(sample.text) <= TEXT_PIECE:
        return [sample]
    pieces: list[formats.Sample] = []
    start = 0
    while start < len(sample.text):
        stop = min(start + TEXT_PIECE, len(sample.text))
        line_end = sample.text.rfind("\n", start, stop) + 1
        if stop < len(sample.text) and line_end > start:
            stop = line_end
        begins, ends = sample.begins and not start, sample.ends and stop == len(sample.text)
        pieces.append(formats.Text(sample.text[start:stop], begins, ends))
        start = stop
    return pieces


def _join(pieces: list[Encoded]) -> Encoded:
    """Return the pieces of a text as one document."""
    joined = np.concatenate([piece.input_ids for piece in pieces])
    return Encoded(joined, joined, plain=any(piece.plain for piece in pieces))
