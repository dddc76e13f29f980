"""The training state by parameter name: fp32 weights, Adam's moments and step count, and `Progress`.

Only trained weights are written: frozen ones come from the model that the config names. Whole
tensors pass one at a time, so neither side needs to know how the other spreads them, and no rank
holds more than one tensor and one file's buffer.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from zerobook.checkpoint import store
from zerobook.errors import CheckpointError, ConfigError
from zerobook.progress import Progress
from zerobook.strategy import MOMENTS, Strategy

FILE_BYTES = 512 * 1024**2
INDEX = "tensors.json"
_KEYS = (None, *MOMENTS)


def check_shared(strategy: Strategy, output_dir: str) -> None:
    """Rank 0 writes the checkpoints, and every rank reads them: all nodes must see one ``output_dir``. Collective.

    Raises:
        ConfigError: on every rank, naming the nodes that do not see rank 0's folder.
    """
    if strategy.world_size == 1:
        return
    folder = Path(output_dir)
    token = problem = None
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
    nodes: list[Any] = [None] * strategy.world_size
    dist.all_gather_object(nodes, None if (folder / token).exists() else socket.gethostname())
    if strategy.is_main:
        (folder / token).unlink()
    blind = sorted({node for node in nodes if node is not None})
    if blind:
        raise ConfigError(
            f"output_dir: what rank 0 writes into {where} is not seen on {', '.join(blind)}. Checkpoints are read by all "
            "nodes: give an --output_dir on a filesystem that they share, as an absolute path."
        )


def save(strategy: Strategy, progress: Progress, output_dir: str, config: dict[str, Any], keep: int | None) -> Path:
    """Write a checkpoint after a whole step. Collective; rank 0 writes.

    Returns:
        The complete checkpoint's folder.
    """
    from contextlib import nullcontext

    checkpoints = store.folder_of(output_dir)
    with store.staged(checkpoints, progress.step) if strategy.is_main else nullcontext() as staging:
        writer = _Writer(staging) if staging is not None else None
        strategy.materialise_optimizer()
        for name, parameter in strategy.trainable():
            for key in _KEYS:
                tensor = strategy.get_tensor(parameter, key)
                if writer is not None:
                    writer.add(f"{key or 'weight'}/{name}", tensor)
                del tensor
        if writer is not None:
            writer.close({"adam_steps": strategy.adam_steps(), "written_by": strategy.describe()})
            (staging / store.PROGRESS).write_text(json.dumps(progress.to_json(), indent=1))
            (staging / "config.json").write_text(json.dumps(config, indent=1))
    if strategy.is_main:
        store.prune(checkpoints, keep)
    strategy.barrier()
    return checkpoints / f"step-{progress.step:06d}"


class _Writer:
    """Collects tensors into safetensors files of at most `FILE_BYTES` (or one tensor)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: dict[str, str] = {}
        self._buffer: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._files = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._buffer and self._bytes + tensor.nbytes > FILE_BYTES:
            self._flush()
        # a copy: the tensor may be a live weight, or a view of a larger buffer
        self._buffer[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._files += 1
        file = f"tensors-{self._files:05d}.safetensors"
        save_file(self._buffer, self.folder / file)
        self.index |= dict.fromkeys(self._buffer, file)
        self._buffer, self._bytes = {}, 0

    def close(self, facts: dict[str, Any]) -> None:
        if self._buffer:
            self._flush()
        (self.folder / INDEX).write_text(json.dumps(facts | {"files": self.index}, indent=1))


def read_progress(checkpoint: Path) -> Progress:
    return Progress.from_json(store.read_json(checkpoint / store.PROGRESS))


def load(strategy: Strategy, checkpoint: Path) -> Progress:
    """Bring weights, moments and step count back, in this process, under any strategy. Collective.

    Rank 0 reads each tensor and broadcasts it.

    Raises:
        CheckpointError: on every rank, where the checkpoint is of another model: names the first
            tensor that differs, with both shapes.
    """
    index = store.read_json(checkpoint / INDEX)
    files: dict[str, str] = index["files"]
    parameters = list(strategy.trainable())
    _check(strategy, checkpoint, parameters, files)
    strategy.materialise_optimizer()
    reader = _Reader(checkpoint, files) if strategy.is_main else None
    for name, parameter in parameters:
        for key in _KEYS:
            shape = strategy.shape(parameter)
            if reader is not None:
                value = reader.read(f"{key or 'weight'}/{name}").to(strategy.device)
            else:
                value = torch.empty(shape, dtype=torch.float32, device=strategy.device)
            if strategy.world_size > 1:
                dist.broadcast(value, src=0)
            strategy.set_tensor(parameter, value, key)
            del value
    strategy.set_adam_steps(index["adam_steps"])
    progress = read_progress(checkpoint)
    strategy.load_scaler_state(progress.scaler)
    # fp16 skips steps that overflow: Adam and the schedule have seen fewer than the loop
    strategy.set_schedule_step(index["adam_steps"])
    return progress


class _Reader:
    def __init__(self, folder: Path, files: dict[str, str]):
        from safetensors import safe_open

        self.files = files
        self._open = {name: safe_open(folder / name, framework="pt") for name in sorted(set(files.values()))}

    def read(self, name: str) -> torch.Tensor:
        return self._open[self.files[name]].get_tensor(name)

    def shape(self, name: str) -> list[int]:
        return list(self._open[self.files[name]].get_slice(name).get_shape())


def _check(strategy: Strategy, checkpoint: Path, parameters: list, files: dict[str, str]) -> None:
    problem = None
    if strategy.is_main:
        reader = _Reader(checkpoint, files)
        saved = {name.removeprefix("weight/") for name in files if name.startswith("weight/")}
        for name, parameter in parameters:
            if name not in saved:
                problem = f"the model trains {name}, which the checkpoint does not hold"
            elif reader.shape(f"weight/{name}") != list(strategy.shape(parameter)):
                problem = (
                    f"{name} is {reader.shape(f'weight/{name}')} there and {list(strategy.shape(parameter))} in this model"
                )
            if problem:
                break
        extra = saved - {name for name, _ in parameters}
        if problem is None and extra:
            problem = f"it holds {sorted(extra)[0]} (and {len(extra) - 1} more), which this model does not train"
    problem = strategy.from_main(problem)
    if problem is not None:
        raise CheckpointError(
            f"{checkpoint}: made by another model: {problem}. Resume with the model and LoRA settings in its config.json."
        )
