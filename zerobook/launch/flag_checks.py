"""Checks of flags that let accelerate's launcher train on fewer processes, drop a flag, or wait without end, and say nothing.

`zerobook doctor`, ``zerobook launch`` and, where the processes do start, a launched run call these checks.
"""

import argparse
import copy
import logging
import socket
from collections.abc import Iterator

from zerobook.launch import accelerate_file

_NAMES = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "ddp": "DDP", "single": "one process"}
_WAYS = {
    "deepspeed_config": ("deepspeed", "Add --use_deepspeed, or name a file with distributed_type DEEPSPEED"),
    "fsdp_config": ("fsdp", "Add --use_fsdp, or name a file with distributed_type FSDP"),
}
"""Section of a strategy file -> (the strategy that reads its flags, how to choose that)."""


def check(typed: argparse.Namespace, *, before_start: bool, resolves: bool = False) -> accelerate_file.FileCheck:
    """Check a launch before it: its Accelerate config and its flags.

    Args:
        typed: the launcher's flags as parsed.
        before_start: the processes are not started yet. The machines still have to meet, and a refusal of accelerate is a
            problem, too.
        resolves: see `machine_problems`.
    """
    file_check = accelerate_file.check(typed.config_file)
    # accelerate may not read such a file.
    if not file_check.is_resolvable:
        return file_check
    try:
        args = validated(typed)
    except Exception as error:
        # If the file has a problem, accelerate's error may only repeat it.
        refusals = [refusal(error)] if before_start and not file_check.problems else []
        return accelerate_file.FileCheck(file_check.problems + refusals, not before_start)
    path = accelerate_file.path_or_default(typed.config_file)
    distributed_type = None if path is None else str(accelerate_file.load(path).get("distributed_type")).upper()
    all_problems = [*file_check.problems, *problems(typed, args, distributed_type)]
    if before_start:
        all_problems += machine_problems(args, resolves=resolves)
    return accelerate_file.FileCheck(all_problems, True)


def refusal(error: Exception) -> str:
    """Return what accelerate's launcher raised as one sentence."""
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(". ") if lines else type(error).__name__
    return f"accelerate refuses this launch: {reason}."


def validated(args: argparse.Namespace) -> argparse.Namespace:
    """Return the launcher's parsed flags with the values of the Accelerate config, as its own code merges them.

    Raises:
        Exception: of many kinds, where accelerate refuses them.
    """
    from accelerate.commands import launch as accelerate_launch

    # It warns of each flag that is not given.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    return accelerate_launch._validate_launch_command(copy.deepcopy(args))[0]


def strategy_of(args: argparse.Namespace) -> str:
    """Return which of accelerate's launchers starts the processes: ``deepspeed``, ``fsdp``, ``ddp`` or ``single``.

    Args:
        args: from `validated`.
    """
    if args.cpu:
        return "single"
    if args.use_deepspeed:
        return "deepspeed"
    if args.use_fsdp:
        return "fsdp"
    return "ddp" if args.multi_gpu else "single"


def problems(typed: argparse.Namespace, args: argparse.Namespace, distributed_type: str | None) -> Iterator[str]:
    """Yield a problem for each flag that accelerate drops, and for processes that it does not start.

    Args:
        typed: the launcher's flags as parsed.
        args: from `validated`.
        distributed_type: of the Accelerate config; None without one.
    """
    strategy = strategy_of(args)
    yield from _dropped_flags(typed, strategy)
    if str(args.mixed_precision).lower() == "fp8":
        yield "mixed_precision: fp8 is not supported. Use no, bf16 or fp16."
    processes = int(args.num_processes or 1)
    machines = int(args.num_machines or 1)
    if strategy == "single" and max(processes, machines) > 1:
        yield _one_process(args, distributed_type, processes, machines)
    elif machines > 1 and processes % machines:
        yield (
            f"num_processes: {processes} is no multiple of num_machines {machines}, and every machine starts the same number. "
            f"Pass --num_processes {-(-processes // machines) * machines}."
        )


def _dropped_flags(typed: argparse.Namespace, strategy: str) -> Iterator[str]:
    """Yield a problem for each typed flag of another strategy than the launch's."""
    for section, (reader, way) in _WAYS.items():
        for flag in sorted(getattr(typed, "nondefault", ())):
            if strategy != reader and flag.startswith(accelerate_file.KEY_PREFIXES[section]):
                yield (
                    f"--{flag} {getattr(typed, flag)} has no effect: the launch is {_NAMES[strategy]}, which does not read it. "
                    f"{way}; or remove it."
                )


def _one_process(args: argparse.Namespace, distributed_type: str | None, processes: int, machines: int) -> str:
    """Return the problem of a launch that would train in one process per machine, although more were requested."""
    size = f"num_machines is {machines}"
    if processes > 1:
        size = f"num_processes is {processes}"
    # The flag --cpu is stronger than the file.
    reason = "no strategy file is named, so that"
    if args.cpu:
        reason = "--cpu is given, with which"
    elif distributed_type is not None:
        reason = f"distributed_type is {distributed_type}, with which"
    return (
        f"{reason} accelerate starts one process, and {size}. Launch with accelerate_configs/ddp.yaml, or another file that "
        "spreads a run; with use_cpu: true in it, it trains on CPUs."
    )


def machine_problems(args: argparse.Namespace, *, resolves: bool) -> Iterator[str]:
    """Yield why the machines of a launch would not find each other, so that it would wait without end.

    Args:
        args: from `validated`.
        resolves: also look the first machine's address up. A name may become known after a launch has begun.
    """
    machines = int(args.num_machines or 1)
    if machines < 2 or strategy_of(args) == "single":
        return
    address = str(args.main_process_ip or "").strip()
    if not address or address.lower() in ("none", "null", "0.0.0.0", "::"):
        # An unspecified address would lead every machine to itself.
        yield (
            f"--main_process_ip: {address or 'not given'}, and num_machines is {machines}. Give the first machine's "
            "address, as the others reach it."
        )
    elif resolves:
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError):
            yield (
                f"--main_process_ip {address}: this host cannot resolve it. Give the first machine's address, as the others "
                "reach it."
            )
    # Two machines with the same rank would wait for one that never comes.
    if args.machine_rank is None:
        yield f"--machine_rank: not given, and num_machines is {machines}. Give each machine its own, from 0 to {machines - 1}."
    elif not 0 <= int(args.machine_rank) < machines:
        yield f"--machine_rank: {args.machine_rank}, but {machines} machines have ranks 0 to {machines - 1}."
    # pdsh is accelerate's default, which starts all machines from the first one over SSH.
    launcher = args.deepspeed_multinode_launcher or "pdsh"
    if strategy_of(args) == "deepspeed" and launcher != "standard" and not args.deepspeed_hostfile:
        yield (
            f"deepspeed_multinode_launcher is {launcher}, which reads the machines from deepspeed_hostfile, and that is not "
            "given. Write deepspeed_multinode_launcher: standard, and start the command on each machine."
        )
