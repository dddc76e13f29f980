"""Comparison of the hosts of a run, in its first seconds.

Differences that would change the training are errors, and differences that may slow the run are warnings.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
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

# Beginnings of environment variables that usually have the same value on all hosts.
COMPARED = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUBLAS_", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "PYTORCH_", "TOKENIZERS_")
# Variables that name a host's own devices.
HOST_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA")
# Key of `facts` whose value has to be the same on all hosts -> (beginning of the message, what to do).
MUST_AGREE = {
    "versions": ("version of", "Install the same environment on all hosts."),
    "code": ("code of", "Update the clone on all hosts, or launch from a disk that they share."),
    "config": ("config:", "Start all hosts with the same config and flags."),
}
# Difference of clocks that gets a warning. With a larger one, the order of events in logs of several hosts is unclear.
CLOCKS_S = 30.0
# Ratio of free memory, or free disk, between hosts that gets a warning.
FREE_RATIO = 2.0
HASH_LENGTH = 12


def check(strategy: Strategy, config: RecipeConfig) -> None:
    """Compare the hosts of the run, measure the links between its ranks, and print warnings. Do nothing in a run on one host.

    Collective.

    Raises:
        ConfigError: on every rank, if a difference between the hosts would change the training.
    """
    if strategy.nodes < 2:
        return
    # After a barrier, all hosts read their clocks at the same moment.
    strategy.barrier()
    hosts = _gather_from_hosts(strategy, lambda: facts(config, strategy.plan.name))
    problems, warnings = differences(hosts)
    if strategy.is_main:
        for warning in warnings:
            say(f"  warning: {warning}")
    if problems:
        raise ConfigError(problems)
    # Measure the links after the comparison, since a run on hosts that differ ends before. Collective.
    measurements = strategy.gather((socket.gethostname(), links.measure_ring(strategy.device)))
    if strategy.is_main:
        between, inside = links.build_links(*zip(*measurements, strict=True))
        say(links.summarize(between, inside))
        # A link is compared with links of its kind only.
        for warning in (*links.warn_of_slow_links(between), *links.warn_of_slow_links(inside)):
            say(f"  warning: {warning}")


def check_data(strategy: Strategy, fingerprints: Mapping[str, str]) -> None:
    """Compare the prepared data of the hosts. Do nothing in a run on one host. Collective.

    Args:
        fingerprints: name of prepared data, such as ``training data`` -> its fingerprint on this host.

    Raises:
        ConfigError: on every rank, if the hosts have different data.
    """
    if strategy.nodes < 2:
        return
    hosts = _gather_from_hosts(strategy, lambda: {"host": socket.gethostname(), "data": fingerprints})
    problems = []
    for name in fingerprints:
        difference = _describe_difference(hosts, "data", name)
        if difference:
            problems.append(
                f"{name}: the fingerprint of the prepared data is {difference}. The files, the tokenizer or the chat template "
                "differ."
            )
    if problems:
        raise ConfigError(problems)


def _gather_from_hosts(strategy: Strategy, read_facts: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """Call ``read_facts`` on the first rank of each host, and return the results on all ranks. Collective."""
    # The other ranks of a host give None to the collective.
    is_first_of_host = int(os.environ.get("LOCAL_RANK", 0)) == 0
    facts_of_ranks = strategy.gather(read_facts() if is_first_of_host else None)
    return [host for host in facts_of_ranks if host is not None]


def facts(config: RecipeConfig, strategy: str, recipe: str | None = None) -> dict[str, Any]:
    """Return the facts of this host that are compared with those of other hosts.

    Args:
        strategy: the name of the strategy.
        recipe: the recipe's file; None: the file that this process runs.
    """
    import psutil

    memory = psutil.virtual_memory()
    cache = Path(config.cache_dir or Path.home())
    environment = {
        key: value for key, value in sorted(os.environ.items()) if key.startswith(COMPARED) and key not in HOST_VARIABLES
    }
    return {
        "host": socket.gethostname(),
        "strategy": strategy,
        "versions": versions(),
        "code": code(Path(recipe or sys.argv[0])),
        # Hosts may keep their prepared data in different folders.
        "config": config.model_dump(mode="json", exclude={"cache_dir"}),
        "environment": environment,
        "gpus": _describe_gpus(),
        "driver": gpus.driver_version(),
        "cores": psutil.cpu_count(),
        "memory": memory.total,
        "memory_free": memory.available,
        # The folder of prepared data may not exist yet.
        "disk_free": shutil.disk_usage(cache if cache.exists() else Path.home()).free,
        "clock": time.time(),
    }


def code(recipe: Path) -> dict[str, str]:
    """Return ``{"zerobook": hash of the package's Python files, name of the recipe's file: its hash}``."""
    package = Path(__file__).resolve().parents[1]
    # The hash includes the names of the files, so that a renamed file is a difference.
    state = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        state.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    recipe_hash = hashlib.sha256(recipe.read_bytes()).hexdigest()[:HASH_LENGTH] if recipe.is_file() else "none"
    return {"zerobook": state.hexdigest()[:HASH_LENGTH], recipe.name: recipe_hash}


def differences(hosts: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Compare the `facts` of all hosts. Return (problems, warnings): sentences with the different values and their hosts."""
    return _find_problems(hosts), _find_warnings(hosts)


def _find_problems(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a problem for each difference that would change the training."""
    problems: list[str] = []
    for table, (beginning, advice) in MUST_AGREE.items():
        for key in _list_keys(hosts, table):
            difference = _describe_difference(hosts, table, key)
            if difference:
                problems.append(f"{beginning} {key}: {difference}. {advice}")
    difference = _describe_difference(hosts, "strategy")
    if difference:
        problems.append(f"strategy: {difference}. Start all hosts with the same --config_file.")
    return problems


def _find_warnings(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning for each difference that may slow the run, or make its logs hard to read."""
    warnings: list[str] = []
    names = [host["host"] for host in hosts]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        warnings.append(f"host names: {', '.join(repeated)} is the name of several hosts. Reports cannot tell them apart.")
    for key in _list_keys(hosts, "environment"):
        difference = _describe_difference(hosts, "environment", key)
        if difference:
            warnings.append(f"environment variable {key}: {difference}.")
    for key, title in (("gpus", "GPUs"), ("driver", "GPU driver"), ("cores", "CPU cores")):
        difference = _describe_difference(hosts, key)
        if difference:
            warnings.append(f"{title}: {difference}. The slowest host decides the pace of all.")
    for key, title in (("memory_free", "free memory"), ("disk_free", "free disk for prepared data")):
        least = min(hosts, key=itemgetter(key))
        most = max(hosts, key=itemgetter(key))
        if most[key] > FREE_RATIO * max(least[key], 1):
            warnings.append(
                f"{title}: {size(least[key])} on {least['host']} and {size(most[key])} on {most['host']}. Does another program "
                f"use {least['host']}?"
            )
    # The clocks were read at about the same moment.
    earliest = min(hosts, key=itemgetter("clock"))
    latest = max(hosts, key=itemgetter("clock"))
    seconds_ahead = latest["clock"] - earliest["clock"]
    if seconds_ahead > CLOCKS_S:
        warnings.append(
            f"clocks: {latest['host']} is {seconds_ahead:.0f} s ahead of {earliest['host']}. Set the time by NTP on both; "
            "times in logs are each host's own."
        )
    return warnings


def _list_keys(hosts: Sequence[Mapping[str, Any]], table: str) -> list[str]:
    """Return the keys of a table of facts that one or more hosts have, each key once."""
    return list(dict.fromkeys(key for host in hosts for key in host[table]))


def _describe_difference(hosts: Sequence[Mapping[str, Any]], *path: str) -> str | None:
    """Compare one fact of all hosts.

    Args:
        path: a key of `facts`; for a fact in a table, the keys of the table and of the fact.

    Returns:
        Such as ``2.13.0 on hosta, hostc; 2.12.1 on hostb``, the most frequent value first. None if the hosts do not differ.
    """
    names_by_value: dict[str, list[str]] = {}
    for host in hosts:
        value: Any = host
        for key in path:
            value = value.get(key)
        names_by_value.setdefault("not set" if value is None else str(value), []).append(host["host"])
    if len(names_by_value) == 1:
        return None
    # The value of most hosts comes first, so that a host with another value is easy to see.
    ordered = sorted(names_by_value.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{value} on {_list_hosts(names)}" for value, names in ordered)


def _list_hosts(names: Sequence[str]) -> str:
    """Return the first four names, and the number of the other names."""
    listed = ", ".join(names[:4])
    return f"{listed} and {len(names) - 4} more" if len(names) > 4 else listed


def _describe_gpus() -> str:
    """Return the number and names of this host's GPUs, such as ``8 x NVIDIA H100``; ``none`` without GPUs."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
