"""DeepSpeed's ``global_stepN``: flat partitions of ZeRO-1 to 3, one file per rank.

Each rank's partition is read as segments of weights, and the imported checkpoint holds the same segments. So nothing is
gathered, and several ranks' files can be read at the same time.
"""

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


class StageNames(NamedTuple):
    """Names that differ between the stages of ZeRO.

    ``masters`` is the key of the fp32 weights, which are a flat tensor for each group. ``optimizer`` is the key of the
    optimizer's state.
    """

    masters: str
    optimizer: str
    model_file: str


STAGE_3 = StageNames("fp32_flat_groups", "optimizer_state_dict", "zero_pp_rank_0_mp_rank_00_model_states.pt")
STAGES_1_2 = StageNames("single_partition_of_fp32_groups", "base_optimizer_state", "mp_rank_00_model_states.pt")


class Segment(NamedTuple):
    """Adjacent elements of a weight in a rank's flat partition of a group."""

    name: str
    weight_start: int
    """index of the first element in the flattened weight"""
    flat_start: int
    """index of the first element in the partition"""
    length: int


def list_rank_files(folder: Path) -> list[Path]:
    """Return the files of the ranks in a ``global_stepN``, in the order of the ranks; none if it is not such a folder."""
    files = {}
    for file in folder.glob("*_optim_states.pt"):
        match = _RANK_FILE.match(file.name)
        if match is not None:
            # The key is (model-parallel rank, data-parallel rank).
            files[int(match.group(2)), int(match.group(1))] = file
    return [files[key] for key in sorted(files)]


def read_zero(folder: Path) -> Source:
    """Return the checkpoint in a ``global_stepN``.

    Raises:
        CheckpointError: a file is missing or damaged, or the model's layers were divided among ranks.
    """
    files = list_rank_files(folder)
    # Read what all ranks have in common from the first rank's file.
    state = load_torch_file(files[0])["optimizer_state_dict"]
    _check_ranks(folder, files, state)
    names = STAGE_3 if STAGE_3.masters in state else STAGES_1_2
    model_state = load_torch_file(folder / names.model_file)
    groups: list[dict[str, torch.Size]] = model_state["param_shapes"]
    shapes: dict[str, list[int]] = {}
    for group in groups:
        for name, shape in group.items():
            shapes[name] = list(shape)

    optimizer = state[names.optimizer]
    # In an elastic checkpoint, this is a list of states, without the settings of the groups.
    setting_groups = [] if isinstance(optimizer, list) else optimizer["param_groups"]
    settings = setting_groups[0] if setting_groups else {}
    first_state = _list_group_states(optimizer)[0]
    require_adamw(folder, first_state)
    # Depending on DeepSpeed's optimizer, the number of steps is in the state of a group or in its settings.
    steps = first_state.get("step", settings.get("step", model_state["global_steps"]))

    buffers = {}
    # A run of adapters takes its buffers from the base model.
    if not any(".lora_" in name for name in shapes):
        for name in model_state["buffer_names"]:
            if name in model_state["module"]:
                buffers[name] = model_state["module"][name]

    parts: list[Iterable[Piece]] = []
    for rank, file in enumerate(files):
        # With ZeRO-1 and 2, all ranks' parts of a group are as long as the first rank's. Only the last part may be shorter,
        # since its padding is not saved.
        starts = [rank * master.numel() for master in state[names.masters]]
        parts.append(_read_pieces(file, rank, len(files), starts, groups, names))
    return Source(
        trainer=f"DeepSpeed ZeRO-{int(state.get('zero_stage', 1))}",
        ranks=len(files),
        shapes=shapes,
        optimizer_steps=int(steps),
        settings=settings,
        group_count=len(setting_groups),
        parts=parts,
        buffers=buffers,
        scaler=_read_scaler(state),
    )


def _check_ranks(folder: Path, files: list[Path], state: dict[str, Any]) -> None:
    """Raise `CheckpointError` unless ``files`` has the files of all ranks, and each rank had all layers.

    Args:
        state: the optimizer state of the first rank.
    """
    if any("_mp_rank_00_" not in file.name for file in files):
        raise CheckpointError(
            f"{folder}: its layers were divided among ranks (tensor or pipeline parallelism). Merge them with the trainer that "
            "wrote them, and import what it saves."
        )
    # The file has the number of partitions of each group of weights, or one number for all groups.
    partitions = state["partition_count"]
    expected = max(partitions) if isinstance(partitions, list) else int(partitions)
    if expected != len(files):
        raise CheckpointError(
            f"{folder}: {counted(expected, 'rank')} wrote it, and it holds the files of {len(files)}. Copy the folders of all "
            "nodes into one, or take an earlier checkpoint."
        )


def _list_group_states(optimizer: Any) -> list[dict[str, Any]]:
    """Return the state that a rank's optimizer keeps for each flat group of weights."""
    # An elastic checkpoint has such a list already.
    if isinstance(optimizer, list):
        return optimizer
    return [state for _, state in sorted(optimizer["state"].items())]


def _read_scaler(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the loss scaler of fp16; None for other precisions, in which the scale is always 1."""
    values = vars(state["loss_scaler"]) if "loss_scaler" in state else {}
    scale = values.get("cur_scale", 1.0)
    if scale == 1.0:
        return None
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float | bool)}
    return {"kind": "DynamicLossScaler", "scale": scale, "state": numbers}


def _read_pieces(
    file: Path, rank: int, ranks: int, starts: list[int], groups: list[dict[str, torch.Size]], names: StageNames
) -> Iterator[Piece]:
    """Yield the pieces in a rank's file. The file is mapped, so a tensor is read when it is used.

    Args:
        ranks: number of ranks.
        starts: for each group, the index of the first element of the rank's part. Used with ZeRO-1 and 2.
        groups: shapes of the weights of each group, by name, in the order in which they are flattened.
    """
    state = load_torch_file(file)["optimizer_state_dict"]
    masters = state[names.masters]
    moments = _list_group_states(state[names.optimizer])
    if len(masters) != len(groups) or len(moments) != len(groups):
        raise CheckpointError(f"{file}: it has other groups of weights than the file of the model. Copy the folder again.")
    for index, group in enumerate(groups):
        if names is STAGE_3:
            segments = _cut_each_weight(group, rank, ranks)
        else:
            # DeepSpeed 0.19 aligns the weights, and records the sizes of the gaps between them.
            paddings = [0] * len(group)
            if "param_alignment_paddings" in state:
                paddings = state["param_alignment_paddings"][index]
            segments = _cut_group(group, paddings, starts[index], masters[index].numel())
        # The weights (key None) and their moments are flattened in the same way, so they have the same segments.
        tensors = {None: masters[index]} | {key: moments[index][key] for key in MOMENTS}
        for segment in segments:
            for key, tensor in tensors.items():
                values = tensor[segment.flat_start : segment.flat_start + segment.length]
                yield Piece(segment.name, key, (segment.weight_start,), values)


def _cut_each_weight(group: dict[str, torch.Size], rank: int, ranks: int) -> Iterator[Segment]:
    """Yield a rank's segments with ZeRO-3, where each weight is cut into as many equal segments as there are ranks."""
    flat_start = 0
    for name, shape in group.items():
        numel = math.prod(shape)
        segment_length = math.ceil(numel / ranks)
        weight_start = rank * segment_length
        # The segments of the last ranks may consist of padding, in part or completely.
        length = min(segment_length, numel - weight_start)
        if length > 0:
            yield Segment(name, weight_start, flat_start, length)
        flat_start += segment_length


def _cut_group(group: dict[str, torch.Size], paddings: list[int], start: int, length: int) -> Iterator[Segment]:
    """Yield a rank's segments with ZeRO-1 and 2, where all weights of a group are one flat tensor, cut into equal parts.

    Args:
        paddings: number of unused elements after each weight.
        start: index in the group of the first element of the rank's part.
        length: number of elements of the rank's part.
    """
    weight_start = 0
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        numel = math.prod(shape)
        # The overlap of the weight and the rank's part, as indices in the group.
        overlap_start = max(weight_start, start)
        overlap_stop = min(weight_start + numel, start + length)
        if overlap_start < overlap_stop:
            yield Segment(name, overlap_start - weight_start, overlap_start - start, overlap_stop - overlap_start)
        weight_start += numel + padding
