"""Command ``zerobook import``: a recipe's YAML, a strategy file and a launch line from another trainer's config or command."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zerobook.cli.arguments import Parser
from zerobook.errors import ConfigError
from zerobook.utils.files import require_new
from zerobook.utils.terminal import say
from zerobook.utils.yaml_text import load_bounded, read_mapping

if TYPE_CHECKING:
    from zerobook.interop.configs.importer import Imported

USAGE = """zerobook import config FILE [--from TRAINER] [--output FOLDER]
       zerobook import command [--output FOLDER] -- COMMAND ...

FILE is another trainer's YAML or JSON, and COMMAND a command line of trl sft, llamafactory-cli train, axolotl train, tune run,
run_clm.py or run_summarization.py, with its launcher. The command writes a recipe's YAML, a strategy file (if no shipped one is
equivalent), and a report on every key: the same, translated, without any change, without effect here, not possible, or unknown.
The report is also printed. The exit code is 1 if a key that may change the training has no counterpart, or if no training data
is named; the files are still written.

examples:
  zerobook import config qlora.yml
  zerobook import config examples/train_lora/qwen3_lora_sft.yaml --from llamafactory --output runs/qwen3
  zerobook import command -- trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --packing
"""


def import_foreign(argv: list[str]) -> int:
    """Run the command. Return 0, or 1 if a key that may change the training has no counterpart, or no data is named."""
    from zerobook.interop.configs.command_lines import Command, read_command
    from zerobook.interop.configs.importer import import_config, recognise_trainer
    from zerobook.interop.configs.table import TRAINERS

    parser = Parser("zerobook import", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=["config", "command"], help="what is imported")
    parser.add_argument("file", nargs="?", metavar="FILE", help="another trainer's config")
    parser.add_argument("--from", dest="trainer", choices=list(TRAINERS), help="the trainer (default: recognised by the keys)")
    parser.add_argument("--output", help="folder to write (default: FILE's name, in the working folder)")
    # Everything after ``--`` is the command line of the other trainer, whose flags this parser must not read.
    separator = argv.index("--") if "--" in argv else len(argv)
    flags = parser.parse_args(argv[:separator])
    if flags.what == "command":
        command = read_command(argv[separator + 1 :])
    elif flags.file is None:
        raise ConfigError("config: name a FILE.")
    else:
        config = read_mapping(flags.file, "config", load_bounded)
        trainer = flags.trainer or recognise_trainer(config, flags.file)
        command = Command(config=config, file=Path(flags.file).expanduser(), trainer=trainer, recipe="")
    folder = Path(flags.output or f"{command.file.stem}_imported").expanduser()
    require_new(folder, "--output")
    imported = import_config(command.config, command.file, command.trainer, recipe=command.recipe)
    write_import(imported, folder)
    words = shlex.join(launch_words(imported, folder))
    say("\nCheck it, then train; --num_processes is the number of GPUs:")
    say(f"  zerobook doctor {words}\n  zerobook launch {words}")
    if not imported.names_data:
        say("\nThe recipe's YAML names no training data. Add dataset_name, train_file or datasets to it.")
    if imported.changes_training:
        say("\nA key that may change the training has no counterpart: see NOT POSSIBLE and UNKNOWN. The files are without it.")
    return 0 if imported.names_data and not imported.changes_training else 1


def write_import(imported: Imported, folder: Path) -> None:
    """Write the recipe's YAML, the strategy file, and account.txt, a report on what became of each key. Print the report."""
    from zerobook.interop.configs.account import format_account

    strategy = imported.strategy
    folder.mkdir(parents=True, exist_ok=True)
    header = f"# Imported from {imported.trainer}: {imported.foreign.file.name}. account.txt says what became of each key.\n"
    # While the other trainer's config was translated, files such as a chat template may have been added to it.
    files = dict(imported.foreign.files)
    files["recipe.yaml"] = header + yaml.safe_dump(imported.values, sort_keys=False, allow_unicode=True)
    files["account.txt"] = format_account(imported)
    # A shipped strategy file is used by its name, and has no content here.
    if strategy.content is not None:
        files[f"{strategy.name}.yaml"] = yaml.safe_dump(strategy.content, sort_keys=False)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    say(files["account.txt"])
    say(f"wrote {folder}: {', '.join(sorted(files))}")


def launch_words(imported: Imported, folder: Path) -> list[str]:
    """Return the arguments of ``zerobook launch`` for the files that `write_import` wrote."""
    strategy = imported.strategy.name
    if imported.strategy.content is not None:
        strategy = str(folder / f"{strategy}.yaml")
    processes = str(imported.foreign.processes)
    return ["--strategy", strategy, "--num_processes", processes, imported.recipe, "--config", str(folder / "recipe.yaml")]
