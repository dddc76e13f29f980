"""Functions that the tables name in ``by`` for data sets, as those of `zerobook.interop.configs.translations`."""

from __future__ import annotations

from typing import Any

from zerobook.interop.configs.foreign import Foreign, NoCounterpart

Flags = dict[str, Any]
ALL_TOKENS = (
    "Of a chat, the assistant's turns alone are learnt here. To learn all tokens, write their ids into the data (format "
    "tokenized)."
)


def path_of(foreign: Foreign, name: Any) -> str:
    """Return a data set's name on the hub, or the absolute path of one that is here."""
    path = foreign.locate(str(name))
    return str(name) if path is None else str(path.absolute())


def mixture(entries: list[dict[str, Any]]) -> Flags:
    """Return ``datasets``, without the keys that are not set. Entries of one path get names of their own."""
    specs = []
    paths = [entry["path"] for entry in entries]
    for number, entry in enumerate(entries, 1):
        spec = {key: value for key, value in entry.items() if value is not None}
        names = [path.rstrip("/").rpartition("/")[2].split(".")[0] for path in paths]
        if names.count(names[number - 1]) > 1:
            spec["name"] = f"{names[number - 1]}_{number}"
        specs.append(spec)
    # A single data set without settings is shorter as a name.
    if len(specs) == 1 and specs[0].keys() == {"path"}:
        return {"dataset_name": paths[0]}
    return {"datasets": specs}


def data_path(foreign: Foreign, value: Any) -> Flags:
    """Return a data set or a file under the name that it has here."""
    return {foreign.entry.to: path_of(foreign, value)}


def trl_dataset(foreign: Foreign, value: Any) -> Flags:
    """Return the data set of ``dataset_name`` and ``dataset_train_split``; a mixture comes before it."""
    name = foreign.get("dataset_name")
    if name is None or foreign.get("datasets") or foreign.get("dataset_mixture"):
        return {}
    split = foreign.get("dataset_train_split", "train")
    if split == "train":
        return {"dataset_name": path_of(foreign, name)}
    return mixture([{"path": path_of(foreign, name), "config_name": foreign.get("dataset_config"), "split": split}])


def trl_mixture(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets of TRL's ``datasets`` or the handbook's ``dataset_mixture``."""
    parts = value["datasets"] if isinstance(value, dict) else value
    entries = []
    for part in parts:
        files = part.get("data_files")
        path = files if isinstance(files, str) else part.get("path") or part["id"]
        config_name = part.get("name") or part.get("config")
        entries.append({"path": path_of(foreign, path), "config_name": config_name, "split": part.get("split")})
    return mixture(entries)


def data_files(foreign: Foreign, value: Any) -> Flags:
    """Return no flag for one file, which is the path of its data set."""
    if not isinstance(value, str) and not (isinstance(value, list) and len(value) == 1):
        raise NoCounterpart(
            "A data set is one file, a folder or a name here. Put the files into a folder, and name that as path."
        )
    return {}


def columns(foreign: Foreign, value: Any) -> Flags:
    """Return no flag for columns that a format has."""
    if "messages" in value and not foreign.get("assistant_only_loss"):
        raise NoCounterpart(ALL_TOKENS)
    if "messages" not in value and "text" not in value:
        raise NoCounterpart("The format is recognised by the columns. Name it with format, or rename the columns in the data.")
    return {}
