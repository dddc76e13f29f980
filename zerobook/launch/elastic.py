"""A launch on a number of machines that may change: ``accelerate launch`` through torchrun's elastic agent.

accelerate's launcher takes one number of machines. Its own code makes the workers' environment and torchrun's arguments here,
and only the number of machines becomes a range.
"""

from __future__ import annotations

from zerobook.errors import ConfigError
from zerobook.launch import accelerate_file
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


def launch(least: int, arguments: list[str]) -> None:
    """Start this machine's processes, and return when they have ended.

    Args:
        least: the fewest machines that the run goes on with.
        arguments: of ``accelerate launch``, with the recipe and its flags. ``--num_machines`` is the most machines, and
            ``--num_processes`` the processes on all of them.

    Raises:
        ConfigError: the range is none, or the launch is not one over machines.
    """
    import torch.distributed.run as torchrun
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import patch_environment
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    parser = accelerate_launch.launch_command_parser()
    args = parser.parse_args(arguments)
    # Keep the values that were typed: accelerate's own code replaces them.
    restarts = args.max_restarts
    backend = args.rdzv_backend
    problems = accelerate_file.check(args.config_file).problems
    if problems:
        raise ConfigError(problems)
    args, defaults, from_file = accelerate_launch._validate_launch_command(args)
    most = int(args.num_machines or 1)
    if not 1 <= least <= most or most == 1:
        raise ConfigError(f"--min_machines: {least}, and --num_machines is {most}. Give at least 1 of at least 2.")
    if backend not in ("static", BACKEND):
        raise ConfigError(f"--rdzv_backend: {backend}, but a number of machines that changes needs {BACKEND}.")
    # torchrun starts the same number of processes on each machine.
    if args.num_processes % most:
        raise ConfigError(f"--num_processes: {args.num_processes} is no multiple of --num_machines {most}.")
    # The address becomes the rendezvous, not rank 0's. Only the machine that has it listens there, and accelerate looks for
    # another program at the port where the rank is 0.
    args.same_network = False
    args.deepspeed_multinode_launcher = "standard"
    args.machine_rank = args.machine_rank or int(not _matches_machine_hostname(str(args.main_process_ip)))
    problems = list(machine_problems(args, resolves=False))
    if problems:
        raise ConfigError(problems)
    environ = distributed_environment(args, defaults, from_file)
    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    torchrun_args = accelerate_launch._filter_args(args, torchrun.get_args_parser(), script)
    torchrun_args.nnodes = f"{least}:{most}"
    torchrun_args.rdzv_backend = BACKEND
    torchrun_args.max_restarts = restarts or RESTARTS
    timeouts = f"last_call_timeout={LAST_CALL_S},join_timeout={JOIN_S}"
    # The last one of two values counts, so typed ones are behind these.
    if torchrun_args.rdzv_conf:
        timeouts += f",{torchrun_args.rdzv_conf}"
    torchrun_args.rdzv_conf = timeouts
    with patch_environment(**environ | OWN_STORE):
        torchrun.run(torchrun_args)
