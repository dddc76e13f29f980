"""Sharded state dicts of ``torch.distributed.checkpoint``, as FSDP saves them: each chunk becomes a piece here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from zerobook.errors import CheckpointError
from zerobook.interop.checkpoints.model_names import to_peft_name
from zerobook.interop.checkpoints.source import MOMENTS, Source
from zerobook.interop.checkpoints.torch_files import read_scaler
from zerobook.interop.checkpoints.unpickle import load_metadata, load_torch_bytes
from zerobook.strategy import Piece

METADATA = ".metadata"
# Names that accelerate gives the two folders.
MODEL_FOLDER = "pytorch_model_fsdp_0"
OPTIMIZER_FOLDER = "optimizer_0"
# Number of parts of the weights that are read at the same time.
PARTS = 8
# The keys of the optimizer's state begin with this.
_STATE = "optimizer.state."


def read_sharded(folder: Path) -> Source:
    """Return the checkpoint in a folder with `MODEL_FOLDER` and `OPTIMIZER_FOLDER`.

    Raises:
        CheckpointError: a file is missing or damaged, or the optimizer is not AdamW.
    """
    model = _Shards(folder / MODEL_FOLDER)
    optimizer = _Shards(folder / OPTIMIZER_FOLDER)
    # A key of the state is, for example, ``optimizer.state.NAME.exp_avg``.
    suffix = f".{MOMENTS[0]}"
    names = [key.removeprefix(_STATE).removesuffix(suffix) for key in optimizer.tensors if key.endswith(suffix)]
    steps = [key for key in optimizer.tensors if key.endswith(".step")]
    if not names or not steps:
        raise CheckpointError(
            f"{optimizer.folder}: the optimizer state has no {MOMENTS[0]} or no step. Only AdamW's state can be taken over. "
            "Start a new run from the trained weights."
        )
    shapes = {name: list(optimizer.tensors[f"{_STATE}{name}{suffix}"].size) for name in names}
    # AdamW counts the steps for each weight, and all counts are equal.
    _, step = next(optimizer.read_chunks(steps[0]))
    settings = {}
    for key in ("lr", "initial_lr", "betas", "eps", "weight_decay"):
        name = f"optimizer.param_groups.0.{key}"
        if name in optimizer.metadata.state_dict_metadata:
            settings[key] = optimizer.read_value(name)
    has_second_group = "optimizer.param_groups.1.params" in optimizer.metadata.state_dict_metadata
    return Source(
        trainer="FSDP",
        ranks=model.ranks,
        shapes=shapes,
        optimizer_steps=int(step),
        settings=settings,
        group_count=2 if has_second_group else 1,
        # Part number k has every eighth weight from the k-th on.
        parts=[_read_pieces(model, optimizer, names[part::PARTS]) for part in range(PARTS)],
        scaler=read_scaler(folder),
    )


def _read_pieces(model: _Shards, optimizer: _Shards, names: list[str]) -> Iterator[Piece]:
    """Yield the chunks of the weights ``names`` and of their moments, each as a piece."""
    for name in names:
        # For adapters, accelerate may save PEFT's names.
        key = f"model.{name}"
        if key not in model.tensors:
            key = f"model.{to_peft_name(name)}"
        for offset, values in model.read_chunks(key):
            yield Piece(name, None, offset, values)
        for moment in MOMENTS:
            for offset, values in optimizer.read_chunks(f"{_STATE}{name}.{moment}"):
                yield Piece(name, moment, offset, values)


class _Shards:
    """Reads the chunks of the tensors in a folder.

    Attributes:
        tensors: name -> size and chunks of each tensor.
        ranks: number of files, since each rank wrote one.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.metadata: Metadata = load_metadata(folder / METADATA)
        self.tensors: dict[str, Any] = {}
        for name, facts in self.metadata.state_dict_metadata.items():
            if hasattr(facts, "chunks"):
                self.tensors[name] = facts
        # Name of a tensor or value -> (offset, place in a file) of each of its chunks.
        self._stored: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in self.metadata.storage_data.items():
            self._stored.setdefault(index.fqn, []).append((index.offset, info))
        self.ranks = len({info.relative_path for entries in self._stored.values() for _, info in entries})

    def read_chunks(self, name: str) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Yield (offset, values) of each chunk of a tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}. The two folders are of different models.")
        for offset, info in self._stored[name]:
            # The offset of a number, which has no dimensions, is empty.
            yield (tuple(offset) or (0,)), self._load(info)

    def read_value(self, name: str) -> Any:
        # A value that is no tensor is stored in one chunk.
        _, info = self._stored[name][0]
        return self._load(info)

    def _load(self, info: Any) -> Any:
        # The index may come from somebody else, and must not name a file elsewhere.
        if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.folder}: {info.relative_path} is outside of the folder, or compressed.")
        return load_torch_bytes(self.folder / info.relative_path, info.offset, info.length)
