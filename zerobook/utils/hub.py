"""Models and datasets on the Hugging Face hub: whether the hub answers, their commits, and the download of their files."""

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from zerobook.errors import ConfigError

# Names of files of weights that transformers loads. The preferred kind comes first.
_WEIGHTS = (r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$", r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?$")
# Suffixes of files of a model other than weights: config, tokenizer, chat template, code.
_OTHER_SUFFIXES = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
# Seconds to wait for a connection.
CONNECT_S = 5.0
# Seconds to wait for an answer of the hub, as long as `datasets` waits.
ANSWER_S = 100.0


def fetch(name: str, revision: str, *, weights: bool) -> None:
    """Download a model's config, tokenizer and code into the hub's cache on this machine, for ``from_pretrained``.

    Nothing is downloaded if ``name`` is a folder. Errors are ignored here: ``from_pretrained`` raises them, unless the cache
    already has all files.

    Args:
        weights: download the weights too.

    Raises:
        ConfigError: as in `check_reachable`.
    """
    if Path(name).exists():
        return
    check_reachable(name, revision)
    from huggingface_hub import HfApi, snapshot_download

    # Any exception: which classes the errors of the network have depends on the version of huggingface_hub.
    with suppress(Exception):
        files = select_files(HfApi().list_repo_files(name, revision=revision), weights=weights)
        snapshot_download(name, revision=revision, allow_patterns=files)


def check_reachable(name: str, revision: str = "main") -> None:
    """Check that the hub can be reached, if a model can only be there. Without this check, its client would try for minutes.

    Raises:
        ConfigError: there is no connection to the hub, and the hub's cache on this machine has nothing of the model.
    """
    from huggingface_hub import constants

    # If a name can only be a path and there is no such folder, `from_pretrained` reports that.
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
    """Raise `OSError` if the service at ``url`` accepts no connection within `CONNECT_S` seconds. Nothing is sent to it."""
    address = urlsplit(url)
    # With a proxy, this machine may have no direct connection to the service, so nothing is checked.
    proxies = getproxies()
    if proxies.get(address.scheme) or proxies.get("all"):
        return
    port = address.port or {"http": 80}.get(address.scheme, 443)
    socket.create_connection((str(address.hostname), port), timeout=CONNECT_S).close()


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: it begins with a slash, dot or ~, or has two slashes, unlike names on the hub.

    >>> is_path("./model"), is_path("outputs/run/model"), is_path("Qwen/Qwen3-8B"), is_path("gpt2")
    (True, True, False, False)
    """
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def commit(name: str, revision: str) -> str | None:
    """Return the commit of ``revision`` of a model in the hub's cache on this machine; None for a folder, or if it has none."""
    if Path(name).exists():
        return None
    # The cache has a folder for each commit, with the commit as its name.
    snapshot = folder(name, revision)
    return None if snapshot is None else snapshot.name


def dataset_commit(name: str, revision: str | None) -> str | None:
    """Return the commit that ``revision`` of a dataset has on the hub now; None if the hub does not answer.

    Args:
        revision: branch, tag or commit; None for the dataset's main branch.
    """
    from datasets import config
    from huggingface_hub import HfApi, constants

    # Errors are ignored here. If there is no such dataset, neither on the hub nor in the cache, `datasets` raises an error.
    with suppress(Exception):
        if not config.HF_HUB_OFFLINE:
            connect(constants.ENDPOINT)
            return HfApi().dataset_info(name, revision=revision, timeout=ANSWER_S).sha
    return None


def folder(name: str, revision: str) -> Path | None:
    """Return the folder with a model's files: ``name`` itself, or a folder of the hub's cache; None if neither exists."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:
        # The hub allows no such name. An embedded model has one.
        return None
    return Path(file).parent if isinstance(file, str) else None


def select_files(files: Iterable[str], *, weights: bool) -> list[str]:
    """Return which files of a model's repository to download: config, tokenizer, code and, for ``weights``, one kind of them.

    >>> files = ["config.json", "model.safetensors", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx"]
    >>> select_files(files, weights=True), select_files(files, weights=False)
    (['config.json', 'model.safetensors'], ['config.json'])
    """
    top_level = [file for file in files if "/" not in file]
    all_weights: list[str] = []
    chosen_weights: list[str] = []
    # transformers loads the first kind of weights that the repository has.
    for pattern in _WEIGHTS:
        weight_files = [file for file in top_level if re.match(pattern, file)]
        all_weights += weight_files
        if weights and not chosen_weights:
            chosen_weights = weight_files
    selected = []
    for file in top_level:
        # The index of weights in several files has the suffix of a config, but belongs to the weights.
        if file in chosen_weights or (file.endswith(_OTHER_SUFFIXES) and file not in all_weights):
            selected.append(file)
    return selected


def advice(error: BaseException) -> str:
    """Return what to do about an error of the hub: sentences that begin with a space, or an empty string."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return " HF_HUB_OFFLINE is set, so only what the cache holds is found. Unset it, or give a folder."
    # transformers raises an OSError of its own, whose cause is the hub's error. So collect the error and its causes.
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]  # None if there is no further cause
    for cause in causes:
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
