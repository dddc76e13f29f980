"""Checks of flags with which accelerate's launcher trains in fewer processes, ignores a flag, or waits without end, and reports
nothing.

`zerobook doctor`, ``zerobook launch`` and launched runs call these checks.
"""

import argparse
import copy
import logging
import socket
from collections.abc import Iterator

from zerobook.launch import accelerate_file

_NAMES = {"deepspeed": "DeepSpeed", "fsdp": "FSDP", "ddp": "DDP", "single": "one process"}
# Section of a strategy file -> (the strategy that reads the flags of the section, how to choose this strategy).
_STRATEGY_OF_SECTION = {
    "deepspeed_config": ("deepspeed", "Add --use_deepspeed, or name a file with distributed_type DEEPSPEED"),
    "fsdp_config": ("fsdp", "Add --use_fsdp, or name a file with distributed_type FSDP"),
}


def check(typed: argparse.Namespace, *, before_start: bool, looks_up_address: bool = False) -> accelerate_file.FileCheck:
    """Check the Accelerate config and the flags of a launch.

    Args:
        typed: the launcher's flags as parsed.
        before_start: the processes are not started yet. So errors of accelerate, and machines that would not find each other,
            are problems, too.
        looks_up_address: see `find_machine_problems`.
    """
    file_check = accelerate_file.check(typed)
    # accelerate might not be able to read such a file.
    if not file_check.is_resolvable:
        return file_check
    try:
        args = merge_flags_and_file(typed)
    except Exception as error:
        # If the file has a problem, accelerate's error may only repeat it.
        refusals = [describe_refusal(error)] if before_start and not file_check.problems else []
        # A launched process has its environment from accelerate already, so its launch can be resolved in spite of the error.
        return accelerate_file.FileCheck(file_check.problems + refusals, is_resolvable=not before_start)
    path = accelerate_file.path_or_default(typed.config_file)
    distributed_type = None if path is None else str(accelerate_file.load(path).get("distributed_type")).upper()
    problems = [*file_check.problems, *find_flag_problems(typed, args, distributed_type)]
    if before_start:
        problems += find_machine_problems(args, looks_up_address=looks_up_address)
    return accelerate_file.FileCheck(problems, is_resolvable=True)


def describe_refusal(error: Exception) -> str:
    """Return an error of accelerate's launcher as one sentence."""
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(". ") if lines else type(error).__name__
    return f"accelerate refuses this launch: {reason}."


def merge_flags_and_file(args: argparse.Namespace) -> argparse.Namespace:
    """Return the launcher's parsed flags with the values of the Accelerate config, merged by accelerate's own code.

    Raises:
        Exception: of many types, if accelerate refuses the flags or the config.
    """
    from accelerate.commands import launch as accelerate_launch

    # accelerate warns of each flag that is not given.
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    return accelerate_launch._validate_launch_command(copy.deepcopy(args))[0]


def find_strategy(args: argparse.Namespace) -> str:
    """Return which of accelerate's launchers starts the processes: ``deepspeed``, ``fsdp``, ``ddp`` or ``single``.

    Args:
        args: the flags merged with the Accelerate config, from `merge_flags_and_file`.
    """
    if args.cpu:
        return "single"
    if args.use_deepspeed:
        return "deepspeed"
    if args.use_fsdp:
        return "fsdp"
    return "ddp" if args.multi_gpu else "single"


def find_flag_problems(typed: argparse.Namespace, args: argparse.Namespace, distributed_type: str | None) -> Iterator[str]:
    """Yield a problem for each flag that accelerate ignores, and for a number of processes that it would not start.

    Args:
        typed: the launcher's flags as parsed.
        args: the flags merged with the Accelerate config, from `merge_flags_and_file`.
        distributed_type: the value in the Accelerate config; None without a config.
    """
    strategy = find_strategy(args)
    yield from _find_unused_flags(typed, strategy)
    if str(args.mixed_precision).lower() == "fp8":
        yield "mixed_precision: fp8 is not supported. Use no, bf16 or fp16."
    processes = int(args.num_processes or 1)
    machines = int(args.num_machines or 1)
    if strategy == "single" and max(processes, machines) > 1:
        yield _describe_single_process(args, distributed_type, processes, machines)
    elif machines > 1 and processes % machines:
        yield (
            f"num_processes: {processes} is no multiple of num_machines {machines}, and every machine starts the same number. "
            f"Pass --num_processes {-(-processes // machines) * machines}."
        )


def _find_unused_flags(typed: argparse.Namespace, strategy: str) -> Iterator[str]:
    """Yield a problem for each typed flag of another strategy than the launch has."""
    # accelerate's parser lists the names of the typed flags as nondefault.
    for section, (strategy_of_flags, advice) in _STRATEGY_OF_SECTION.items():
        for flag in sorted(getattr(typed, "nondefault", ())):
            if strategy != strategy_of_flags and flag.startswith(accelerate_file.KEY_PREFIXES[section]):
                yield (
                    f"--{flag} {getattr(typed, flag)} has no effect: the launch is {_NAMES[strategy]}, which does not read it. "
                    f"{advice}; or remove it."
                )


def _describe_single_process(args: argparse.Namespace, distributed_type: str | None, processes: int, machines: int) -> str:
    """Return the problem of a launch in which accelerate would start one process per machine, although more were requested."""
    size = f"num_machines is {machines}"
    if processes > 1:
        size = f"num_processes is {processes}"
    # The flag --cpu overrides the file.
    reason = "no strategy file is named, so that"
    if args.cpu:
        reason = "--cpu is given, with which"
    elif distributed_type is not None:
        reason = f"distributed_type is {distributed_type}, with which"
    return (
        f"{reason} accelerate starts one process, and {size}. Launch with accelerate_configs/ddp.yaml, or another file that "
        "spreads a run; with use_cpu: true in it, it trains on CPUs."
    )


def find_machine_problems(args: argparse.Namespace, *, looks_up_address: bool) -> Iterator[str]:
    """Yield each reason why the machines of a launch would not find each other and would wait without end.

    Args:
        args: the flags merged with the Accelerate config, from `merge_flags_and_file`.
        looks_up_address: also check that the first machine's name has an address. A launch does not check it, since a name may
            get its address after the launch has begun.
    """
    machines = int(args.num_machines or 1)
    if machines < 2 or find_strategy(args) == "single":
        return
    address = str(args.main_process_ip or "").strip()
    # With an unspecified address such as 0.0.0.0, every machine would connect to itself.
    if not address or address.lower() in ("none", "null", "0.0.0.0", "::"):
        yield (
            f"--main_process_ip: {address or 'not given'}, and num_machines is {machines}. Give the first machine's "
            "address, as the others reach it."
        )
    elif looks_up_address:
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError):
            yield (
                f"--main_process_ip {address}: this host cannot resolve it. Give the first machine's address, as the others "
                "reach it."
            )
    # Two machines with the same rank would wait for a third one that never comes.
    if args.machine_rank is None:
        yield f"--machine_rank: not given, and num_machines is {machines}. Give each machine its own, from 0 to {machines - 1}."
    elif not 0 <= int(args.machine_rank) < machines:
        yield f"--machine_rank: {args.machine_rank}, but {machines} machines have ranks 0 to {machines - 1}."
    # By default, accelerate starts the processes of all machines from the first machine, by pdsh over SSH.
    launcher = args.deepspeed_multinode_launcher or "pdsh"
    if find_strategy(args) == "deepspeed" and launcher != "standard" and not args.deepspeed_hostfile:
        yield (
            f"deepspeed_multinode_launcher is {launcher}, which reads the machines from deepspeed_hostfile, and that is not "
            "given. Write deepspeed_multinode_launcher: standard, and start the command on each machine."
        )
