"""``zerobook data inspect FILE``: what a data file holds, before any run.

    zerobook data inspect chats.jsonl
    zerobook data inspect chats.jsonl --model meta-llama/Llama-3.1-8B-Instruct --max_seq_length 2048
    zerobook data inspect train.jsonl --validation_file held_out.jsonl --json

It shows the format, the lengths before cutting, which lines a run would cut or leave out, duplicates, and samples that are in
training and held-out data both.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from zerobook.cli.arguments import Parser
from zerobook.cli.show_rows import show_rows
from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.data.examine import BadSamples, Examined, Places, examine, held_out_twice, in_both
from zerobook.data.held_out import describe_empty_share, short_text_problem, unsupervised_problem
from zerobook.data.source import Source
from zerobook.data.sources import open_held_out, open_source
from zerobook.data.templates import CausalEncoder, describe_default_template
from zerobook.errors import ConfigError, DataError
from zerobook.utils.chat_template import template_file
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import console, say

BINS = 12
PLACES_OF_REASON = 5
"""Places that are listed for each reason why samples cannot be used."""


def inspect(arguments: list[str]) -> int:
    """Entry of the command; returns the exit code: 2 where samples cannot be used, as a run with the file would."""
    parser = Parser("zerobook data inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a data file, a folder, a hub dataset, or embedded:NAME")
    parser.add_argument("--model", default="embedded:smollm2", help="model whose tokenizer counts (default: %(default)s)")
    parser.add_argument("--max_seq_length", type=int, default=1024, help="tokens that a sample may have (default: %(default)s)")
    parser.add_argument("--validation_file", help="held-out data, which are compared with the training data")
    parser.add_argument("--format", help="format of the samples; unset: detected from the columns")
    for flag in ("--text_column", "--summary_column", "--dataset_config_name"):
        parser.add_argument(flag, help=f"as the recipes' {flag}")
    for key in ("validation_split_percentage", "seed"):
        default = RecipeConfig.model_fields[key].default
        parser.add_argument(f"--{key}", type=int, default=default, help=f"as the recipes' --{key} (default: %(default)s)")
    parser.add_argument("--chat_template", help="as the recipes' --chat_template")
    parser.add_argument("--samples", type=int, default=2, help="rows to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    known = parser.parse_args(arguments)
    encoder = _encoder(known.model, known.chat_template)
    splits = open_source(known.file, config_name=known.dataset_config_name)
    columns = {"text_column": known.text_column, "summary_column": known.summary_column}
    settings: dict[str, Any] = {"length": known.max_seq_length, "format": known.format, "columns": columns}
    train = examine(splits.train, encoder, rows=known.samples, **settings)
    other = open_held_out(known.validation_file) if known.validation_file else splits.held_out
    held_out = examine(other, encoder, **settings) if other is not None else None
    if train.has_chats and encoder.has_default_template:
        say(describe_default_template(encoder.tokenizer), file=sys.stderr)
    if held_out is not None:
        held_out_count, both = int(held_out.is_kept.sum()), in_both(train, held_out)
    elif splits.train.lone_text:
        held_out_count, both = 0, Places()  # the end of the text is held out
    else:
        held_out_count, both = held_out_twice(train, known.validation_split_percentage / 100, known.seed)
    choice = splits.describe(uses_held_out=not known.validation_file)
    if known.json:
        facts: dict[str, Any] = {"max_seq_length": known.max_seq_length, "train": train.summary()}
        if held_out:
            facts["held_out"] = held_out.summary()
        facts |= {"held_out_samples": held_out_count, "in_both": {"count": both.count, "first": both.first}, "splits": choice}
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        if choice:
            say(f"{known.file}: a run {choice}")
        _say(train, known.max_seq_length)
        if held_out:
            _say(held_out, known.max_seq_length)
        elif held_out_count:
            share = f"--validation_split_percentage {known.validation_split_percentage}, --seed {known.seed}"
            say(f"{held_out_count:,} of the samples are held out ({share})")
        _list("held-out samples that are training samples too", both)
        rows = [(place, {"input_ids": row.input_ids, "labels": row.labels}) for place, row in train.first]
        show_rows(rows, encoder.tokenizer)
    problem = _held_out_problem(known, held_out)
    if problem:
        raise DataError(problem)
    share = known.validation_split_percentage
    if held_out is None and len(train.lengths) and share and not _rows_of_share(known, splits.train, train, held_out_count):
        say(describe_empty_share(known.file, share), file=sys.stderr)
    has_bad_samples = train.bad.count or (held_out is not None and held_out.bad.count)
    return 2 if has_bad_samples else 0


def _held_out_problem(known: argparse.Namespace, held_out: Examined | None) -> str | None:
    """Return why no loss can be measured on data that is all held out; None where one can be."""
    if held_out is None or held_out.bad.count:
        return None
    length = known.max_seq_length
    tokens = int(held_out.lengths.sum())
    if held_out.format == "text":
        return short_text_problem(held_out.name, tokens, length, "max_seq_length") if tokens < length else None
    if held_out.is_kept.any():
        return None
    return unsupervised_problem(held_out.name, f"{len(held_out.lengths)} samples", length, "max_seq_length")


def _rows_of_share(known: argparse.Namespace, source: Source, train: Examined, samples: int) -> int:
    """Return how many rows a run holds out of training data without a held-out split.

    Args:
        samples: the number of samples that are held out at random.
    """
    if not source.lone_text:
        return samples
    tokens = int(train.lengths.sum())
    return round(tokens * known.validation_split_percentage / 100) // known.max_seq_length


def _encoder(model: str, template: str | None) -> CausalEncoder:
    from zerobook.checkpoint.result import find_result
    from zerobook.models.load import open_tokenizer

    if template is not None:
        try:
            template = read_text(template_file(template))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat_template {template}: it cannot be read: {error}.") from None
    name = embedded.located(find_result(model).model)
    tokenizer, _ = open_tokenizer(name, template=template, revision="main", trust_remote_code=False)
    encoder = CausalEncoder(tokenizer, length=None)
    encoder.take_default_template()
    return encoder


def _say(found: Examined, length: int) -> None:
    facts, out = found.summary(), console()
    out.print(f"\n{found.name}", style="bold")
    sizes = ", ".join(f"{what} {tokens:,}" for what, tokens in facts["lengths"].items())
    counts = f"{facts['samples']:,} samples, {facts['tokens']:,} tokens, {found.supervised:,} of them supervised"
    say(f"format {found.format}; {counts}")
    say(f"tokens of a sample before cutting: {sizes or 'none'}")
    if found.unread:
        say(f"columns that are not read: {', '.join(found.unread)}")
    if len(found.lengths):
        _histogram(found.lengths, out)
    if found.format == "text":
        say("running text is cut into blocks, and loses nothing")
    elif found.cut.count or found.dropped.count:
        _list(f"cut at --max_seq_length {length}", found.cut)
        _list(f"left out: nothing supervised within --max_seq_length {length}", found.dropped)
        say(f"--max_seq_length {facts['needed_length']} keeps all of them whole")
    else:
        say(f"no sample is cut at --max_seq_length {length}; {facts['needed_length']} would do")
    _list("exact duplicates", found.duplicates)
    _list_bad_samples(found.bad)


def _histogram(lengths: np.ndarray, out: Any) -> None:
    counts, edges = np.histogram(lengths, bins=min(BINS, max(1, len(np.unique(lengths)))))
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        bar = "█" * max(int(count > 0), round(60 * count / counts.max()))
        out.print(f"  {int(np.ceil(low)):>6} to {int(high):>6} {bar} {count}", style="cyan")


def _list_bad_samples(bad: BadSamples) -> None:
    """Print the reasons why samples cannot be used, each with its first places."""
    if not bad.count:
        return
    say(f"{bad.count:,} samples that cannot be used:")
    for reason, places in bad.by_reason.items():
        shown = places.first[:PLACES_OF_REASON]
        more = f" and {places.count - len(shown):,} more" if places.count > len(shown) else ""
        say(f"    {places.count:,} x {reason}")
        say(f"        {'; '.join(shown)}{more}")


def _list(what: str, places: Places) -> None:
    """Print a number of places and the first ones; nothing where there are none."""
    if places.count:
        say(f"{places.count:,} {what}:")
        for place in places.first:
            say(f"    {place}")
        if places.count > len(places.first):
            say(f"    and {places.count - len(places.first):,} more")
