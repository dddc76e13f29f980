"""Write checkpoints: each rank writes its own share, and rank 0 makes one checkpoint of them, at once or in the background.

Ranks communicate through files only, so that a thread can write while the training runs collectives: each rank leaves
``rank-N.json`` in the staging folder when its files are durable, or ``rank-N.failed`` with the reason.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.merge import is_slice, merge
from zerobook.checkpoint.progress import Progress
from zerobook.errors import CheckpointError
from zerobook.strategy import Piece, Strategy
from zerobook.utils.reading import file_digest, read_json, read_text

FILE_BYTES = 512 << 20
HEADER_BYTES = 1 << 16
"""Bytes reserved for a file's header: about 400 tensors; with more, another file begins."""
INDEX = "tensors.json"
BUFFERS = "buffers.safetensors"
"""Persistent buffers by name, in their own dtypes; rank 0 writes them."""
ADAM_STEPS, STEPS = "adam_steps", "optimizer_steps"
"""Keys of the index for the optimizer's count of steps: of AdamW, and of any other."""
STATE_SHAPES = "state_shapes"
"""Key of the index for the shapes of state that is not of its weight's shape."""
_POLL_S = (0.02, 0.5)
"""Seconds between two reads of the folder, at first and at most."""
_BEGIN_S = 600
"""Seconds within which every rank must begin to write. NFS can hide a new folder from other hosts for a minute."""
_BLOCK = (1 << 22, 1 << 27)
"""Elements of the first block of host memory, and of the largest: powers of two, to which torch rounds pinned memory up."""


class Saved(NamedTuple):
    """The result of one save: ``problem`` is None if ``checkpoint`` is complete."""

    checkpoint: Path
    seconds: float
    problem: str | None


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
        self._host: list[torch.Tensor] = []
        self._thread: threading.Thread | None = None
        self._results: list[Saved] = []

    def save(self, progress: Progress, config: dict[str, Any]) -> None:
        """Save the state after a whole step. Collective.

        Returns when the checkpoint is complete or has failed; in the background, when the state is copied. `results` returns
        the outcome.
        """
        self.wait()
        strategy, staging = self.strategy, store.staging_of(self.checkpoints, progress.step)
        start = time.monotonic()
        problem = strategy.on_main(lambda: _make(staging))
        if problem is not None:
            self._results += [Saved(self._final(progress.step), 0.0, problem)] if strategy.is_main else []
            return
        strategy.materialise_optimizer()
        plain = strategy.plan.optimizer == "adamw"
        shapes = {name: list(strategy.shape(p)) for name, p in strategy.trainable()}
        facts: dict[str, Any] = {ADAM_STEPS if plain else STEPS: strategy.optimizer_steps()}
        facts |= {"written_by": strategy.describe(), "shapes": shapes}
        expected = _shapes(strategy)
        others = {full: shape for full, shape in expected.items() if shape != shapes[full.partition("/")[2]]}
        facts |= {STATE_SHAPES: others} if others else {}
        buffers = strategy.buffers() if strategy.is_main else {}
        texts = {INDEX: facts, store.PROGRESS: progress.to_json(), "config.json": config}
        if self.background:
            pieces = self._copies()
            work = (staging, progress.step, pieces, buffers, json.loads(json.dumps(texts)), expected, start)
            self._thread = threading.Thread(target=self._write, args=work, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(staging, progress.step, strategy.pieces(), buffers, texts, expected, start)
            strategy.barrier()

    def results(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call; on rank 0 only."""
        done = []
        while self._results:  # one at a time: the writing thread may append meanwhile
            done.append(self._results.pop(0))
        return done

    def wait(self) -> None:
        """Wait until no save is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copies(self) -> list[Piece]:
        """Return this rank's share, in host memory. A piece that does not fit into the rest of a block is cut there."""
        copies = []
        block, room = -1, torch.empty(0)
        for piece in self.strategy.pieces():
            left = [piece]
            while left:
                if not len(room):
                    block += 1
                    room = self._block(block, pinned=piece.values.is_cuda)
                part, rest = left[0].cut(len(room))
                copy = room[: part.values.numel()].view(part.values.shape)
                copy.copy_(part.values, non_blocking=True)
                copies.append(part._replace(values=copy))
                left, room = [*rest, *left[1:]], room[part.values.numel() :]
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize(self.strategy.device)
        return copies

    def _block(self, number: int, *, pinned: bool) -> torch.Tensor:
        """Return a block of host memory, fp32 [n], made at its first use: each is twice as large as the one before."""
        if number == len(self._host):
            smallest, largest = _BLOCK
            self._host.append(torch.empty(min(smallest << number, largest), dtype=torch.float32, pin_memory=pinned))
        return self._host[number]

    def _write(
        self,
        staging: Path,
        step: int,
        pieces: Iterable[Piece],
        buffers: dict[str, torch.Tensor],
        texts: dict[str, Any],
        expected: dict[str, list[int]],
        start: float,
    ) -> None:
        rank = self.strategy.rank
        if not _appears(staging):
            return  # rank 0 reports that this rank did not begin
        try:
            index = write_pieces(staging, rank, pieces)
            _publish_file(staging / f"rank-{rank}.json", json.dumps(index))
        except OSError as error:
            _leave_word(staging / f"rank-{rank}.failed", f"{error.strerror or error} ({error.filename or staging})")
        except Exception as error:  # an error in a thread would go unnoticed
            _leave_word(staging / f"rank-{rank}.failed", f"{type(error).__name__}: {error}")
        if not self.strategy.is_main:
            return
        problem: str | None = None
        try:
            problem = self._publish(staging, step, buffers, texts, expected)
        except OSError as error:
            problem = f"rank 0: {error.strerror or error} ({error.filename or staging})"
        except CheckpointError as error:
            problem = str(error)
        if problem is not None:
            shutil.rmtree(staging, ignore_errors=True)
        self._results.append(Saved(self._final(step), time.monotonic() - start, problem))

    def _final(self, step: int) -> Path:
        return self.checkpoints / store.name_of(step)

    def _publish(
        self,
        staging: Path,
        step: int,
        buffers: dict[str, torch.Tensor],
        texts: dict[str, Any],
        expected: dict[str, list[int]],
    ) -> str | None:
        """Wait for every rank's share, and make a checkpoint of them. Rank 0."""
        shares: dict[int, dict[str, Any]] = {}
        ranks, deadline, pause = range(self.strategy.world_size), time.monotonic() + _BEGIN_S, _POLL_S[0]
        while len(shares) < len(ranks):
            # NFS brings a listing up to date when the folder is opened; it may answer for a minute that one file is missing
            names = os.listdir(staging)
            for rank in (rank for rank in ranks if rank not in shares):
                done, failed = staging / f"rank-{rank}.json", staging / f"rank-{rank}.failed"
                if failed.name in names:
                    time.sleep(_POLL_S[0])  # the reason follows the file
                    return f"rank {rank}: {read_text(failed) or 'it could not write why; the disk may be full'}"
                if done.name in names:
                    shares[rank] = read_json(done)
                    done.unlink()
                elif time.monotonic() > deadline and not any(name.startswith(_prefix(rank)) for name in names):
                    return f"rank {rank}: it did not begin to write within {_BEGIN_S:g} s; its host may not see {staging}"
            if len(shares) < len(ranks):
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
        indices = [shares[rank] for rank in ranks]
        texts[INDEX]["pieces"] = merge([index["pieces"] for index in indices], expected)
        for name, content in texts.items():
            (staging / name).write_text(json.dumps(content, indent=None if name == INDEX else 1))
        (staging / BUFFERS).write_bytes(safetensors.torch.save(buffers))
        digests = {name: digest for index in indices for name, digest in index["digests"].items()}
        slices = any(is_slice(entry) for entries in texts[INDEX]["pieces"].values() for entry in entries)
        as_before = ADAM_STEPS in texts[INDEX] and not slices
        store.publish(staging, step, digests, 4 if as_before else store.FORMAT_VERSION)
        store.prune(self.checkpoints, self.keep, self.protected, keep_best=self.keep_best)
        return None


def _make(staging: Path) -> str | None:
    """Make the folder of a save. Return why it cannot be made, None where it is there."""
    try:
        store.make_staging(staging)
    except OSError as error:
        return f"the folder {staging} cannot be made: {error.strerror or error}"
    return None


def _appears(staging: Path) -> bool:
    """Wait until this host sees the folder that rank 0 has made. Return whether it does."""
    deadline = time.monotonic() + _BEGIN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if staging.name in os.listdir(staging.parent):
                return True
        time.sleep(_POLL_S[1])
    return False


def _prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's files."""
    return f"tensors-{rank:05d}-"


def write_pieces(folder: Path, rank: int, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write ``pieces`` into safetensors files of at most `FILE_BYTES` (or one piece), fsynced. Nothing is buffered.

    Returns:
        ``pieces``: name -> [[start, stop, file], ...], with names as ``exp_avg/PARAMETER``, and [offset, shape, file] for a
        slice; ``digests`` of the files.
    """
    found: dict[str, list] = {}
    digests: dict[str, str] = {}
    file: _File | None = None
    try:
        for name, key, offset, values in pieces:
            full = f"{key or 'weight'}/{name}"
            entry = entry_name(full, offset)
            if file is not None and not file.has_room(entry, values):
                digests[file.path.name] = file.close()
                file = None
            file = file or _File(folder / f"{_prefix(rank)}{len(digests):05d}.safetensors")
            file.add(entry, values)
            stretch = len(offset) == 1
            place = [offset[0], offset[0] + values.numel()] if stretch else [list(offset), list(values.shape)]
            found.setdefault(full, []).append([*place, file.path.name])
        if file is not None:
            digests[file.path.name] = file.close()
    except OSError:
        if file is not None:
            file.abandon()
        raise
    return {"pieces": found, "digests": digests}


def entry_name(full: str, offset: Sequence[int]) -> str:
    """Return the name of a piece in its file: ``exp_avg/PARAMETER@OFFSET``."""
    return f"{full}@{','.join(map(str, offset))}"


class _File:
    """A safetensors file, written tensor by tensor. The header is written last, into space reserved at the front.

    The format: 8 bytes with the header's length, the header (JSON, filled up with spaces), the tensors' bytes
    (https://github.com/huggingface/safetensors#format). The library wants all tensors at once, and copies them twice.
    """

    def __init__(self, path: Path):
        self.path = path
        self._header: dict[str, Any] = {}
        self._length = 2
        self._end = 0
        self._file = path.open("wb")
        self._file.seek(8 + HEADER_BYTES)

    def _entry(self, values: torch.Tensor) -> dict[str, Any]:
        return {"dtype": "F32", "shape": list(values.shape), "data_offsets": [self._end, self._end + 4 * values.numel()]}

    def has_room(self, name: str, values: torch.Tensor) -> bool:
        length = self._length + len(json.dumps({name: self._entry(values)}))
        return length <= HEADER_BYTES and self._end + 4 * values.numel() <= FILE_BYTES

    def add(self, name: str, values: torch.Tensor) -> None:
        """Append ``values``; they are not kept."""
        self._header[name] = self._entry(values)
        self._length += len(json.dumps({name: self._header[name]}))
        self._file.write(values.detach().to("cpu", torch.float32).contiguous().numpy().data)
        self._end += 4 * values.numel()

    def abandon(self) -> None:
        """Free the file's space: on a full disk, otherwise not even the error could be written."""
        os.truncate(self.path, 0)
        with suppress(OSError):  # what is buffered does not fit either
            self._file.close()

    def close(self) -> str:
        """Make the file durable; returns its digest."""
        header = json.dumps(self._header).encode()
        room = max(HEADER_BYTES, -(-len(header) // 8) * 8)
        assert room == HEADER_BYTES, f"{self.path}: a header of {len(header)} bytes"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return file_digest(self.path)


def bytes_of_state(strategy: Strategy) -> int:
    """Return the bytes of the tensors in a checkpoint."""
    return 4 * sum(math.prod(shape) for shape in _shapes(strategy).values())


def _shapes(strategy: Strategy) -> dict[str, list[int]]:
    """Return name -> shape of all tensors of a checkpoint, with names as ``exp_avg/PARAMETER``."""
    found = {}
    for name, parameter in strategy.trainable():
        found[f"weight/{name}"] = list(strategy.shape(parameter))
        found |= {f"{key}/{name}": list(shape) for key, shape in strategy.state_shapes(parameter).items()}
    return found


def _publish_file(file: Path, text: str) -> None:
    """Write a file that appears complete or not at all."""
    partial = file.with_suffix(".part")
    partial.write_text(text)
    partial.rename(file)


def _leave_word(file: Path, reason: str) -> None:
    """Report that this rank failed. An empty file needs no space; the reason is written if there is space.

    If the folder is gone, rank 0 has given the save up already, and reports why.
    """
    with suppress(FileNotFoundError):
        file.touch()
        with suppress(OSError):
            file.write_text(reason)
