"""Write checkpoints: each rank writes its part, and rank 0 merges the parts into one checkpoint, also in the background.

Ranks communicate through files only, so that a thread can write while the training runs collectives. When the files of a rank
are flushed to disk, it writes ``rank-N.json`` into the staging folder, or ``rank-N.failed`` with the reason of an error.
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
HEADER_BYTES = 1 << 16
"""Bytes reserved for a file's header: about 400 tensors; with more, another file begins."""
INDEX = "tensors.json"
BUFFERS = "buffers.safetensors"
"""Persistent buffers by name, in their own dtypes; rank 0 writes them."""
ADAM_STEPS = "adam_steps"
"""Key of the index for the steps that AdamW has counted. Earlier versions read it."""
STEPS = "optimizer_steps"
"""Key of the index for the steps that any other optimizer has counted."""
STATE_SHAPES = "state_shapes"
"""Key of the index for the shapes of state that is not of its weight's shape."""
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
"""Seconds between two reads of the folder, at first and at most."""
_BEGIN_S = 600
"""Seconds within which every rank must begin to write. NFS can hide a new folder from other hosts for a minute."""
_FIRST_BLOCK = 1 << 22
_LARGEST_BLOCK = 1 << 27
"""Elements of the first block of host memory, and of the largest: powers of two, to which torch rounds pinned memory up."""


class Saved(NamedTuple):
    """The result of one save: ``problem`` is None if ``checkpoint`` is complete."""

    checkpoint: Path
    seconds: float
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class _Save:
    """A save that has begun: what this rank writes into ``staging``. Rank 0 writes everything but the other ranks' pieces.

    ``texts`` are the contents of the JSON files by name, ``shapes`` those of all tensors by their names in the checkpoint, and
    ``start`` is a time of `time.monotonic`.
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
        keep: complete checkpoints that stay, see `store.prune`.
        background: copy this rank's share to host memory (kept from save to save) and write it while training goes on.
            Otherwise the share is written directly.
    """

    def __init__(self, strategy: Strategy, output_dir: str, *, keep: int | None, background: bool = False):
        self.strategy = strategy
        self.checkpoints = store.folder_of(output_dir)
        self.keep = keep
        self.background = background
        self.protected: frozenset[int] = frozenset()
        """steps whose checkpoints are not pruned"""
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
        """Save the state after a whole step. Collective.

        Returns when the checkpoint is complete or has failed; in the background, when the state is copied. `results` returns
        the outcome.
        """
        hooks = hooks or HookState()
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
        # The state exists before its shapes are asked for: optimizers make it in their first step.
        strategy.materialise_optimizer()
        index = self._make_index()
        shapes = _tensor_shapes(strategy)
        for key in hooks.tensors:
            for name, shape in index["shapes"].items():
                shapes[f"{key}/{name}"] = shape
        state_shapes = {name: shape for name, shape in shapes.items() if shape != index["shapes"][name.partition("/")[2]]}
        if state_shapes:
            index[STATE_SHAPES] = state_shapes
        buffers = strategy.buffers() if strategy.is_main else {}
        texts = {INDEX: index, store.PROGRESS: progress.to_json(), "config.json": config}
        if hooks.values:
            texts[HOOKS] = hooks.values
        if self.background:
            # Training goes on, so everything that it changes is copied first.
            pieces: Iterable[Piece] = self._copy_pieces(strategy.pieces(hooks.tensors))
            texts = json.loads(json.dumps(texts))
        else:
            pieces = _noting_progress(strategy.pieces(hooks.tensors))
        save = _Save(
            step=progress.step,
            staging=staging,
            pieces=pieces,
            buffers=buffers,
            texts=texts,
            shapes=shapes,
            start=start,
        )
        if self.background:
            self._saving_step = progress.step
            self._thread = threading.Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(save)
            # Ranks go on when rank 0 has made the checkpoint. Collective.
            strategy.barrier()

    def _make_staging(self, staging: Path) -> str | None:
        """Make the folder of a save. Return why it cannot be made, None if it is there."""
        # An earlier attempt may have kept more checkpoints, and the space of the surplus is counted as free.
        store.prune(self.checkpoints, self.keep, self.protected, keep_best=self.keep_best)
        try:
            store.make_staging(staging)
        except OSError as error:
            return f"the folder {staging} cannot be made: {error.strerror or error}"
        return None

    def _make_index(self) -> dict[str, Any]:
        """Return the index of the tensors, without their pieces and without shapes of state."""
        strategy = self.strategy
        shapes = {name: list(strategy.shape(parameter)) for name, parameter in strategy.trainable()}
        steps_key = ADAM_STEPS if strategy.plan.optimizer == "adamw" else STEPS
        return {steps_key: strategy.optimizer_steps(), "written_by": strategy.describe(), "shapes": shapes}

    def results(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call; on rank 0 only."""
        ended = []
        # One at a time: the writing thread may append meanwhile.
        while self._results:
            ended.append(self._results.pop(0))
        return ended

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy_pieces(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Return copies of ``pieces`` in host memory. A piece that does not fit into the rest of a block is cut there."""
        copies = []
        block = -1
        room = torch.empty(0)
        for piece in pieces:
            uncopied = [piece]
            while uncopied:
                # The rest of the block is used up.
                if not len(room):
                    block += 1
                    room = self._block(block, pinned=piece.values.is_cuda)
                head, rest = uncopied[0].cut(len(room))
                count = head.values.numel()
                copy = room[:count].view(head.values.shape)
                copy.copy_(head.values, non_blocking=True)
                copies.append(head._replace(values=copy))
                uncopied = [*rest, *uncopied[1:]]
                room = room[count:]
        # The copies are asynchronous, and the next step changes what is copied.
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize(self.strategy.device)
        return copies

    def _block(self, number: int, *, pinned: bool) -> torch.Tensor:
        """Return a block of host memory, fp32 [n], made at its first use: each is twice as large as the one before."""
        if number == len(self._host_blocks):
            elements = min(_FIRST_BLOCK << number, _LARGEST_BLOCK)
            self._host_blocks.append(torch.empty(elements, dtype=torch.float32, pin_memory=pinned))
        return self._host_blocks[number]

    def _write(self, save: _Save) -> None:
        """Write this rank's share. Rank 0 then makes the checkpoint, and records the result."""
        if not _is_visible_in_time(save.staging):
            # Rank 0 reports that this rank did not begin.
            return
        self._write_share(save)
        if not self.strategy.is_main:
            return
        # In the background, an error that is raised here would go unnoticed.
        problem: str | None = None
        try:
            indices = self._wait_for_shares(save.staging)
            complete(save.staging, save.step, indices, shapes=save.shapes, texts=save.texts, buffers=save.buffers)
            store.prune(self.checkpoints, self.keep, self.protected, keep_best=self.keep_best)
        except OSError as error:
            problem = f"rank 0: {error.strerror or error} ({error.filename or save.staging})"
        except CheckpointError as error:
            problem = str(error)
        # Ranks that still write find their folder gone, and give up.
        if problem is not None:
            shutil.rmtree(save.staging, ignore_errors=True)
        self._results.append(Saved(self.checkpoints / store.name_of(save.step), time.monotonic() - save.start, problem))

    def _write_share(self, save: _Save) -> None:
        """Write this rank's pieces, and leave their index, or the reason why they could not be written."""
        rank = self.strategy.rank
        failed = save.staging / f"rank-{rank}.failed"
        try:
            index = write_pieces(save.staging, rank, save.pieces)
            # Renamed when it is complete, since rank 0 reads it as soon as it is there.
            partial = save.staging / f"rank-{rank}.part"
            partial.write_text(json.dumps(index))
            partial.rename(save.staging / f"rank-{rank}.json")
        except OSError as error:
            _report_failure(failed, f"{error.strerror or error} ({error.filename or save.staging})")
        except Exception as error:
            # Every error is told to rank 0: in a thread it would go unnoticed.
            _report_failure(failed, f"{type(error).__name__}: {error}")

    def _wait_for_shares(self, staging: Path) -> list[dict[str, Any]]:
        """Wait until every rank has written its share, and return the index of each. Rank 0.

        Raises:
            CheckpointError: a rank could not write its share, or did not begin to.
        """
        ranks = range(self.strategy.world_size)
        indices: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _BEGIN_S
        pause = _FIRST_PAUSE_S
        while True:
            # NFS brings a listing up to date when the folder is opened. It may answer for a minute that a single file is
            # missing.
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
        indices: what `write_pieces` returned, of each rank.
        shapes: of all tensors by their names in the checkpoint.
        texts: contents of the JSON files by name. The index of the tensors gets the pieces.

    Raises:
        CheckpointError: the pieces do not make whole tensors.
    """
    pieces = merge([index["pieces"] for index in indices], shapes)
    texts[INDEX]["pieces"] = pieces
    for name, content in texts.items():
        # The index has a line for each number where it is indented, and may list thousands of pieces.
        indent = None if name == INDEX else 1
        (staging / name).write_text(json.dumps(content, indent=indent))
    (staging / BUFFERS).write_bytes(safetensors.torch.save(buffers))
    digests: dict[str, str] = {}
    for index in indices:
        digests |= index["digests"]
    # Earlier versions read format 4, which has segments only, and AdamW's state.
    has_slices = any(is_slice(entry) for entries in pieces.values() for entry in entries)
    is_format_4 = ADAM_STEPS in texts[INDEX] and not has_slices
    store.publish(staging, step, digests, 4 if is_format_4 else store.FORMAT_VERSION)


def _read_share(staging: Path, rank: int, names: list[str], *, is_late: bool) -> dict[str, Any] | None:
    """Return the index of the pieces of a rank, and delete its file; None if the rank is still writing.

    Args:
        names: of the files in ``staging``.
        is_late: every rank should have begun by now.

    Raises:
        CheckpointError: the rank failed, or it is late and has not begun.
    """
    done = staging / f"rank-{rank}.json"
    failed = staging / f"rank-{rank}.failed"
    if failed.name in names:
        # The rank creates the file first, and writes the reason into it after that.
        time.sleep(_FIRST_PAUSE_S)
        raise CheckpointError(f"rank {rank}: {read_text(failed) or 'it could not write why; the disk may be full'}")
    if done.name in names:
        index: dict[str, Any] = read_json(done)
        done.unlink()
        return index
    if is_late and not any(name.startswith(_file_prefix(rank)) for name in names):
        raise CheckpointError(f"rank {rank}: it did not begin to write within {_BEGIN_S:g} s; its host may not see {staging}")
    return None


def _is_visible_in_time(staging: Path) -> bool:
    """Wait until this host sees the folder that rank 0 has made. Return whether it does."""
    deadline = time.monotonic() + _BEGIN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if staging.name in os.listdir(staging.parent):
                return True
        time.sleep(_LONGEST_PAUSE_S)
    return False


def _noting_progress(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces. All of them together may take longer to write than the limit of a save."""
    for piece in pieces:
        yield piece
        touch()


def _file_prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's files."""
    return f"tensors-{rank:05d}-"


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write ``pieces`` into safetensors files of at most `FILE_BYTES` (or one piece), fsynced. Nothing is buffered.

    Returns:
        ``pieces``: name -> [[start, stop, file], ...], with names as ``exp_avg/PARAMETER``, and [offset, shape, file] for a
        slice; ``digests`` of the files.
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
            # A piece of the flattened tensor is listed by its end, a slice by its shape.
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
    """A safetensors file, written tensor by tensor. The header is written last, into space reserved at the front.

    The format: 8 bytes with the header's length, the header (JSON, filled up with spaces), the tensors' bytes
    (https://github.com/huggingface/safetensors#format). The library needs all tensors at once, and copies them twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self._header: dict[str, Any] = {}
        # In characters, with the two braces. A header with all tensors is not made again for each of them.
        self._header_length = 2
        # In bytes, counted from the end of the header, as the format counts.
        self._data_end = 0
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_BYTES)

    def _entry(self, values: torch.Tensor) -> dict[str, Any]:
        return {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [self._data_end, self._data_end + 4 * values.numel()],
        }

    def has_room(self, name: str, values: torch.Tensor) -> bool:
        """Return whether ``values`` can be added within the limits of a file and of its header."""
        length = self._header_length + len(json.dumps({name: self._entry(values)}))
        return length <= HEADER_BYTES and self._data_end + 4 * values.numel() <= FILE_BYTES

    def add(self, name: str, values: torch.Tensor) -> None:
        """Append ``values``; they are not kept."""
        self._header[name] = self._entry(values)
        self._header_length += len(json.dumps({name: self._header[name]}))
        self._file.write(values.detach().to("cpu", torch.float32).contiguous().numpy().data)
        self._data_end += 4 * values.numel()

    def abandon(self) -> None:
        """Free the file's space: on a full disk, otherwise not even the error could be written."""
        os.truncate(self.path, 0)
        # What is buffered does not fit either.
        with suppress(OSError):
            self._file.close()

    def close(self) -> str:
        """Make the file durable; returns its digest."""
        header = json.dumps(self._header).encode()
        assert len(header) <= HEADER_BYTES, f"{self.path}: a header of {len(header)} bytes"
        self._file.seek(0)
        self._file.write(HEADER_BYTES.to_bytes(8, "little") + header.ljust(HEADER_BYTES))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return file_digest(self.path)


def bytes_of_state(strategy: Strategy) -> int:
    """Return the bytes of the tensors in a checkpoint."""
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
    """Report that this rank failed. An empty file needs no space; the reason is written if there is space.

    If the folder is gone, rank 0 has given the save up already, and reports why.
    """
    with suppress(FileNotFoundError):
        file.touch()
        with suppress(OSError):
            file.write_text(reason)
