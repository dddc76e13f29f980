"""Scalars of TensorBoard's event files, read without the tensorboard package, which need not be installed.

An event file is a series of records: 8 bytes of length, 4 of its checksum, the content, and 4 of its checksum. The content is a
protocol buffer. The numbers of its fields are those of event.proto and summary.proto in TensorBoard's sources.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAGIC = b"brain.Event:"
"""Bytes in the first record of every event file."""
# Fields of an event, of its summary, and of a value in that.
_STEP = 2
_SUMMARY = 5
_VALUE = 1
_TAG = 1
_NUMBER = 2


def read_scalars(content: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield step, tag and value of each scalar in an event file, up to the first damaged record.

    The last record of a run that was killed may be torn. Values that are tensors, as TensorFlow 2 writes them, are left out.
    """
    position = 0
    while position + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, position)
        event = content[position + 12 : position + 12 + size]
        position += size + 16
        try:
            yield from _scalars_of_event(event)
        except ValueError:
            return


def _scalars_of_event(event: bytes) -> Iterator[tuple[int, str, float]]:
    fields = _fields(event)
    # A step of 0 is not written.
    steps = [int.from_bytes(content, "little") for number, content in fields if number == _STEP]
    for number, summary in fields:
        if number != _SUMMARY:
            continue
        for value_number, value in _fields(summary):
            parts = dict(_fields(value)) if value_number == _VALUE else {}
            # Images, histograms and texts have no number.
            if len(parts.get(_NUMBER, b"")) == 4:
                (scalar,) = struct.unpack("<f", parts[_NUMBER])
                yield (steps or [0])[0], parts.get(_TAG, b"").decode("utf-8", "replace"), scalar


def _fields(message: bytes) -> list[tuple[int, bytes]]:
    """Return number and content of each field of a protocol buffer. Raises ValueError if it is damaged."""
    fields = []
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = divmod(key, 8)
        if wire_type == 0:
            value, position = _varint(message, position)
            fields.append((number, value.to_bytes(10, "little")))
            continue
        # Eight bytes, four bytes, or a length and as many bytes.
        size = {1: 8, 5: 4}.get(wire_type)
        if wire_type == 2:
            size, position = _varint(message, position)
        if size is None or position + size > len(message):
            raise ValueError("a torn field, or one of unknown kind")
        fields.append((number, message[position : position + size]))
        position += size
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number of variable length, and the position after it."""
    value = 0
    # The largest number, of 64 bits, takes ten bytes.
    for index, byte in enumerate(message[position : position + 10]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError("a number without an end")
