"""Conversion of raw samples to token ids, chunk by chunk and in order, on several processes."""

import multiprocessing
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from zerobook.data import formats
from zerobook.data.source import Item, Malformed, not_utf8
from zerobook.data.store import Ragged
from zerobook.data.templates import Encoded, Encoder
from zerobook.data.values import json_problem
from zerobook.errors import ConfigError, DataError
from zerobook.objective import Objective
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain

CHUNK_BYTES = 1 << 20
CHUNK_SAMPLES = 1000
# Characters. Longer texts are tokenized in pieces, which end at line ends if possible, since a tokenizer uses about 100 bytes
# of memory per token.
TEXT_PIECE = 1 << 20
# Bytes of a JSON line that is not running text.
SAMPLE_LIMIT = 16 << 20

# Name of the count of samples that are truncated but keep supervised tokens.
CUT = "cut to the maximum length"
BY_DEFAULT_TEMPLATE = "rendered by the default chat template"
DROPPED = "dropped, nothing supervised within the maximum length"

# (location, row) of each sample.
Chunk = list[tuple[str, Any]]


@dataclass(frozen=True)
class Reading:
    """Settings that convert the samples of a source to token ids. Sent to worker processes.

    ``detected``: the user did not name the format, so a column that the format does not read may be a mistake.
    ``is_held_out``: no sample is trained on.
    """

    format: str
    columns: dict[str, str | None]
    encoder: Encoder
    objective: Objective
    detected: bool = False
    is_held_out: bool = False

    def weigh(self, document: Encoded) -> int:
        """Return the objective's weight of a document. Raises `ConfigError` if it is not an integer of at least 0."""
        weight = self.objective.weight({"input_ids": document.input_ids, "labels": document.labels, **document.extra})
        if not isinstance(weight, int | np.integer) or weight < 0:
            raise ConfigError(
                f"{type(self.objective).__name__}.weight gave {weight!r}; it has to be an integer of at least 0, since the "
                "loss of a step is divided by the sum of its rows' weights."
            )
        return int(weight)


@dataclass
class EncodedChunk:
    """Encoded documents. A sample has several if the chat template rewrites earlier turns.

    ``ids`` and ``labels`` (None: equal to the ids) are the documents' tokens, ``extra`` their further arrays by name.
    ``weights``, int32 [documents], are the objective's; ``begins``, bool [documents], marks the first document of each sample.
    ``bad`` holds (location, reason) of bad samples; ``counts`` says what was done to samples, and how often.
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
    for location, row, cost in items:
        chunk.append((location, row))
        size += _estimate_size(row)
        bar.update(cost)
        # The number is limited, too: a megabyte of short samples would be too many to encode at once.
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_SAMPLES:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def _estimate_size(row: object) -> int:
    """Return the approximate number of bytes of a row. Values that are not texts count as 200."""
    if isinstance(row, bytes):
        return len(row)
    if not isinstance(row, dict):
        return 200
    size = 0
    for value in row.values():
        size += len(value) if isinstance(value, str) else 200
    return size


def detect(
    chunk: Chunk, columns: dict[str, str | None], encoder_formats: Mapping[str, formats.Format], *, skip: bool = False
) -> str:
    """Return the format of the first sample that is an object. Broken lines, and lines with another value, do not count.

    Args:
        columns: the names of the source and the target column, where the user gave them.
        encoder_formats: the formats of the encoder.
        skip: if the sample fits no format, try the next one. If none fits, the error is that of the first one.

    Raises:
        DataError: no sample is an object, or its columns fit no format.
    """
    first_error: DataError | None = None
    for _, raw in chunk:
        row = parse_row(raw)
        if not isinstance(row, dict):
            continue
        try:
            return formats.detect(row, encoder_formats=encoder_formats, **columns)
        except DataError as error:
            # Report the first sample: it is the one that the user sees at the head of the file.
            first_error = first_error or error
            if not skip:
                break
    if first_error:
        raise first_error
    if chunk:
        raise DataError(f"none of the first {len(chunk)} samples can be read: {_unreadable_reason(chunk[0][1])}.")
    raise DataError("the dataset is empty, there is nothing to train on.")


def list_unread(chunk: Chunk, reading: Reading) -> list[str]:
    """Return the columns, and the keys of turns, that the format does not read. A key may be in some samples only."""
    rows = (parse_row(raw) for _, raw in chunk)
    readable = [row for row in rows if isinstance(row, dict)]
    encoder_formats = formats.formats_of(reading.encoder)
    return formats.list_unread(reading.format, readable, encoder_formats=encoder_formats, **reading.columns)


def encode_all(reading: Reading, raw_chunks: Iterator[Chunk], workers: int) -> Iterator[EncodedChunk]:
    """Yield encoded chunks in their order. Memory holds about two chunks per worker."""
    if workers == 1:
        for chunk in raw_chunks:
            yield _encode(reading, chunk)
        return
    # A fork would copy locks that other threads hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(reading,)) as pool:
        # Results are yielded in the order of the chunks, and not in the order in which the workers complete them.
        submitted: deque[Future] = deque()
        for chunk in raw_chunks:
            submitted.append(pool.submit(_encode_in_worker, chunk))
            if len(submitted) > 2 * workers:
                yield submitted.popleft().result()
        # The source has ended, and up to two chunks per worker are not yielded yet.
        while submitted:
            yield submitted.popleft().result()


# In a worker process, the reading for all of its chunks. It is sent once, at the start, and not with each chunk.
_READING: list[Reading] = []


# Set up a worker process before its first chunk.
def _start_worker(reading: Reading) -> None:
    # One thread per worker, since the workers share the cores. The tokenizers library reads this at its first use.
    os.environ.update({"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    _READING[:] = [reading]
    # Without this thread, a worker would wait for chunks for ever if its parent is killed.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has one
    os._exit(1)


def _encode_in_worker(chunk: Chunk) -> EncodedChunk:
    return _encode(_READING[0], chunk)


def parse_row(row: object) -> object:
    """Return the object of a JSON line, or `Malformed`. A row that is not bytes is returned as it is."""
    if not isinstance(row, bytes):
        return row
    import orjson

    try:
        return orjson.loads(row)
    except orjson.JSONDecodeError as error:
        try:
            # orjson does not say that bytes are not UTF-8, which is the more useful reason.
            row.decode()
        except UnicodeDecodeError as decode_error:
            return Malformed(not_utf8(decode_error.start))
        return Malformed(f"{json_problem(error)} (column {error.colno})")


# Return the reason that a row cannot be read, with advice on the form of JSON files.
def _unreadable_reason(raw: object) -> str:
    row = parse_row(raw)
    reason = row.reason if isinstance(row, Malformed) else f"a {type(row).__name__}, not an object"
    # A JSON file may be one object with samples in it, or an array under the name of JSON Lines.
    if isinstance(raw, bytes):
        reason += ". A JSON file has one sample in each line, or it is named .json and is an array of samples"
    return reason


def read_sample(reading: Reading, raw: object) -> Any:
    """Return the sample in a row. Runs and ``zerobook data`` both use this function, so they refuse the same rows.

    Raises:
        BadSample: it cannot be used.
        EmptyText: it is a document without text.
    """
    row = parse_row(raw)
    encoder_formats = formats.formats_of(reading.encoder)
    if isinstance(row, Malformed):
        raise formats.BadSample(row.reason)
    # Running text is cut into blocks, so it may have any length.
    if isinstance(raw, bytes) and len(raw) > SAMPLE_LIMIT and reading.format != "text":
        raise formats.BadSample(f"{len(raw)} bytes; a sample of more than {SAMPLE_LIMIT} bytes is refused")
    sample = formats.parse(reading.format, row, encoder_formats=encoder_formats, **reading.columns)
    if reading.detected and reading.format not in encoder_formats:
        # The user did not name the format, and a column that it does not read may change the meaning of the sample.
        formats.check_unread(cast("Mapping[str, Any]", row), sample)
        if not reading.is_held_out:
            formats.check_split(cast("Mapping[str, Any]", row))
    return sample


def _encode(reading: Reading, chunk: Chunk) -> EncodedChunk:
    """Parse and tokenize one chunk. Bad samples are returned with location and reason."""
    bad: dict[int, tuple[str, str]] = {}  # number of a bad sample in the chunk -> its location and reason
    counts: Counter = Counter()

    # Read the samples. A long text becomes several pieces, any other sample is one piece.
    samples: list[tuple[int, str, list[formats.Sample]]] = []
    for number, (location, raw) in enumerate(chunk):
        try:
            samples.append((number, location, _split_text(read_sample(reading, raw))))
        except formats.EmptyText:
            counts["empty texts left out"] += 1
        except formats.BadSample as error:
            bad[number] = _describe_bad(location, error)

    # One call for all pieces, since the tokenizers library works on the texts of a call in parallel.
    results = iter(reading.encoder.encode([piece for _, _, pieces in samples for piece in pieces]))

    documents: list[Encoded] = []
    weights: list[int] = []
    begins: list[bool] = []
    has_default_template = getattr(reading.encoder, "has_default_template", False)
    for number, location, pieces in samples:
        encoded = _join_pieces([next(results) for _ in pieces])
        if isinstance(encoded, formats.BadSample):
            bad[number] = _describe_bad(location, encoded)
            continue
        _count_changes(counts, encoded, default_template=has_default_template and isinstance(pieces[0], formats.Chat))
        # A long text may be read in several segments. All but the first continue a sample, and begin none.
        begins_sample = getattr(pieces[0], "begins", True)
        for document in (encoded, *encoded.others):
            weight = reading.weigh(document)
            # Running text is not dropped: it is cut into blocks later, and these are weighed.
            if not weight and reading.format != "text":
                reason = DROPPED if document.cut else "dropped, nothing supervised"
                counts[reason] += 1
                continue
            counts[CUT] += document.cut
            documents.append(document)
            weights.append(weight)
            begins.append(begins_sample)
            # The further documents of the sample do not begin it.
            begins_sample = False

    ids = Ragged.join([document.input_ids for document in documents])
    labels = None
    if reading.format != "text":
        labels = Ragged.join([document.labels for document in documents])
    # Some samples are bad when they are read, and others when they are encoded. Report them in the order of the source.
    bad_in_order = [bad[number] for number in sorted(bad)]
    extra = _join_extra(documents)
    return EncodedChunk(ids, labels, extra, np.array(weights, np.int32), np.array(begins, bool), bad_in_order, counts)


def _count_changes(counts: Counter, sample: Encoded, *, default_template: bool) -> None:
    """Count what the encoder did to a sample that its user may not expect."""
    counts["texts with the name of a special token, read as characters"] += sample.plain
    counts[BY_DEFAULT_TEMPLATE] += default_template
    counts["rows added for turns that the chat template rewrites later on"] += len(sample.others)
    for document in (sample, *sample.others):
        counts["turns given an end-of-text token"] += document.added_eos
        counts["turns of which the chat template leaves out a part"] += document.shortened


def _join_extra(documents: list[Encoded]) -> dict[str, Ragged]:
    """Return the arrays that a user's encoder adds to ids and labels, by name.

    Raises:
        DataError: the documents have different arrays.
    """
    if not documents:
        return {}
    names = set(documents[0].extra)
    for document in documents:
        document_names = set(document.extra)
        if document_names != names:
            raise DataError(
                f"the encoder gave documents with the arrays {sorted(names)} and others with {sorted(document_names)} beside "
                "ids and labels. Every document needs the same arrays; an array may be empty."
            )
    joined = {}
    for name in sorted(names):
        joined[name] = Ragged.join([document.extra[name] for document in documents])
    return joined


def _describe_bad(location: str, reason: Exception) -> tuple[str, str]:
    """Return a bad sample's location and reason, each in one line. The message of a template may quote lines of the sample."""
    return plain(location, lines=False), plain(str(reason), lines=False)


def _split_text(sample: formats.Sample) -> list[formats.Sample]:
    """Return the pieces of a text, of at most `TEXT_PIECE` characters each. Any other sample is one piece."""
    if not isinstance(sample, formats.Text) or len(sample.text) <= TEXT_PIECE:
        return [sample]
    pieces: list[formats.Sample] = []
    start = 0
    while start < len(sample.text):
        stop = min(start + TEXT_PIECE, len(sample.text))
        if stop < len(sample.text):
            # Cut at the last line end, if there is one.
            line_end = sample.text.rfind("\n", start, stop) + 1
            if line_end > start:
                stop = line_end
        begins = sample.begins and start == 0
        ends = sample.ends and stop == len(sample.text)
        pieces.append(formats.Text(sample.text[start:stop], begins, ends))
        start = stop
    return pieces


def _join_pieces(pieces: list[Encoded | formats.BadSample]) -> Encoded | formats.BadSample:
    """Return the encoded pieces of a sample as one document; if a piece is bad, return the first bad one."""
    for piece in pieces:
        if isinstance(piece, formats.BadSample):
            return piece
    encoded = cast("list[Encoded]", pieces)
    if len(encoded) == 1:
        return encoded[0]
    # Only running text has several pieces. All of it is supervised, so the labels are the ids.
    ids = np.concatenate([piece.input_ids for piece in encoded])
    return Encoded(ids, ids, plain=any(piece.plain for piece in encoded))
