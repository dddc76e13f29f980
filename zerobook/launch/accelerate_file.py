"""The Accelerate YAML of a launch: what accelerate would drop, or cannot launch the recipes with, is an error.

`zerobook doctor`, ``--dry-run`` and a launched run all call `check`, so that they agree.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zerobook.errors import ConfigError
from zerobook.launch.accelerate_cli import parse_flags
from zerobook.utils.nearest import nearest
from zerobook.utils.shipped import shipped
from zerobook.utils.yaml_text import load_yaml, read_mapping

_SHIPPED = f"Shipped ones are in {shipped('accelerate_configs')}; zerobook init FOLDER copies them."
_LAUNCHED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
"""Values of ``distributed_type`` that the recipes run under."""
BEGINNINGS = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "parallelism_config": ("parallelism_config_",),
}
"""Section -> beginnings of the launcher's flags that are its keys."""
_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
"""Keys by which a DeepSpeed config is known."""
_OF_RECIPES = {"model_name_or_path", "train_file", "dataset_name", "output_dir", "learning_rate"}
"""Keys by which a recipe's config is known."""
READ_HERE = {"parallelism_config_ep_size"}
"""Keys that accelerate does not know, and Zerobook reads."""


class FileCheck(NamedTuple):
    """The problems of an Accelerate config.

    Attributes:
        problems: a sentence each, with the file's name.
        is_resolvable: what else the file says can be resolved all the same.
    """

    problems: list[str]
    is_resolvable: bool


def check(file: str | None) -> FileCheck:
    """Check an Accelerate config; None takes the machine's default, if there is one."""
    file = path(file)
    if file is None:
        return FileCheck([], True)
    try:
        loaded = load(file)
    except ConfigError as error:
        return FileCheck(error.problems, False)
    problems = [*_other_launchers(loaded), *_wrong_types(loaded)]
    # Keys are read only if the sections are mappings, and the file is one for these launches.
    is_resolvable = not problems
    if is_resolvable:
        problems += _unknown_keys(loaded)
    return FileCheck([f"{file}: {problem}" for problem in problems], is_resolvable)


def path(file: str | None) -> str | None:
    """Return ``file``, or the path of this machine's default config if there is one."""
    from accelerate.commands.config.config_args import default_config_file

    if file:
        return file
    return str(default_config_file) if Path(default_config_file).is_file() else None


def path_of(flags: list[str] | None) -> str | None:
    """Return the config that the launcher's flags (script included) name, or this machine's default; None without either."""
    return None if flags is None else path(parse_flags(flags).config_file)


def load(file: str) -> dict[str, Any]:
    """Return the mapping in a file. Raise `ConfigError` if accelerate would show a traceback."""
    loaded = read_mapping(file, "Accelerate config", json.loads if file.endswith(".json") else load_yaml, advice=_SHIPPED)
    other_kind = _other_kind(loaded)
    if other_kind:
        raise ConfigError(f"{file}: {other_kind}")
    return loaded


def _other_kind(loaded: dict[str, Any]) -> str | None:
    """Return what a file is and where it belongs, if it is one of another program or of another flag; None if it is not."""
    # These two are in every file that accelerate config writes.
    if "distributed_type" in loaded or "compute_environment" in loaded:
        return None
    keys = loaded.keys() & (_OF_DEEPSPEED | _OF_RECIPES)
    if not keys:
        return None
    return (
        f"{', '.join(sorted(keys))} belong to a DeepSpeed config or to a recipe's config, not to an Accelerate config. Name a "
        "DeepSpeed config as deepspeed_config_file in an Accelerate config, as accelerate_configs/zero2.yaml does, and a "
        f"recipe's config behind the recipe, with --config. {_SHIPPED}"
    )


def _other_launchers(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield why a file is of a launcher, or for hardware, that the recipes do not run under."""
    kind = loaded.get("distributed_type", "NO")
    environment = loaded.get("compute_environment", "LOCAL_MACHINE")
    if str(environment).upper() != "LOCAL_MACHINE":
        yield f"compute_environment is {environment}; the recipes are launched on machines of your own. {_SHIPPED}"
    elif kind is not False and str(kind).upper() not in _LAUNCHED:
        yield f"distributed_type is {kind}; the recipes run under {', '.join(_LAUNCHED)}. {_SHIPPED}"
    if loaded.get("mpirun_config"):
        yield "mpirun_config: accelerate starts the processes, not mpirun. Remove it, and set distributed_type to MULTI_GPU."
    if str(loaded.get("mixed_precision", "no")).lower() == "fp8" or loaded.get("fp8_config"):
        yield "mixed_precision fp8 is not supported. Use no, bf16 or fp16, and remove fp8_config."


def _wrong_types(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each section that is not a mapping, each number that is none, and each unquoted no."""
    for key, value in (("distributed_type", "NO"), ("mixed_precision", "no")):
        if loaded.get(key) is False:
            yield f"{key} is {value} without quotes, which YAML reads as false. Write '{value}'."
    for key in ("num_processes", "num_machines"):
        count = loaded.get(key)
        # YAML's true is a bool, which Python takes for 1.
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            yield f"{key} is {count!r}, expected a number of 1 or more."
    for section in BEGINNINGS:
        keys = loaded.get(section) or {}
        if not isinstance(keys, dict):
            yield f"{section} is {keys!r}, expected a mapping of keys to values."
            continue
        for key, value in keys.items():
            if str(key).endswith("_size") and (not isinstance(value, int) or isinstance(value, bool)):
                yield f"{section}.{key} is {value!r}, expected a number of processes."


def _unknown_keys(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each key of a section that accelerate would drop."""
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions} | READ_HERE
    for section, beginnings in BEGINNINGS.items():
        names = {flag for flag in flags if flag.startswith(beginnings)}
        for key in map(str, loaded.get(section) or {}):
            name = key
            if section == "fsdp_config" and not key.startswith("fsdp"):
                # accelerate adds the prefix of this section.
                name = f"fsdp_{key}"
            if name not in names:
                yield f"{section}.{key}: accelerate has no such key.{nearest(name, names)} Correct it or remove it."
