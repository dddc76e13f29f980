"""The environment that ``accelerate launch`` would give to its workers, computed by accelerate's own code."""

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
        environ: the environment. If accelerate cannot read the strategy, it is that of a launch without a strategy.
        precision: ``--mixed_precision`` as typed, or None.
        problems: the problems of the launch.
        has_strategy: True if ``environ`` has the settings of the strategy.
    """

    environ: dict[str, str]
    precision: str | None
    problems: list[str]
    has_strategy: bool


def worker_environment(launch_flags: list[str]) -> tuple[dict[str, str], str | None]:
    """Return the environment that accelerate gives to rank 0, and ``--mixed_precision`` as typed, or None.

    Raises:
        ConfigError: accelerate refuses the flags or the file, or would ignore a part of them.
    """
    workers = inspect(launch_flags)
    if workers.problems:
        raise ConfigError(workers.problems)
    return workers.environ, workers.precision


def inspect(launch_flags: list[str]) -> Workers:
    """Compute the environment that accelerate would give to rank 0, and find all problems of the launch."""
    typed, problems = read_flags(launch_flags)
    # accelerate writes the file's precision, or its default, into ``typed`` below.
    precision = typed.mixed_precision
    check = flag_checks.check(typed, before_start=True, looks_up_address=True)
    is_resolvable = check.is_resolvable and not problems
    problems += check.problems
    if is_resolvable:
        try:
            environ = _prepare_environment(typed)
            # Accelerate's launcher does not pass all settings of the strategy to workers: add the others.
            _, hidden_settings = read_hidden_settings([*launch_flags, SCRIPT])
            return Workers(hidden_settings | environ, precision, problems, has_strategy=True)
        except ConfigError as error:
            # If the flags have a problem, accelerate's error may only repeat it.
            if not check.problems:
                problems += error.problems
    # The strategy cannot be used. Return an environment without one, with which the caller can still check the recipe's flags.
    environ = plain_environment(_rank_variables(typed.num_processes or 1, machines=1))
    return Workers(environ, precision, problems, has_strategy=False)


def plain_environment(ranks: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables of strategy files, and with the variables in ``ranks``.

    If a strategy file cannot be resolved, the rest of the command line is checked with this environment.
    """
    strategy_prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    return {key: value for key, value in os.environ.items() if not key.startswith(strategy_prefixes)} | dict(ranks)


def _rank_variables(processes: int, machines: int) -> dict[str, str]:
    """Return the variables that torchrun sets for rank 0."""
    return {
        "LOCAL_RANK": "0",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": str(processes // machines),
        "WORLD_SIZE": str(processes),
        "TORCHELASTIC_RUN_ID": "none",
    }


def _prepare_environment(typed: argparse.Namespace) -> dict[str, str]:
    """Return the variables that accelerate sets for rank 0, and those that torchrun adds.

    Raises:
        ConfigError: accelerate refuses the launch.
    """
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as prepare

    try:
        args, defaults, from_file = accelerate_launch._validate_launch_command(typed)
        # Nothing is started here. With 0, accelerate takes a free port, and does not complain of a port that is in use.
        args.main_process_port = 0
        strategy = flag_checks.find_strategy(args)
        if strategy == "single":
            _, environ = prepare.prepare_simple_launcher_cmd_env(args)
        else:
            environ = distributed_environment(args, defaults, from_file)
    except Exception as error:
        # accelerate's errors have many types, and its launcher would show their tracebacks.
        raise ConfigError(flag_checks.describe_refusal(error)) from error
    # torchrun adds these when it starts a worker.
    if strategy != "single":
        environ |= _rank_variables(args.num_processes, int(args.num_machines or 1))
    return environ


def distributed_environment(args: argparse.Namespace, defaults: Any, from_file: bool) -> dict[str, str]:
    """Return the variables that accelerate sets for a launch of several processes.

    The arguments are the results of accelerate's ``_validate_launch_command``.

    Args:
        args: the launcher's flags, merged with the Accelerate config.
        defaults: the Accelerate config; None without one.
        from_file: ``mixed_precision`` is from the Accelerate config.
    """
    from accelerate.utils import launch as prepare

    if not args.use_deepspeed:
        return prepare.prepare_multi_gpu_env(args)
    # accelerate compares these keys of the YAML with the JSON. Its own launcher makes the same list.
    fields = list(defaults.deepspeed_config) if defaults else []
    args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * from_file)
    _, environ = prepare.prepare_deepspeed_cmd_env(args)
    return environ
