"""From named sources to token ids on disk, once; every process of every later run maps what is there.

A source is tokenized into a folder named by a fingerprint of all that decides its content: the source's bytes, format,
tokenizer, template and lengths. One process a node does it, under a lock; a folder appears under its name only when whole.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from zerobook.config import VALIDATION, DatasetSpec, RecipeConfig
from zerobook.data import embedded
from zerobook.data.sources import Source, open_source
from zerobook.data.store import META, TokenStore, TokenWriter
from zerobook.data.tokenize import Reading, chunks, detect, encode_all
from zerobook.data.views import Blocks, Documents, Part, View, pack, report
from zerobook.errors import DataError
from zerobook.loss import Objective
from zerobook.strategy import Strategy

VERSION = 1
"""Of what is written; another one is prepared again."""
LISTED = 50
"""Bad samples that are named; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """``held_out`` by dataset; empty where nothing is held out. ``report`` says what became of the samples."""

    train: Part
    held_out: dict[str, Part]
    weights: list[float] | None = None
    report: dict[str, dict[str, Any]] = field(default_factory=dict)


def prepare(config: RecipeConfig, tokenizer: Any, strategy: Strategy, *, encoder: Any, objective: Objective) -> PreparedData:
    """Tokenize what is not there yet, on one process a node, and open all of it on every process.

    Args:
        encoder: samples -> ids and labels, see `zerobook.data.templates`.
        objective: says which labels count.

    Raises:
        DataError: on every rank, where one met it.
    """
    library = Library(config, tokenizer, encoder, objective)
    strategy.once_per_node(lambda: library.tokenize(workers=config.preprocessing_num_workers or 1))
    return library.open()


class Library:
    """The prepared folders of a config's datasets."""

    def __init__(self, config: RecipeConfig, tokenizer: Any, encoder: Any, objective: Objective):
        self.config = config
        self.encoder = encoder
        self.objective = objective
        self.tokenizer_digest = digest_of_tokenizer(tokenizer)
        self.length: int = encoder.length
        self.root = (Path(config.cache_dir).expanduser() if config.cache_dir else embedded.cache_dir()) / "data"
        self._folders: dict[tuple[str, str], Path] = {}

    def tokenize(self, *, workers: int) -> None:
        """Make every folder that is missing."""
        for spec in self._specs():
            splits = open_source(spec.path, config_name=spec.config_name, split=spec.split)
            self._folder(spec, splits.train, workers, held_out=spec.name == VALIDATION)
            if splits.held_out is not None:
                self._folder(spec, splits.held_out, workers, held_out=True)

    def open(self) -> PreparedData:
        """Views of the prepared folders, as the config splits, cuts and packs them."""
        config = self.config
        train, held_out, weights, facts = [], {}, [], {}
        for spec in self._specs():
            splits = open_source(spec.path, config_name=spec.config_name, split=spec.split)
            store = TokenStore(self._folder(spec, splits.train, held_out=spec.name == VALIDATION))
            own = TokenStore(self._folder(spec, splits.held_out, held_out=True)) if splits.held_out else None
            if spec.name == VALIDATION:
                mine, others = None, self._cut(store, None)
            elif own is not None or config.validation_file:
                mine, others = self._cut(store, None), self._cut(own, None) if own else None
            else:
                share = config.validation_split_percentage / 100
                mine, others = (self._cut(store, half) for half in _halves(store, share, config.seed))
            reports = store.meta["report"]
            if mine is not None:
                if not len(mine):
                    raise DataError(f"{spec.path}: nothing is left to train on: {reports or 'it is shorter than one row'}.")
                train.append(_first(mine, config.max_train_samples if len(self._specs()) == 1 else None))
                weights.append(spec.weight)
                facts[spec.name] = reports | report(train[-1], self.length)
            if others is not None and len(others):
                held_out[spec.name] = _first(others, config.max_eval_samples)
                facts[f"{spec.name}, held out"] = report(held_out[spec.name], self.length)
        mixed = weights if any(w is not None for w in weights) else None
        if mixed is not None:
            mixed = [1.0 if w is None else w for w in mixed]
        return PreparedData(
            train=self._part(train),
            held_out={name: self._part([view]) for name, view in held_out.items()},
            weights=mixed,
            report=facts,
        )

    def _specs(self) -> list[DatasetSpec]:
        return self.config.dataset_specs()

    # --- views
    def _cut(self, store: TokenStore, chosen: np.ndarray | slice | None) -> View:
        """``chosen``: document numbers, a stretch of tokens of a lone text, or all."""
        text = store.meta["format"] == "text"
        if isinstance(chosen, slice):
            starts, stops = np.array([chosen.start]), np.array([chosen.stop])
            documents = None
        else:
            documents = np.arange(len(store)) if chosen is None else chosen
            starts, stops = store.offsets[documents], store.offsets[documents + 1]
        if text and not (self.config.packing and documents is not None):
            return Blocks(store, np.asarray(starts), np.asarray(stops), self.length)
        assert documents is not None
        if self.config.packing:
            return pack(store, documents, self.length)
        return Documents(store, documents)

    def _part(self, views: list[View]) -> Part:
        keys = ("packing", "validation_split_percentage", "max_train_samples", "max_eval_samples")
        facts = [VERSION, self.length, self.config.seed, {key: getattr(self.config, key) for key in keys}]
        facts += [(view.store.meta["digest"], len(view)) for view in views]
        return Part(tuple(views), _fingerprint(facts))

    # --- folders
    def _folder(self, spec: DatasetSpec, source: Source, workers: int = 1, *, held_out: bool) -> Path:
        """The source's folder; made where it is missing."""
        key = (spec.model_dump_json(), source.name)
        if key in self._folders:
            return self._folders[key]
        rows = self._rows_wanted(held_out)
        settings = {
            "version": VERSION,
            "source": source.digest(),
            "format": spec.format,
            "columns": [spec.text_column, spec.summary_column],
            "limit": [spec.limit, rows and [rows, self.config.packing]],
            "on_bad_sample": self.config.on_bad_sample,
            "tokenizer": self.tokenizer_digest,
            "encoder": [type(self.encoder).__name__, {k: v for k, v in vars(self.encoder).items() if isinstance(v, int | str)}],
            "shifted": self.objective.shifted,
        }
        folder = self.root / _fingerprint(settings)
        if not (folder / META).exists():
            import filelock

            self.root.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(f"{folder}.lock")
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                tqdm.write(f"{source.name}: another process is preparing it; waiting for {folder}")
                lock.acquire()
            with lock:
                if not (folder / META).exists():
                    self._say_if_changed(source, folder)
                    self._make(folder, spec, source, settings, rows, workers)
        self._folders[key] = folder
        return folder

    def _say_if_changed(self, source: Source, folder: Path) -> None:
        """A source that was prepared before with other content or settings is prepared again; people wonder why."""
        for other in self.root.glob(f"*/{META}"):
            meta = json.loads(other.read_text())
            if meta["source_name"] == source.name and meta["settings"]["source"] != source.digest():
                tqdm.write(f"{source.name}: changed since it was prepared into {other.parent.name}; prepared again")
                return

    def _make(
        self, folder: Path, spec: DatasetSpec, source: Source, settings: dict[str, Any], rows: int | None, workers: int
    ) -> None:
        staging = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            writer = TokenWriter(staging, shifted=self.objective.shifted)
            meta = self._write(writer, spec, source, rows, workers)
            writer.close(meta | {"settings": settings, "source_name": source.name})
            staging.rename(folder)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            used = sum(f.stat().st_size for f in staging.iterdir())
            raise DataError(
                f"{source.name}: the disk of {self.root} is full after {used / 1e6:.1f} MB of token ids, with "
                f"{shutil.disk_usage(self.root).free / 1e6:.1f} MB free. Give --cache_dir on a larger disk."
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write(self, writer: TokenWriter, spec: DatasetSpec, source: Source, rows: int | None, workers: int) -> dict[str, Any]:
        counts: Counter = Counter()
        listed: list[str] = []
        bar = tqdm(total=source.total, desc=f"preparing {spec.name}", unit=source.unit, unit_scale=True, leave=False)
        parts = chunks(islice(source.read(), spec.limit), bar)
        first = next(parts, [])
        columns = {"text_column": spec.text_column, "summary_column": spec.summary_column}
        try:
            reading = Reading(spec.format or detect(first, columns), columns, self.encoder)
        except DataError as error:
            raise DataError(f"{source.name}: {error}") from None
        in_tokens = reading.format == "text" or self.config.packing
        for encoded in encode_all(reading, chain([first], parts), workers):
            for where, reason in encoded.bad:
                if self.config.on_bad_sample == "error":
                    raise DataError(f"{source.name}, {where}: {reason}. Mend it, or pass --on_bad_sample skip.")
                if len(listed) < LISTED:
                    listed.append(f"{where}: {reason}")
            counts += encoded.counts
            counts["bad samples skipped"] += len(encoded.bad)
            writer.append(encoded.documents)
            if rows is not None and (writer.tokens >= rows * self.length if in_tokens else writer.documents >= rows):
                break
        bar.close()
        if listed:
            tqdm.write(f"{source.name}: {counts['bad samples skipped']} bad samples skipped, the first {listed[0]}")
        found = {what: number for what, number in counts.items() if number}
        return {"format": reading.format, "lone_text": source.lone_text, "report": found, "bad_samples": listed}

    def _rows_wanted(self, held_out: bool) -> int | None:
        """Where a limit asks for less than the source holds, so many rows are enough; None reads it all."""
        config = self.config
        if len(self._specs()) > 1:
            return None  # their shares are set by weights; a limit of their own stands in ``datasets``
        if held_out:
            return config.max_eval_samples
        if config.max_train_samples is None:
            return None
        # a tenth more, since documents do not split evenly
        return math.ceil(1.1 * config.max_train_samples / (1 - config.validation_split_percentage / 100)) + 8


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Of all that decides which ids a text becomes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return _fingerprint([core, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)])


def _fingerprint(value: Any) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def _halves(store: TokenStore, share: float, seed: int) -> tuple[Any, Any]:
    """(chosen for training, held out): a seeded share of the documents, or the end of a lone text."""
    if share == 0:
        return None, np.empty(0, np.int64)
    if store.meta["lone_text"]:
        total = int(store.offsets[-1])
        cut = total - round(total * share)
        return slice(0, cut), slice(cut, total)
    held = min(max(1, round(len(store) * share)), len(store) - 1)
    order = np.random.default_rng(seed).permutation(len(store))
    return np.sort(order[held:]), np.sort(order[:held])


def _first(view: View, rows: int | None) -> View:
    """The first ``rows`` rows of ``view``."""
    if rows is None or rows >= len(view):
        return view
    if isinstance(view, Documents):
        return replace(view, chosen=view.chosen[:rows])
    if isinstance(view, Blocks):
        ends = np.minimum(np.cumsum(view.stops - view.starts), rows * view.length)
        starts = ends - np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        return replace(view, stops=view.starts + starts)
    offsets = view.packing.offsets[: rows + 1]
    return replace(view, packing=type(view.packing)(offsets, view.packing.members[: offsets[-1]]))
