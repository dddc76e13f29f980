"""The command line of ``accelerate launch``: its flags, and settings that it does not pass to its workers.

A worker gets "no" for ``--mixed_precision`` whether "no" was typed or nothing. It does not get the NVMe paths of an inline
DeepSpeed section, ``use_cpu`` under DeepSpeed and FSDP, or the expert-parallel size. So it reads these settings from the
command line of its parent process, which is the launcher.
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


# Variable for the expert-parallel size of the Accelerate YAML. accelerate does not know this size, and ignores it.
EXPERTS_VARIABLE = "PARALLELISM_CONFIG_EP_SIZE"
# Stands for the recipe, which accelerate's parser requires.
SCRIPT = "script.py"
# Variable for the path of the Accelerate YAML. The path of the DeepSpeed JSON in it may be relative to the YAML's folder.
STRATEGY_FILE_VARIABLE = "ZEROBOOK_STRATEGY_FILE"


def launcher_flags(command: list[str]) -> list[str] | None:
    """Return the arguments after ``accelerate launch`` in a process's command line; None if it is of another program.

    For ``zerobook launch``, these are the arguments that it passes on to accelerate.
    """
    # The command may begin with an interpreter and the interpreter's flags.
    for index, token in enumerate(command):
        name = Path(token).name
        arguments = command[index + 1 :]
        is_launch = arguments[:1] == ["launch"]
        if name in ("zerobook", "zerobook.cli.main") and is_launch:
            # accelerate does not know this flag. The recipe may have a flag with the same name, which stays.
            flags, _, _ = split_at_recipe(arguments[1:])
            return [*_remove_flag(flags, "--min_machines"), *arguments[1 + len(flags) :]]
        if name in ("accelerate", "accelerate.commands.accelerate_cli", "accelerate_cli.py") and is_launch:
            return arguments[1:]
        # The launcher can also be started without the word launch: as a script, as a module, or by its file.
        is_script_or_module = name in ("accelerate-launch", "accelerate.commands.launch")
        if is_script_or_module or token.endswith("accelerate/commands/launch.py"):
            return arguments
    return None


def _remove_flag(arguments: list[str], flag: str) -> list[str]:
    """Return the arguments without a flag and its value.

    >>> _remove_flag(["--machines", "1", "--cpu", "x.py"], "--machines"), _remove_flag(["--cpu", "--machines=1"], "--machines")
    (['--cpu', 'x.py'], ['--cpu'])
    """
    remaining = [argument for argument in arguments if not argument.startswith(f"{flag}=")]
    while flag in remaining:
        index = remaining.index(flag)
        del remaining[index : index + 2]
    return remaining


def parent_command() -> list[str]:
    """Return the command line of the process that started this one; empty if it cannot be read."""
    try:
        return psutil.Process().parent().cmdline()
    # A process without a parent has None instead, which has no cmdline.
    except (psutil.Error, AttributeError):
        return []


def parent_flags() -> list[str] | None:
    """Return `launcher_flags` of the process that started this one."""
    return launcher_flags(parent_command())


def is_of_zerobook(command: list[str]) -> bool:
    """Return whether a command line is one of ``zerobook``."""
    # The command may begin with an interpreter and -m.
    return any(Path(token).name.startswith("zerobook") for token in command[:3])


def command_to_resume() -> str:
    """Return the command that continues this process's run from its newest checkpoint."""
    flag = "--resume_from_checkpoint"
    recipe_arguments = sys.argv[1:]
    resume_arguments = [*_remove_flag(recipe_arguments, flag), flag, "auto"]
    launch_arguments = parent_flags()
    if launch_arguments is None:
        return shlex.join(["python", sys.argv[0], *resume_arguments])
    program = "zerobook" if is_of_zerobook(parent_command()) else "accelerate"
    # The launcher's command line ends with the recipe and the recipe's arguments. The new ones take the place of these.
    end = len(launch_arguments) - len(recipe_arguments)
    if launch_arguments[end:] == recipe_arguments:
        launch_arguments = launch_arguments[:end]
    return shlex.join([program, "launch", *launch_arguments, *resume_arguments])


def has_automatic_threads() -> bool:
    """Return whether the launcher chose ``OMP_NUM_THREADS``: the user did not set it, and typed no number of threads.

    accelerate and torchrun then set it to 1 for their workers. /proc still has the environment that the launcher got.
    """
    try:
        parent = psutil.Process().parent()
        command = parent.cmdline()
        is_set_by_user = "OMP_NUM_THREADS" in parent.environ()
    # A process without a parent has None instead, which has no cmdline.
    except (psutil.Error, AttributeError):
        return False
    if is_set_by_user:
        return False
    flags = launcher_flags(command)
    # Besides accelerate, only torchrun sets the variable.
    if flags is None:
        return any(Path(token).name == "torchrun" or token == "torch.distributed.run" for token in command)
    return parse_flags(flags).num_cpu_threads_per_process is None


def describe_unreachable_host(plan: LaunchPlan, environ: Mapping[str, str]) -> str | None:
    """Return `describe_loopback` for a launch over several machines that uses gloo; else None.

    NCCL chooses a network interface by itself.
    """
    # On GPUs, FSDP2 and the groups that `meet` forms for restarts use gloo beside NCCL, for tensors in host memory.
    uses_gloo = plan.device == "cpu" or plan.kind == "fsdp" or restarts_ranks(environ)
    spans_machines = int(environ.get("LOCAL_WORLD_SIZE", plan.world_size)) < plan.world_size
    if plan.backend is None or not uses_gloo or not spans_machines:
        return None
    return describe_loopback(environ)


def describe_loopback(environ: Mapping[str, str]) -> str | None:
    """Return a note if gloo would listen on this machine's loopback, which no other machine reaches; else None.

    gloo listens at the address of the host name, and on loopback if the name has no address.
    """
    if environ.get("GLOO_SOCKET_IFNAME"):
        return None
    name = socket.gethostname()
    try:
        # An entry ends with (address, port).
        address = str(socket.getaddrinfo(name, None)[0][4][0])
        # An IPv6 address may end with the name of an interface, behind a %.
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return None
    except OSError:
        address = "no address"
    return (
        f"this machine's host name, {name}, resolves to {address}: gloo then listens on loopback, and processes on other "
        "machines wait for this one without a message. Set GLOO_SOCKET_IFNAME to the interface that they reach, as in "
        "GLOO_SOCKET_IFNAME=eth0, or correct the name in /etc/hosts"
    )


def split_at_recipe(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Return (the launcher's flags, the recipe or None, the recipe's flags).

    The recipe is a file, or the name of a shipped one.
    """
    names = shipped.names("recipes")
    for index, token in enumerate(arguments):
        if token.endswith(".py") or token in names:
            return arguments[:index], token, arguments[index + 1 :]
    return list(arguments), None, []


def parse_flags(flags: list[str]) -> argparse.Namespace:
    """Return the launcher's arguments, which include the script, as accelerate's parser reads them."""
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser().parse_args(flags)


def read_flags(flags: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the launcher's flags, without a recipe.

    Returns:
        (the flags as accelerate's parser reads them, problems). If the parser does not take the flags, the first is what it
        reads from a launch without flags.
    """
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            args, unknown = parser.parse_known_args([*flags, SCRIPT])
    except SystemExit:
        # argparse prints usage and "error: " with its message, and exits.
        message = messages.getvalue().strip().rpartition("error: ")[2]
        return parse_flags([SCRIPT]), [f"accelerate launch does not take {' '.join(flags)}: {message}."]
    if unknown:
        # All unknown flags are reported at once.
        names = {action.dest for action in parser._actions}
        return parse_flags([SCRIPT]), [_explain_unknown_flag(flag, names) for flag in unknown]
    # An argument that is no flag takes the place of the script.
    problems = []
    if args.training_script != SCRIPT:
        problems.append(
            f"{args.training_script}: neither a flag of accelerate launch nor a recipe."
            f"{nearest(args.training_script, shipped.names('recipes'))} Give flags, and then a recipe, such as "
            "recipes/causal_lm.py."
        )
    return args, problems


def _explain_unknown_flag(flag: str, known_names: set[str]) -> str:
    """Return the problem of a flag that accelerate does not know, with the nearest name that it knows."""
    name = flag.partition("=")[0]
    key = name.lstrip("-").replace("-", "_")
    hint = nearest(key, known_names, "--")
    if key in RecipeConfig.model_fields:
        hint = " It is the recipe's: write it after the recipe."
    return f"{name}: accelerate launch has no such flag.{hint}"


def typed_flags(flags: list[str]) -> dict[str, Any]:
    """Return the flags that the launcher's arguments (script included) set, name -> value."""
    args = parse_flags(flags)
    # accelerate's parser lists the names of the typed flags as nondefault.
    return {key: value for key, value in vars(args).items() if key in getattr(args, "nondefault", ())}


def read_hidden_settings(flags: list[str]) -> tuple[str | None, dict[str, str]]:
    """Read the settings that accelerate's launcher does not pass to its workers.

    They are in the flags (script included), and in the Accelerate config that these name or that is the machine's default.

    Returns:
        (``--mixed_precision`` as typed, or None; variables with the other settings, and `STRATEGY_FILE_VARIABLE`).
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file

    args = parse_flags(flags)
    # If no file is named, accelerate reads its default file.
    file = {}
    if args.config_file or Path(default_config_file).is_file():
        file = vars(load_config_from_file(args.config_file))
    deepspeed_section = file.get("deepspeed_config") or {}
    environ = {}
    experts = (file.get("parallelism_config") or {}).get("parallelism_config_ep_size")
    if experts is not None:
        environ[EXPERTS_VARIABLE] = str(experts)
    for key in ("offload_optimizer_nvme_path", "offload_param_nvme_path"):
        path = getattr(args, key) or deepspeed_section.get(key)
        if path and path != "none":
            environ[f"ACCELERATE_DEEPSPEED_{key.upper()}"] = str(path)
    if file.get("use_cpu"):
        environ["ACCELERATE_USE_CPU"] = "true"
    # The path of the JSON may be relative to the YAML, whose path the workers do not get from accelerate.
    has_json_in_yaml = deepspeed_section.get("deepspeed_config_file") and args.deepspeed_config_file is None
    if args.config_file and has_json_in_yaml:
        environ[STRATEGY_FILE_VARIABLE] = args.config_file
    return args.mixed_precision, environ
