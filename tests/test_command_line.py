"""The command line is frozen: a new command or flag is a decision, and is written down in command_line.txt."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import pytest

from zerobook.cli.main import COMMANDS
from zerobook.config import RecipeConfig
from zerobook.training.recipe_file import recipe_class

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("command_line.txt")
WORDS = {"data": [["prepare"], ["inspect", "mine.jsonl"]], "launch": [["recipe.py"]]}
"""Command -> the words for which it makes its parsers, where these differ from none."""


class ParserMade(Exception):
    """Raised in place of parsing."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def stop(parser, *arguments, **options):
    raise ParserMade(parser)


def parsers_of(command, monkeypatch):
    """Return the parsers of a command, without those of its subcommands."""
    module, function = COMMANDS[command]
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", stop)
    parsers = []
    for words in WORDS.get(command, [[]]):
        with pytest.raises(ParserMade) as made:
            getattr(import_module(module), function)(words)
        parsers.append(made.value.parser)
    return parsers


def lines_of(parser):
    """Return a line for each flag and each word that is chosen from a list, also of subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield subparser.prog
                yield from lines_of(subparser)
        elif action.option_strings:
            yield from (f"{parser.prog} {flag}" for flag in action.option_strings if flag not in ("-h", "--help"))
        elif action.choices:
            yield from (f"{parser.prog} {choice}" for choice in action.choices)


def command_line(monkeypatch):
    lines = {f"zerobook {command}" for command in COMMANDS}
    for command in COMMANDS:
        for parser in parsers_of(command, monkeypatch):
            lines.update(lines_of(parser))
    monkeypatch.undo()
    lines.update(f"recipes --{key}" for key in RecipeConfig.model_fields)
    for file in sorted((ROOT / "recipes").glob("[!_]*.py")):
        keys = recipe_class(str(file)).config_class.model_fields
        lines.update(f"recipes/{file.name} --{key}" for key in keys if key not in RecipeConfig.model_fields)
    return sorted(lines)


def test_no_command_or_flag_is_new_or_gone(monkeypatch):
    frozen = LIST.read_text().splitlines()
    lines = command_line(monkeypatch)

    new = [line for line in lines if line not in frozen]
    gone = [line for line in frozen if line not in lines]

    assert not new, (
        f"new on the command line: {', '.join(new)}. Look first for a flag that could do the same. If there is none, add these "
        f"lines to tests/{LIST.name}, in their alphabetical places, and say why in the commit."
    )
    assert not gone, (
        f"gone from the command line: {', '.join(gone)}. If that is meant, delete these lines from tests/{LIST.name}, and name "
        "them in CHANGELOG.md under Removed."
    )
    assert frozen == sorted(frozen)


def test_a_new_flag_fails_with_a_sentence_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(globals(), "command_line", lambda _: [*LIST.read_text().splitlines(), "zerobook chat --one_more"])
    with pytest.raises(AssertionError, match=r"zerobook chat --one_more.*add these lines to tests/command_line\.txt"):
        test_no_command_or_flag_is_new_or_gone(monkeypatch)
