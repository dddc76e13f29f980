"""Preparation of data: a source is tokenized to disk once, and every process of every later run maps the files.

A source's folder is named by a fingerprint of everything that decides its content: the source's bytes, format, tokenizer,
template and lengths. One process of each node tokenizes, under a lock. A folder gets its name only when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import math
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import xxhash

from zerobook.config import DatasetSpec, RecipeConfig
from zerobook.data import embedded, files, sources
from zerobook.data.formats import formats_of
from zerobook.data.held_out import describe_empty_share, describe_short_text, describe_unsupervised
from zerobook.data.pack import Packing
from zerobook.data.sampler import Permutation, held_out_mask
from zerobook.data.source import Source, Splits, take_samples
from zerobook.data.sources import open_held_out, open_source
from zerobook.data.store import TokenStore, TokenWriter
from zerobook.data.stream import Stream
from zerobook.data.templates import CausalEncoder, Encoder, describe_default_template
from zerobook.data.tokenize import BY_DEFAULT_TEMPLATE, CUT, DROPPED, Chunk, Reading, chunks, detect, encode_all, list_unread
from zerobook.data.verification import find_damage, stamp
from zerobook.data.views import Blocks, Documents, PreparedRows, View, pack, report, text_row
from zerobook.errors import ConfigError, DataError
from zerobook.health.position import touch
from zerobook.objective import NextToken, Objective, TargetTokens
from zerobook.strategy import Strategy
from zerobook.utils import locks
from zerobook.utils.bars import tqdm
from zerobook.utils.files import put_in_place, refresh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Version of the files. Data of another version is prepared again.
VERSION = 2
# Version of how samples are read. Data that was read by another version is prepared again. If the tokens are the same, a run
# still resumes.
READER = 9
# Number of bad samples that are listed; the others are only counted.
LISTED = 50
# Share of the samples that lose a part to the maximum length, from which a run warns.
MANY_CUT = 0.5
# Number of reasons that are listed with their counts.
REASONS = 5


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Prepared rows. ``held_out``: by dataset, or empty. ``report``: facts about the samples, by dataset.

    ``formats``: name of a dataset -> (its format, the columns that the format does not read).
    """

    train: PreparedRows | Stream
    held_out: dict[str, PreparedRows]
    weights: list[float] | None = None
    report: dict[str, dict[str, Any]] = field(default_factory=dict)
    formats: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    bad_samples: dict[str, list[str]] = field(default_factory=dict)
    """The first samples that were left out of each dataset: place and reason."""

    @property
    def uses_default_template(self) -> bool:
        """Whether chats were rendered by the default chat template, since the tokenizer has none."""
        return any(BY_DEFAULT_TEMPLATE in facts for facts in self.report.values())

    @property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the training data and of each dataset's held-out data."""
        fingerprints = {"training data": self.train.fingerprint}
        for name, rows in self.held_out.items():
            fingerprints[f"held-out data of {name}"] = rows.fingerprint
        return fingerprints

    @property
    def held_out_fingerprint(self) -> str:
        """Fingerprint of the tokens that a held-out loss is measured on; empty if nothing is held out.

        Losses of two runs, or of two attempts of one run, are comparable only if it is the same.
        """
        if not self.held_out:
            return ""
        facts = []
        for rows in self.held_out.values():
            for view in rows.views:
                facts.append([view.store.meta["digest"], *map(_digest_of_array, view.selection)])
        return _fingerprint(facts)


def prepare(
    config: RecipeConfig,
    tokenizer: PreTrainedTokenizerBase,
    strategy: Strategy,
    *,
    encoder: Encoder,
    objective: Objective,
    workers: int | None = None,
    read_ahead: bool = True,
) -> PreparedData:
    """Tokenize data that is not prepared yet, on one process of each node, and open all data on every process. Collective.

    Args:
        encoder: converts samples to ids and labels.
        objective: gives the loss weights of the rows.
        workers: processes that tokenize; None: as the config says.
        read_ahead: prepare a stream's next shards in other processes during training.

    Raises:
        ConfigError: packing with an objective or an encoder that cannot be packed.
        DataError: on every rank, if the error occurred on one.
    """
    # If the tokenizer has no chat template, chats are rendered by the default one, and the run adds it to its config if the
    # prepared data have chats (see `uses_default_template`). A stream is not read before the run, so this is not known for it:
    # its chats need a template of the tokenizer or the user.
    if isinstance(encoder, CausalEncoder) and not config.streaming:
        encoder.take_default_template()
    library = Library(config, tokenizer, encoder, objective)
    # By default one process tokenizes, since each has a copy of the tokenizer in memory.
    workers = workers or config.preprocessing_num_workers or 1
    # Collective: one process of each node tokenizes. The others wait for it, and get the folders from it.
    data = library.open(strategy.once_per_node(lambda: library.tokenize(workers)))
    if strategy.is_main:
        if data.uses_default_template:
            tqdm.write(describe_default_template(tokenizer))
        for describe in (describe_missing_held_out, describe_trained_held_out, describe_cut_samples):
            for message in describe(config, data):
                tqdm.write(message)
    if config.streaming:
        # One process of each node prepares the next shards for all of them.
        prepares_shards = strategy.accelerator.is_local_main_process and read_ahead
        stream = library.stream(workers if prepares_shards else 0)
        # Only the number of shards is known before they are read.
        shards = zip(config.dataset_specs(), stream.counts, strict=True)
        facts: dict[str, dict[str, Any]] = {spec.name: {"shards": count} for spec, count in shards}
        data = replace(data, train=stream, report=facts | data.report)
    return data


def describe_missing_held_out(config: RecipeConfig, data: PreparedData) -> list[str]:
    """Return warnings about datasets of which nothing is held out, although something should be."""
    if config.streaming:
        message = "streaming: no samples of a stream are held out. Give --validation_file to measure a held-out loss"
        return [] if data.held_out else [message]
    if config.validation_file or not config.validation_split_percentage:
        return []
    percentage = config.validation_split_percentage
    paths = [spec.path for spec in config.dataset_specs() if spec.name not in data.held_out]
    return [describe_empty_share(path, percentage, has_other_held_out_data=bool(data.held_out)) for path in paths]


def describe_trained_held_out(config: RecipeConfig, data: PreparedData) -> list[str]:
    """Return warnings about held-out samples that are also trained on. Only complete files of equal content are found."""
    held_out_stores = {name: rows.views[0].store for name, rows in data.held_out.items()}
    messages = []
    # The data of a stream is not open yet, so there are no views.
    for spec, view in zip(config.dataset_specs(), data.train.views, strict=False):
        # The share that a dataset holds out of its training data is in the same folder, and is not trained on.
        own_held_out = held_out_stores.get(spec.name)
        holds_out_a_share = own_held_out is not None and own_held_out.folder == view.store.folder
        for name, store in held_out_stores.items():
            # The digests are of contents, so a copy of a file under another name is found, too.
            held_out_files = store.meta["settings"]["source"].split("\n")
            if set(held_out_files).isdisjoint(view.store.meta["settings"]["source"].split("\n")):
                continue
            # Datasets with equal settings share a folder, and hold out the same samples of it.
            if holds_out_a_share and store.folder == view.store.folder:
                continue
            messages.append(
                f"WARNING: {spec.path} is training data, and held-out data of {name!r} has the same content, or a file of it. "
                "So the held-out loss is partly measured on samples that are trained on. Name other data with "
                "--validation_file, or give all entries of one file the same settings."
            )
    return messages


def describe_cut_samples(config: RecipeConfig, data: PreparedData) -> list[str]:
    """Return a warning for each dataset of which half of the samples or more lose a part, or all, to the maximum length."""
    messages = []
    # The data of a stream is not open yet, so there are no views.
    for spec, view in zip(config.dataset_specs(), data.train.views, strict=False):
        meta = view.store.meta
        dropped = meta["report"].get(DROPPED, 0)
        shortened = meta["report"].get(CUT, 0) + dropped
        samples = meta["documents"] + dropped
        if shortened < MANY_CUT * samples:
            continue
        messages.append(
            f"WARNING: {spec.path}: {shortened:,} of {samples:,} samples do not fit into a row, and what does not fit is not "
            f"trained on. --{type(config).length_key} is {config.row_length}: raise it as far as model and memory allow, or "
            "split the samples."
        )
    return messages


# The prepared folders of a dataset, of its training data and of its held-out data: None if it has no such data.
Folders = tuple[Path | None, Path | None]


class Library:
    """The prepared folders of a config's datasets."""

    def __init__(self, config: RecipeConfig, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, objective: Objective):
        flag = config.rows_shared_by
        if flag and not isinstance(objective, NextToken):
            raise ConfigError(
                f"{flag}: {type(objective).__name__} is no NextToken objective, and only those learn from rows of several "
                f"samples. Drop --{flag}, or derive the objective from zerobook.objective.NextToken."
            )
        self.config = config
        self.encoder = encoder
        # Copy the objective now. It may later get a second model, which the processes that prepare a stream cannot be sent.
        self.objective = copy(objective)
        self.tokenizer_digest = digest_of_tokenizer(tokenizer)
        self.vocabulary = len(tokenizer)
        if not encoder.length:
            raise ConfigError(f"{type(encoder).__name__}.length is {encoder.length!r}; rows need a length of at least 1.")
        self.length: int = encoder.length
        # What was opened or computed before: splits by name of the dataset, shards and folder names by its number.
        self._opened: dict[str, Splits] = {}
        self._cut_sources: dict[int, list[Source]] = {}
        self._stream_names: dict[int, str] = {}
        cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir else embedded.cache_dir()
        self.root = cache_dir / "data"

    def tokenize(self, workers: int) -> list[Folders]:
        """Make every folder that is missing. Return the folders of each dataset, and last those of the validation file."""
        all_folders: list[Folders] = []
        for spec in self.config.dataset_specs():
            splits = self._open_splits(spec)
            choice = splits.describe(uses_held_out=not self.config.validation_file)
            if choice:
                tqdm.write(f"data: {spec.path} {choice}")
            train = None
            held_out = None
            if not self.config.streaming:
                train = self._prepare_folder(spec, splits.train, self._count_needed_rows(splits), workers)
            if splits.held_out is not None and not self.config.validation_file:
                held_out = self._prepare_folder(spec, splits.held_out, self.config.max_eval_samples, workers)
            all_folders.append((train, held_out))
        if self.config.validation_file:
            spec = self.config.validation_spec()
            # The file is the held-out data of all datasets of the run, and has no training data.
            held_out = self._prepare_folder(spec, open_held_out(spec.path), self.config.max_eval_samples, workers)
            all_folders.append((None, held_out))
        return all_folders

    # Open a dataset, once: for a dataset on the hub, this takes several requests.
    def _open_splits(self, spec: DatasetSpec) -> Splits:
        if spec.name not in self._opened:
            self._opened[spec.name] = open_source(
                spec.path,
                config_name=spec.config_name,
                revision=spec.revision,
                split=spec.split,
                streaming=self.config.streaming,
            )
        return self._opened[spec.name]

    def _count_needed_rows(self, splits: Splits) -> int | None:
        """Return how many rows to prepare so that enough of them are left to train on; None to prepare the whole source."""
        config = self.config
        # The datasets of a mixture have limits of their own.
        if config.max_train_samples is None or config.datasets:
            return None
        train_share = 1.0
        if not (splits.held_out or config.validation_file):
            train_share = 1 - config.validation_split_percentage / 100
        # Prepare some more, since the documents of a sample stay together, so the share is not exact.
        return math.ceil(1.1 * config.max_train_samples / train_share) + 8

    def open(self, all_folders: list[Folders]) -> PreparedData:
        """Return views of the folders that `tokenize` returned, split, cut and packed as the config says."""
        config = self.config
        specs = [*config.dataset_specs()]
        if config.validation_file:
            specs.append(config.validation_spec())
        train: list[View] = []
        held_out: dict[str, View] = {}
        facts: dict[str, dict[str, Any]] = {}
        bad_samples: dict[str, list[str]] = {}
        formats: dict[str, tuple[str, list[str]]] = {}
        for spec, folders in zip(specs, all_folders, strict=True):
            name = spec.name
            train_view, held_out_view = self._open_views(*folders)
            view = held_out_view if train_view is None else train_view
            if view is not None:
                formats[name] = view.store.meta["format"], view.store.meta["ignored_columns"]
            if train_view is not None:
                meta = train_view.store.meta
                if meta["bad_samples"]:
                    bad_samples[name] = meta["bad_samples"]
                if not len(train_view):
                    # Refuse an empty dataset of a mixture, too, since its weight could not be kept.
                    self._refuse_empty(spec, train_view)
                # The datasets of a mixture have limits of their own.
                if not config.datasets:
                    train_view = _take_first(train_view, config.max_train_samples)
                train.append(train_view)
                facts[name] = meta["report"] | report(train_view, self.length)
            # Held-out data in a folder of its own must not be empty. A share of the training data may be.
            if held_out_view is not None and folders[1] is not None:
                self._check_held_out(held_out_view)
            if held_out_view is not None and len(held_out_view):
                held_out[name] = _take_first(held_out_view, config.max_eval_samples)
                facts[f"{name}, held out"] = report(held_out[name], self.length)
        return PreparedData(
            train=self._join_views(train),
            held_out={name: self._join_views([view]) for name, view in held_out.items()},
            weights=self.weights(),
            report=facts,
            formats=formats,
            bad_samples=bad_samples,
        )

    def weights(self) -> list[float] | None:
        """Return the weights of the training datasets; None if the config gives none."""
        specs = self.config.dataset_specs()
        if not any(spec.weight for spec in specs):
            return None
        # Once a dataset has a weight, those without one have the weight 1.
        return [spec.weight or 1.0 for spec in specs]

    # --- streams, see `zerobook.data.stream`
    def stream(self, ahead: int) -> Stream:
        """Return the training datasets as a stream, without preparing any data yet."""
        specs = self.config.dataset_specs()
        keys = ("packing", "seed", "on_bad_sample")
        config_settings = {key: getattr(self.config, key) for key in keys}
        settings = [self._stream_settings(spec) for spec in specs]
        # The sizes of shards decide the shards, and so the order of the rows.
        shard_sizes = [files.SHARD_BYTES, sources.SHARD_ROWS]
        counts = [len(self._cut_source(index)) for index in range(len(specs))]
        return Stream(
            shards=self,
            counts=counts,
            fingerprint=_fingerprint([settings, shard_sizes, config_settings, counts]),
            isolated=self.config.packing,
            longest_sample=self.length,
            largest_id=self.vocabulary - 1,
            ahead=ahead,
        )

    # Return the settings that decide the content of all shards of a dataset.
    def _stream_settings(self, spec: DatasetSpec) -> dict[str, Any]:
        source = self._open_splits(spec).train
        # A stream may be too large for a digest of its content, so take its sketch if it has one.
        return self._settings(spec, (source.sketch or source.digest)(), None)

    def shard(self, dataset: int, index: int) -> PreparedRows:
        """Return the rows of one shard. Prepare the shard if it is missing; wait if another process is preparing it."""
        spec = self.config.dataset_specs()[dataset]
        source = self._cut_source(dataset)[index]
        folder = self._shard_folder(dataset, index)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Keep the lock until the files are mapped, since another process may be about to delete them.
        with locks.locked(_lock_file(folder), meanwhile=touch) as alone:

            def make() -> None:
                # The digest may take long, so it is computed only if the shard is missing.
                settings = self._settings(spec, source.digest(), None)
                self._make_folder(folder, spec, source, settings, rows=None, workers=1, alone=bool(alone))

            self._make_if_needed(folder, source, make)
            store = TokenStore(folder).mapped()
        return PreparedRows((self._make_view(store, np.arange(len(store))),), store.meta["digest"])

    def delete_shard(self, dataset: int, index: int) -> None:
        """Delete a shard's folder, if there is one. Processes that have mapped its files can still read them.

        Nothing is deleted while another process is about to map the files, or on a file system without locks, where that is not
        known.
        """
        folder = self._shard_folder(dataset, index)
        # Do not wait for the lock. A folder that is in use is left to the next run.
        with suppress(FileNotFoundError), locks.locked(_lock_file(folder), wait=0) as is_locked:
            if is_locked:
                shutil.rmtree(folder)

    # Return the shards of a dataset's source. To find where it can be cut may take requests to the hub.
    def _cut_source(self, dataset: int) -> list[Source]:
        if dataset not in self._cut_sources:
            self._cut_sources[dataset] = self._open_splits(self.config.dataset_specs()[dataset]).train.shards()
        return self._cut_sources[dataset]

    # Return the folder of a shard, which may not exist. Its name depends on the settings and on how the source is cut.
    def _shard_folder(self, dataset: int, index: int) -> Path:
        if dataset not in self._stream_names:
            settings = self._stream_settings(self.config.dataset_specs()[dataset])
            self._stream_names[dataset] = f"stream-{_fingerprint([settings, READER, files.SHARD_BYTES, sources.SHARD_ROWS])}"
        return self.root / self._stream_names[dataset] / f"shard-{index:05d}"

    def __getstate__(self) -> dict[str, Any]:
        # Sources have functions that cannot be pickled. Another process opens the sources again.
        return vars(self) | {"_opened": {}, "_cut_sources": {}}

    def _open_views(self, train_folder: Path | None, held_out_folder: Path | None) -> tuple[View | None, View | None]:
        """Return the (training, held-out) views of one dataset."""
        held_out = None
        if held_out_folder is not None:
            held_out_store = TokenStore(held_out_folder)
            # A separate split or file is held out completely.
            held_out = self._make_view(held_out_store, np.arange(len(held_out_store)))
        if train_folder is None:
            return None, held_out
        store = TokenStore(train_folder)
        if held_out is not None or self.config.validation_file:
            return self._make_view(store, np.arange(len(store))), held_out
        # Without a split or a file for it, a share of the training data is held out.
        train, held_out_share = _split_held_out(store, self.config.validation_split_percentage / 100, self.config.seed)
        return self._make_view(store, train), self._make_view(store, held_out_share)

    # Raise `DataError` for a dataset without a row to train on.
    def _refuse_empty(self, spec: DatasetSpec, view: View) -> None:
        meta = view.store.meta
        if meta["format"] == "text" and meta["tokens"]:
            raise DataError(
                f"{spec.path}: the text has {meta['tokens']} tokens, fewer than one block of {self.length} to train on "
                f"once some is held out. Lower --{self.config.length_key}."
            )
        raise DataError(
            f"{spec.path}: nothing is left to train on within {self.length} tokens "
            f"({_describe_counts(meta['report']) or 'the dataset is empty'}). --{self.config.length_key} sets the maximum."
        )

    def _check_held_out(self, view: View) -> None:
        """Raise `DataError` if no loss can be measured on a split or file that is held out completely."""
        if view.loss_weights.any():
            return
        meta = view.store.meta
        if meta["format"] == "text" and meta["tokens"]:
            raise DataError(describe_short_text(meta["source_name"], meta["tokens"], self.length, self.config.length_key))
        raise DataError(
            describe_unsupervised(meta["source_name"], _describe_counts(meta["report"]), self.length, self.config.length_key)
        )

    # --- views
    def _make_view(self, store: TokenStore, chosen: np.ndarray | slice) -> View:
        """Return the rows made of the ``chosen`` documents, or of a slice of the tokens of a lone text."""
        if isinstance(chosen, slice):
            return self._blocks(store, np.array([chosen.start]), np.array([chosen.stop]))
        if self.config.packing:
            return pack(store, chosen, self.length, self.objective.weight)
        if store.meta["format"] == "text":
            return self._blocks(store, store.offsets[chosen], store.offsets[chosen + 1])
        return Documents(store, chosen)

    # Return ranges of tokens of running text, joined and cut into blocks.
    def _blocks(self, store: TokenStore, starts: np.ndarray, stops: np.ndarray) -> Blocks:
        # One weight for all blocks: they have the same length, and all of their tokens are supervised.
        weight = self.objective.weight(text_row(self.length))
        if weight < 1:
            raise ConfigError(
                f"{type(self.objective).__name__}.weight gave {weight} for a block of {self.length} tokens of running text. "
                "All blocks have one weight, which may depend on their length alone, and has to be 1 or more."
            )
        return Blocks(store, starts, stops, self.length, weight)

    # Return the rows of several datasets, with a fingerprint of their content, their split and how they were cut.
    def _join_views(self, views: list[View]) -> PreparedRows:
        keys = ("packing", "validation_split_percentage", "max_train_samples", "max_eval_samples")
        facts = [VERSION, self.length, self.config.seed, {key: getattr(self.config, key) for key in keys}]
        # The length of a view shows the limits, and the share that is held out.
        facts += [(view.store.meta["digest"], len(view)) for view in views]
        return PreparedRows(tuple(views), _fingerprint(facts))

    # --- folders
    def _prepare_folder(self, spec: DatasetSpec, source: Source, rows: int | None, workers: int) -> Path:
        """Return the source's folder. Make it if it is missing. ``rows``: as many are enough; None: read the whole source."""
        settings = {
            **self._settings(spec, source.digest(), rows),
            "reader": READER,
            "is_held_out": source.is_held_out,
            "lone_text": source.lone_text,
        }
        folder = self.root / _fingerprint(settings)
        self._ensure_folder(folder, spec, source, settings, rows, workers)
        return folder

    def _settings(self, spec: DatasetSpec, digest: str, rows: int | None) -> dict[str, Any]:
        """Return the settings that decide the content prepared from a source with this ``digest``."""
        return {
            "version": VERSION,
            "source": digest,
            "format": spec.format,
            "columns": [spec.text_column, spec.summary_column],
            "limit": [spec.limit, rows and [rows, self.config.packing]],
            "on_bad_sample": self.config.on_bad_sample,
            "tokenizer": self.tokenizer_digest,
            "encoder": [*_identify_class(self.encoder), _settings_of(self.encoder)],
            **_weighing_settings(self.objective),
        }

    def _ensure_folder(
        self, folder: Path, spec: DatasetSpec, source: Source, settings: dict[str, Any], rows: int | None, workers: int
    ) -> None:
        """Make ``folder`` if it is missing or damaged, or wait until another process has made it."""
        # A complete folder is never changed. So no lock is needed, and the hosts of a run can read it at the same time.
        if folder.exists() and find_damage(folder) is None:
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = (
            f"{source.name}: another process is preparing it; waiting for {folder}. If its host is gone for good, a network "
            f"disk may keep its lock for ever: delete {_lock_file(folder)} and start again"
        )
        with locks.locked(_lock_file(folder), before_wait=lambda: tqdm.write(waiting)) as alone:
            make = partial(self._make_folder, folder, spec, source, settings, rows, workers, alone=bool(alone))
            self._make_if_needed(folder, source, make)

    def _make_if_needed(self, folder: Path, source: Source, make: Callable[[], None]) -> None:
        """Call ``make`` if ``folder``, which this process has locked, is missing or damaged.

        Raises:
            DataError: it is damaged, and the source cannot be read again.
        """
        # Another host may have made it during the wait for the lock.
        refresh(folder)
        if not folder.exists():
            make()
            return
        damage = find_damage(folder, silent=self.config.streaming)
        if damage is None:
            return
        tqdm.write(f"WARNING: {damage}. {source.name} is prepared again")
        try:
            make()
        except (DataError, OSError) as error:
            raise DataError(
                f"{damage}. It cannot be prepared again: {error} Make {source.name} readable, or restore {folder} from a copy."
            ) from error

    def _make_folder(
        self,
        folder: Path,
        spec: DatasetSpec,
        source: Source,
        settings: dict[str, Any],
        rows: int | None,
        workers: int,
        *,
        alone: bool,
    ) -> None:
        """Prepare a source into ``folder``.

        Args:
            rows: as many are enough; None: read the whole source.
            alone: this process has a lock. Without locks, other processes may prepare the same folder at the same time.
        """
        # Some file systems grant the same lock once on each host, so a locked folder may still be prepared on several hosts.
        suffix = socket.gethostname() if alone else uuid4().hex
        # Write to a folder on the same file system, which is then renamed.
        staging = folder.with_name(f".{folder.name}.{suffix}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            writer = TokenWriter(staging)
            meta = self._write(writer, spec, source, rows, workers)
            writer.close(meta | {"settings": settings, "source_name": source.name})
            put_in_place(staging, folder, is_sound=lambda: _is_sound(folder))
            stamp(folder)
        except OSError as error:
            # Home folders of clusters have quotas.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The disk may have been full for the folder itself. Then ``glob`` finds nothing.
            written_bytes = sum(file.stat().st_size for file in staging.glob("*"))
            free_bytes = shutil.disk_usage(self.root).free
            raise DataError(
                f"{source.name}: the disk of {self.root} or its quota is full after {written_bytes / 1e6:.1f} MB of token ids, "
                f"with {free_bytes / 1e6:.1f} MB free on the disk. Give --cache_dir on a larger disk."
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write(self, writer: TokenWriter, spec: DatasetSpec, source: Source, rows: int | None, workers: int) -> dict[str, Any]:
        """Tokenize a source into ``writer``, until it has enough ``rows``. Return the facts for its ``meta.json``."""
        bar = tqdm(
            total=source.total,
            desc=f"preparing {spec.name}",
            unit=source.unit,
            unit_scale=True,
            leave=False,
            disable=self.config.streaming,
        )
        raw_chunks = chunks(take_samples(source.read(), 0, spec.limit), bar)
        first_chunk = next(raw_chunks, [])
        reading = self._detect_reading(spec, source, first_chunk)
        unread = list_unread(first_chunk, reading)

        # Rows of running text and packs are filled with tokens. Any other row is a document.
        fills_rows = reading.format == "text" or self.config.packing
        counts: Counter = Counter()
        bad_samples: list[str] = []
        reasons: Counter = Counter()
        for encoded in encode_all(reading, chain([first_chunk], raw_chunks), workers):
            touch()
            for location, reason in encoded.bad:
                if self.config.on_bad_sample == "error":
                    raise DataError(f"{source.name}, {location}: {reason}. Correct it, or pass --on_bad_sample skip.")
                if len(bad_samples) < LISTED:
                    bad_samples.append(f"{location}: {reason}")
                reasons[reason] += 1
            counts += encoded.counts
            counts["bad samples skipped"] += len(encoded.bad)
            if encoded.extra and self.config.packing:
                raise ConfigError(
                    f"packing: rows of {type(self.encoder).__name__} have {', '.join(encoded.extra)} beside ids and "
                    "labels, and such rows cannot be packed. Drop --packing."
                )
            # Write each chunk as it comes, so that memory does not grow with the data.
            writer.append(encoded.ids, encoded.labels, encoded.weights, begins=encoded.begins, extra=encoded.extra)
            row_count = writer.tokens // self.length if fills_rows else writer.documents
            if rows is not None and row_count >= rows:
                break
        bar.close()
        facts = {what: number for what, number in counts.items() if number}
        if bad_samples and not self.config.streaming:
            self._report_bad_samples(source, facts, bad_samples[0], reasons, is_empty=not writer.documents)
        return {
            "format": reading.format,
            "ignored_columns": unread,
            "lone_text": source.lone_text,
            "report": facts,
            "bad_samples": bad_samples,
        }

    # Return how the samples of a source are read: the format that the user named, or the one that its first samples have.
    def _detect_reading(self, spec: DatasetSpec, source: Source, first_chunk: Chunk) -> Reading:
        columns = {"text_column": spec.text_column, "summary_column": spec.summary_column}
        format: str | None = spec.format
        try:
            if not format:
                # A shard may be empty, or begin with a bad sample. The first samples of the stream decide for all shards.
                if self.config.streaming and not source.is_held_out:
                    first_chunk = next(chunks(self._open_splits(spec).train.read(), tqdm(disable=True)), [])
                format = detect(first_chunk, columns, formats_of(self.encoder), skip=self.config.on_bad_sample == "skip")
            return Reading(
                format, columns, self.encoder, self.objective, detected=spec.format is None, is_held_out=source.is_held_out
            )
        except DataError as error:
            raise DataError(f"{source.name}: {error}") from None

    def _report_bad_samples(
        self, source: Source, facts: dict[str, int], first: str, reasons: Counter, *, is_empty: bool
    ) -> None:
        """Print how many samples were skipped, and why. Raises `DataError` if no sample is left."""
        why = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(REASONS))
        if len(reasons) > REASONS:
            why += f"; and {len(reasons) - REASONS} more reasons"
        if is_empty:
            raise DataError(
                f"{source.name}: not one sample can be used ({_describe_counts(facts)}). The first is {first}. All reasons: "
                f"{why}. Correct them, or name other data."
            )
        tqdm.write(f"{source.name}: {reasons.total()} bad samples skipped, the first {first}. All reasons: {why}")


def _describe_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.items())


def _identify_class(instance: object) -> list[str]:
    """Return the name of an object's class, and for a class from outside this package digests of the files that define it.

    So data is prepared again when such a file changes.
    """
    try:
        source_files = {inspect.getsourcefile(kind) for kind in type(instance).__mro__ if not _is_built_in(kind)}
        digests = []
        # Sorted, since the order of a set differs between processes.
        for file in sorted(filter(None, source_files)):
            digests.append(hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16])
    except (OSError, TypeError):
        # A class that was typed into an interpreter has no file.
        raise ConfigError(
            f"{type(instance).__name__} is not defined in a file, so a change of it could not be detected in prepared data. "
            "Put the class into a file, and import it from there."
        ) from None
    return [type(instance).__name__, *digests]


def _settings_of(instance: object) -> dict[str, Any]:
    """Return the attributes of an object that are plain values, for the fingerprint of prepared data.

    For classes of this package, only integers and strings are taken, as in the fingerprints of earlier versions.
    """
    plain: tuple[type, ...] = (int, float, str, type(None), list, tuple, dict)
    if _is_built_in(type(instance)):
        plain = (int, str)
    return {key: value for key, value in vars(instance).items() if isinstance(value, plain)}


def _is_built_in(kind: type) -> bool:
    return kind.__module__.split(".")[0] in ("zerobook", "builtins", "abc", "typing")


def _is_sound(folder: Path) -> bool:
    """Return whether another host has prepared the folder by now."""
    refresh(folder)
    return folder.exists() and find_damage(folder, silent=True) is None


def _weighing_settings(objective: Objective) -> dict[str, Any]:
    """Return the settings by which ``objective`` weighs rows, for the fingerprint of prepared data."""
    for built_in in (NextToken, TargetTokens):
        # A subclass that weighs rows as its base does shares the prepared data with it.
        if type(objective).weight is built_in.weight:
            return {"shifted": built_in.shifted}
    return {"objective": [*_identify_class(objective), _settings_of(objective)]}


def digest_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of everything in the tokenizer that decides the ids of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    # Without a backend, the tokenizer's code decides which tokens surround a text.
    return _fingerprint([core, str(tokenizer.chat_template), str(tokenizer.special_tokens_map), tokenizer("a")["input_ids"]])


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _fingerprint(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())


def _digest_of_array(array: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array, np.int64).data)


def _split_held_out(store: TokenStore, share: float, seed: int) -> tuple[slice | np.ndarray, slice | np.ndarray]:
    """Return the numbers of the (training, held-out) documents, of which a random share is held out.

    Of a lone text, return the ranges of its (training, held-out) tokens. Its end is held out.
    """
    if store.meta["lone_text"]:
        # Random blocks would be easier to predict, since the model would be trained on their neighbours.
        total = int(store.offsets[-1])
        cut = total - round(total * share)
        return slice(0, cut), slice(cut, total)
    samples = np.asarray(store.samples)
    count = int(samples[-1]) + 1 if len(samples) else 0
    # The documents of a sample stay together.
    is_held_out = held_out_mask(count, share, seed)[samples]
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def _take_first(view: View, rows: int | None) -> View:
    """Return a view with at most ``rows`` rows of ``view``: the first ones, or a random choice of packs."""
    if rows is None or rows >= len(view):
        return view
    if isinstance(view, Documents):
        return replace(view, chosen=view.chosen[:rows])
    if isinstance(view, Blocks):
        # Shorten the ranges of tokens so that they end with the last block. Ranges after it become empty. ``ends`` are
        # positions in the joined ranges, so their differences are the new lengths of the ranges.
        ends = np.minimum(np.cumsum(view.stops - view.starts), rows * view.length)
        return replace(view, stops=view.starts + np.diff(ends, prepend=0))
    # The first packs have the longest samples, so packs are chosen at random.
    is_chosen = Permutation(len(view), seed=0, epoch=0)(np.arange(len(view))) < rows
    sizes = np.diff(view.packing.offsets)
    # The samples of the other packs stay in the view, but are in no row.
    offsets = np.concatenate([[0], np.cumsum(sizes[is_chosen])])
    return replace(view, packing=Packing(offsets, view.packing.members[np.repeat(is_chosen, sizes)]))
