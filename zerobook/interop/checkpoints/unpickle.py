"""Files that other trainers pickled, read without running their code.

torch's ``weights_only`` loader makes only tensors and plain values. Checkpoints name a few other classes. In their place, this
module puts classes that only hold values. A file that names any other class is refused.
"""

import io
import pickle
import threading
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zerobook.errors import CheckpointError


class Values:
    """The attributes of an object of another trainer, without its class."""


# (class in its place, name of the class) of what `load_torch_file` takes besides tensors and plain values.
ALLOWED: list[Any] = [
    # These are DeepSpeed's loss scalers, the number of a ZeRO stage, and the place of a weight in a flat partition.
    (Values, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (Values, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Values, "deepspeed.utils.tensor_fragment.fragment_address"),
]

# (module, name) -> class that the index of a sharded checkpoint may name, besides dtypes and the classes below.
METADATA_CLASSES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    # The index names the folder that it was written to.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}
for _name in (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
):
    METADATA_CLASSES["torch.distributed.checkpoint.metadata", _name] = getattr(dcp_metadata, _name)


_lock = threading.Lock()


def load_torch_file(file: Path) -> Any:
    """Return the content of a file of ``torch.save``. Its tensors stay in the file until they are used.

    Raises:
        CheckpointError: the file is missing, damaged, or names another class.
    """
    return _load(file, file, mmap=True)


def load_torch_bytes(file: Path, start: int, length: int) -> Any:
    """Return what ``torch.save`` wrote into ``length`` bytes of a file from byte ``start`` on."""
    try:
        with file.open("rb") as opened:
            opened.seek(start)
            content = io.BytesIO(opened.read(length))
    except OSError as error:
        raise CheckpointError(f"{file}: it cannot be read: {error.strerror}.") from None
    return _load(file, content)


def _load(file: Path, content: Path | io.BytesIO, **options: Any) -> Any:
    try:
        # The lock is needed since the allowed classes hold for all threads of the process.
        with _lock, torch.serialization.safe_globals(ALLOWED):
            return torch.load(content, map_location="cpu", weights_only=True, **options)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: it is missing. The folder is not a complete checkpoint: copy it again.") from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(_explain_refusal(file, content, error)) from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{file}: it is damaged or not of torch.save ({reason}). Copy it again.") from None


def _explain_refusal(file: Path, content: Path | io.BytesIO, error: pickle.UnpicklingError) -> str:
    # Find the names of the classes that are not allowed. If that fails, quote torch's message.
    try:
        if isinstance(content, io.BytesIO):
            content.seek(0)
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(content)) - {name for _, name in ALLOWED}
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError):
        names = set()
    reason = ", ".join(sorted(names)) or str(error).partition("\n")[0]
    return (
        f"{file}: it asks for {reason}, and an object of a class could run any code while it is read, so it is refused. Save "
        "the checkpoint with tensors and plain values alone."
    )


class _MetadataUnpickler(pickle.Unpickler):
    # pickle calls this for each class that a file names.
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in METADATA_CLASSES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return METADATA_CLASSES[module, name]


def load_metadata(file: Path) -> dcp_metadata.Metadata:
    """Return the index of a checkpoint of ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: the file is missing, damaged, or names another class.
    """
    try:
        with file.open("rb") as opened:
            content = _MetadataUnpickler(opened).load()
        if isinstance(content, dcp_metadata.Metadata):
            return content
        reason = type(content).__name__
    except FileNotFoundError:
        raise CheckpointError(f"{file}: it is missing, so the save was not finished. Take an earlier checkpoint.") from None
    # A damaged pickle may raise anything.
    except Exception as error:
        reason = str(error)
    raise CheckpointError(
        f"{file}: it is damaged, or asks for a class that an index does not need, so it is refused ({reason}). Copy it again."
    )
