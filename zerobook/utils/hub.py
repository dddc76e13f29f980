"""Files of a model on the Hugging Face hub, downloaded before anything waits for them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_WEIGHTS = (r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?$")
"""Names of weights that transformers loads, the preferred kind first."""
_BESIDE = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")


def fetch(name: str, revision: str, *, weights: bool) -> None:
    """Download a model's config, tokenizer and code, as ``from_pretrained`` reads them, into the hub's cache on this machine.

    Nothing happens where ``name`` is a folder. Errors are ignored here: ``from_pretrained`` raises them, unless
    it finds all files in the cache without a network.

    Args:
        weights: download the weights too.
    """
    if Path(name).exists():
        return
    from huggingface_hub import HfApi, snapshot_download

    with suppress(Exception):  # errors of the network are of httpx's classes, whose module depends on the hub's version
        wanted = needed(HfApi().list_repo_files(name, revision=revision), weights=weights)
        snapshot_download(name, revision=revision, allow_patterns=wanted)


def commit(name: str, revision: str) -> str | None:
    """Return the commit that ``revision`` of a model has in the hub's cache on this machine; None for a folder."""
    found = None if Path(name).exists() else folder(name, revision)
    return None if found is None else found.name


def folder(name: str, revision: str) -> Path | None:
    """Return where a model's files are on this machine: ``name`` itself, or in the hub's cache; None where they are not."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # no name of the hub, such as an embedded model's
        return None
    return Path(file).parent if isinstance(file, str) else None


def needed(files: Iterable[str], *, weights: bool) -> list[str]:
    """Return which files of a repository to download: configs, tokenizers, code, and at most one kind of weights.

    >>> files = ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"]
    >>> needed(files, weights=True), needed(files, weights=False)
    (['config.json', 'model.safetensors'], ['config.json'])
    """
    own = [file for file in files if "/" not in file]
    kinds = [[file for file in own if re.match(kind, file)] for kind in _WEIGHTS]
    chosen = next(filter(None, kinds), []) if weights else []
    return [file for file in own if file in chosen or (file.endswith(_BESIDE) and not any(file in kind for kind in kinds))]
