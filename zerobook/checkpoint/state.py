"""Load the training state from a checkpoint: fp32 weights, the optimizer's state and step count, buffers, and `Progress`.

A checkpoint has trained weights only: frozen ones come from the model that the config names. It holds each tensor in the pieces
that the strategy has written. Any range of a tensor can be read from them, so every other strategy can resume from it.
"""

import math
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import nn

from zerobook.checkpoint import store
from zerobook.checkpoint.hook_state import HOOKS, tensor_key
from zerobook.checkpoint.merge import is_slice
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resume import compare_optimizer
from zerobook.checkpoint.save import ADAM_STEPS, BUFFERS, INDEX, STATE_SHAPES, STEPS, entry_name
from zerobook.errors import CheckpointError, ConfigError
from zerobook.health.position import touch
from zerobook.optimizer import optimizer_name
from zerobook.strategy import Strategy
from zerobook.strategy.weights import persistent_buffers
from zerobook.utils import files


def require_shared_folder(strategy: Strategy, output_dir: str) -> None:
    """Check that ``output_dir`` is on a filesystem that all nodes share and that can hold checkpoints and runlogs. Collective.

    Rank 0 writes a file there, and all ranks look for it.

    Raises:
        ConfigError: on every rank: rank 0 cannot write there, or nodes do not see what it writes.
    """
    folder = Path(output_dir)
    file_name = ""
    problem = None
    if strategy.is_main:
        # The name is unique, so an earlier run cannot have left such a file on the disk of a node.
        file_name = f".seen-by-all-{uuid4().hex}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_and_append(folder / file_name)
        except OSError as error:
            with suppress(OSError):
                (folder / file_name).unlink(missing_ok=True)
            problem = (
                f"output_dir: {folder.absolute()} cannot be written to: {error.strerror or error}. Checkpoints are written "
                "at any position of a file, and a runlog is appended to, which some mounted buckets do not allow."
            )
    # A relative path may be another folder on another node, so the message has the absolute path of rank 0.
    main_folder = f"{folder.absolute()} on {socket.gethostname()}"
    file_name, problem, main_folder = strategy.from_main((file_name, problem, main_folder))
    if problem is not None:
        raise ConfigError(problem)
    # None if this rank sees the file.
    blind_host = None if files.is_seen(folder / file_name) else socket.gethostname()
    # Collective.
    blind_hosts = strategy.gather(blind_host) if strategy.world_size > 1 else []
    # Remove the file only after the gather, when every rank has looked for it.
    if strategy.is_main:
        (folder / file_name).unlink()
    host_names = sorted({host for host in blind_hosts if host is not None})
    if host_names:
        raise ConfigError(
            f"output_dir: files that rank 0 writes into {main_folder} are not visible on {', '.join(host_names)}. Checkpoints "
            "are read by all nodes: give an --output_dir on a filesystem that they share, as an absolute path."
        )


# Writes as runs do, which some mounted buckets refuse: bytes out of order, as a file of a checkpoint, whose header is written
# last, and then one more byte at the end, as in a runlog.
def _write_and_append(file: Path) -> None:
    with file.open("wb") as opened:
        opened.seek(1)
        opened.write(b"1")
        opened.seek(0)
        opened.write(b"0")
    with file.open("ab") as opened:
        opened.write(b"2")


def read_progress(checkpoint: Path) -> Progress:
    return Progress.from_json(store.read_json(checkpoint / store.PROGRESS))


def load(strategy: Strategy, checkpoint: Path) -> tuple[Progress, int]:
    """Load the training state of a checkpoint into the live model and optimizer, under any strategy. Collective.

    Each rank reads its own part of the state. Weights that every rank holds completely are read by rank 0 and broadcast.

    Returns:
        (progress that the checkpoint records, bytes of tensors that this rank read).

    Raises:
        CheckpointError: on every rank. The checkpoint is of another optimizer, or of another model. For a model, the message
            names the first tensor that differs, with both shapes.
    """
    problem = compare_optimizer(checkpoint, optimizer_name(strategy.plan.optimizer))
    if problem is not None:
        raise CheckpointError(problem)
    # Check everything before the first value is changed.
    index = store.read_json(checkpoint / INDEX)
    parameters = list(strategy.trainable())
    _check_weights(strategy, checkpoint, parameters, index["shapes"])
    reader = Reader(checkpoint, index)
    _check_state(strategy, checkpoint, parameters, reader)
    buffers = read_buffers(checkpoint, dict(persistent_buffers(strategy.unwrapped)))
    # An optimizer makes its state in its first step. Make it now, so that there are tensors to restore.
    strategy.materialise_optimizer()
    for name, parameter in parameters:
        # The key None stands for the weight itself.
        for key in (None, *strategy.state_shapes(parameter)):
            strategy.restore(parameter, key, TensorReader(reader, f"{key or 'weight'}/{name}"))
        # Show progress, since loading a large model takes minutes, and would be taken for a hang.
        touch()
    strategy.restore_buffers(buffers)
    # The number of AdamW's steps has a key of its own, which earlier versions read.
    steps = index[ADAM_STEPS] if ADAM_STEPS in index else index[STEPS]
    strategy.set_optimizer_steps(steps)
    progress = read_progress(checkpoint)
    strategy.load_scaler_state(progress.scaler)
    # In fp16, the optimizer skips steps that overflow. So it, and with it the schedule, has fewer steps than the training loop.
    strategy.set_schedule_step(steps)
    return progress, reader.bytes_read


def read_hook_states(checkpoint: Path, strategy: Strategy) -> dict[str, dict[str, Any]]:
    """Return hook's name -> its state, with this rank's shards of its tensors; empty if no hook had a state. Collective."""
    file = checkpoint / HOOKS
    if not file.exists():
        return {}
    reader = Reader(checkpoint)
    states = {}
    for hook, saved in store.read_json(file).items():
        state = dict(saved["values"])
        for key in saved["tensors"]:
            shards = {}
            for name, parameter in strategy.trainable():
                shards[name] = strategy.read_shard(parameter, TensorReader(reader, f"{tensor_key(hook, key)}/{name}"))
            state[key] = shards
        states[hook] = state
    return states


def read_buffers(checkpoint: Path, model_buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a checkpoint's persistent buffers by name.

    Raises:
        CheckpointError: the model has other buffers.
    """
    import safetensors.torch

    saved_buffers = safetensors.torch.load_file(checkpoint / BUFFERS)
    # A buffer of another shape, such as a router's bias, is of another model.
    for name in sorted({*saved_buffers, *model_buffers}):
        saved_shape = _describe_shape(saved_buffers, name)
        model_shape = _describe_shape(model_buffers, name)
        if saved_shape != model_shape:
            raise CheckpointError(
                f"{checkpoint}: made by another model: the buffer {name} is {saved_shape} in it and {model_shape} in this "
                "model. Resume with the model in its config.json."
            )
    return saved_buffers


def _describe_shape(buffers: dict[str, torch.Tensor], name: str) -> str:
    return str(tuple(buffers[name].shape)) if name in buffers else "missing"


class Reader:
    """Reads any range or slice of a checkpoint's tensors, however these were cut into pieces.

    Args:
        folder: the checkpoint.
        index: content of its `INDEX`, if that was read already.

    Attributes:
        bytes_read: bytes of all values that were read.
    """

    def __init__(self, folder: Path, index: dict[str, Any] | None = None):
        self.folder = folder
        self.index = index or store.read_json(folder / INDEX)
        self.bytes_read = 0
        self._open: dict[str, safe_open] = {}
        self._buffer = torch.empty(0)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor ``name``, such as ``exp_avg/PARAMETER``, in fp32."""
        segments = self._read_segments(name, start, stop)
        if len(segments) == 1:
            return segments[0]
        return torch.cat([torch.empty(0), *segments])

    def read_into_buffer(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the same as `read`, in memory that the next call reuses. To allocate memory takes as long as to read."""
        segments = self._read_segments(name, start, stop)
        if len(segments) == 1:
            return segments[0]
        if len(self._buffer) < stop - start:
            self._buffer = torch.empty(stop - start)
        values = self._buffer[: stop - start]
        position = 0
        for segment in segments:
            values[position : position + len(segment)] = segment
            position += len(segment)
        return values

    def _read_segments(self, name: str, start: int, stop: int) -> list[torch.Tensor]:
        """Return elements ``start`` to ``stop`` of a flattened tensor, one segment for each piece that holds some of them."""
        self.bytes_read += 4 * (stop - start)
        pieces = self.index["pieces"][name]
        if any(map(is_slice, pieces)):
            # The elements of a slice are not adjacent in the flattened tensor. Read the rows that contain the elements, and cut
            # the elements out of them.
            row_size = max(1, math.prod(self.shape(name)[1:]))
            first_row = start // row_size
            # Rounded up.
            end_row = -(-stop // row_size)
            rows = self._read_rows(name, first_row, end_row).flatten()
            return [rows[start - first_row * row_size : stop - first_row * row_size]]
        segments = []
        # Pieces are listed in order, so the segments are too.
        for piece_start, piece_stop, file in pieces:
            # The range that the piece and the request have in common.
            low = max(start, piece_start)
            high = min(stop, piece_stop)
            if low < high:
                piece = self._open_file(file).get_slice(entry_name(name, [piece_start]))
                segments.append(piece[low - piece_start : high - piece_start])
        return segments

    def _read_rows(self, name: str, first_row: int, end_row: int) -> torch.Tensor:
        """Return rows ``first_row`` to ``end_row`` of the first dimension, fp32 [end_row - first_row, ...], from all pieces."""
        shape = self.shape(name)
        rows = torch.empty(end_row - first_row, *shape[1:])
        flat_rows = rows.view(-1)
        row_size = math.prod(shape[1:])
        for entry in self.index["pieces"][name]:
            if is_slice(entry):
                offset, size, file = entry
                # The rows that the slice and the request have in common.
                low = max(first_row, offset[0])
                high = min(end_row, offset[0] + size[0])
                if low < high:
                    piece = self._open_file(file).get_slice(entry_name(name, offset))
                    # Copy them to the place that the slice has in the other dimensions.
                    inner = [slice(begin, begin + count) for begin, count in zip(offset[1:], size[1:], strict=True)]
                    rows[(slice(low - first_row, high - first_row), *inner)] = piece[low - offset[0] : high - offset[0]]
            else:
                start, stop, file = entry
                # A segment of the flattened tensor may begin and end inside a row, so count elements and not rows.
                first = first_row * row_size
                low = max(first, start)
                high = min(end_row * row_size, stop)
                if low < high:
                    piece = self._open_file(file).get_slice(entry_name(name, [start]))
                    flat_rows[low - first : high - first] = piece[low - start : high - start]
        return rows

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` in its shape."""
        shape = self.shape(name)
        return self.read(name, 0, shape.numel()).view(shape)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the tensor ``name``. State has the shape of its weight, unless the index has another for it."""
        # Names are as ``exp_avg/PARAMETER``, and the shapes of weights are listed by PARAMETER.
        state_shape = self.index.get(STATE_SHAPES, {}).get(name)
        return torch.Size(state_shape or self.index["shapes"][name.partition("/")[2]])

    def read_block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of ``shape`` that begins at ``offset`` in the tensor ``name``, in fp32."""
        self.bytes_read += 4 * math.prod(shape)
        # Read complete rows, and cut the other dimensions afterwards.
        block = self._read_rows(name, offset[0], offset[0] + shape[0])
        for dimension in range(1, len(shape)):
            block = block.narrow(dimension, offset[dimension], shape[dimension])
        return block

    def _open_file(self, name: str) -> safe_open:
        if name not in self._open:
            # The checkpoint may come from somebody else, so its index must not lead to other files.
            if Path(name).name != name:
                raise CheckpointError(f"{self.folder / INDEX}: the file {name} leads out of the checkpoint's folder.")
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]


class TensorReader:
    """Reads one tensor of a checkpoint, as a strategy expects it: see `zerobook.strategy.pieces.Read`."""

    def __init__(self, reader: Reader, name: str):
        self._reader = reader
        self._name = name

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        return self._reader.read_into_buffer(self._name, start, stop)

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return self._reader.read_block(self._name, offset, shape)


def _check_weights(
    strategy: Strategy, checkpoint: Path, parameters: list[tuple[str, nn.Parameter]], shapes: dict[str, list[int]]
) -> None:
    """Raise `CheckpointError` if the checkpoint has other trained weights than the model.

    Args:
        shapes: name -> shape of each trained weight in the checkpoint.
    """
    problem = None
    for name, parameter in parameters:
        shape = list(strategy.shape(parameter))
        if name not in shapes:
            problem = f"the model trains {name}, which the checkpoint does not hold"
            break
        if shapes[name] != shape:
            problem = f"{name} has the shape {shapes[name]} in the checkpoint and {shape} in this model"
            break
    # A weight that only the checkpoint has would be missing in the next save.
    extra = set(shapes) - {name for name, _ in parameters}
    if problem is None and extra:
        problem = f"it holds weights that this model does not train, such as {min(extra)} ({len(extra)} in all)"
    if problem is not None:
        raise CheckpointError(
            f"{checkpoint}: made by another model: {problem}. Resume with the model and LoRA settings in its config.json."
        )


def _check_state(strategy: Strategy, checkpoint: Path, parameters: list[tuple[str, nn.Parameter]], reader: Reader) -> None:
    """Raise `CheckpointError` if the checkpoint lacks state of this run's optimizer, or has it in another shape.

    This happens, for example, if the class of the optimizer was changed after the save.
    """
    for name, parameter in parameters:
        for key, shape in strategy.state_shapes(parameter).items():
            full_name = f"{key}/{name}"
            saved_shape = list(reader.shape(full_name)) if full_name in reader.index["pieces"] else "missing"
            if saved_shape != list(shape):
                raise CheckpointError(
                    f"{checkpoint}: the optimizer state {full_name} is {saved_shape} in it, and this run's optimizer keeps "
                    f"{list(shape)}. Bring back the optimizer that it was written with, or start a new run from the exported "
                    "model."
                )
