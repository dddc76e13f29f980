"""The command line of ``accelerate launch``: its flags, and settings that it does not pass to its workers.

It passes "no" for ``--mixed_precision`` both when that was typed and when nothing was, and drops the NVMe paths of an inline
DeepSpeed section, ``use_cpu`` under DeepSpeed and FSDP, and the expert-parallel size. They are found through its command line,
which is that of a worker's parent process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import ipaddress
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from zerobook.config import RecipeConfig
from zerobook.launch.meet import restarts_ranks
from zerobook.utils import shipped
from zerobook.utils.nearest import nearest

if TYPE_CHECKING:
    from zerobook.strategy.launch_plan import LaunchPlan


EXPERTS = "PARALLELISM_CONFIG_EP_SIZE"
"""Variable for the expert-parallel size of the Accelerate YAML. accelerate has sizes of other kinds only, and ignores it."""
SCRIPT = "script.py"
"""Stands for the recipe, which accelerate's parser requires."""
STRATEGY_FILE = "ZEROBOOK_STRATEGY_FILE"
"""Variable for the Accelerate YAML that names the DeepSpeed JSON: paths in it may start beside its folder."""


def launcher_flags(command: list[str]) -> list[str] | None:
    """Return the arguments after ``accelerate launch`` in a process's command line; None if it is of another program.

    For ``zerobook launch``, these are the arguments that it passes on.
    """
    # An interpreter and its own flags may come first.
    for index, token in enumerate(command):
        if Path(token).name in ("zerobook", "zerobook.cli.main") and command[index + 1 : index + 2] == ["launch"]:
            return _without_machines(command[index + 2 :])
        # accelerate's command has several forms: a module, its file, a script of its own, or a word after accelerate.
        if (
            token == "accelerate.commands.launch"
            or token.endswith("accelerate/commands/launch.py")
            or Path(token).name == "accelerate-launch"
        ):
            return command[index + 1 :]
        is_accelerate = Path(token).name in ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli.py")
        if is_accelerate and command[index + 1 : index + 2] == ["launch"]:
            return command[index + 2 :]
    return None


def _without_machines(arguments: list[str]) -> list[str]:
    """Return the arguments of ``zerobook launch`` without ``--min_machines``.

    >>> _without_machines(["--min_machines", "1", "--cpu", "x.py"]), _without_machines(["--cpu", "--min_machines=1", "x.py"])
    (['--cpu', 'x.py'], ['--cpu', 'x.py'])
    """
    remaining = [token for token in arguments if not token.startswith("--min_machines=")]
    if "--min_machines" in remaining:
        index = remaining.index("--min_machines")
        del remaining[index : index + 2]
    return remaining


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty if it cannot be read."""
    try:
        return psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return []


def parent_flags() -> list[str] | None:
    """Return `launcher_flags` of the process that started this one."""
    return launcher_flags(parent_command())


def is_of_zerobook(command: list[str]) -> bool:
    """Return whether a command line is one of ``zerobook``."""
    return any(Path(token).name.startswith("zerobook") for token in command[:3])


def command_to_resume() -> str:
    """Return the command that continues this process's run from its newest checkpoint."""
    resume = ["--resume_from_checkpoint", "auto"]
    arguments = sys.argv[1:]
    # From the end, so that what is deleted does not move what is still to be read.
    for index, token in reversed(list(enumerate(arguments))):
        if token == resume[0]:
            del arguments[index : index + 2]
        elif token.startswith(f"{resume[0]}="):
            del arguments[index]
    flags = parent_flags()
    if flags is None:
        return shlex.join(["python", sys.argv[0], *arguments, *resume])
    program = "zerobook" if is_of_zerobook(parent_command()) else "accelerate"
    # The launcher's command line ends with this process's arguments, which are replaced.
    end = len(flags) - len(sys.argv[1:])
    if flags[end:] == sys.argv[1:]:
        flags = flags[:end]
    return shlex.join([program, "launch", *flags, *arguments, *resume])


def chose_threads() -> bool:
    """Return whether the launcher itself chose ``OMP_NUM_THREADS``: no user had set it, or typed a number of threads.

    accelerate and torchrun set it to 1 for their workers. What a launcher was started with stays readable in /proc.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline()
        is_set_by_user = "OMP_NUM_THREADS" in parent.environ()
    except (psutil.Error, AttributeError):
        return False
    if is_set_by_user:
        return False
    flags = launcher_flags(command)
    # Of other launchers, torchrun alone sets it.
    if flags is None:
        return any(Path(token).name == "torchrun" or token == "torch.distributed.run" for token in command)
    return parse_flags(flags).num_cpu_threads_per_process is None


def loopback_note(plan: LaunchPlan, environ: Mapping[str, str]) -> str | None:
    """Return `unreachable_name` of a launch over several machines with gloo. NCCL chooses an interface by itself."""
    # FSDP2 has gloo beside NCCL, for what is in host memory, and so has every group that is formed here for restarts.
    has_gloo = plan.device == "cpu" or plan.kind == "fsdp" or restarts_ranks(environ)
    several = int(environ.get("LOCAL_WORLD_SIZE", plan.world_size)) < plan.world_size
    return unreachable_name(environ) if plan.backend is not None and has_gloo and several else None


def unreachable_name(environ: Mapping[str, str]) -> str | None:
    """Return a note if gloo would listen on this machine's loopback, which no other machine reaches; else None.

    gloo takes the address of the host name, and loopback if there is none.
    """
    if environ.get("GLOO_SOCKET_IFNAME"):
        return None
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        address = "no address"
    # An IPv6 address may end with the name of an interface, behind a %.
    if address != "no address" and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return (
        f"this machine's host name, {name}, resolves to {address}: gloo then listens on loopback, and processes on other "
        "machines wait for this one without a word. Set GLOO_SOCKET_IFNAME to the interface that they reach, as in "
        "GLOO_SOCKET_IFNAME=eth0, or correct the name in /etc/hosts"
    )


def split_at_recipe(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the launcher's flags, the recipe, or None, and its flags. The recipe is a file, or the name of a shipped one."""
    names = shipped.names("recipes")
    for index, token in enumerate(arguments):
        if token.endswith(".py") or token in names:
            return arguments[:index], token, arguments[index + 1 :]
    return list(arguments), None, []


def parse_flags(flags: list[str]) -> argparse.Namespace:
    """Return the launcher's arguments (script included) as its own parser reads them."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(flags)


def read_flags(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the launcher's flags, without a recipe.

    Returns:
        (the flags as accelerate's parser reads them, or those of a launch without flags after a problem; problems).
    """
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args, unknown = parser.parse_known_args([*flags, SCRIPT])
    except SystemExit:
        # argparse prints its message and exits.
        problem = f"accelerate launch does not take {' '.join(flags)}: {messages.getvalue().strip().rpartition('error: ')[2]}."
        return parse_flags([SCRIPT]), [problem]
    # All flags that are not known are reported at once, each with the nearest name.
    names = {action.dest for action in parser._actions}
    problems = []
    for flag in unknown:
        name = flag.partition("=")[0]
        key = name.lstrip("-").replace("-", "_")
        is_of_recipe = key in RecipeConfig.model_fields
        hint = " It is the recipe's: write it after the recipe." if is_of_recipe else nearest(key, names, "--")
        problems.append(f"{name}: accelerate launch has no such flag.{hint}")
    if not unknown and args.training_script != SCRIPT:
        problems.append(
            f"{args.training_script}: neither a flag of accelerate launch nor a recipe."
            f"{nearest(args.training_script, shipped.names('recipes'))} Give flags, and then a recipe, such as "
            "recipes/causal_lm.py."
        )
    return (parse_flags([SCRIPT]) if unknown else args), problems


def typed_flags(flags: list[str]) -> dict[str, Any]:
    """Return the flags that the launcher's arguments (script included) set, by name."""
    args = parse_flags(flags)
    return {key: value for key, value in vars(args).items() if key in getattr(args, "nondefault", ())}


def left_unsaid(flags: list[str]) -> tuple[str | None, dict[str, str]]:
    """Read flags (script included) and the Accelerate config that they name or that is the machine's default.

    Returns:
        (``--mixed_precision`` as typed, or None; variables that accelerate reads and its launcher does not set, and
        `STRATEGY_FILE`).
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    args = parse_flags(flags)
    # accelerate reads its default file where none is named.
    file = {}
    if args.config_file or Path(default_config_file).is_file():
        file = vars(load_config_from_file(args.config_file))
    environ = {}
    experts = (file.get("parallelism_config") or {}).get("parallelism_config_ep_size")
    if experts is not None:
        environ[EXPERTS] = str(experts)
    for what in ("optimizer", "param"):
        key = f"offload_{what}_nvme_path"
        path = getattr(args, key) or (file.get("deepspeed_config") or {}).get(key)
        if path and path != "none":
            environ[f"ACCELERATE_DEEPSPEED_{key.upper()}"] = str(path)
    if file.get("use_cpu"):
        environ["ACCELERATE_USE_CPU"] = "true"
    # Paths in the YAML may start beside it, which the workers do not know.
    names_json = (file.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if args.config_file and names_json and args.deepspeed_config_file is None:
        environ[STRATEGY_FILE] = args.config_file
    return args.mixed_precision, environ
