"""``zerobook launch``: ``accelerate launch`` with names and short errors, and for runs that go on when machines are lost."""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from zerobook.cli.arguments import Parser, positive
from zerobook.errors import ConfigError
from zerobook.launch import elastic, flag_checks
from zerobook.launch.accelerate_cli import parse_flags, read_flags, split_at_recipe
from zerobook.launch.by_name import OTHER_PROGRAMS, replace_names
from zerobook.launch.process import pass_signals_on, run_launcher
from zerobook.utils.shipped import names
from zerobook.utils.terminal import say

DESCRIPTION = """Start a recipe on this machine as accelerate launch does, with the same flags.

RECIPE and --strategy are files, or names of those that come with Zerobook, which work in any folder. The recipe's YAML may have
the keys strategy and num_processes, too; flags override them. The accelerate launch line that all this stands for is printed.

The launcher adds no traceback of its own to an error or after Ctrl-C, and ends with the exit code of the recipe.

With --min_machines, the run goes on when machines are lost. Run the command on every machine. When a machine is lost, the
others continue from the last checkpoint. When it is back, start the same command there: all machines save, and continue
together. The global batch stays the same: fewer processes accumulate more micro-batches. The machine of --main_process_ip must
not be lost.
"""
EXAMPLE = """examples:
  zerobook launch --strategy zero2 --num_processes 2 lora_finetune --config my.yaml
  zerobook launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/lora_finetune.py --config my.yaml
  zerobook launch --min_machines 1 --config_file accelerate_configs/zero3.yaml --num_machines 2 --num_processes 16 \\
    --main_process_ip 10.0.0.1 recipes/lora_finetune.py --config my.yaml --resume_from_checkpoint auto
"""


def launch(argv: list[str]) -> int:
    """Start the processes of this machine. Return the exit code of the process that failed first, or 0."""
    parser = Parser(
        "zerobook launch",
        usage="zerobook launch [--strategy NAME] [--min_machines N] [accelerate launch's flags] RECIPE [its flags]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--strategy", metavar="NAME", help="a shipped strategy file's name, such as zero3, or a file")
    parser.add_argument("--min_machines", type=positive, help="the fewest machines that the run goes on with")
    if not argv or argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    before_recipe, recipe, _ = split_at_recipe(argv)
    # Do not read the recipe's flags, which come after it and may have the same names.
    flags, accelerate_flags = parser.parse_known_args(before_recipe)
    arguments = [*accelerate_flags, *argv[len(before_recipe) :]]
    # Without a recipe, a file must be named, unless a flag such as -m starts another program.
    if recipe is None and OTHER_PROGRAMS.isdisjoint(argv):
        _check_program(accelerate_flags)
    # The run reads the command line of this process, which must have paths. If the strategy or the recipe is a name, replace
    # this process by one with their paths.
    resolved_arguments = replace_names(arguments, flags.strategy)
    if resolved_arguments != arguments:
        if flags.min_machines:
            resolved_arguments = ["--min_machines", str(flags.min_machines), *resolved_arguments]
        _restart_with(resolved_arguments, argv)
    if flags.min_machines:
        return run_launcher(lambda: elastic.launch(flags.min_machines, arguments))
    return run_launcher(lambda: _launch(arguments))


def _check_program(flags: list[str]) -> None:
    """Raise `ConfigError` if the flags of the launcher are not followed by a file, which may also be another program."""
    accelerate_args, problems = read_flags(flags)
    if not problems:
        problems = [f"no recipe is named. Write one behind the flags: a file, or {', '.join(sorted(names('recipes')))}."]
    if not Path(accelerate_args.training_script).is_file():
        raise ConfigError(problems)


def _restart_with(arguments: list[str], argv: list[str]) -> NoReturn:
    """Print the launch line with ``arguments``, and replace this process by ``zerobook launch`` with them.

    The run reads the command line of its launcher, which therefore must have paths and not names.

    Args:
        argv: arguments of this ``zerobook launch``.
    """
    # The words of the command line between Python and ``argv``, such as ``/usr/bin/zerobook launch``.
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(argv)]
    is_on_path = shutil.which("accelerate") == str(Path(sys.executable).with_name("accelerate"))
    printed_program = ["accelerate", "launch"] if is_on_path else [sys.executable, "-m", "accelerate.commands.launch"]
    # accelerate launch cannot continue with fewer machines, so the printed line is that of zerobook launch.
    if "--min_machines" in arguments:
        printed_program = [sys.executable, *program]
    say(shlex.join([*printed_program, *arguments]))
    os.execv(sys.executable, [sys.executable, *program, *arguments])


def _launch(arguments: list[str]) -> None:
    """Start the processes by accelerate's own command.

    Raises:
        ConfigError: with a sentence for each setting that accelerate would refuse or ignore, or with which it would hang. If
            there is one, and the script is a recipe, then also with a sentence for each problem of the recipe's flags.
    """
    flags, script, _ = split_at_recipe(arguments)
    # Without a recipe's file (-m, --no_python), only the flags of accelerate can be checked.
    if script is None or not OTHER_PROGRAMS.isdisjoint(flags):
        problems = flag_checks.check(parse_flags(arguments), before_start=True).problems
    else:
        problems = _launch_problems(arguments, flags, script)
    if problems:
        raise ConfigError(problems)
    from accelerate.commands.launch import launch_command

    args = parse_flags(arguments)
    # torchrun passes SIGTERM and Ctrl-C on to its processes. accelerate's launcher of a single process does not.
    if flag_checks.find_strategy(flag_checks.merge_flags_and_file(args)) == "single":
        pass_signals_on()
    launch_command(args)


def _launch_problems(arguments: list[str], flags: list[str], script: str) -> list[str]:
    """Return the problems of a launch; an empty list if its processes can start.

    Processes that start report the problems of the recipe's flags and data. If they cannot start, these problems are returned
    here, too, so that the user sees all problems at once.
    """
    accelerate_args, problems = read_flags(flags)
    problems += flag_checks.check(accelerate_args, before_start=True).problems
    has_script = Path(script).is_file()
    if has_script and not problems:
        return []
    from zerobook.cli.doctor import inspect_launch
    from zerobook.launch.resolve import Hardware
    from zerobook.training.recipe_file import is_recipe

    if has_script and not is_recipe(script):
        return problems
    # `inspect_launch` returns the problems of the flags again, together with those of the recipe.
    plan, launch_problems, _, _ = inspect_launch(arguments, Hardware.detect())
    if plan is not None:
        launch_problems += plan.problems
    return launch_problems
