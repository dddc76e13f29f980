"""Checkpoints that hold each tensor as a whole: ``optimizer.pt`` or ``optimizer.bin`` beside a file of weights.

transformers' Trainer, accelerate and PEFT write them, and FSDP with a full state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerobook.errors import CheckpointError
from zerobook.interop.checkpoints.model_names import ADAPTER_CONFIG, list_weight_orders, make_empty_model, to_peft_name
from zerobook.interop.checkpoints.source import MOMENTS, Source, read_json_object, require_adamw
from zerobook.interop.checkpoints.unpickle import load_torch_file
from zerobook.strategy import Piece
from zerobook.strategy.weights import persistent_buffers

OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
# Files of weights. If the weights are divided among several files, there is an index instead, such as
# ``model.safetensors.index.json``.
WEIGHT_FILES = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model_fsdp.bin",
    "pytorch_model.bin",
    "adapter_model.bin",
)


def find_optimizer_file(folder: Path) -> Path | None:
    """Return the file of the optimizer's state in a folder; None if there is none."""
    return next((folder / name for name in OPTIMIZER_FILES if (folder / name).exists()), None)


def read_torch_files(folder: Path, optimizer_file: Path) -> Source:
    """Return the checkpoint in a folder.

    Raises:
        CheckpointError: a file is missing or damaged, or the optimizer is not AdamW, or not of the folder's model.
    """
    optimizer = load_torch_file(optimizer_file)
    states = optimizer["state"]
    first_state: dict[str, Any] = next(iter(states.values()), {})
    require_adamw(optimizer_file, first_state)
    buffers = {}
    weights = _Weights(folder)
    if all(isinstance(key, str) for key in states):
        # A full state dict of FSDP has the names of the weights as keys, and other optimizers have numbers.
        names = {name: name for name in states}
        shapes = {name: list(state[MOMENTS[0]].shape) for name, state in states.items()}
    else:
        model = make_empty_model(folder)
        names = _name_numbers(optimizer, model, optimizer_file)
        shapes = {name: list(model.get_parameter(name).shape) for name in names}
        for name, _ in persistent_buffers(model):
            buffers[name] = weights.read(name)
    return Source(
        trainer="transformers" if (folder / "trainer_state.json").exists() else "accelerate",
        # No file has the number of ranks.
        ranks=1,
        shapes=shapes,
        optimizer_steps=int(first_state["step"]),
        settings=optimizer["param_groups"][0],
        group_count=len(optimizer["param_groups"]),
        parts=[_read_pieces(names, shapes, states, weights)],
        buffers=buffers,
        scaler=read_scaler(folder),
    )


def read_scaler(folder: Path) -> dict[str, Any] | None:
    """Return the fp16 loss scaler that accelerate saved in a folder; None if there is none."""
    for name in OPTIMIZER_FILES:
        file = folder / name.replace("optimizer", "scaler")
        if file.exists():
            state = load_torch_file(file)
            return {"kind": "GradScaler", "scale": state["scale"], "state": state}
    return None


def _name_numbers(optimizer: dict[str, Any], model: nn.Module, optimizer_file: Path) -> dict[str, int]:
    """Return name -> number of each trained weight: the optimizer's state has only the numbers.

    Trainers number weights in different orders. The first order whose group sizes and shapes agree with the state is taken.
    """
    groups = [group["params"] for group in optimizer["param_groups"]]
    states = optimizer["state"]
    for order in list_weight_orders(model):
        if [len(names) for names in order] != [len(group) for group in groups]:
            continue
        numbers: dict[str, int] = {}
        for names, group in zip(order, groups, strict=True):
            numbers |= zip(names, group, strict=True)
        if all(
            number in states and states[number][MOMENTS[0]].shape == model.get_parameter(name).shape
            for name, number in numbers.items()
        ):
            return numbers
    raise CheckpointError(
        f"{optimizer_file}: it has groups of {', '.join(map(str, map(len, groups)))} weights, which are not those of the model "
        "in the folder. Copy the config of the model that was trained there, or start a new run from the trained weights."
    )


def _read_pieces(
    names: Mapping[str, Any], shapes: dict[str, list[int]], states: dict[Any, dict[str, torch.Tensor]], weights: _Weights
) -> Iterator[Piece]:
    """Yield the weights and moments, each as one piece.

    Args:
        names: name of a weight -> its key in ``states``, the optimizer's state.
    """
    for name, key in names.items():
        weight = weights.read(name)
        if list(weight.shape) != shapes[name]:
            raise CheckpointError(
                f"{weights.folder}: {name} has the shape {list(weight.shape)}, and its optimizer state is of {shapes[name]}. "
                "The files are of two models: copy the checkpoint again."
            )
        yield Piece(name, None, (0,), weight.flatten())
        for moment in MOMENTS:
            yield Piece(name, moment, (0,), states[key][moment].flatten())


class _Weights:
    """Reads the weights in a folder by their names in the model, from one file or several."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._adapts = (folder / ADAPTER_CONFIG).exists()
        self._file_of: dict[str, str] = {}
        for file_name in WEIGHT_FILES:
            index_file = folder / f"{file_name}.index.json"
            if (folder / file_name).exists():
                self._file_of = dict.fromkeys(self._open(file_name).keys(), file_name)
            elif index_file.exists():
                self._file_of = read_json_object(index_file)["weight_map"]
            if self._file_of:
                return
        raise CheckpointError(f"{folder}: it holds the optimizer's state and no {WEIGHT_FILES[0]}. Copy the checkpoint again.")

    def read(self, name: str) -> torch.Tensor:
        # PEFT's files have other names. For DoRA's vectors, they also leave out ``.weight``.
        saved_names = [to_peft_name(name), to_peft_name(name).removesuffix(".weight")] if self._adapts else [name]
        for candidate in saved_names:
            if candidate in self._file_of:
                file = self._open(self._file_of[candidate])
                return file[candidate] if isinstance(file, dict) else file.get_tensor(candidate)
        raise CheckpointError(
            f"{self.folder}: there is no weight {name} in its {WEIGHT_FILES[0]}, which may have other names than the model. "
            "Let DeepSpeed or FSDP save the checkpoint, or start a new run from the trained weights."
        )

    def _open(self, file_name: str) -> Any:
        """Return the tensors of a file, by name. A tensor is read from the file when it is used."""
        from safetensors import SafetensorError, safe_open

        if file_name not in self._files:
            file = self.folder / file_name
            if Path(file_name).name != file_name:
                raise CheckpointError(f"{self.folder}: its index names the file {file_name}, which is outside of it.")
            try:
                is_safetensors = file.suffix == ".safetensors"
                self._files[file_name] = safe_open(file, framework="pt") if is_safetensors else load_torch_file(file)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: it is missing or damaged ({error}). Copy the checkpoint again.") from None
        return self._files[file_name]
