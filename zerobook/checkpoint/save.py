"""Write checkpoints: each rank writes its pieces, and rank 0 makes one checkpoint of them, also in the background.

Ranks tell each other about a save through files only, so that a thread can write while the training runs collectives. When a
rank has flushed its files to disk, it writes ``rank-N.json`` into the staging folder; after an error, it writes the reason into
``rank-N.failed``.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.hook_state import HOOKS, HookState
from zerobook.checkpoint.merge import is_slice, merge
from zerobook.checkpoint.progress import Progress
from zerobook.errors import CheckpointError
from zerobook.health.position import touch
from zerobook.strategy import Piece, Strategy
from zerobook.utils.reading import file_digest, read_json, read_text

FILE_BYTES = 512 << 20
# Bytes reserved for the header of a file. About 400 tensors fit into it; with more, another file begins.
HEADER_BYTES = 1 << 16
INDEX = "tensors.json"
# Persistent buffers by name, in their own dtypes; rank 0 writes them.
BUFFERS = "buffers.safetensors"
# Key of the index for the steps that AdamW has counted. It is a key of its own, since earlier versions read it.
ADAM_STEPS = "adam_steps"
# Key of the index for the steps that any other optimizer has counted.
STEPS = "optimizer_steps"
# Key of the index for the shapes of optimizer state whose shape is not that of its weight.
STATE_SHAPES = "state_shapes"
# Seconds between two looks into the folder: the first pause, which is doubled each time, and the longest one.
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
# Seconds within which every rank must begin to write. NFS can hide a new folder from other hosts for a minute.
_BEGIN_S = 600
# Elements of the first block of host memory, and of the largest. They are powers of two, since torch rounds pinned memory up
# to one.
_FIRST_BLOCK = 1 << 22
_LARGEST_BLOCK = 1 << 27


class Saved(NamedTuple):
    """The result of a save. ``problem`` is None if ``checkpoint`` is complete; otherwise it is the reason of the failure."""

    checkpoint: Path
    seconds: float
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """The contents of a checkpoint that a save writes: each rank its pieces, and rank 0 the other files too.

    Attributes:
        texts: name of a JSON file -> its content.
        shapes: name -> shape of every tensor of the checkpoint.
        start: when the save began, as a time of `time.monotonic`.
    """

    step: int
    staging: Path
    pieces: Iterable[Piece]
    buffers: dict[str, torch.Tensor]
    texts: dict[str, Any]
    shapes: dict[str, list[int]]
    start: float


class Saver:
    """Saves a run's state, at most one checkpoint at a time.

    Args:
        keep: number of complete checkpoints that stay, see `store.prune`.
        background: copy this rank's share to host memory, and write it while training goes on. The host memory stays allocated
            for the next save. Otherwise the share is written directly.

    Attributes:
        protected: steps whose checkpoints are not pruned.
        keep_best: whether the checkpoint with the lowest held-out loss is not pruned.
    """

    def __init__(self, strategy: Strategy, output_dir: str, *, keep: int | None, background: bool = False):
        self.strategy = strategy
        self.checkpoints = store.folder_of(output_dir)
        self.keep = keep
        self.background = background
        self.protected: frozenset[int] = frozenset()
        self.keep_best = True
        self._host_blocks: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._saving_step: int | None = None
        self._results: list[Saved] = []

    @property
    def writing_step(self) -> int | None:
        """Step of the checkpoint that is written in the background at the moment; None if there is none."""
        if self._thread is None or not self._thread.is_alive():
            return None
        return self._saving_step

    def save(self, progress: Progress, config: dict[str, Any], hooks: HookState | None = None) -> None:
        """Save the state after a complete step. Collective.

        It returns when the checkpoint is complete or has failed; in the background, when the state is copied. Then `results`
        has the outcome.

        Args:
            config: content of the checkpoint's config.json.
        """
        # The blocks of host memory still hold the last save until it is written.
        self.wait()
        strategy = self.strategy
        staging = store.staging_of(self.checkpoints, progress.step)
        start = time.monotonic()
        problem = strategy.on_main(lambda: self._make_staging(staging))
        if problem is not None:
            if strategy.is_main:
                self._results.append(Saved(self.checkpoints / store.name_of(progress.step), 0.0, problem))
            return
        contents = self._collect(progress, config, hooks or HookState(), staging, start)
        if self.background:
            self._saving_step = progress.step
            self._thread = threading.Thread(target=self._write, args=(contents,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(contents)
            # Ranks go on when rank 0 has made the checkpoint. Collective.
            strategy.barrier()

    def _collect(self, progress: Progress, config: dict[str, Any], hooks: HookState, staging: Path, start: float) -> _Contents:
        """Collect what this rank writes. In the background, it is a copy of everything that the training changes."""
        strategy = self.strategy
        # Optimizers make their state in their first step. Make it now, so that its shapes are known.
        strategy.materialise_optimizer()
        weight_shapes = {name: list(strategy.shape(parameter)) for name, parameter in strategy.trainable()}
        steps_key = ADAM_STEPS if strategy.plan.optimizer == "adamw" else STEPS
        # The index of the tensors, to which rank 0 adds the pieces later.
        index = {steps_key: strategy.optimizer_steps(), "written_by": strategy.describe(), "shapes": weight_shapes}
        shapes = _tensor_shapes(strategy)
        # The tensors of hooks have the shapes of the weights.
        for key in hooks.tensors:
            for name, shape in weight_shapes.items():
                shapes[f"{key}/{name}"] = shape
        # Names are KEY/PARAMETER. A reader takes a tensor to have the shape of its weight, unless the index has another shape.
        state_shapes = {name: shape for name, shape in shapes.items() if shape != weight_shapes[name.partition("/")[2]]}
        if state_shapes:
            index[STATE_SHAPES] = state_shapes
        texts = {INDEX: index, store.PROGRESS: progress.to_json(), "config.json": config}
        if hooks.values:
            texts[HOOKS] = hooks.values
        buffers = strategy.buffers() if strategy.is_main else {}
        pieces: Iterable[Piece] = strategy.pieces(hooks.tensors)
        if self.background:
            pieces = self._copy_pieces(pieces)
            texts = json.loads(json.dumps(texts))
        else:
            pieces = _note_progress(pieces)
        return _Contents(
            step=progress.step,
            staging=staging,
            pieces=pieces,
            buffers=buffers,
            texts=texts,
            shapes=shapes,
            start=start,
        )

    def _make_staging(self, staging: Path) -> str | None:
        """Make the folder that a save writes into. Return the error message if it cannot be made, else None. Rank 0."""
        # Prune before writing: an earlier attempt may have kept more checkpoints, and `check_space` counts their space as free.
        store.prune(self.checkpoints, self.keep, self.protected, keep_best=self.keep_best)
        try:
            store.make_staging(staging)
        except OSError as error:
            return f"the folder {staging} cannot be made: {error.strerror or error}"
        return None

    def results(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call; on rank 0 only."""
        ended = []
        # Take the results out one at a time, since the writing thread may append another one meanwhile.
        while self._results:
            ended.append(self._results.pop(0))
        return ended

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return copies of ``pieces`` in blocks of host memory. A piece that does not fit into the rest of a block is cut."""
        copies = []
        next_block = 0
        # The unused rest of the current block.
        room = torch.empty(0)
        for piece in pieces:
            uncopied = [piece]
            while uncopied:
                if not len(room):
                    room = self._get_block(next_block, pinned=piece.values.is_cuda)
                    next_block += 1
                # Copy as much of the first piece as fits into the block. What is left of it comes next.
                head, rest = uncopied.pop(0).cut(len(room))
                uncopied = rest + uncopied
                count = head.values.numel()
                copy = room[:count].view(head.values.shape)
                copy.copy_(head.values, non_blocking=True)
                copies.append(head._replace(values=copy))
                room = room[count:]
        # Wait for the copies, which are asynchronous: the next step changes the tensors that are copied.
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize(self.strategy.device)
        return copies

    def _get_block(self, number: int, *, pinned: bool) -> torch.Tensor:
        """Return a block of host memory, fp32 [n], which is made at its first use. Each is twice as large as the one before."""
        if number == len(self._host_blocks):
            elements = min(_FIRST_BLOCK << number, _LARGEST_BLOCK)
            self._host_blocks.append(torch.empty(elements, dtype=torch.float32, pin_memory=pinned))
        return self._host_blocks[number]

    def _write(self, contents: _Contents) -> None:
        """Write this rank's share. Rank 0 then makes the checkpoint, and appends the result to `_results`."""
        staging = contents.staging
        if not _wait_until_visible(staging):
            # Rank 0 reports that this rank did not begin.
            return
        self._write_share(staging, contents.pieces)
        if not self.strategy.is_main:
            return
        # Errors become the problem of the result: in a thread, nobody would see a raised error.
        problem: str | None = None
        try:
            indices = self._wait_for_shares(staging)
            complete(staging, contents.step, indices, shapes=contents.shapes, texts=contents.texts, buffers=contents.buffers)
            store.prune(self.checkpoints, self.keep, self.protected, keep_best=self.keep_best)
        except OSError as error:
            problem = f"rank 0: {error.strerror or error} ({error.filename or staging})"
        except CheckpointError as error:
            problem = str(error)
        # Ranks that still write find that their folder is gone, and stop writing.
        if problem is not None:
            shutil.rmtree(staging, ignore_errors=True)
        self._results.append(Saved(self.checkpoints / store.name_of(contents.step), time.monotonic() - contents.start, problem))

    def _write_share(self, staging: Path, pieces: Iterable[Piece]) -> None:
        """Write this rank's pieces. Then write their index, or the reason why they could not be written, for rank 0."""
        rank = self.strategy.rank
        failed = staging / f"rank-{rank}.failed"
        try:
            index = write_pieces(staging, rank, pieces)
            # The file gets its name when it is complete, since rank 0 reads it as soon as it sees the name.
            partial = staging / f"rank-{rank}.part"
            partial.write_text(json.dumps(index))
            partial.rename(staging / f"rank-{rank}.json")
        except OSError as error:
            _report_failure(failed, f"{error.strerror or error} ({error.filename or staging})")
        except Exception as error:
            # Rank 0 must learn of every error: in a thread, nobody would see a raised one.
            _report_failure(failed, f"{type(error).__name__}: {error}")

    def _wait_for_shares(self, staging: Path) -> list[dict[str, Any]]:
        """Wait until every rank has written its share, and return what `write_pieces` returned on each, in order. Rank 0.

        Raises:
            CheckpointError: a rank could not write its share, or did not begin to.
        """
        ranks = range(self.strategy.world_size)
        indices: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _BEGIN_S
        pause = _FIRST_PAUSE_S
        while True:
            # List the folder instead of looking for single files: NFS may answer for a minute that a new file is missing, but
            # updates a listing when the folder is opened.
            names = os.listdir(staging)
            for rank in ranks:
                if rank not in indices:
                    index = _read_share(staging, rank, names, is_late=time.monotonic() > deadline)
                    if index is not None:
                        indices[rank] = index
            if len(indices) == len(ranks):
                return [indices[rank] for rank in ranks]
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def complete(
    staging: Path,
    step: int,
    indices: list[dict[str, Any]],
    *,
    shapes: dict[str, list[int]],
    texts: dict[str, Any],
    buffers: dict[str, torch.Tensor],
) -> None:
    """Make the checkpoint of ``step`` of the pieces in ``staging``.

    Args:
        indices: what `write_pieces` returned on each rank.
        shapes: name -> shape of every tensor of the checkpoint.
        texts: name of a JSON file -> its content. The pieces are added to the index of the tensors, `INDEX`.

    Raises:
        CheckpointError: the pieces do not make complete tensors.
    """
    pieces = merge([index["pieces"] for index in indices], shapes)
    texts[INDEX]["pieces"] = pieces
    for name, content in texts.items():
        # With an indent, each number is in a line of its own, and the index may list thousands of pieces.
        indent = None if name == INDEX else 1
        (staging / name).write_text(json.dumps(content, indent=indent))
    (staging / BUFFERS).write_bytes(safetensors.torch.save(buffers))
    digests: dict[str, str] = {}
    for index in indices:
        digests |= index["digests"]
    # Earlier versions can read format 4, which has segments only, and only the state of AdamW.
    has_slices = any(is_slice(entry) for entries in pieces.values() for entry in entries)
    is_format_4 = ADAM_STEPS in texts[INDEX] and not has_slices
    store.publish(staging, step, digests, 4 if is_format_4 else store.FORMAT_VERSION)


def _read_share(staging: Path, rank: int, names: list[str], *, is_late: bool) -> dict[str, Any] | None:
    """Return the index that a rank has written, and delete its file; None if the rank is still writing.

    Args:
        names: names of the files in ``staging``.
        is_late: whether each rank should have begun by now.

    Raises:
        CheckpointError: the rank failed, or it is late and has not begun.
    """
    done = staging / f"rank-{rank}.json"
    failed = staging / f"rank-{rank}.failed"
    if failed.name in names:
        # The rank creates the file first, and writes the reason into it after that. Wait for the reason.
        time.sleep(_FIRST_PAUSE_S)
        raise CheckpointError(f"rank {rank}: {read_text(failed) or 'it could not write why; the disk may be full'}")
    if done.name in names:
        index: dict[str, Any] = read_json(done)
        done.unlink()
        return index
    if is_late and not any(name.startswith(_file_prefix(rank)) for name in names):
        raise CheckpointError(f"rank {rank}: it did not begin to write within {_BEGIN_S:g} s; its host may not see {staging}")
    return None


def _wait_until_visible(staging: Path) -> bool:
    """Wait until this host sees the folder that rank 0 has made. Return False if it does not within `_BEGIN_S` seconds."""
    deadline = time.monotonic() + _BEGIN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if staging.name in os.listdir(staging.parent):
                return True
        time.sleep(_LONGEST_PAUSE_S)
    return False


def _note_progress(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces, and note progress after each is written: all of them may take longer than the time limit of a save."""
    for piece in pieces:
        yield piece
        touch()


# Returns the prefix of the names of a rank's safetensors files.
def _file_prefix(rank: int) -> str:
    return f"tensors-{rank:05d}-"


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write ``pieces`` into safetensors files, and flush these to disk. A file has at most `FILE_BYTES`, or a single piece.

    Pieces are written one by one, and none is kept in memory.

    Returns:
        A dict with ``pieces``: tensor's name, as ``exp_avg/PARAMETER``, -> its entries as in `zerobook.checkpoint.merge`; and
        ``digests``: name -> digest of each file.
    """
    entries: dict[str, list] = {}
    digests: dict[str, str] = {}
    file: _File | None = None
    try:
        for name, key, offset, values in pieces:
            tensor_name = f"{key or 'weight'}/{name}"
            piece_name = entry_name(tensor_name, offset)
            # Begin another file if this one is full.
            if file is not None and not file.has_room(piece_name, values):
                digests[file.path.name] = file.close()
                file = None
            if file is None:
                file = _File(folder / f"{_file_prefix(rank)}{len(digests):05d}.safetensors")
            file.add(piece_name, values)
            # The entry of a segment of the flattened tensor has its start and stop, that of a slice its offset and shape.
            if len(offset) == 1:
                entry = [offset[0], offset[0] + values.numel(), file.path.name]
            else:
                entry = [list(offset), list(values.shape), file.path.name]
            entries.setdefault(tensor_name, []).append(entry)
        if file is not None:
            digests[file.path.name] = file.close()
    except OSError:
        if file is not None:
            file.abandon()
        raise
    return {"pieces": entries, "digests": digests}


def entry_name(name: str, offset: Sequence[int]) -> str:
    """Return the name of a piece in its file: ``exp_avg/PARAMETER@OFFSET``."""
    return f"{name}@{','.join(map(str, offset))}"


class _File:
    """A safetensors file that is written tensor by tensor. The header is written last, into space reserved at the front.

    The format is: 8 bytes with the header's length, the header (JSON, filled up with spaces), the bytes of the tensors
    (https://github.com/huggingface/safetensors#format). The library cannot do this: it needs all tensors at once, and copies
    them twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self._header: dict[str, Any] = {}
        # Characters of the header: an empty one is two braces. They are counted so that the header is encoded only once.
        self._header_length = 2
        # Bytes of the tensors so far. The format counts positions of tensors from the end of the header.
        self._data_end = 0
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_BYTES)

    # Returns the entry in the header for a tensor that is appended next. A number in fp32 has 4 bytes.
    def _make_entry(self, values: torch.Tensor) -> dict[str, Any]:
        return {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [self._data_end, self._data_end + 4 * values.numel()],
        }

    def has_room(self, name: str, values: torch.Tensor) -> bool:
        """Return whether ``values`` can be added within the limits of a file and of its header."""
        length = self._header_length + len(json.dumps({name: self._make_entry(values)}))
        return length <= HEADER_BYTES and self._data_end + 4 * values.numel() <= FILE_BYTES

    def add(self, name: str, values: torch.Tensor) -> None:
        """Append a tensor in fp32."""
        self._header[name] = self._make_entry(values)
        self._header_length += len(json.dumps({name: self._header[name]}))
        self._file.write(values.detach().to("cpu", torch.float32).contiguous().numpy().data)
        self._data_end += 4 * values.numel()

    def abandon(self) -> None:
        """Free the file's space. Otherwise, on a full disk, not even the reason of the error could be written."""
        os.truncate(self.path, 0)
        # Closing writes buffered bytes, for which a full disk has no space.
        with suppress(OSError):
            self._file.close()

    def close(self) -> str:
        """Write the header, flush the file to disk, and return its digest."""
        header = json.dumps(self._header).encode()
        assert len(header) <= HEADER_BYTES, f"{self.path}: a header of {len(header)} bytes"
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return file_digest(self.path)


def bytes_of_state(strategy: Strategy) -> int:
    """Return the bytes of the tensors in a checkpoint, which are all in fp32."""
    return 4 * sum(math.prod(shape) for shape in _tensor_shapes(strategy).values())


def _tensor_shapes(strategy: Strategy) -> dict[str, list[int]]:
    """Return name -> shape of all tensors of a checkpoint, with names as ``exp_avg/PARAMETER``."""
    shapes = {}
    for name, parameter in strategy.trainable():
        shapes[f"weight/{name}"] = list(strategy.shape(parameter))
        for key, shape in strategy.state_shapes(parameter).items():
            shapes[f"{key}/{name}"] = list(shape)
    return shapes


def _report_failure(file: Path, reason: str) -> None:
    """Tell rank 0 by a file that this rank failed. An empty file needs no space; the reason is written if there is space."""
    # If the folder is gone, rank 0 has ended the save already, and reports why.
    with suppress(FileNotFoundError):
        file.touch()
        with suppress(OSError):
            file.write_text(reason)
