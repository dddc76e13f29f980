"""Checks of the Accelerate YAML of a launch: keys that accelerate would ignore, and values that the recipes do not run with.

`zerobook doctor`, ``--dry-run`` and a launched run all call `check`, so that they agree.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerobook.errors import ConfigError
from zerobook.launch.accelerate_cli import parse_flags
from zerobook.utils.nearest import nearest
from zerobook.utils.shipped import shipped
from zerobook.utils.yaml_text import load_yaml, read_mapping

_ADVICE = f"Shipped ones are in {shipped('accelerate_configs')}; zerobook init FOLDER copies them."
# Values of ``distributed_type`` that the recipes run under.
_DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
# Section of the YAML -> beginnings of its keys, which are also flags of accelerate's launcher.
KEY_PREFIXES = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "parallelism_config": ("parallelism_config_",),
}
# Keys by which a DeepSpeed config is recognised.
_DEEPSPEED_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
# Keys by which a recipe's config is recognised.
_RECIPE_KEYS = {"model_name_or_path", "train_file", "dataset_name", "output_dir", "learning_rate"}
# Keys that accelerate does not know, but that Zerobook reads.
ZEROBOOK_KEYS = {"parallelism_config_ep_size"}


class FileCheck(NamedTuple):
    """The problems of an Accelerate config.

    Attributes:
        problems: one sentence for each, with the file's name.
        is_resolvable: accelerate can read the file in spite of the problems, so the rest of the launch can be checked.
    """

    problems: list[str]
    is_resolvable: bool


def check(typed: argparse.Namespace) -> FileCheck:
    """Check the Accelerate config of a launch. If the flags name none, check this machine's default config, if there is one.

    Args:
        typed: the launcher's flags as parsed.
    """
    file = path_or_default(typed.config_file)
    if file is None:
        return FileCheck([], is_resolvable=True)
    try:
        loaded = load(file)
    except ConfigError as error:
        return FileCheck(error.problems, is_resolvable=False)
    problems = [*_find_unsupported_launchers(loaded), *_find_wrong_types(loaded, typed)]
    # Keys can be checked only if the sections are mappings, and the recipes can run under such a file.
    is_resolvable = not problems
    if is_resolvable:
        problems += _find_unknown_keys(loaded)
    return FileCheck([f"{file}: {problem}" for problem in problems], is_resolvable)


def path_or_default(file: str | None) -> str | None:
    """Return ``file``; if it is None, the path of this machine's default config, or None if there is none."""
    from accelerate.commands.config.config_args import default_config_file

    if file:
        return file
    return str(default_config_file) if Path(default_config_file).is_file() else None


def path_in_flags(flags: list[str] | None) -> str | None:
    """Return the config that the launcher's flags (script included) name, or this machine's default config.

    None without flags, and if there is no config.
    """
    if flags is None:
        return None
    return path_or_default(parse_flags(flags).config_file)


def load(file: str) -> dict[str, Any]:
    """Return the mapping in an Accelerate config. Raise `ConfigError` if the file is unreadable or another kind of config."""
    loaded = read_mapping(file, "Accelerate config", json.loads if file.endswith(".json") else load_yaml, advice=_ADVICE)
    other_kind = _describe_other_kind(loaded)
    if other_kind:
        raise ConfigError(f"{file}: {other_kind}")
    return loaded


def _describe_other_kind(loaded: dict[str, Any]) -> str | None:
    """Return a problem if the file is a DeepSpeed config or a recipe's config; None otherwise."""
    # At least one of these two keys is in every file that accelerate config writes.
    if "distributed_type" in loaded or "compute_environment" in loaded:
        return None
    keys = loaded.keys() & (_DEEPSPEED_KEYS | _RECIPE_KEYS)
    if not keys:
        return None
    return (
        f"{', '.join(sorted(keys))} belong to a DeepSpeed config or to a recipe's config, not to an Accelerate config. Name a "
        "DeepSpeed config as deepspeed_config_file in an Accelerate config, as accelerate_configs/zero2.yaml does, and a "
        f"recipe's config behind the recipe, with --config. {_ADVICE}"
    )


def _find_unsupported_launchers(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each launcher, kind of hardware and precision of the file that the recipes do not run with."""
    distributed_type = loaded.get("distributed_type", "NO")
    environment = loaded.get("compute_environment", "LOCAL_MACHINE")
    if str(environment).upper() != "LOCAL_MACHINE":
        yield f"compute_environment is {environment}; the recipes are launched on machines of your own. {_ADVICE}"
    # YAML reads NO without quotes as False, which `_find_wrong_types` reports.
    elif distributed_type is not False and str(distributed_type).upper() not in _DISTRIBUTED_TYPES:
        yield f"distributed_type is {distributed_type}; the recipes run under {', '.join(_DISTRIBUTED_TYPES)}. {_ADVICE}"
    if loaded.get("mpirun_config"):
        yield "mpirun_config: accelerate starts the processes, not mpirun. Remove it, and set distributed_type to MULTI_GPU."
    if str(loaded.get("mixed_precision", "no")).lower() == "fp8" or loaded.get("fp8_config"):
        yield "mixed_precision fp8 is not supported. Use no, bf16 or fp16, and remove fp8_config."


def _find_wrong_types(loaded: dict[str, Any], typed: argparse.Namespace) -> Iterator[str]:
    """Yield a problem for each section that is not a mapping, and for each value of a wrong type, such as an unquoted no.

    A wrong value is no problem where a typed flag overrides it.
    """
    for key, value in (("distributed_type", "NO"), ("mixed_precision", "no")):
        if not isinstance(loaded.get(key), str | None):
            yield f"{key} is {loaded[key]!r}, expected a name. YAML reads {value} without quotes as False: write '{value}'."
    for key in ("num_processes", "num_machines"):
        count = loaded.get(key, 1)
        # YAML reads true as a bool, and a bool is an int in Python.
        is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
        if not is_count and getattr(typed, key) is None:
            yield f"{key} is {count!r}, expected a number of 1 or more. Correct it, or pass --{key}."
    for section in KEY_PREFIXES:
        keys = loaded.get(section) or {}
        if not isinstance(keys, dict):
            yield f"{section} is {keys!r}, expected a mapping of keys to values."
            continue
        for key, value in keys.items():
            if str(key).endswith("_size") and (not isinstance(value, int) or isinstance(value, bool)):
                yield f"{section}.{key} is {value!r}, expected a number of processes."


def _find_unknown_keys(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each key of a section that accelerate would ignore."""
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions} | ZEROBOOK_KEYS
    for section, beginnings in KEY_PREFIXES.items():
        names = {flag for flag in flags if flag.startswith(beginnings)}
        for key in map(str, loaded.get(section) or {}):
            name = key
            # In this section, accelerate takes a key with the prefix and without it.
            if section == "fsdp_config" and not key.startswith("fsdp"):
                name = f"fsdp_{key}"
            if name not in names:
                yield f"{section}.{key}: accelerate has no such key.{nearest(name, names)} Correct it or remove it."
