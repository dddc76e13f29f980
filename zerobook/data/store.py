"""Token ids on disk: documents are joined in flat files, and readers map the files into memory.

``input_ids.bin``, ``labels.bin``        int32, all documents joined; no labels file where labels equal the ids
``*.offsets.npy``                        int64 [documents + 1], where each begins; one file for ids and labels of equal lengths
``NAME.bin``, ``NAME.offsets.npy``       further arrays of every document, int32, as an encoder names them
``supervised.npy``                       int32 [documents], the loss weight of each; usually the number of labels in the loss
``samples.npy``                          int64 [documents], the sample that each is part of; no file if none is divided
``meta.json``                            counts and settings, sizes and digests of all files, written last

`zerobook.data.verification` compares the files with ``meta.json``, and leaves ``verified-HOST.json`` beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zerobook.data.verification import META, write_meta
from zerobook.errors import DataError
from zerobook.utils.reading import open_regular, read_json


@dataclass(frozen=True)
class Ragged:
    """Arrays of different lengths, joined: ``values`` int32 [sum of lengths], ``lengths`` int64 [arrays]."""

    values: np.ndarray
    lengths: np.ndarray

    @classmethod
    def join(cls, arrays: Sequence[np.ndarray]) -> Ragged:
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        return cls(np.concatenate([np.empty(0, np.int32), *arrays]).astype(np.int32, copy=False), lengths)


class TokenWriter:
    """Writes documents to a folder that does not exist yet. Memory grows by about 20 bytes a document.

    It grows by 8 more bytes a document for each further array.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self.folder = folder
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in ("input_ids", "labels")}
        self._lengths: dict[str, list[np.ndarray]] = {"input_ids": [], "labels": []}
        self._weights: list[np.ndarray] = []
        self._begins: list[np.ndarray] = []
        self._labels_equal_ids = True  # in all documents so far

    @property
    def tokens(self) -> int:
        return self._files["input_ids"].tell() // 4

    @property
    def documents(self) -> int:
        return sum(map(len, self._weights))

    def append(
        self,
        ids: Ragged,
        labels: Ragged | None,
        weights: np.ndarray,
        *,
        begins: np.ndarray,
        extra: Mapping[str, Ragged],
    ) -> None:
        """Add documents.

        Args:
            ids: token ids.
            labels: None if they equal the ids.
            weights: int [documents], the loss weight of each document, computed by the objective.
            begins: bool [documents], which are the first of their sample.
            extra: further arrays of every document, the same names in every call.
        """
        if not len(weights):
            return
        # Write the labels also if they equal the ids: those of a later document may differ.
        arrays = {"input_ids": ids, "labels": ids if labels is None else labels, **extra}
        if self._weights and set(arrays) != set(self._files):
            raise DataError(
                f"the encoder gave documents with the arrays {sorted(arrays)} after others with {sorted(self._files)}. Every "
                "document needs the same arrays; an array may be empty."
            )
        self._begins.append(begins)
        self._labels_equal_ids = self._labels_equal_ids and labels is None
        for name, ragged in arrays.items():
            if name not in self._files:
                self._files[name] = (self.folder / f"{name}.bin").open("xb")
                self._lengths[name] = []
            self._lengths[name].append(ragged.lengths)
            self._files[name].write(ragged.values.data)
        self._weights.append(weights.astype(np.int32))

    def close(self, meta: dict[str, Any]) -> None:
        """Write the remaining files. ``meta`` is JSON; counts, sizes and digests are added to it."""
        for file in self._files.values():
            file.close()
        offsets = {}
        for name, lengths in self._lengths.items():
            offsets[name] = np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]))

        # Leave out a file if readers can use another one instead.
        if self._labels_equal_ids:
            (self.folder / "labels.bin").unlink()
        has_own_offsets = not np.array_equal(offsets["input_ids"], offsets["labels"])
        for name in offsets:
            if name != "labels" or has_own_offsets:
                np.save(self.folder / f"{name}.offsets.npy", offsets[name])
        weights = np.concatenate([np.zeros(0, np.int32), *self._weights])
        np.save(self.folder / "supervised.npy", weights)
        begins = np.concatenate([np.zeros(0, bool), *self._begins])
        # Most data has one document for each sample, and needs no file for this. The numbers of the samples begin at 0.
        if not begins[1:].all():
            np.save(self.folder / "samples.npy", np.cumsum(begins) - begins[0])

        counts = {
            "documents": len(weights),
            "tokens": int(offsets["input_ids"][-1]),
            "supervised": int(weights.sum()),
            "extra": sorted(set(offsets) - {"input_ids", "labels"}),
        }
        # Sizes and digests are of the complete files.
        sizes = {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())}
        digest, digests = self._digests()
        write_meta(self.folder, meta | counts | {"digest": digest, "bytes": sizes, "xxh3_128": digests})

    def _digests(self) -> tuple[str, dict[str, str]]:
        """Return (the digest of the names and contents of all files, the digest of each file)."""
        import xxhash

        all_files = xxhash.xxh3_128()
        digests = {}
        for file in sorted(self.folder.iterdir()):
            # With the names, two files whose contents were swapped give another digest.
            all_files.update(file.name.encode())
            digest = xxhash.xxh3_128()
            with open_regular(file) as handle:
                while block := handle.read(1 << 22):
                    all_files.update(block)
                    digest.update(block)
            digests[file.name] = digest.hexdigest()
        return all_files.hexdigest(), digests


class TokenStore:
    """A folder that `TokenWriter` closed. Its files are mapped when first read, so worker processes receive only its path."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.meta: dict[str, Any] = read_json(folder / META)

    def __len__(self) -> int:
        return int(self.meta["documents"])

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)

    def mapped(self) -> TokenStore:
        """Return this store with all files open, so that it can still be read after they are deleted."""
        # Each of these properties maps its file when it is first read.
        for _ in (self.ids, self.labels, self.offsets, self.label_offsets, self.loss_weights, self.samples, self.extra):
            pass
        return self

    @cached_property
    def ids(self) -> np.ndarray:
        """int32 [tokens]"""
        return self._map("input_ids")

    @cached_property
    def labels(self) -> np.ndarray:
        """int32, the labels of all documents"""
        return self._map("labels") if (self.folder / "labels.bin").exists() else self.ids

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 [documents + 1]"""
        return np.load(self.folder / "input_ids.offsets.npy", mmap_mode="r")

    @cached_property
    def label_offsets(self) -> np.ndarray:
        """int64 [documents + 1]"""
        file = self.folder / "labels.offsets.npy"
        return np.load(file, mmap_mode="r") if file.exists() else self.offsets

    @cached_property
    def extra(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """name -> (values int32, offsets int64 [documents + 1]) of the arrays besides ids and labels"""
        arrays = {}
        for name in self.meta.get("extra", []):
            offsets = np.load(self.folder / f"{name}.offsets.npy", mmap_mode="r")
            arrays[name] = (self._map(name), offsets)
        return arrays

    @cached_property
    def loss_weights(self) -> np.ndarray:
        """int32 [documents], the weight of each in the divisor of the loss"""
        return np.load(self.folder / "supervised.npy", mmap_mode="r")

    @cached_property
    def samples(self) -> np.ndarray:
        """int64 [documents], the number of the sample that each document belongs to"""
        file = self.folder / "samples.npy"
        return np.load(file, mmap_mode="r") if file.exists() else np.arange(len(self))

    # Map a file of int32 into memory. An empty file cannot be mapped.
    def _map(self, name: str) -> np.ndarray:
        file = self.folder / f"{name}.bin"
        return np.memmap(file, np.int32, "r") if file.stat().st_size else np.empty(0, np.int32)
