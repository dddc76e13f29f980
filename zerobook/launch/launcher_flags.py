"""The flags of ``accelerate launch`` on a command line, read so that each wrong one is a problem of its own."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from typing import NamedTuple

from zerobook.config import RecipeConfig
from zerobook.launch.accelerate_cli import parsed
from zerobook.utils.nearest import nearest

SCRIPT = "script.py"
"""Stands for the recipe, which accelerate's parser requires."""


class LauncherFlags(NamedTuple):
    """The launcher's part of a command line.

    Attributes:
        flags: those that accelerate takes.
        args: the same, as its parser reads them.
        problems: one for each of the others.
    """

    flags: list[str]
    args: argparse.Namespace
    problems: list[str]


def split_at_recipe(arguments: list[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the launcher's flags, the recipe, or None, and its flags."""
    for index, token in enumerate(arguments):
        if token.endswith(".py"):
            return arguments[:index], token, arguments[index + 1 :]
    return list(arguments), None, []


def read_flags(launch_flags: list[str]) -> LauncherFlags:
    """Read the launcher's flags, without a recipe. Those that it does not take are left out."""
    flags = list(launch_flags)
    problems: list[str] = []
    # argparse stops at the first wrong flag, so that flag is taken away and the rest is read again.
    while True:
        messages = io.StringIO()
        try:
            with contextlib.redirect_stderr(messages):
                args = parsed([*flags, SCRIPT])
        except SystemExit:
            reason = messages.getvalue().strip().rpartition("error: ")[2]
            flags, refusals = _without_refused(flags, reason)
            problems += refusals
            continue
        if args.training_script == SCRIPT:
            return LauncherFlags(flags, args, problems)
        problems.append(
            f"{args.training_script}: neither a flag of accelerate launch nor a recipe. Give flags, and then a recipe, such as "
            "recipes/causal_lm.py."
        )
        flags.remove(args.training_script)


def _without_refused(flags: list[str], reason: str) -> tuple[list[str], list[str]]:
    """Return the flags without those that accelerate's parser refused, and a problem for each of these."""
    if reason.startswith("unrecognized arguments: "):
        names = [token.partition("=")[0] for token in flags if token in reason.split() and token.startswith("-")]
        problems = [_unknown(name) for name in names]
    elif refused := re.match(r"argument ([^:]+): (.*)", reason, re.S):
        spellings = refused[1].split("/")
        names = [token.partition("=")[0] for token in flags if token.partition("=")[0] in spellings]
        problems = [f"{spellings[0]}: accelerate launch does not take its value: {refused[2]}."]
    else:
        # The last flag took the script as its value.
        names = flags[-1:]
        problems = [f"{flags[-1]}: it has no value."]
    if not names:
        # A message of another form names no flag that could be left out.
        return [], [f"accelerate launch does not take {' '.join(flags)}: {reason}."]
    for name in names:
        flags = _without(flags, name)
    return flags, problems


def _unknown(name: str) -> str:
    """Return the problem of a flag that accelerate does not have."""
    from accelerate.commands.launch import launch_command_parser

    key = name.lstrip("-").replace("-", "_")
    if key in RecipeConfig.model_fields:
        return f"{name}: accelerate launch has no such flag. It is the recipe's: write it after the recipe."
    names = {action.dest for action in launch_command_parser()._actions}
    return f"{name}: accelerate launch has no such flag.{nearest(key, names, '--')}"


def _without(flags: list[str], name: str) -> list[str]:
    """Return the flags without one of them and its values.

    >>> _without(["--a", "1", "--b", "2", "3", "--c=4"], "--b"), _without(["--c=4", "--d", "-1"], "--c")
    (['--a', '1', '--c=4'], ['--d', '-1'])
    """
    remaining: list[str] = []
    is_its_value = False
    for token in flags:
        if re.match(r"-+[a-zA-Z]", token):
            is_its_value = token.partition("=")[0] == name
        if not is_its_value:
            remaining.append(token)
    return remaining
