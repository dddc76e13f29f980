"""The environment that ``accelerate launch`` would give to its workers, computed by accelerate's own code."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from zerobook.errors import ConfigError
from zerobook.launch import flag_checks
from zerobook.launch.accelerate_cli import SCRIPT, read_flags, read_hidden_settings


class Workers(NamedTuple):
    """The environment that ``accelerate launch`` would give to rank 0.

    Attributes:
        environ: its environment; a plain launch's where accelerate cannot read the strategy.
        precision: ``--mixed_precision`` as typed, or None.
        problems: of the launch.
        has_strategy: the environment is that of the strategy.
    """

    environ: dict[str, str]
    precision: str | None
    problems: list[str]
    has_strategy: bool


def worker_environment(launch_flags: list[str]) -> tuple[dict[str, str], str | None]:
    """Return the environment that accelerate gives to rank 0, and ``--mixed_precision`` as typed, or None.

    Raises:
        ConfigError: accelerate refuses the flags or the file, or would drop a part of them.
    """
    workers = inspect(launch_flags)
    if workers.problems:
        raise ConfigError(workers.problems)
    return workers.environ, workers.precision


def inspect(launch_flags: list[str]) -> Workers:
    """Work out what accelerate would give to rank 0, and every problem of the launch."""
    typed, problems = read_flags(launch_flags)
    check = flag_checks.check(typed, before_start=True, resolves=True)
    is_resolvable = check.is_resolvable and not problems
    problems += check.problems
    if is_resolvable:
        try:
            environ = _prepared(typed)
            precision, unsaid = read_hidden_settings([*launch_flags, SCRIPT])
            return Workers(unsaid | environ, precision, problems, True)
        except ConfigError as error:
            # If the flags have a problem, accelerate's error may only repeat it.
            if not check.problems:
                problems += error.problems
    return Workers(plain_environment(_ranks(typed.num_processes or 1, 1)), typed.mixed_precision, problems, False)


def plain_environment(ranks: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without what a strategy file sets, with the variables of ``ranks``.

    With it, the rest of a command line is checked if the strategy file cannot be resolved.
    """
    of_strategies = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in os.environ.items() if not key.startswith(of_strategies)} | dict(ranks)


def _ranks(processes: int, machines: int) -> dict[str, str]:
    """Return the variables that torchrun sets for rank 0."""
    return {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": str(processes // machines),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": "none",
    }


def _prepared(typed: argparse.Namespace) -> dict[str, str]:
    """Return the variables that accelerate sets for rank 0, and those that torchrun adds.

    Raises:
        ConfigError: accelerate refuses the launch.
    """
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as prepare

    try:
        args, defaults, from_file = accelerate_launch._validate_launch_command(typed)
        # Any free port does: nothing is started.
        args.main_process_port = 0
        strategy = flag_checks.strategy_of(args)
        if strategy == "single":
            _, environ = prepare.prepare_simple_launcher_cmd_env(args)
        else:
            environ = distributed_environment(args, defaults, from_file)
    except Exception as error:
        # Its launcher would show a traceback, of errors of many kinds.
        raise ConfigError(flag_checks.refusal(error)) from error
    # torchrun adds these when it starts a worker.
    if strategy != "single":
        environ |= _ranks(args.num_processes, int(args.num_machines or 1))
    return environ


def distributed_environment(args: argparse.Namespace, defaults: Any, from_file: bool) -> dict[str, str]:
    """Return the variables that accelerate sets for a launch of several processes.

    Args:
        args, defaults, from_file: from accelerate's ``_validate_launch_command``.
    """
    from accelerate.utils import launch as prepare

    if not args.use_deepspeed:
        return prepare.prepare_multi_gpu_env(args)
    # The names of the YAML's keys, which accelerate compares with the JSON.
    fields = list(defaults.deepspeed_config) if defaults else []
    args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * from_file)
    _, environ = prepare.prepare_deepspeed_cmd_env(args)
    return environ
