"""The files behind the name of a trained model: a run's folder, its model or adapter, a checkpoint, an exported folder."""

from dataclasses import dataclass
from pathlib import Path

from zerobook.checkpoint import store
from zerobook.errors import ConfigError
from zerobook.utils.reading import read_json


@dataclass(frozen=True)
class Result:
    """A model by its name. ``model`` is what ``from_pretrained`` takes; ``adapter`` is a folder beside it, or None, and
    ``revision`` that of the model on the hub, if the adapter's config names one."""

    model: str
    adapter: Path | None = None
    revision: str | None = None


def find_result(name: str) -> Result:
    """Return the model, and the adapter beside it, that ``name`` stands for.

    Args:
        name: a run's ``output_dir``, the model or adapter folder in it, a checkpoint, an exported folder, or a hub name,
            which is returned as it is.

    Raises:
        ConfigError: a folder that holds no model. It says where it was looked for.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return Result(name)
    if is_adapter(folder):
        return _read_adapter(folder)
    if (folder / store.MANIFEST).exists():
        raise ConfigError(f"{name}: this is a checkpoint, which holds weights only. {how_to_export(folder)}")
    # A model. Checkpoints have a config.json too, and were refused above.
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
        raise ConfigError(f"{name}: the run has not ended, so it has saved no model yet. {how_to_export(checkpoints[-1])}")
    raise ConfigError(
        f"{name}: found neither config.json (a model) nor adapter_config.json (an adapter), here or in model/ or adapter/, and "
        "no checkpoint in checkpoints/. A run writes them when it ends."
    )


def how_to_export(checkpoint: Path) -> str:
    """Return the command that makes a model of a checkpoint, in a sentence."""
    return f"Make a model of it: zerobook export {checkpoint} --output {checkpoint.name}-model"


def holds_result(folder: Path) -> bool:
    """Return whether a folder holds a model or an adapter."""
    return is_adapter(folder) or ((folder / "config.json").exists() and not (folder / store.MANIFEST).exists())


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").exists()


def _read_adapter(adapter: Path) -> Result:
    """Return an adapter with the model that it was trained beside."""
    file = adapter / "adapter_config.json"
    try:
        facts = read_json(file)
        base = facts.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file}: this is not an adapter's config: {error}.") from None
    if not base:
        raise ConfigError(f"{file}: it names no base_model_name_or_path. Write the model it was trained on there.")
    return Result(str(base), adapter, facts.get("revision"))
