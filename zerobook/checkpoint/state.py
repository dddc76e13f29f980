"""The training state by parameter name: fp32 weights, the optimizer's state and step count, buffers, and `Progress`.

Only trained weights are kept: frozen ones come from the model that the config names. Each tensor is cut as the
strategy that wrote it sharded it. Any range of a tensor can be read, so any other strategy can resume from it.
"""

from __future__ import annotations

import math
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.merge import is_slice
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.resume import differing_optimizer
from zerobook.checkpoint.save import ADAM_STEPS, BUFFERS, INDEX, STATE_SHAPES, STEPS, entry_name
from zerobook.errors import CheckpointError, ConfigError
from zerobook.optimizer import optimizer_name
from zerobook.strategy import Strategy
from zerobook.strategy.weights import persistent_buffers

if TYPE_CHECKING:
    from safetensors import safe_open
    from torch import nn


def check_shared(strategy: Strategy, output_dir: str) -> None:
    """Check that all nodes see one ``output_dir``: all ranks write and read checkpoints there. Collective.

    Raises:
        ConfigError: on every rank, naming the nodes that do not see rank 0's folder.
    """
    if strategy.world_size == 1:
        return
    folder = Path(output_dir)
    token, problem = "", None
    if strategy.is_main:
        token = f".seen-by-all-{uuid4().hex}"  # a name that no earlier run can have left on a node's own disk
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / token).touch()
        except OSError as error:
            problem = f"output_dir: {folder.absolute()} cannot be written to: {error.strerror}."
    token, problem, where = strategy.from_main((token, problem, f"{folder.absolute()} on {socket.gethostname()}"))
    if problem is not None:
        raise ConfigError(problem)
    nodes = strategy.gather(None if (folder / token).exists() else socket.gethostname())
    if strategy.is_main:
        (folder / token).unlink()
    blind = sorted({node for node in nodes if node is not None})
    if blind:
        raise ConfigError(
            f"output_dir: files that rank 0 writes into {where} are not visible on {', '.join(blind)}. Checkpoints are read "
            "by all nodes: give an --output_dir on a filesystem that they share, as an absolute path."
        )


def read_progress(checkpoint: Path) -> Progress:
    return Progress.from_json(store.read_json(checkpoint / store.PROGRESS))


def load(strategy: Strategy, checkpoint: Path) -> tuple[Progress, int]:
    """Load weights, optimizer state and step count, under any strategy. Collective.

    Each rank reads its own share of the state; weights that every rank holds whole are read by rank 0 and sent.

    Returns:
        (the loop's state, bytes of tensors that this rank read).

    Raises:
        CheckpointError: on every rank. The checkpoint is of another optimizer or of another model; the message names the
            first tensor that differs, with both shapes.
    """
    problem = differing_optimizer(checkpoint, optimizer_name(strategy.plan.optimizer))
    if problem is not None:
        raise CheckpointError(problem)
    index = store.read_json(checkpoint / INDEX)
    parameters = list(strategy.trainable())
    _check(strategy, checkpoint, parameters, index["shapes"])
    reader = Reader(checkpoint, index)
    _check_state(strategy, checkpoint, parameters, reader)
    buffers = read_buffers(checkpoint, dict(persistent_buffers(strategy.unwrapped)))
    strategy.materialise_optimizer()
    for name, parameter in parameters:
        for key in (None, *strategy.state_shapes(parameter)):
            strategy.restore(parameter, key, TensorReader(reader, f"{key or 'weight'}/{name}"))
    if buffers is not None:
        strategy.restore_buffers(buffers)
    steps = index[STEPS] if STEPS in index else index[ADAM_STEPS]
    strategy.set_optimizer_steps(steps)
    progress = read_progress(checkpoint)
    strategy.load_scaler_state(progress.scaler)
    # fp16 skips steps that overflow: the optimizer and the schedule have seen fewer than the loop
    strategy.set_schedule_step(steps)
    return progress, reader.bytes_read


def read_buffers(checkpoint: Path, there: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """Return a checkpoint's persistent buffers by name; None for format 3, which has none.

    Args:
        there: the model's buffers, by name.

    Raises:
        CheckpointError: the model has other buffers.
    """
    import safetensors.torch

    if store.read_json(checkpoint / store.MANIFEST)["format_version"] == 3:
        return None
    found = safetensors.torch.load_file(checkpoint / BUFFERS)
    for name in sorted({*found, *there}):
        shapes = [tuple(buffers[name].shape) if name in buffers else "missing" for buffers in (found, there)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{checkpoint}: made by another model: the buffer {name} is {shapes[0]} in it and {shapes[1]} in this model. "
                "Resume with the model in its config.json."
            )
    return found


class Reader:
    """Reads any stretch of a checkpoint's tensors, however they were cut when they were written.

    ``bytes_read`` counts the bytes requested from the files.
    """

    def __init__(self, folder: Path, index: dict[str, Any] | None = None):
        self.folder = folder
        self.index = index or store.read_json(folder / INDEX)
        self.bytes_read = 0
        self._open: dict[str, safe_open] = {}
        self._buffer = torch.empty(0)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor ``name``, such as ``exp_avg/PARAMETER``, in fp32."""
        found = self._parts(name, start, stop)
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0), *found])

    def borrow(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the same as `read`, in memory that the next call reuses: new pages cost as much as reading."""
        found = self._parts(name, start, stop)
        if len(found) == 1:
            return found[0]
        if len(self._buffer) < stop - start:
            self._buffer = torch.empty(stop - start)
        whole = self._buffer[: stop - start]
        place = 0
        for part in found:
            whole[place : place + len(part)] = part
            place += len(part)
        return whole

    def _parts(self, name: str, start: int, stop: int) -> list[torch.Tensor]:
        self.bytes_read += 4 * (stop - start)
        if any(map(is_slice, self.index["pieces"][name])):
            row = max(1, math.prod(self.shape(name)[1:]))
            first = start // row
            return [self._rows(name, first, -(-stop // row)).flatten()[start - first * row : stop - first * row]]
        found = []
        for first, last, file in self.index["pieces"][name]:
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append(self._file(file).get_slice(f"{name}@{first}")[low - first : high - first])
        return found

    def _rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last`` of the first dimension, fp32 [last - first, ...], from slices and stretches."""
        whole = self.shape(name)
        found = torch.empty(last - first, *whole[1:])
        flat, row = found.view(-1), math.prod(whole[1:])
        for entry in self.index["pieces"][name]:
            if is_slice(entry):
                offset, shape, file = entry
                low, high = max(first, offset[0]), min(last, offset[0] + shape[0])
                if low < high:
                    places = tuple(slice(at, at + size) for at, size in zip(offset[1:], shape[1:], strict=True))
                    values = self._file(file).get_slice(entry_name(name, offset))
                    found[(slice(low - first, high - first), *places)] = values[low - offset[0] : high - offset[0]]
                continue
            start, stop, file = entry
            low, high = max(first * row, start), min(last * row, stop)
            if low < high:
                values = self._file(file).get_slice(entry_name(name, [start]))
                flat[low - first * row : high - first * row] = values[low - start : high - start]
        return found

    def whole(self, name: str) -> torch.Tensor:
        """Return the tensor ``name`` in its shape."""
        shape = self.shape(name)
        return self.read(name, 0, shape.numel()).view(shape)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.index.get(STATE_SHAPES, {}).get(name) or self.index["shapes"][name.partition("/")[2]])

    def read_block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the slice of ``shape`` that begins at ``offset`` in the tensor ``name``, in fp32."""
        self.bytes_read += 4 * math.prod(shape)
        rows = self._rows(name, offset[0], offset[0] + shape[0])
        for dimension, (at, size) in enumerate(zip(offset, shape, strict=True)):
            rows = rows.narrow(dimension, at, size) if dimension else rows
        return rows

    def _file(self, name: str) -> safe_open:
        from safetensors import safe_open

        if name not in self._open:
            if Path(name).name != name:
                raise CheckpointError(f"{self.folder / INDEX}: the file {name} leads out of the checkpoint's folder.")
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]


class TensorReader:
    """Implementation of `zerobook.strategy.pieces.Read` for the tensor ``name``."""

    def __init__(self, reader: Reader, name: str):
        self._reader, self._name = reader, name

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        return self._reader.borrow(self._name, start, stop)

    def block(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return self._reader.read_block(self._name, offset, shape)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, whole, by names such as ``weight/PARAMETER``."""
    reader = Reader(checkpoint)
    return {name: reader.whole(name) for name in reader.index["pieces"]}


def _check(
    strategy: Strategy, checkpoint: Path, parameters: list[tuple[str, nn.Parameter]], shapes: dict[str, list[int]]
) -> None:
    problem = None
    for name, parameter in parameters:
        if name not in shapes:
            problem = f"the model trains {name}, which the checkpoint does not hold"
        elif shapes[name] != list(strategy.shape(parameter)):
            problem = f"{name} is {shapes[name]} there and {list(strategy.shape(parameter))} in this model"
        if problem:
            break
    extra = set(shapes) - {name for name, _ in parameters}
    if problem is None and extra:
        problem = f"it holds {min(extra)} (and {len(extra) - 1} more), which this model does not train"
    if problem is not None:
        raise CheckpointError(
            f"{checkpoint}: made by another model: {problem}. Resume with the model and LoRA settings in its config.json."
        )


def _check_state(strategy: Strategy, checkpoint: Path, parameters: list[tuple[str, nn.Parameter]], reader: Reader) -> None:
    """Refuse a checkpoint without the state that this run's optimizer keeps, such as after a change of a user's class."""
    for name, parameter in parameters:
        for key, shape in strategy.state_shapes(parameter).items():
            full = f"{key}/{name}"
            there = list(reader.shape(full)) if full in reader.index["pieces"] else "missing"
            if there != list(shape):
                raise CheckpointError(
                    f"{checkpoint}: the optimizer state {full} is {there} in it, and this run's optimizer keeps {list(shape)}. "
                    "Bring back the optimizer that it was written with, or start a new run from the exported model."
                )
