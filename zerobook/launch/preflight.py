"""Comparison of the hosts of a run, in its first seconds: what would corrupt the training is refused, the rest is a warning."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.config import RecipeConfig
from zerobook.errors import ConfigError
from zerobook.launch import links
from zerobook.utils import gpus
from zerobook.utils.terminal import say
from zerobook.utils.units import size
from zerobook.utils.versions import versions

if TYPE_CHECKING:
    from zerobook.strategy import Strategy

OWN_KEYS = ("cache_dir",)
"""Keys of the config that may differ from host to host."""
COMPARED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUBLAS_", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "PYTORCH_", "TOKENIZERS_")
"""Beginnings of environment variables that usually have the same value on all hosts."""
OWN_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables that name a host's own devices."""
CLOCKS_S = 30.0
"""Difference of clocks that is worth a warning: logs and files of hosts are then hard to put in order."""
UNEQUAL = 2.0
"""Ratio of free memory between hosts that is worth a warning."""
HASH = 12


def check(strategy: Strategy, config: RecipeConfig) -> None:
    """Compare the hosts of the run, measure the links between its ranks, and print warnings. Does nothing on one host.
    Collective.

    Raises:
        ConfigError: on every rank; the hosts would not train the same.
    """
    if strategy.nodes < 2:
        return
    strategy.barrier()  # clocks are read at the same moment
    found = _of_hosts(strategy, lambda: facts(config, strategy.plan.name))

    def compare() -> None:
        problems, warnings = differences(found)
        for warning in warnings:
            say(f"  warning: {warning}")
        if problems:
            raise ConfigError(problems)

    strategy.on_main(compare)
    rates = strategy.to_main((socket.gethostname(), links.ring_rate(strategy.device)))
    if rates is not None:
        between, inside = links.links(*zip(*rates, strict=True))
        say(links.summary(between, inside))
        for warning in (*links.slow_links(between), *links.slow_links(inside)):
            say(f"  warning: {warning}")


def check_data(strategy: Strategy, fingerprints: Mapping[str, str]) -> None:
    """Compare the prepared data of the hosts, name -> fingerprint. Does nothing on one host. Collective.

    Raises:
        ConfigError: on every rank; the hosts have other data.
    """
    if strategy.nodes < 2:
        return
    found = _of_hosts(strategy, lambda: {"host": socket.gethostname(), "data": fingerprints})

    def compare() -> None:
        problems = [
            f"{name}: the fingerprint of the prepared data is {said}. The files, the tokenizer or the chat template differ."
            for name in fingerprints
            if (said := _unequal(found, [host["data"].get(name) for host in found]))
        ]
        if problems:
            raise ConfigError(problems)

    strategy.on_main(compare)


def _of_hosts(strategy: Strategy, look: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the result of ``look`` on each host, on rank 0; an empty list on the others. Collective."""
    found = strategy.to_main(look() if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None)
    return [host for host in found or [] if host is not None]


def facts(config: RecipeConfig, strategy: str, recipe: str | None = None) -> dict[str, Any]:
    """Return what is compared of this host. ``recipe`` is the recipe's file; None: this process's program."""
    import psutil

    memory, cache = psutil.virtual_memory(), Path(config.cache_dir or Path.home())
    return {
        "host": socket.gethostname(),
        "strategy": strategy,
        "versions": versions(),
        "code": code(Path(recipe or sys.argv[0])),
        "config": {key: value for key, value in config.model_dump(mode="json").items() if key not in OWN_KEYS},
        "environment": _variables(os.environ),
        "gpus": _gpus(),
        "driver": gpus.driver_version(),
        "cores": psutil.cpu_count(),
        "memory": memory.total,
        "memory_free": memory.available,
        "disk_free": shutil.disk_usage(cache if cache.exists() else Path.home()).free,
        "clock": time.time(),
    }


def code(recipe: Path) -> dict[str, str]:
    """Return a hash of the package's Python files, and one of the recipe's file."""
    package = Path(__file__).resolve().parents[1]
    state = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        state.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    own = hashlib.sha256(recipe.read_bytes()).hexdigest()[:HASH] if recipe.is_file() else "none"
    return {"zerobook": state.hexdigest()[:HASH], recipe.name: own}


def differences(hosts: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Compare the `facts` of all hosts. Return (problems, warnings), each a sentence with both values and the hosts."""
    problems: list[str] = []
    warnings: list[str] = []
    names = [host["host"] for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        warnings.append(f"host names: {', '.join(twice)} is the name of several hosts. Reports cannot tell them apart.")
    for name, what, way_out in (
        ("versions", "version of", "Install the same environment on all hosts."),
        ("code", "code of", "Update the clone on all hosts, or launch from a disk that they share."),
        ("config", "config:", "Start all hosts with the same config and flags."),
    ):
        for key in _keys(host[name] for host in hosts):
            if said := _unequal(hosts, [host[name].get(key) for host in hosts]):
                problems.append(f"{what} {key}: {said}. {way_out}")
    if said := _unequal(hosts, [host["strategy"] for host in hosts]):
        problems.append(f"strategy: {said}. Start all hosts with the same --config_file.")
    for key in _keys(host["environment"] for host in hosts):
        if said := _unequal(hosts, [host["environment"].get(key) for host in hosts]):
            warnings.append(f"environment variable {key}: {said}.")
    for key, what in (("gpus", "GPUs"), ("driver", "GPU driver"), ("cores", "CPU cores")):
        if said := _unequal(hosts, [host[key] for host in hosts]):
            warnings.append(f"{what}: {said}. The slowest host decides the pace of all.")
    for key, what in (("memory_free", "free memory"), ("disk_free", "free disk for prepared data")):
        least, most = (choose(hosts, key=lambda host: host[key]) for choose in (min, max))
        if most[key] > UNEQUAL * max(least[key], 1):
            warnings.append(
                f"{what}: {size(least[key])} on {least['host']} and {size(most[key])} on {most['host']}. Does another program "
                f"use {least['host']}?"
            )
    early, late = (choose(hosts, key=lambda host: host["clock"]) for choose in (min, max))
    if late["clock"] - early["clock"] > CLOCKS_S:
        ahead = late["clock"] - early["clock"]
        warnings.append(
            f"clocks: {late['host']} is {ahead:.0f} s ahead of {early['host']}. Set the time by NTP on both; times in logs are "
            "each host's own."
        )
    return problems, warnings


def _keys(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _unequal(hosts: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> str | None:
    """Return ``2.13.0 on hosta, hostc; 2.12.1 on hostb``, the most frequent value first; None if all are equal."""
    groups: dict[str, list[str]] = {}
    for host, value in zip(hosts, values, strict=True):
        groups.setdefault("not set" if value is None else str(value), []).append(host["host"])
    if len(groups) == 1:
        return None
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value} on {_few(names)}" for value, names in ordered)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in sorted(environ.items()) if key.startswith(COMPARED) and key not in OWN_VARIABLES}


def _gpus() -> str:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
