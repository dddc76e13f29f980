"""Find the model that a name refers to: a run's folder, its model or adapter, an exported folder, or a name on the hub."""

from dataclasses import dataclass
from pathlib import Path

from zerobook.checkpoint import store
from zerobook.errors import ConfigError
from zerobook.utils.reading import read_json


@dataclass(frozen=True)
class Result:
    """A model, and the adapter that was trained for it, if there is one.

    Attributes:
        model: a folder or a name on the hub, as ``from_pretrained`` expects it.
        adapter: folder of the adapter.
        revision: revision of the model on the hub, if the adapter's config names one.
    """

    model: str
    adapter: Path | None = None
    revision: str | None = None


def find_result(name: str) -> Result:
    """Return the model, and its adapter if there is one, that ``name`` refers to.

    Args:
        name: a run's ``output_dir``, the model or adapter folder in it, a checkpoint, an exported folder, or a hub name,
            which is returned as it is.

    Raises:
        ConfigError: the folder holds no model, or both a model and an adapter. The message says where they were looked for.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return Result(name)
    if is_adapter(folder):
        return _read_adapter(folder)
    if (folder / store.MANIFEST).exists():
        raise ConfigError(f"{name}: this is a checkpoint, not a saved model. {_suggest_export(folder)}")
    # A folder with a config.json is a model. Checkpoints have a config.json too, and were refused above.
    if (folder / "config.json").exists():
        return Result(name)
    # The folder is that of a run, with its result inside.
    results = [folder / result for result in ("model", "adapter") if holds_result(folder / result)]
    if len(results) > 1:
        raise ConfigError(f"{name}: it holds both {results[0]} and {results[1]}. Name one of them.")
    if results:
        return find_result(str(results[0]))
    checkpoints = store.list_complete(store.folder_of(name))
    if checkpoints:
        raise ConfigError(f"{name}: the run has not ended, so it has saved no model yet. {_suggest_export(checkpoints[-1])}")
    raise ConfigError(
        f"{name}: found neither config.json (a model) nor adapter_config.json (an adapter), here or in model/ or adapter/, and "
        "no checkpoint in checkpoints/. A run writes them when it ends."
    )


# Returns a sentence with the command that makes a model from a checkpoint.
def _suggest_export(checkpoint: Path) -> str:
    return f"Make a model of it: zerobook export {checkpoint} --output {checkpoint.name}-model"


def holds_result(folder: Path) -> bool:
    """Return whether a folder holds a model or an adapter."""
    return is_adapter(folder) or ((folder / "config.json").exists() and not (folder / store.MANIFEST).exists())


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


# Returns an adapter with the model that it was trained on, which its config names.
def _read_adapter(adapter: Path) -> Result:
    file = adapter / "adapter_config.json"
    try:
        adapter_config = read_json(file)
        base = adapter_config.get("base_model_name_or_path")
    # A config that is no JSON object has no `get`.
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: this is not an adapter's config: {error}.") from None
    if not base:
        raise ConfigError(f"{file}: it names no base_model_name_or_path. Write the model it was trained on there.")
    return Result(str(base), adapter, adapter_config.get("revision"))
