"""Functions that translate another trainer's keys about data sets.

The tables of keys name them under ``by``. Each takes the other trainer's config and the value of the key, and returns flags of
Zerobook -> values, as the functions in `translations` do.
"""

import os
import re
from typing import Any

from zerobook.interop.configs.foreign import Foreign, NoCounterpart
from zerobook.utils.reading import read_text
from zerobook.utils.written_values import as_list
from zerobook.utils.yaml_text import load_bounded

Flags = dict[str, Any]

# Component of torchtune -> the data set that it loads.
TORCHTUNE_SOURCES = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "grammar_dataset": "liweili/c4_200m",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
}
# Component of torchtune -> the column of its data set on whose text it trains.
TORCHTUNE_TEXTS = {"cnn_dailymail_articles_dataset": "article", "wikitext_dataset": "page"}
# Components of torchtune that train on all tokens by default.
LEARN_ALL = ("alpaca_dataset", "alpaca_cleaned_dataset")
# Names that `datasets.load_dataset` takes instead of a data set, to read files.
LOADERS = ("json", "csv", "parquet", "text")
# Pattern of a split, or of some of its rows, such as ``train[:10%]``.
_SPLIT = r"[^+\[(]+(\[-?\d*%?:-?\d*%?\])?"


def resolve_path(foreign: Foreign, name: Any) -> str:
    """Return the absolute path of a data set on this machine; otherwise its name, which is then one on the hub."""
    if not isinstance(name, str | int):
        raise NoCounterpart("A data set is one name, file or folder here. Write several as entries of datasets.")
    path = foreign.locate(str(name))
    return str(name) if path is None else str(path.absolute())


def make_mixture(entries: list[dict[str, Any]]) -> Flags:
    """Return the flag ``datasets`` for entries of it, whose values may be None.

    Entries whose paths would give them the same name get numbered names.
    """
    specs = []
    paths = [entry["path"] for entry in entries]
    # The last part of a path, without the ending of a file, is its default name.
    names = [path.rstrip("/").rpartition("/")[2].split(".")[0] for path in paths]
    for number, entry in enumerate(entries, 1):
        spec = {key: value for key, value in entry.items() if value is not None}
        if names.count(names[number - 1]) > 1:
            spec["name"] = f"{names[number - 1]}_{number}"
        specs.append(spec)
    # A single data set without settings needs only the shorter flag.
    if len(specs) == 1 and specs[0].keys() == {"path"}:
        return {"dataset_name": paths[0]}
    return {"datasets": specs}


def _make_entries(foreign: Foreign, part: dict[str, Any], path: Any) -> list[dict[str, Any]]:
    """Return entries of ``datasets``, one for each split that a mapping names.

    Args:
        part: a mapping with the arguments of `datasets.load_dataset`.
        path: the name of the data set, or one of `LOADERS` with the file in ``part``.
    """
    files = part.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if path in LOADERS and isinstance(files, str):
        path = files
    elif files or path is None:
        raise NoCounterpart("A data set is one file, a folder or a name here. Put its files into a folder, and name that.")
    entry = {
        "path": resolve_path(foreign, path),
        "config_name": part.get("name") or part.get("config"),
        "revision": part.get("revision"),
    }
    split = part.get("split")
    if not split:
        return [entry]
    # `train+test` means both splits. As two entries without weights, they mean the same: each row is used once in an epoch.
    splits = [name.strip() for name in split.split("+")]
    if not all(re.fullmatch(_SPLIT, name) for name in splits):
        raise NoCounterpart(f"{split} is not the name of a split, or of some of its rows. Write such names, joined by +.")
    return [entry | {"split": name} for name in splits]


def translate_trl_dataset(foreign: Foreign, _value: Any) -> Flags:
    """Return the data set of ``dataset_name`` and ``dataset_train_split``; nothing if TRL uses a mixture instead."""
    name = foreign.get("dataset_name")
    if name is None or foreign.get("datasets") or foreign.get("dataset_mixture"):
        return {}
    split = foreign.get("dataset_train_split", "train")
    # The table has a row of its own for dataset_config, which is used with this flag.
    if split == "train":
        return {"dataset_name": resolve_path(foreign, name)}
    return make_mixture(_make_entries(foreign, {"name": foreign.get("dataset_config"), "split": split}, name))


def check_roles(foreign: Foreign, value: Any) -> Flags:
    """Return no flags if the roles in ``value``, whose turns are trained on, are those of the assistant."""
    if set(value) - {"assistant", "gpt"}:
        raise NoCounterpart(
            "assistant_only_loss is true or false here: the assistant's turns are learnt, or all tokens of a chat."
        )
    return {}


def translate_llamafactory_datasets(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets of LLaMA-Factory, which ``dataset_info.json`` describes by their names."""
    return make_mixture([_read_dataset_info(foreign, name) for name in as_list(value)])


# Return an entry of ``datasets`` for the data set that ``dataset_info.json`` has under a name.
def _read_dataset_info(foreign: Foreign, name: str) -> dict[str, Any]:
    folder = foreign.get("dataset_dir")
    file = foreign.locate(f"{folder}/dataset_info.json")
    if file is None:
        raise NoCounterpart(f"{folder}/dataset_info.json is not there. Copy it there, or name the data as dataset_name.")
    info = load_bounded(read_text(file))
    if name not in info:
        raise NoCounterpart(f"{name} is not in {file}. Name the data as dataset_name.")
    entry = info[name]
    columns = entry.get("columns") or {}
    recognised = {"instruction", "input", "output", "history", "system", "tools", "messages", "conversations"}
    if entry.get("ranking") or set(columns.values()) - recognised:
        raise NoCounterpart(
            f"{name} has the columns {', '.join(columns.values())}. Rename them in the data, see docs/guides/data.md."
        )
    # `os.path.join` drops the folder if the file has an absolute path.
    path = entry.get("hf_hub_url") or entry.get("ms_hub_url") or resolve_path(foreign, os.path.join(folder, entry["file_name"]))
    limit = foreign.get("max_samples") or entry.get("num_samples")
    return {"path": path, "config_name": entry.get("subset"), "split": entry.get("split"), "limit": limit}


def translate_swift_datasets(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets of ms-swift, each written as ``NAME:SUBSET#ROWS``."""
    entries = []
    for name in as_list(value):
        path, _, limit = name.partition("#")
        # A colon separates the subset, since neither paths nor names of data sets have one.
        path, _, subset = path.partition(":")
        entries.append({"path": resolve_path(foreign, path), "config_name": subset or None, "limit": limit or None})
    return make_mixture(entries)


def translate_trl_mixture(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets of TRL's ``datasets`` or of the alignment handbook's ``dataset_mixture``."""
    # ``datasets`` is a list. ``dataset_mixture`` is a mapping with such a list, whose entries have the key id, not path.
    if isinstance(value, dict):
        value = value["datasets"]
    entries = []
    for part in value:
        entries += _make_entries(foreign, part, part.get("path") or part["id"])
    return make_mixture(entries)


def translate_axolotl_datasets(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets of Axolotl."""
    formats = {"alpaca": "instruction", "completion": "text"}
    entries = []
    for part in value:
        format_name = formats.get(str(part.get("type")))
        entries += [entry | {"format": format_name} for entry in _make_entries(foreign, part, part["path"])]
    return make_mixture(entries)


def translate_torchtune_dataset(foreign: Foreign, value: Any) -> Flags:
    """Return the data sets that components of torchtune load, and whether only the assistant's tokens are trained on."""
    entries = []
    # For each data set, whether all tokens are trained on.
    learns_all = set()
    for part in as_list(value):
        component = part["_component_"].rpartition(".")[2]
        if component in TORCHTUNE_TEXTS:
            raise NoCounterpart(
                f"The column {TORCHTUNE_TEXTS[component]} is learnt as text. Rename it to text in a copy of the "
                "data, remove the other columns, and name the copy as dataset_name."
            )
        entries += _make_entries(foreign, part, part.get("source") or TORCHTUNE_SOURCES.get(component))
        learns_all.add(part.get("train_on_input", component in LEARN_ALL))
    if len(learns_all) > 1:
        raise NoCounterpart("train_on_input is the same for all data sets of a run here: set it in each, or train twice.")
    return make_mixture(entries) | {"assistant_only_loss": not learns_all.pop()}


def check_columns(foreign: Foreign, value: Any) -> Flags:
    """Return no flags if the columns in ``value`` are those of a format that Zerobook recognises."""
    if "messages" not in value and "text" not in value:
        raise NoCounterpart("The format is recognised by the columns. Name it with format, or rename the columns in the data.")
    return {}
