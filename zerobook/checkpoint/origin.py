"""The base model of a checkpoint: its config and, for adapters, a digest of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.errors import CheckpointError, ConfigError
from zerobook.utils import hub
from zerobook.utils.reading import open_regular, read_safetensors_header

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Number of blocks of a weights file in its digest, and bytes of each: 4 MiB together, which are read fast for any model.
_BLOCKS = 64
_BLOCK_BYTES = 1 << 16
# Keys of a model's config about its files and its loading, which do not change what the model computes.
_IGNORED_KEYS = ("transformers_version", "dtype", "torch_dtype", "attn_implementation", "architectures", "auto_map")
# Generation settings that have another meaning in a model's config, or that training depends on.
_COMPARED_GENERATION_KEYS = ("top_k", "pad_token_id", "decoder_start_token_id")


def facts(model_config: PreTrainedConfig, folder: Path | None) -> dict[str, Any]:
    """Return the facts that a checkpoint records about the model that its run loads.

    Args:
        model_config: the config of the model as transformers loads it.
        folder: the folder of the model's weights, if adapters are trained; None if the checkpoint holds all weights itself.
    """
    # The text of an object could contain its address in memory, so the name of its class is recorded instead.
    config = json.loads(json.dumps(model_config.to_dict(), default=lambda value: type(value).__name__, skipkeys=True))
    return {"config": config, "weights": None if folder is None else weights_digest(folder)}


def weights_digest(folder: Path) -> str | None:
    """Return a digest of a folder's weights that is computed fast also for large files; None if the folder has no weights.

    The digest covers the files' names and sizes, the headers of safetensors files (names, shapes and dtypes of the tensors),
    and `_BLOCKS` blocks spread over each file. Reading all of a large model would take as long as loading it. Files of up to
    4 MiB are read completely. Further training changes nearly all numbers of a model, so the blocks show it; a change of a few
    rows of one tensor may not be noticed. The path of the folder is not covered.
    """
    import xxhash

    names = hub.select_files(sorted(file.name for file in folder.iterdir()), weights=True)
    files = [folder / name for name in names if name.endswith((".safetensors", ".bin"))]
    if not files:
        return None
    digest = xxhash.xxh3_128()
    for file in files:
        try:
            _add_file(digest, file)
        except OSError as error:
            raise ConfigError(f"{file}: it is not a file of weights that can be read: {error.strerror}.") from None
    return digest.hexdigest()


def _add_file(digest: Any, file: Path) -> None:
    """Add a file's name, size, header and blocks to a digest."""
    size = file.stat().st_size
    digest.update(f"{file.name} {size}\n".encode())
    if file.suffix == ".safetensors":
        digest.update(read_safetensors_header(file))
    with open_regular(file) as handle:
        # The blocks are at equal distances. The first is the beginning of the file, and the last is its end.
        for number in range(_BLOCKS):
            handle.seek(max(0, size - _BLOCK_BYTES) * number // (_BLOCKS - 1))
            digest.update(handle.read(_BLOCK_BYTES))


def check(checkpoint: Path, saved: dict[str, Any], current: dict[str, Any] | None, *, weights: bool) -> None:
    """Raise `CheckpointError` if the weights of ``checkpoint`` would compute something else in this model than they were
    trained for.

    Args:
        saved: the content of the checkpoint's config.json. Older checkpoints have no ``base`` in it, and are not checked.
        current: `facts` of the model; None if they are not known.
        weights: compare the weights' digests too, if both are known. The same commit of the hub has the same weights.
    """
    if current is None or not saved.get("base"):
        return
    problem = difference(saved["base"], current, weights=weights)
    if problem is not None:
        config = saved["config"]
        raise CheckpointError(
            f"{checkpoint}: made by another model: {problem}. Its weights would compute something else with this model. Use "
            f"the model that it was trained from, {config['model_name_or_path'] or config.get('config_name')}; it may lie at "
            "another path."
        )


def difference(recorded: dict[str, Any], current: dict[str, Any], *, weights: bool = True) -> str | None:
    """Return how two models' `facts` differ, with both values; None if the same weights compute the same in both.

    Args:
        weights: compare the digests of the weights too, if both are known.
    """
    from transformers import GenerationConfig

    # A model's config may also have the settings of generation, which do not affect training.
    ignored = {*_IGNORED_KEYS, *GenerationConfig().to_dict()} - {*_COMPARED_GENERATION_KEYS}
    is_same_version = recorded["config"].get("transformers_version") == current["config"].get("transformers_version")
    differing = _find_differing_keys(recorded["config"], current["config"], ignored, compares_all=is_same_version)
    if differing:
        return "; ".join(f"{key} was {before!r} and is {after!r} now" for key, (before, after) in differing.items())
    if weights and recorded["weights"] and current["weights"] and recorded["weights"] != current["weights"]:
        return f"the digest of its weights was {recorded['weights']} and is {current['weights']} now"
    return None


def _find_differing_keys(
    recorded: dict[str, Any], current: dict[str, Any], ignored: set[str], *, compares_all: bool
) -> dict[str, tuple[Any, Any]]:
    """Return key -> (recorded value, current value) of the settings that differ. The key of an inner dict is ``outer.inner``.

    Args:
        compares_all: a key that only one dict has is a difference too, if the dict is the value of a setting, such as the
            parameters of rotary positions. In the config of a model it never is: versions of transformers add keys there,
            with values that change nothing.
    """
    # The config of a model has a ``model_type``. A dict inside such a config has none.
    is_model_config = "model_type" in recorded and "model_type" in current
    keys = recorded.keys() & current.keys()
    if compares_all and not is_model_config:
        keys = recorded.keys() | current.keys()
    differing: dict[str, tuple[Any, Any]] = {}
    for key in sorted(keys):
        # Dropout is a training setting, and may be changed like a learning rate.
        if key in ignored or key.startswith("_") or "drop" in key:
            continue
        before = recorded.get(key)
        after = current.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            for inner_key, values in _find_differing_keys(before, after, ignored, compares_all=compares_all).items():
                differing[f"{key}.{inner_key}"] = values
        elif before != after:
            differing[key] = (before, after)
    return differing
