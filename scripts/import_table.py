"""Import the example configs of other trainers, and write docs/measured/imported_configs.md.

    python scripts/import_table.py ../axolotl/examples ../LLaMA-Factory/examples ../trl/examples ../torchtune/recipes/configs

Each folder is in a clone of its project. Every YAML file in it, and every command in a shell script that zerobook import knows,
is imported into a folder of its own, and resolved there as zerobook doctor does, without a hub.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from io import StringIO
from pathlib import Path

from zerobook.cli.doctor import inspect_launch
from zerobook.cli.import_config import launch_words, write_import
from zerobook.errors import ConfigError
from zerobook.interop.configs.account import HEADINGS
from zerobook.interop.configs.command_lines import Command, find_program, read_command
from zerobook.interop.configs.importer import Imported, Refused, import_config, recognise_trainer
from zerobook.interop.configs.table import NOT_POSSIBLE, UNKNOWN
from zerobook.launch.by_name import replace_names
from zerobook.launch.resolve import Hardware
from zerobook.utils.yaml_text import load_bounded, read_mapping

PAGE = Path(__file__).resolve().parents[1] / "docs" / "measured" / "imported_configs.md"
MOST_KEYS = 15
"""Keys without a counterpart that the page lists, of each project."""
NOT_A_CONFIG = "not a training config, but for example a config for accelerate or for inference"
OF_THIS_MACHINE = {
    "no such file or folder": "a model or a file of the example is not on this machine",
    "is not installed": "a tracker of the example is not installed here",
    "does not train on a CPU": "this machine has no GPU",
    "GPU": "this machine has no GPU",
    "CUDA": "this machine has no GPU",
}
"""Part of a problem that doctor reports -> its reason on this machine. The config is not the reason of these problems."""


@dataclass
class Project:
    """The results of importing the configs of a folder."""

    name: str
    commit: str
    files: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    imported: int = 0
    exit_0: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    """Key -> configs in which it has no counterpart."""
    passes: int = 0
    machine_problems: Counter[str] = field(default_factory=Counter)
    """Reason -> configs that have only problems of this machine."""
    problems: Counter[str] = field(default_factory=Counter)
    """Other problem, without names and numbers -> configs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=PAGE)
    flags = parser.parse_args()
    hardware = Hardware.detect()
    projects = [examine(folder, hardware) for folder in flags.folders]
    flags.output.write_text(page(projects), encoding="utf-8")
    print(f"wrote {flags.output}")


def examine(folder: Path, hardware: Hardware) -> Project:
    """Import all configs of a folder, and return the counts."""
    root = git(folder, "rev-parse", "--show-toplevel")
    commit = f"{git(folder, 'rev-parse', '--short', 'HEAD')} ({git(folder, 'log', '-1', '--format=%cs')})"
    project = Project(f"{Path(root).name}/{folder.resolve().relative_to(root)}", commit)
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".yaml", ".yml"):
            project.files += 1
            import_one(project, partial(config_of, file), hardware)
        elif file.suffix == ".sh":
            for words in commands(file):
                project.files += 1
                import_one(project, partial(command_of, words, file), hardware)
    return project


def git(folder: Path, *words: str) -> str:
    """Return the output of a git command in a folder."""
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout.strip()


def config_of(file: Path) -> Command:
    """Return a config file as a command that has no flags.

    Raises:
        Refused: it is not the config of a training.
    """
    config = read_mapping(str(file), "config", load_bounded)
    # A config of accelerate is a strategy file already.
    if "distributed_type" in config:
        raise Refused(NOT_A_CONFIG, "")
    try:
        trainer = recognise_trainer(config, str(file))
    except ConfigError:
        raise Refused(NOT_A_CONFIG, "") from None
    return Command(config, file, trainer, "")


def command_of(words: list[str], file: Path) -> Command:
    """Return a command of a shell script. If the command names no config file, the script is its file."""
    command = read_command(words)
    if command.file == Path("command"):
        return command._replace(file=file)
    return command


def commands(script: Path) -> Iterator[list[str]]:
    """Yield the commands of a shell script that begin a training of a known program."""
    text = script.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        # Variables stand before the program.
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        if find_program(words) is not None:
            yield words


def import_one(project: Project, read: Callable[[], Command], hardware: Hardware) -> None:
    """Import the config that ``read`` returns, and count the result in ``project``."""
    try:
        command = read()
        imported = import_config(*command[:3], recipe=command.recipe)
    except Refused as error:
        project.refused[error.what] += 1
        return
    except ConfigError:
        project.refused["not readable, or not recognised as a config of one of these trainers"] += 1
        return
    project.imported += 1
    project.exit_0 += imported.names_data and not imported.changes_training
    # All kinds, in the order of the columns, also those that do not occur.
    project.kinds.update(dict.fromkeys(HEADINGS, 0))
    project.kinds.update(line.kind for line in imported.lines)
    unmet = [line.key for line in imported.lines if line.kind in (NOT_POSSIBLE, UNKNOWN)]
    # The keys of all entries of a list count as one key.
    project.missing.update({re.sub(r"\[\d+\]", "[]", key) for key in unmet})
    count_problems(project, doctor(imported, hardware))


def doctor(imported: Imported, hardware: Hardware) -> list[str]:
    """Return the problems that ``zerobook doctor`` finds in the launch of an imported config."""
    with tempfile.TemporaryDirectory() as folder:
        with redirect_stdout(StringIO()):
            write_import(imported, Path(folder))
        _, strategy, *words = launch_words(imported, Path(folder))
        plan, problems, _, _ = inspect_launch(replace_names(words, strategy), hardware)
    return problems + (plan.problems if plan else [])


def count_problems(project: Project, problems: list[str]) -> None:
    """Count a config's problems in ``project``, each kind once."""
    machine_reasons = set()
    others = set()
    for problem in problems:
        reasons = [reason for part, reason in OF_THIS_MACHINE.items() if part in problem]
        if reasons:
            machine_reasons.add(reasons[0])
        else:
            # Names and numbers differ from config to config.
            others.add(re.sub(r"[^\s:]*[/\d][^\s:]*", "...", problem)[:110])
    project.passes += not problems
    project.problems.update(others)
    if not others:
        project.machine_problems.update(machine_reasons)


def page(projects: list[Project]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# Imported configs",
        "",
        "The example configs of other trainers were imported with `zerobook import` and checked as `zerobook doctor` does, "
        f"without access to the hub, on a machine without a GPU, {date.today()}. `python scripts/import_table.py` writes this "
        "page. The columns from *same* on count keys. A key of an entry in a list of data sets counts once for each entry. In "
        "messages, `...` stands for a name or a number, and a message is cut after 110 characters.",
        "",
        f"| project | commit | configs | imported | exit code 0 | {' | '.join(HEADINGS)} |",
        "|" + "---|" * (5 + len(HEADINGS)),
    ]
    for project in projects:
        kinds = " | ".join(str(count) for count in project.kinds.values())
        lines.append(
            f"| {project.name} | {project.commit} | {project.files} | {project.imported} | {project.exit_0} | {kinds} |"
        )
    lines += [
        "",
        "*Exit code 0*: each key that changes the training has a counterpart, and training data is named. *Default*: keys that "
        "are not set, or have the trainer's own default.",
    ]
    for project in projects:
        lines += ["", f"## {project.name}", ""]
        lines += listed("Not imported: what the config is, and the number of such configs", project.refused)
        missing = Counter(dict(ranked(project.missing)[:MOST_KEYS]))
        lines += listed("Keys without a counterpart, and the number of configs with each", missing)
        lines.append(f"`zerobook doctor` has no problem with {project.passes} of {project.imported}.")
        lines += listed("Problems of this machine, and the number of configs that have no others", project.machine_problems)
        lines += listed("Other problems, and the number of configs with each", project.problems)
    return "\n".join(lines) + "\n"


def ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    """Return (name, count), the largest count first. Equal counts are in the order of the names."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def listed(title: str, counts: Counter[str]) -> list[str]:
    """Return the lines of a list with a title; no lines if there is nothing to list."""
    if not counts:
        return []
    entries = [f"- {name}: {count}" for name, count in ranked(counts)]
    return [f"{title}:", "", *entries, ""]


if __name__ == "__main__":
    main()
