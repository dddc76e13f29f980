"""A launch on a number of machines that may change: ``accelerate launch`` through torchrun's elastic agent.

accelerate's launcher takes one number of machines. Its own code makes the workers' environment and torchrun's arguments here,
and only the number of machines becomes a range.
"""

from argparse import Namespace

from zerobook.errors import ConfigError
from zerobook.launch import accelerate_file
from zerobook.launch.accelerate_cli import parse_flags
from zerobook.launch.flag_checks import machine_problems
from zerobook.launch.worker_environment import distributed_environment

BACKEND = "c10d"
"""torchrun's rendezvous for a number of machines that changes."""
RESTARTS = 100
"""Restarts by default. Each lost machine costs its agents one."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With a store that agents and processes share, torch 2.13 waits without end for a machine that comes back: its agent waits for
an address that the first agent wrote in an earlier round."""
LAST_CALL_S = 5
"""Seconds to wait for more machines once the fewest are there."""
JOIN_S = 600
"""Seconds to wait for the fewest machines."""


def launch(fewest: int, arguments: list[str]) -> None:
    """Start this machine's processes, and return when they have ended.

    Args:
        fewest: the fewest machines that the run goes on with.
        arguments: of ``accelerate launch``, with the recipe and its flags. ``--num_machines`` is the most machines, and
            ``--num_processes`` the processes on all of them.

    Raises:
        ConfigError: the numbers of machines and processes do not fit together, or accelerate would refuse the launch.
    """
    from accelerate.commands import launch as accelerate_launch

    args = parse_flags(arguments)
    # Keep the values that were typed: accelerate's own code replaces them.
    restarts = args.max_restarts
    backend = args.rdzv_backend
    problems = accelerate_file.check(args.config_file).problems
    if problems:
        raise ConfigError(problems)
    args, defaults, from_file = accelerate_launch._validate_launch_command(args)
    most = int(args.num_machines or 1)
    if not 1 <= fewest <= most or most == 1:
        raise ConfigError(
            f"--min_machines: it is {fewest}, and --num_machines is {most}. Give --num_machines 2 or more, and --min_machines "
            "from 1 to that."
        )
    if backend not in ("static", BACKEND):
        raise ConfigError(f"--rdzv_backend: {backend}, but a number of machines that changes needs {BACKEND}.")
    # torchrun starts the same number of processes on each machine.
    if args.num_processes % most:
        raise ConfigError(f"--num_processes: {args.num_processes} is no multiple of --num_machines {most}.")
    _prepare_rendezvous(args)
    problems = list(machine_problems(args, resolves=False))
    if problems:
        raise ConfigError(problems)
    environ = distributed_environment(args, defaults, from_file)
    _run_agent(args, environ, f"{fewest}:{most}", restarts or RESTARTS)


def _prepare_rendezvous(args: Namespace) -> None:
    """Make ``main_process_ip`` the address of the rendezvous, instead of rank 0's."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    # On one network, accelerate takes the address for rank 0's.
    args.same_network = False
    # DeepSpeed's own launchers would start the other machines. With "standard", each machine starts its processes.
    args.deepspeed_multinode_launcher = "standard"
    # Only the machine that has the address listens there. On machine 0, accelerate refuses a port that is in use.
    if not args.machine_rank and not _matches_machine_hostname(str(args.main_process_ip)):
        args.machine_rank = 1


def _run_agent(args: Namespace, environ: dict[str, str], machines: str, restarts: int) -> None:
    """Run torchrun's agent of this machine until its processes have ended.

    Args:
        machines: the fewest and the most machines, as torchrun writes the range.
    """
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import patch_environment

    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    torchrun_args = accelerate_launch._filter_args(args, torchrun.get_args_parser(), script)
    torchrun_args.nnodes = machines
    torchrun_args.rdzv_backend = BACKEND
    torchrun_args.max_restarts = restarts
    timeouts = f"last_call_timeout={LAST_CALL_S},join_timeout={JOIN_S}"
    # If a key is given twice, torchrun takes the last value, so the user's come last.
    if torchrun_args.rdzv_conf:
        timeouts += f",{torchrun_args.rdzv_conf}"
    torchrun_args.rdzv_conf = timeouts
    with patch_environment(**environ | OWN_STORE):
        torchrun.run(torchrun_args)
