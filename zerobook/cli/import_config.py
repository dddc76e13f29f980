"""Command ``zerobook import``: a recipe's YAML, a strategy file and a launch line from another trainer's config or command."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from zerobook.cli.arguments import Parser
from zerobook.errors import ConfigError
from zerobook.utils.shipped import shipped
from zerobook.utils.terminal import say
from zerobook.utils.yaml_text import load_bounded, read_mapping

if TYPE_CHECKING:
    from zerobook.interop.configs.importer import Imported

USAGE = """zerobook import config FILE [--from TRAINER] [--output FOLDER]

FILE is another trainer's YAML or JSON. Written are a recipe's YAML, a strategy file where no shipped one says the same, and
the account of every key, which is also printed: the same, translated with what changes in meaning, without effect here, or
not possible with what to do. Exit code 1 if a key that may change the training has no counterpart; the files are written
all the same.

examples:
  zerobook import config qlora.yml
  zerobook import config examples/train_lora/qwen3_lora_sft.yaml --from llamafactory --output runs/qwen3
"""


def import_foreign(argv: list[str]) -> int:
    """Entry of the command. Return 0, or 1 where a key that may change the training has no counterpart."""
    from zerobook.interop.configs.importer import import_config, recognise
    from zerobook.interop.configs.table import TRAINERS

    parser = Parser("zerobook import", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("what", choices=["config"], help="what is imported")
    parser.add_argument("file", metavar="FILE", help="another trainer's config")
    parser.add_argument("--from", dest="trainer", choices=list(TRAINERS), help="the trainer (default: recognised by the keys)")
    parser.add_argument("--output", help="folder to write (default: FILE's name, in the working folder)")
    flags = parser.parse_args(argv)
    config = {str(key): value for key, value in read_mapping(flags.file, "config", load_bounded).items()}
    trainer = flags.trainer or recognise(config, flags.file)
    folder = Path(flags.output or f"{Path(flags.file).stem}_imported").expanduser()
    _check_folder(folder)
    imported = import_config(config, Path(flags.file).expanduser(), trainer)
    return _write(imported, folder)


def _check_folder(folder: Path) -> None:
    """Raise `ConfigError` where a file would be overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--output: {folder} exists and is not empty. Nothing was written. Name another folder.")


def _write(imported: Imported, folder: Path) -> int:
    """Write the files, print the account, and return the exit code."""
    from zerobook.interop.configs.account import account_text
    from zerobook.interop.configs.strategies import choose

    strategy = choose(imported.foreign)
    folder.mkdir(parents=True, exist_ok=True)
    recipe_yaml = folder / "recipe.yaml"
    header = f"# Imported from {imported.trainer}: {imported.foreign.file.name}. account.txt says what became of each key.\n"
    recipe_yaml.write_text(header + yaml.safe_dump(imported.values, sort_keys=False, allow_unicode=True), encoding="utf-8")
    strategy_yaml = shipped(f"accelerate_configs/{strategy.name}.yaml")
    if strategy.content is not None:
        strategy_yaml = folder / f"{strategy.name}.yaml"
        strategy_yaml.write_text(yaml.safe_dump(strategy.content, sort_keys=False), encoding="utf-8")
    for name, text in imported.foreign.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    account = account_text(imported)
    (folder / "account.txt").write_text(account, encoding="utf-8")
    say(account)
    say(f"wrote {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    words = ["--config_file", _from_here(strategy_yaml), "--num_processes", str(imported.processes)]
    words += [_from_here(shipped(f"recipes/{imported.recipe}.py")), "--config", str(recipe_yaml)]
    say(f"\nCheck it, then train; --num_processes is the number of GPUs:\n  zerobook doctor {shlex.join(words)}")
    say(f"  accelerate launch {shlex.join(words)}")
    if imported.changes_training:
        say(
            "\nA key that may change the training has no counterpart: see NOT POSSIBLE and UNKNOWN. The files are written "
            "without it."
        )
        return 1
    return 0


def _from_here(file: Path) -> str:
    """Return a path from the working folder where that is shorter."""
    path = os.path.relpath(file)
    return str(file) if path.startswith("..") else path
