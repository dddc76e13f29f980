"""``zerobook data inspect FILE``: show what a data file contains, before it is used in a run.

    zerobook data inspect chats.jsonl
    zerobook data inspect chats.jsonl --model meta-llama/Llama-3.1-8B-Instruct --max_seq_length 2048
    zerobook data inspect train.jsonl --validation_file held_out.jsonl --json

It shows the format, the lengths of the samples, the lines that a run would truncate or leave out, duplicates, and samples that
are in both the training and the held-out data.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from zerobook.cli.arguments import Parser, positive
from zerobook.cli.show_rows import print_histogram, show_rows
from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.data.examine import BadSamples, Examined, Locations, examine, find_repeated_held_out, find_shared_samples
from zerobook.data.held_out import describe_empty_share, describe_short_text, describe_unsupervised
from zerobook.data.source import Splits
from zerobook.data.sources import open_held_out, open_source
from zerobook.data.templates import CausalEncoder, describe_default_template
from zerobook.errors import ConfigError, DataError
from zerobook.utils.chat_template import template_file
from zerobook.utils.reading import read_text
from zerobook.utils.terminal import console, say
from zerobook.utils.written_values import as_whole_number

# Locations that are listed for each reason why samples cannot be used.
LOCATIONS_OF_REASON = 5


def inspect(arguments: list[str]) -> int:
    """Run the command. Return the exit code: 2 if samples cannot be used, since a run would refuse the file; otherwise 0."""
    flags = _parser().parse_args(arguments)
    encoder = _make_encoder(flags.model, flags.chat_template)

    # Read the training data and the held-out data.
    splits = open_source(flags.file, config_name=flags.dataset_config_name)
    split_description = splits.describe(uses_held_out=not flags.validation_file)
    options: dict[str, Any] = {
        "length": flags.max_seq_length,
        "format": flags.format,
        "columns": {"text_column": flags.text_column, "summary_column": flags.summary_column},
    }
    train = examine(splits.train, encoder, rows=flags.samples, **options)
    # A validation file of the user replaces the held-out split of the dataset.
    held_out_source = open_held_out(flags.validation_file) if flags.validation_file else splits.held_out
    held_out = None
    if held_out_source is not None:
        held_out = examine(held_out_source, encoder, **options)
    held_out_count, shared_samples = _held_out_samples(splits, train, held_out, flags)

    # The findings go to stdout, and notes to stderr.
    if train.has_chats and encoder.has_default_template:
        say(describe_default_template(encoder.tokenizer), file=sys.stderr)
    if flags.json:
        findings: dict[str, Any] = {"max_seq_length": flags.max_seq_length, "train": train.summary()}
        if held_out:
            findings["held_out"] = held_out.summary()
        findings |= {
            "held_out_samples": held_out_count,
            "in_both": {"count": shared_samples.count, "first": shared_samples.first},
            "splits": split_description,
        }
        print(json.dumps(findings, indent=2))
    else:
        # The description begins with a verb: "trains on ..., holds out ...".
        if split_description:
            say(f"{flags.file}: a run {split_description}")
        _print_text(train, held_out, held_out_count, shared_samples, flags)
        # `examine` has kept the first rows of the training data, as many as --samples says.
        rows = [(location, {"input_ids": row.input_ids, "labels": row.labels}) for location, row in train.first]
        show_rows(rows, encoder.tokenizer)

    # Errors and warnings come after the findings, which show their cause.
    problem = _held_out_problem(held_out, flags.max_seq_length)
    if problem:
        raise DataError(problem)
    if held_out is None:
        _warn_if_nothing_is_held_out(splits, train, held_out_count, flags)
    has_bad_samples = train.bad.count or (held_out is not None and held_out.bad.count)
    return 2 if has_bad_samples else 0


def _held_out_samples(
    splits: Splits, train: Examined, held_out: Examined | None, flags: argparse.Namespace
) -> tuple[int, Locations]:
    """Return the number of samples that a run would hold out, and the locations of those that it would also train on."""
    if held_out is not None:
        return int(held_out.is_kept.sum()), find_shared_samples(train, held_out)
    # Of running text, a run holds out the end, which does not consist of samples.
    if splits.train.lone_text:
        return 0, Locations()
    return find_repeated_held_out(train, flags.validation_split_percentage / 100, flags.seed)


def _print_text(
    train: Examined, held_out: Examined | None, held_out_count: int, shared_samples: Locations, flags: argparse.Namespace
) -> None:
    """Print the findings about the training data, the held-out data, and the samples that are in both."""
    # Other tokenizers and chat templates give other lengths.
    say(f"tokens are counted with the tokenizer of {flags.model} (--model)")
    _print_findings(train, flags.max_seq_length)
    if held_out:
        _print_findings(held_out, flags.max_seq_length)
    elif held_out_count:
        chosen_by = f"--validation_split_percentage {flags.validation_split_percentage}, --seed {flags.seed}"
        say(f"{held_out_count:,} of the samples are held out ({chosen_by})")
    _print_locations("held-out samples that are training samples too", shared_samples)


def _warn_if_nothing_is_held_out(splits: Splits, train: Examined, held_out_count: int, flags: argparse.Namespace) -> None:
    """Warn if the share of the training data that a run holds out is less than one row."""
    share = flags.validation_split_percentage
    # Do not warn if the user wants no held-out data, or if there are no samples.
    if not share or not len(train.lengths):
        return
    held_out_rows = held_out_count
    # A run cuts the end of running text into rows of the maximum length.
    if splits.train.lone_text:
        held_out_rows = round(int(train.lengths.sum()) * share / 100) // flags.max_seq_length
    if not held_out_rows:
        say(describe_empty_share(flags.file, share), file=sys.stderr)


def _parser() -> Parser:
    parser = Parser("zerobook data inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a data file, a folder, a hub dataset, or embedded:NAME")
    parser.add_argument("--model", default="embedded:smollm2", help="model whose tokenizer counts (default: %(default)s)")
    parser.add_argument(
        "--max_seq_length", type=positive, default=1024, help="tokens that a sample may have (default: %(default)s)"
    )
    parser.add_argument("--validation_file", help="held-out data, which are compared with the training data")
    parser.add_argument("--format", help="format of the samples; unset: detected from the columns")
    for flag in ("--text_column", "--summary_column", "--dataset_config_name"):
        parser.add_argument(flag, help=f"as the recipes' {flag}")
    for key in ("validation_split_percentage", "seed"):
        field = RecipeConfig.model_fields[key]
        help_text = f"as the recipes' --{key} (default: %(default)s)"
        parser.add_argument(f"--{key}", type=_make_value_reader(field), default=field.default, help=help_text)
    parser.add_argument("--chat_template", help="as the recipes' --chat_template")
    parser.add_argument("--samples", type=int, default=2, help="rows to show (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _make_value_reader(field: FieldInfo) -> Callable[[str], Any]:
    """Return a function that reads a flag's value, within the limits of the recipes' flag."""
    value_type: Any = Annotated[(field.annotation, *field.metadata)]
    adapter: TypeAdapter[Any] = TypeAdapter(value_type)

    def read_value(text: str) -> Any:
        try:
            return adapter.validate_strings(str(as_whole_number(text)))
        except ValidationError as error:
            reason, _, _ = error.errors()[0]["msg"].partition(", unable to parse")
            raise argparse.ArgumentTypeError(f"{reason}, and it is {text}") from None

    return read_value


def _held_out_problem(held_out: Examined | None, length: int) -> str | None:
    """Return why no loss can be measured on separate held-out data; None if it can, or if there is no such data."""
    # Bad samples have been printed, and the user has to mend them first.
    if held_out is None or held_out.bad.count:
        return None
    tokens = int(held_out.lengths.sum())
    if held_out.format == "text" and tokens < length:
        return describe_short_text(held_out.name, tokens, length, "max_seq_length")
    # Every sample of running text is kept.
    if held_out.is_kept.any():
        return None
    return describe_unsupervised(held_out.name, f"{len(held_out.lengths)} samples", length, "max_seq_length")


def _make_encoder(model: str, template_name: str | None) -> CausalEncoder:
    """Return the encoder that a recipe for causal models would use, without a maximum length."""
    from zerobook.checkpoint.result import find_result
    from zerobook.models.load import open_tokenizer

    template = None
    if template_name is not None:
        try:
            template = read_text(template_file(template_name))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat_template {template_name}: it cannot be read: {error}.") from None
    # The name may be a run's output_dir, whose model is then in a folder of it, or embedded:smollm2, which is in a package.
    tokenizer_path = embedded.locate_model(find_result(model).model)
    tokenizer, _ = open_tokenizer(tokenizer_path, template=template, revision="main", trust_remote_code=False)
    encoder = CausalEncoder(tokenizer, length=None)
    # Without any chat template, use the default one, as a run does.
    encoder.take_default_template()
    return encoder


def _print_findings(data: Examined, length: int) -> None:
    """Print what a file holds, and what a run with rows of at most ``length`` tokens does with it."""
    summary = data.summary()
    console().print(f"\n{data.name}", style="bold")
    say(
        f"format {data.format}; {summary['samples']:,} samples, {summary['tokens']:,} tokens, {data.supervised:,} of them "
        "supervised"
    )
    # These are the lengths before cutting, by which the user can choose the limit.
    lengths = ", ".join(f"{name} {tokens:,}" for name, tokens in summary["lengths"].items())
    say(f"tokens of a sample before cutting: {lengths or 'none'}")
    if data.unread:
        say(f"columns that are not read: {', '.join(data.unread)}")
    if len(data.lengths):
        print_histogram(data.lengths)
    if data.format == "text":
        say("running text is cut into blocks, and loses nothing")
    elif data.cut.count or data.dropped.count:
        _print_locations(f"cut at --max_seq_length {length}", data.cut)
        _print_locations(f"left out: nothing supervised within --max_seq_length {length}", data.dropped)
        say(f"--max_seq_length {summary['needed_length']} keeps all of them whole")
    else:
        say(f"no sample is cut at --max_seq_length {length}; {summary['needed_length']} would do")
    _print_locations("exact duplicates", data.duplicates)
    _print_bad_samples(data.bad)


def _print_bad_samples(bad: BadSamples) -> None:
    """Print the reasons why samples cannot be used, each with the first locations of such samples."""
    if not bad.count:
        return
    say(f"{bad.count:,} samples that cannot be used:")
    for reason, locations in bad.by_reason.items():
        listed = "; ".join(locations.first[:LOCATIONS_OF_REASON])
        if locations.count > LOCATIONS_OF_REASON:
            listed += f" and {locations.count - LOCATIONS_OF_REASON:,} more"
        say(f"    {locations.count:,} x {reason}")
        say(f"        {listed}")


def _print_locations(heading: str, locations: Locations) -> None:
    """Print the number of locations and the first of them. Print nothing if there are none."""
    if locations.count:
        say(f"{locations.count:,} {heading}:")
        for location in locations.first:
            say(f"    {location}")
        if locations.count > len(locations.first):
            say(f"    and {locations.count - len(locations.first):,} more")
