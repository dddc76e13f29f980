"""DeepSpeed's ``global_stepN``: flat partitions of ZeRO-1 to 3, a file a rank.

Each rank's partition is read as segments of weights, which our checkpoints hold as they are. So nothing is gathered, and any
number of ranks can be read at the same time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zerobook.errors import CheckpointError
from zerobook.interop.checkpoints.source import MOMENTS, Source, require_adamw
from zerobook.interop.checkpoints.unpickle import load_torch_file
from zerobook.strategy import Piece
from zerobook.utils.units import counted

_RANK_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


class Names(NamedTuple):
    """What the stages of ZeRO call the same."""

    masters: str
    optimizer: str
    model_file: str


STAGE_3 = Names("fp32_flat_groups", "optimizer_state_dict", "zero_pp_rank_0_mp_rank_00_model_states.pt")
STAGES_1_2 = Names("single_partition_of_fp32_groups", "base_optimizer_state", "mp_rank_00_model_states.pt")


class Segment(NamedTuple):
    """Elements of a weight in a rank's flat partition."""

    name: str
    weight_start: int
    """first of them in the flattened weight"""
    flat_start: int
    """first of them in the partition"""
    length: int


def rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks in a ``global_stepN``, in order; none if it is not such a folder."""
    files = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _RANK_FILE.match(file.name)
        if match is not None:
            files[int(match.group(2)), int(match.group(1))] = file
    return [files[key] for key in sorted(files)]


def read_zero(folder: Path) -> Source:
    """Return the checkpoint in a ``global_stepN``.

    Raises:
        CheckpointError: a file is missing or damaged, or the model's layers were divided among ranks.
    """
    files = rank_files(folder)
    first_state = _optimizer_state(files[0])
    _check_ranks(folder, files, first_state)
    names = STAGE_3 if STAGE_3.masters in first_state else STAGES_1_2
    model_state = load_torch_file(folder / names.model_file)
    shapes: dict[str, list[int]] = {}
    for group in model_state["param_shapes"]:
        for name, shape in group.items():
            shapes[name] = list(shape)
    optimizer = first_state[names.optimizer]
    groups = [] if isinstance(optimizer, list) else optimizer["param_groups"]
    settings = groups[0] if groups else {}
    moments = _moments(optimizer)[0]
    require_adamw(folder, moments)
    # Some of DeepSpeed's optimizers count in the group.
    steps = moments.get("step", settings.get("step", model_state["global_steps"]))
    buffers = {}
    # The base of adapters is frozen, and its buffers come from the base model.
    if not any(".lora_" in name for name in shapes):
        for name in model_state["buffer_names"]:
            if name in model_state["module"]:
                buffers[name] = model_state["module"][name]
    parts: list[Iterable[Piece]] = []
    for rank, file in enumerate(files):
        # All ranks have parts of one length, but for padding that the last one leaves out.
        starts = [rank * master.numel() for master in first_state[names.masters]]
        parts.append(_pieces(file, rank, len(files), starts, model_state["param_shapes"], names))
    stage = int(first_state.get("zero_stage", 1))
    return Source(
        trainer=f"DeepSpeed ZeRO-{stage}",
        ranks=len(files),
        shapes=shapes,
        optimizer_steps=int(steps),
        settings=settings,
        group_count=len(groups),
        parts=parts,
        buffers=buffers,
        scaler=_scaler(first_state),
    )


def _check_ranks(folder: Path, files: list[Path], first_state: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless the files are those of all ranks, each of which had all layers."""
    if any("_mp_rank_00_" not in file.name for file in files):
        raise CheckpointError(
            f"{folder}: its layers were divided among ranks (tensor or pipeline parallelism). Merge them with the trainer that "
            "wrote them, and import what it saves."
        )
    # A number for each group of weights, or one for all.
    partitions = first_state["partition_count"]
    expected = max(partitions) if isinstance(partitions, list) else int(partitions)
    if expected != len(files):
        raise CheckpointError(
            f"{folder}: {counted(expected, 'rank')} wrote it, and it holds the files of {len(files)}. Copy the folders of all "
            "nodes into one, or take an earlier checkpoint."
        )


def _optimizer_state(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = load_torch_file(file)["optimizer_state_dict"]
    return state


def _moments(optimizer: Any) -> list[dict[str, Any]]:
    """Return the optimizer's state of each flat group of a rank."""
    # An elastic checkpoint has a list, without the settings of groups.
    if isinstance(optimizer, list):
        return optimizer
    return [state for _, state in sorted(optimizer["state"].items())]


def _scaler(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the loss scaler of fp16; None for other precisions, whose scale is always 1."""
    values = vars(state["loss_scaler"]) if "loss_scaler" in state else {}
    scale = values.get("cur_scale", 1.0)
    if scale == 1.0:
        return None
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float | bool)}
    return {"kind": "DynamicLossScaler", "scale": scale, "state": numbers}


def _pieces(
    file: Path, rank: int, ranks: int, starts: list[int], groups: list[dict[str, torch.Size]], names: Names
) -> Iterator[Piece]:
    """Yield the pieces of a rank. Its tensors are read from the mapped file as they are used.

    Args:
        starts: where the rank's part of each group begins, with ZeRO-1 and 2.
    """
    state = _optimizer_state(file)
    masters = state[names.masters]
    moments = _moments(state[names.optimizer])
    if len(masters) != len(groups) or len(moments) != len(groups):
        raise CheckpointError(f"{file}: it has other groups of weights than the file of the model. Copy the folder again.")
    for index, group in enumerate(groups):
        if names is STAGE_3:
            segments = _own_segments(group, rank, ranks)
        else:
            # DeepSpeed 0.19 aligns weights, and records the gaps between them.
            paddings = [0] * len(group)
            if "param_alignment_paddings" in state:
                paddings = state["param_alignment_paddings"][index]
            segments = _cut_segments(group, paddings, starts[index], masters[index].numel())
        tensors = {None: masters[index]} | {key: moments[index][key] for key in MOMENTS}
        for segment in segments:
            for key, tensor in tensors.items():
                values = tensor[segment.flat_start : segment.flat_start + segment.length]
                yield Piece(segment.name, key, (segment.weight_start,), values)


def _own_segments(group: dict[str, torch.Size], rank: int, ranks: int) -> Iterator[Segment]:
    """Yield a rank's segments with ZeRO-3, where each weight is cut into as many equal segments as there are ranks."""
    position = 0
    for name, shape in group.items():
        numbers = math.prod(shape)
        size = math.ceil(numbers / ranks)
        # The last segments are padded, or lie behind the end.
        length = min(size, numbers - rank * size)
        if length > 0:
            yield Segment(name, rank * size, position, length)
        position += size


def _cut_segments(group: dict[str, torch.Size], paddings: list[int], start: int, length: int) -> Iterator[Segment]:
    """Yield a rank's segments with ZeRO-1 and 2, where all weights of a group are one flat tensor, cut into equal parts.

    Args:
        paddings: unused elements behind each weight.
        start: first element of the rank's part, and its ``length``.
    """
    position = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        numbers = math.prod(shape)
        first = max(position, start)
        stop = min(position + numbers, start + length)
        if first < stop:
            yield Segment(name, first - position, first - start, stop - first)
        position += numbers + padding
