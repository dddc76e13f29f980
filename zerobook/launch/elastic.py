"""A launch on a number of machines that may change, by torchrun's elastic agent.

accelerate's launcher takes one number of machines. So accelerate's code only makes the environment of the workers and the
arguments of torchrun here, and the number of machines in these arguments is then replaced by a range.
"""

from argparse import Namespace

from zerobook.errors import ConfigError
from zerobook.launch import accelerate_file
from zerobook.launch.accelerate_cli import parse_flags
from zerobook.launch.flag_checks import find_machine_problems
from zerobook.launch.worker_environment import distributed_environment

# torchrun's rendezvous for a number of machines that changes.
BACKEND = "c10d"
# Restarts by default. Each lost machine costs every agent one restart.
RESTARTS = 100
# Variable that keeps the processes from using the store of the agents. If they share it, torch 2.13 waits without end when a
# machine comes back: the agent of that machine waits for an address that the first agent wrote in an earlier round.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# Seconds to wait for more machines after the fewest have come.
LAST_CALL_S = 5
# Seconds to wait until the fewest machines have come.
JOIN_S = 600


def launch(fewest: int, arguments: list[str]) -> None:
    """Start this machine's processes, and return when they have ended.

    Args:
        fewest: the run continues with this number of machines or more.
        arguments: those of ``accelerate launch``, with the recipe and its flags. ``--num_machines`` is the largest number of
            machines, and ``--num_processes`` the number of processes on that many machines.

    Raises:
        ConfigError: the numbers of machines and processes do not fit together, or accelerate would refuse the launch.
    """
    from accelerate.commands import launch as accelerate_launch

    args = parse_flags(arguments)
    # Remember the typed values, which accelerate's code replaces below.
    restarts = args.max_restarts
    backend = args.rdzv_backend
    problems = accelerate_file.check(args).problems
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
    problems = list(find_machine_problems(args, looks_up_address=False))
    if problems:
        raise ConfigError(problems)
    environ = distributed_environment(args, defaults, from_file)
    _run_agent(args, environ, f"{fewest}:{most}", restarts or RESTARTS)


def _prepare_rendezvous(args: Namespace) -> None:
    """Make ``main_process_ip`` the address of the rendezvous, instead of rank 0's."""
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    # accelerate takes the address as the endpoint of the rendezvous only without same_network.
    args.same_network = False
    # DeepSpeed's own launchers would start the processes of other machines. With "standard", each machine starts its own.
    args.deepspeed_multinode_launcher = "standard"
    # accelerate refuses the launch if the port is in use on machine 0. But the rendezvous listens on the machine that has the
    # address, so another machine with the rank 0 gets another rank. torchrun ignores the rank in a launch of this kind.
    if not args.machine_rank and not _matches_machine_hostname(str(args.main_process_ip)):
        args.machine_rank = 1


def _run_agent(args: Namespace, environ: dict[str, str], machines: str, restarts: int) -> None:
    """Run torchrun's agent of this machine until its processes have ended.

    Args:
        args: the arguments of accelerate's launcher.
        environ: variables of the processes.
        machines: the fewest and the most machines, such as ``1:2``.
        restarts: how often the processes may be started again.
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
