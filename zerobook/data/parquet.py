"""Parquet files, decompressed in a separate process that has a memory limit.

A few kilobytes of Parquet can decompress to many gigabytes: a page of zeros, one long text for all rows, a list of a billion
nulls. pyarrow has no limit for what it allocates, so the operating system has to limit the process.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet
from pyarrow import Array, RecordBatch
from pyarrow.parquet import FileMetaData

from zerobook.errors import DataError
from zerobook.utils.memory_limit import memory_limit
from zerobook.utils.reading import open_regular

# Bytes that the process may take. A column needs a page of it, and `_BATCH_ROWS` rows.
MOST_MEMORY = 2 << 30
# Bytes of a row, as of a line in other files.
MOST_ROW = 256 << 20
MOST_TOTAL = 1 << 30
# A file is refused if it decompresses to more than `MOST_TOTAL` bytes, and to more than this many times its own size.
MOST_EXPANSION = 10_000
# Most rows, and about the most bytes, that are decompressed at a time.
_BATCH_ROWS = 256
_BATCH_SIZE = 64 << 20
# Bytes of rows that are sent at a time.
_PIECE = 16 << 20
# Bytes of a small object of Python.
_OBJECT_SIZE = 56
# Key in the metadata of the stream, for the number of rows in the file.
_ROWS = b"rows"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from zerobook.data import parquet; parquet._serve(*sys.argv[2:])"
)


def read_parts(file: Path, groups: list[int] | None = None) -> Iterator[tuple[int, list[Any]]]:
    """Yield (the rows in the whole file, the next rows as Python values).

    Args:
        groups: read only these row groups.

    Raises:
        OSError: it is not a regular file, or the disk has an error.
        DataError: it cannot be read within the limits.
    """

    # Fail for a pipe or a device, which would block the other process.
    open_regular(file).close()
    # If zerobook is importable only by an import hook, the new interpreter needs its folder in the path.
    path = [*sys.path, str(Path(__file__).parents[2])]
    total_size = max(MOST_TOTAL, MOST_EXPANSION * file.stat().st_size)
    arguments = [json.dumps(path), str(file), json.dumps(groups), str(MOST_MEMORY), str(total_size)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # This allocator returns free memory to the system, and raises an error at the limit.
            env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        assert process.stdout is not None
        try:
            stream = pyarrow.ipc.open_stream(process.stdout)
            rows = int(stream.schema.metadata[_ROWS])
            for batch in stream:
                yield rows, batch.to_pylist()
        # The stream has no end if the process failed, and is empty if the file has no rows. The exit code tells which.
        except (pyarrow.ArrowException, OSError):
            pass
        else:
            # After the last rows, let the process exit by itself, so that its exit code is known.
            process.wait()
        finally:
            # The caller may stop reading before the file's end.
            process.kill()
            process.stdout.close()
            # A negative code is a signal, such as that of the kernel when memory is short.
            code = process.wait()
        if code:
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip()
            # A code above 1 is the number of an error of the disk, see `_serve`.
            if code > 1:
                raise OSError(code, reason)
            reason = reason or (
                f"the process that decompresses it ended with {code}; it may need more than {MOST_MEMORY >> 20} MiB of memory"
            )
            raise DataError(f"{file}: cannot be read ({reason}).")


# --- in the other process
def _serve(file: str, groups: str, memory: str, total_size: str) -> None:
    """Write a file's rows to stdout as a stream of Arrow. If the file cannot be read, exit with the reason."""
    # pyarrow was imported before, since the large libraries that it maps into memory must not count towards the limit.
    try:
        with memory_limit(int(memory)):
            _send_rows(file, json.loads(groups), int(total_size))
    except MemoryError:
        sys.exit(f"it needs more than {int(memory) >> 20} MiB of memory")
    except DataError as error:
        sys.exit(str(error))
    # A damaged file can cause any error.
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # An error of the disk, which may not occur at the next start, has a number. A damaged file has the code 1.
        sys.exit(getattr(error, "errno", None) or 1)


# Write the rows to stdout. Raises `DataError` if they have more than ``total_size`` bytes.
def _send_rows(file: str, groups: list[int] | None, total_size: int) -> None:
    metadata = pyarrow.parquet.read_metadata(file)
    # Of columns with the same name, a row as a dict would have only the last.
    names = metadata.schema.to_arrow_schema().names
    if len(names) > len(set(names)):
        raise DataError(f"two of its columns {', '.join(map(repr, names))} have the same name; rename one")
    remaining_size = total_size
    stream = None
    for batch in _batches(file, groups, metadata):
        for piece, size in _split_batch(batch):
            # Count the sizes of the rows, since those in the metadata may be wrong.
            remaining_size -= size
            if remaining_size < 0:
                raise DataError(f"it decompresses to more than {MOST_EXPANSION:,} times its size")
            piece = _without_dictionaries(piece)
            if stream is None:
                # The columns' types are known with the first rows.
                schema = piece.schema.with_metadata({_ROWS: str(metadata.num_rows)})
                stream = pyarrow.ipc.new_stream(sys.stdout.buffer, schema)
            stream.write_batch(piece)
            sys.stdout.buffer.flush()
    if stream is not None:
        stream.close()


def _batches(file: str, groups: list[int] | None, metadata: FileMetaData) -> Iterator[RecordBatch]:
    """Yield the rows, many at a time. If the memory does not suffice, yield the remaining ones one at a time."""
    size = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    # This number follows from the average size of a row in the file. In memory, rows may be far larger: a text that many rows
    # share is in the file once.
    rows_per_batch = _BATCH_SIZE * metadata.num_rows // max(1, size)
    yielded_count = 0
    # The file is read a second time, one row at a time, only if the first reading ends with a memory error.
    for rows_at_once in (max(1, min(_BATCH_ROWS, rows_per_batch)), 1):
        # With these options, pages are read one by one, and not whole columns of a row group.
        table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        read_count = 0
        try:
            for batch in table.iter_batches(batch_size=rows_at_once, row_groups=groups, use_threads=False):
                read_count += batch.num_rows
                # The second reading begins at the first row again. Leave out the rows that were yielded before.
                if read_count > yielded_count:
                    yielded_count = read_count
                    yield batch
            return
        except pyarrow.ArrowMemoryError:
            if rows_at_once == 1:
                raise


def _split_batch(batch: RecordBatch) -> Iterator[tuple[RecordBatch, int]]:
    """Yield (a piece of the batch, about how many bytes its rows take as Python values).

    A piece has at most `_PIECE` such bytes, or a single row.
    """
    size = sum(map(_estimate_size, batch.columns))
    if size <= _PIECE or batch.num_rows == 1:
        if size > MOST_ROW:
            raise DataError(f"a row has more than {MOST_ROW >> 20} MiB")
        yield batch, size
        return
    # Halve the batch until each piece is small enough: the rows may differ in size by any factor.
    half = batch.num_rows // 2
    yield from _split_batch(batch.slice(0, half))
    yield from _split_batch(batch.slice(half))


def _without_dictionaries(batch: RecordBatch) -> RecordBatch:
    """Return a batch with plain columns. A dictionary-encoded column would be sent with its dictionary for every few rows."""
    columns = []
    for column in batch.columns:
        is_dictionary = pyarrow.types.is_dictionary(column.type)
        columns.append(column.dictionary_decode() if is_dictionary else column)
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _estimate_size(array: Array) -> int:
    """Return about how many bytes the values of an array take as Python objects. Values of Arrow may share memory."""
    types = pyarrow.types
    kind = array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return _estimate_size(array.storage)
    # Every value becomes a Python object, in addition to the bytes of its content.
    objects_size = _OBJECT_SIZE * len(array)
    if types.is_dictionary(kind):
        # Do not decode the array. If many rows share a long text, the result may be too large for the memory.
        values = array.dictionary
        if types.is_primitive(values.type):
            return objects_size
        lengths = pyarrow.compute.binary_length(values).take(array.indices)
        return objects_size + (pyarrow.compute.sum(lengths).as_py() or 0)
    if types.is_struct(kind):
        return objects_size + sum(map(_estimate_size, array.flatten()))
    # Maps cannot be flattened, so convert them to lists.
    if types.is_map(kind):
        array = array.cast(pyarrow.list_(pyarrow.struct([kind.key_field, kind.item_field])))
    if types.is_nested(kind):  # lists and maps
        return objects_size + _estimate_size(array.flatten())
    if types.is_primitive(kind) or types.is_null(kind) or types.is_decimal(kind):
        return objects_size
    # binary_length does not support string views, so cast them. For other types, the cast copies no text.
    lengths = pyarrow.compute.binary_length(array.cast(pyarrow.large_binary()))
    return objects_size + (pyarrow.compute.sum(lengths).as_py() or 0)
