"""Models and datasets on the Hugging Face hub: their commits, and files that are downloaded before anything waits for them."""

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from zerobook.errors import ConfigError

_WEIGHTS = (r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?$")
"""Names of weights that transformers loads, the preferred kind first."""
CONNECT_S = 5.0
"""Seconds to wait for a connection."""
ANSWER_S = 100.0
"""Seconds to wait for an answer of the hub, as `datasets` does."""
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
    check_reachable(name, revision)
    from huggingface_hub import HfApi, snapshot_download

    # Errors of the network are of httpx's classes, whose module depends on the hub's version.
    with suppress(Exception):
        files = select_files(HfApi().list_repo_files(name, revision=revision), weights=weights)
        snapshot_download(name, revision=revision, allow_patterns=files)


def check_reachable(name: str, revision: str = "main") -> None:
    """Check in seconds that the hub answers, if a model can only be there: its client tries for minutes.

    Raises:
        ConfigError: no connection to the hub, and nothing of the model in its cache on this machine.
    """
    from huggingface_hub import constants

    # `from_pretrained` says of a path that there is no such folder.
    if is_path(name) or Path(name).exists() or constants.HF_HUB_OFFLINE or folder(name, revision) is not None:
        return
    try:
        connect(constants.ENDPOINT)
    except OSError as error:
        raise ConfigError(
            f"model_name_or_path: {name} is no folder here ({Path.cwd()}), it is not in the hub's cache "
            f"({constants.HF_HUB_CACHE}), and the hub cannot be reached at {constants.ENDPOINT}: {error.strerror or error}. "
            "Give a folder, or copy the model into the cache and set HF_HUB_OFFLINE=1."
        ) from error


def connect(url: str) -> None:
    """Raise `OSError` if a service accepts no connection within `CONNECT_S`. What it answers is its client's business."""
    address = urlsplit(url)
    # With a proxy, it is the proxy that has to be reached.
    proxies = getproxies()
    if proxies.get(address.scheme) or proxies.get("all"):
        return
    port = address.port or {"http": 80}.get(address.scheme, 443)
    socket.create_connection((str(address.hostname), port), timeout=CONNECT_S).close()


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: names on the hub have at most one slash.

    >>> is_path("./model"), is_path("outputs/run/model"), is_path("Qwen/Qwen3-8B"), is_path("gpt2")
    (True, True, False, False)
    """
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def commit(name: str, revision: str) -> str | None:
    """Return the commit that ``revision`` of a model has in the hub's cache on this machine; None for a folder."""
    if Path(name).exists():
        return None
    # The cache has a folder for each commit.
    snapshot = folder(name, revision)
    return None if snapshot is None else snapshot.name


def dataset_commit(name: str, revision: str | None) -> str | None:
    """Return the commit that ``revision`` of a dataset has on the hub now; None where the hub does not answer.

    Args:
        revision: branch, tag or commit; None for the dataset's main branch.
    """
    from datasets import config
    from huggingface_hub import HfApi, constants

    # `datasets` raises the error of a name that is not there, unless it finds the dataset in its cache.
    with suppress(Exception):
        if not config.HF_HUB_OFFLINE:
            connect(constants.ENDPOINT)
            return HfApi().dataset_info(name, revision=revision, timeout=ANSWER_S).sha
    return None


def folder(name: str, revision: str) -> Path | None:
    """Return where a model's files are on this machine: ``name`` itself, or in the hub's cache; None if they are not."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        # No name of the hub, such as an embedded model's.
        return None
    return Path(file).parent if isinstance(file, str) else None


def select_files(files: Iterable[str], *, weights: bool) -> list[str]:
    """Return which files of a repository to download: configs, tokenizers, code, and at most one kind of weights.

    >>> files = ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"]
    >>> select_files(files, weights=True), select_files(files, weights=False)
    (['config.json', 'model.safetensors'], ['config.json'])
    """
    top_level = [file for file in files if "/" not in file]
    all_weights: list[str] = []
    chosen_weights: list[str] = []
    # The first kind of weights that is there is the one to load.
    for pattern in _WEIGHTS:
        weight_files = [file for file in top_level if re.match(pattern, file)]
        all_weights += weight_files
        if weights and not chosen_weights:
            chosen_weights = weight_files
    selected = []
    for file in top_level:
        # The index of the weights ends like a config, and belongs to the weights.
        is_beside = file.endswith(_BESIDE) and file not in all_weights
        if is_beside or file in chosen_weights:
            selected.append(file)
    return selected


def advice(error: BaseException) -> str:
    """Return the way out of an error of the hub, as a sentence after a space; an empty string where none is known."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return " HF_HUB_OFFLINE is set, so only what the cache holds is found. Unset it, or give a folder."
    # transformers raises an OSError of its own; the hub's error is its cause.
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]  # None ends the chain
    for cause in chain:
        status = None
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            status = cause.response.status_code
        if isinstance(cause, GatedRepoError) or status in (401, 403):
            return " It is gated, private or not there: ask for access on its page, and run hf auth login."
        if type(cause).__name__ in ("ConnectError", "ConnectTimeout", "LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            return (
                " The hub cannot be reached. Give a folder, or set HF_HUB_OFFLINE=1 where the model is in the cache and there "
                "is no network."
            )
    return ""
