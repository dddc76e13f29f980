"""The Accelerate YAML of a launch: what accelerate would drop, or cannot launch the recipes with, is an error.

`zerobook doctor`, ``--dry-run`` and a launched run all call `check`, so that they agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from zerobook.config import nearest
from zerobook.errors import ConfigError
from zerobook.launch.accelerate_cli import file_and_processes
from zerobook.utils.shipped import shipped
from zerobook.utils.yaml_text import load_yaml

_SHIPPED = f"Shipped ones are in {shipped('accelerate_configs')}; zerobook init FOLDER copies them."
_LAUNCHED = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP")
"""Values of ``distributed_type`` that the recipes run under."""
_SECTIONS = {
    "fsdp_config": ("fsdp_",),
    "deepspeed_config": ("deepspeed_", "zero", "offload_", "gradient_"),
    "parallelism_config": ("parallelism_config_",),
}
"""Section -> beginnings of the launcher's flags that are its keys."""
OWN = {"parallelism_config_ep_size"}
"""Keys that accelerate does not know, and Zerobook reads."""


def check(file: str | None, processes: int | None = None) -> None:
    """Raise `ConfigError` with all problems of an Accelerate config.

    Args:
        file: its path; None takes the machine's default, if there is one.
        processes: the number of processes that the launcher's flags ask for.
    """
    file = file or _default()
    if file is None:
        return
    loaded = load(file)
    problems = [*_other_launchers(loaded), *_unknown_keys(loaded)]
    for key in ("num_processes", "num_machines"):
        count = loaded.get(key)
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            problems.append(f"{key} is {count!r}, expected a number of 1 or more.")
    if not problems and str(loaded.get("distributed_type", "NO")).upper() == "NO" and (processes or 1) > 1:
        problems.append(
            f"distributed_type is NO, which starts one process, and --num_processes is {processes}. Launch with "
            "accelerate_configs/ddp.yaml, or another file that spreads a run."
        )
    if problems:
        raise ConfigError([f"{file}: {problem}" for problem in problems])


def _default() -> str | None:
    """Return the path of this machine's default config, where there is one."""
    from accelerate.commands.config.config_args import default_config_file

    return str(default_config_file) if Path(default_config_file).is_file() else None


def path_of(flags: list[str] | None) -> str | None:
    """Return the config that the launcher's flags (script included) name, or this machine's default; None without either."""
    return None if flags is None else file_and_processes(flags)[0] or _default()


def load(file: str) -> dict[str, Any]:
    """Return the mapping in a file. Raise `ConfigError` where accelerate would show a traceback."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        loaded = json.loads(text) if file.endswith(".json") else load_yaml(text)
    except OSError as error:
        raise ConfigError(f"{file}: the Accelerate config cannot be read ({error.strerror}). {_SHIPPED}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: the Accelerate config is not UTF-8 text. Save it in that encoding.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{where}: not a valid Accelerate config: {getattr(error, 'problem', error)}.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{file}: expected an Accelerate config, a mapping of keys to values, found a {type(loaded).__name__}. {_SHIPPED}"
        )
    return loaded


def _other_launchers(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield why a file is of a launcher, or for hardware, that the recipes do not run under."""
    kind, where = loaded.get("distributed_type", "NO"), loaded.get("compute_environment", "LOCAL_MACHINE")
    if str(where).upper() != "LOCAL_MACHINE":
        yield f"compute_environment is {where}; the recipes are launched on machines of your own. {_SHIPPED}"
    elif str(kind).upper() not in _LAUNCHED:
        yield f"distributed_type is {kind}; the recipes run under {', '.join(_LAUNCHED)}. {_SHIPPED}"
    if loaded.get("mpirun_config"):
        yield "mpirun_config: accelerate starts the processes, not mpirun. Remove it, and set distributed_type to MULTI_GPU."
    if str(loaded.get("mixed_precision", "no")).lower() == "fp8" or loaded.get("fp8_config"):
        yield "mixed_precision fp8 is not supported. Use no, bf16 or fp16, and remove fp8_config."


def _unknown_keys(loaded: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for each section that is no mapping, and each key of a section that accelerate would drop."""
    from accelerate.commands.launch import launch_command_parser

    flags = {action.dest for action in launch_command_parser()._actions}
    for section, beginnings in _SECTIONS.items():
        keys = loaded.get(section) or {}
        if not isinstance(keys, dict):
            yield f"{section} is {keys!r}, expected a mapping of keys to values."
            continue
        known = {flag for flag in flags if flag.startswith(beginnings)}
        known |= {key for key in OWN if key.startswith(beginnings)}
        for key, value in keys.items():
            if str(key).endswith("_size") and (not isinstance(value, int) or isinstance(value, bool)):
                yield f"{section}.{key} is {value!r}, expected a number of processes."
        for key in map(str, keys):
            # accelerate adds the prefix of this section
            full = f"fsdp_{key}" if section == "fsdp_config" and not key.startswith("fsdp") else key
            if full not in known:
                yield f"{section}.{key}: accelerate has no such key.{nearest(full, known)} Correct it or remove it."
