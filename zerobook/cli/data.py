"""``zerobook data``: inspect a data file, or prepare the data of a recipe before a run, and inspect it.

    zerobook data inspect chats.jsonl --max_seq_length 1024
    zerobook data prepare recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml
    zerobook data inspect recipes/lora_finetune.py --config recipes/configs/lora_smollm2.yaml --samples 3

For a data file, zerobook data inspect FILE --help lists the flags. What follows is for a recipe.

All flags that are not listed below are passed to the recipe. A later launch of the recipe with the same flags uses the prepared
data. The data is tokenized on all cores that this process may use, or in as many processes as --preprocessing_num_workers says.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import numpy as np

from zerobook.cli.arguments import Parser
from zerobook.cli.show_rows import print_histogram, show_rows
from zerobook.config_sources import parse
from zerobook.data.prepare import PreparedData
from zerobook.errors import ConfigError
from zerobook.launch.build import usable_cores
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.shipped import names
from zerobook.utils.terminal import console, make_table, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def data(arguments: list[str]) -> int:
    """Run ``zerobook data ARGUMENTS`` and return the exit code."""
    # `inspect` takes either a recipe (a Python file, or the name of a shipped one) or a data file; each has flags of its own.
    names_recipe = any(word.endswith(".py") or word in names("recipes") for word in arguments)
    if arguments[:1] == ["inspect"] and not names_recipe and arguments[1:] not in ([], ["-h"], ["--help"]):
        from zerobook.cli.inspect_data import inspect

        return inspect(arguments[1:])
    parser = Parser("zerobook data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "inspect"])
    parser.add_argument(
        "recipe",
        help="the recipe's file, such as recipes/lora_finetune.py. A recipe is Python code: it is run until its data is "
        "prepared",
    )
    parser.add_argument("--samples", type=int, default=2, help="inspect: rows to show of each dataset")
    flags, recipe_flags = parser.parse_known_args(arguments)
    prepared, tokenizer = _prepare(flags.recipe, recipe_flags)
    _print_table(prepared)
    if flags.action == "inspect":
        rows = []
        for name, view in _list_datasets(prepared):
            print_lengths(name, view.lengths)
            rows += [(f"{name}, row {number}", view[number]) for number in range(min(flags.samples, len(view)))]
        # `_prepare` has run the recipe's file. `recipe_class` returns its class without running the file again.
        show_rows(rows, tokenizer, encoder_decoder=recipe_class(flags.recipe).encoder_decoder)
    return 0


# Prepare the data of a recipe with its flags. Return it with the tokenizer.
def _prepare(recipe: str, flags: list[str]) -> tuple[PreparedData, PreTrainedTokenizerBase]:
    from zerobook.training.run import prepare_data

    recipe_type = recipe_class(recipe)
    config, sources, dry_run = parse(recipe_type.config_class, flags)
    if dry_run:
        raise ConfigError("--dry-run: zerobook data does not train, so there is no dry run. Drop the flag.")
    if config.streaming:
        raise ConfigError(
            "streaming: a stream is prepared during the run, not before it. To inspect some samples, pass --streaming false "
            "and --max_train_samples N."
        )
    # The tokenization may use all cores, since no other ranks run beside this process.
    return prepare_data(recipe_type(config), sources, config.preprocessing_num_workers or usable_cores())


def _list_datasets(data: PreparedData) -> list[tuple[str, Any]]:
    """Return (name, view of its rows) of each training dataset, and then of each held-out dataset."""
    # The report has the training datasets in the order of the views.
    names = [name for name in data.report if not name.endswith(", held out")]
    datasets = list(zip(names, data.train.views, strict=True))
    for name, held_out in data.held_out.items():
        datasets.append((f"{name}, held out", held_out.views[0]))
    return datasets


def _print_table(data: PreparedData) -> None:
    figures = ("rows", "tokens", "counted by the loss", "shortest", "median", "longest")
    table = make_table("prepared data", ("dataset", "format", *figures, "what was done"), numbers=figures)
    for name, view in _list_datasets(data):
        lengths = view.lengths
        numbers = (
            len(view),
            lengths.sum(),
            view.loss_weights.sum(),
            lengths.min(),
            np.median(lengths),
            lengths.max(),
        )
        # The report also has what the preparation did with samples, such as how many it truncated.
        actions = [f"{count:,} {action}" for action, count in data.report[name].items() if action not in ("rows", "tokens")]
        # The held-out part of a dataset has the format of the dataset.
        format, _ = data.formats[name.removesuffix(", held out")]
        table.add_row(name, format, *(f"{int(number):,}" for number in numbers), ", ".join(actions))
    console().print(table)
    for name, (_, unread_columns) in data.formats.items():
        if unread_columns:
            say(f"columns of {name} that are not read: {', '.join(unread_columns)}")
    # Datasets may share a folder of prepared data. Each folder is printed once.
    for folder in dict.fromkeys(str(view.store.folder) for _, view in _list_datasets(data)):
        say(folder)


def print_lengths(name: str, lengths: np.ndarray) -> None:
    """Print a histogram of the tokens per row of a dataset."""
    console().print(f"\n{name}: tokens per row", style="bold")
    print_histogram(lengths)
