"""A whole run: its steps, its hours and its cost, each with the range of the planned rate."""

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerobook.config import RecipeConfig
from zerobook.data.files import JSON_LINES, TABLE, TEXT, file_source
from zerobook.data.tokenize import detect
from zerobook.errors import ConfigError, DataError
from zerobook.plan.hardware import Cluster
from zerobook.plan.rows import Row
from zerobook.utils.devices import DEVICES
from zerobook.utils.units import count, counted, duration, with_range

# Bytes of a data file for each token: about what tokenizers reach on English text.
BYTES_PER_TOKEN = 4
# Samples among which the format of a file is detected.
DETECTED_SAMPLES = 100
# Tokens of a run of unknown length, if its cost is requested.
TOKENS = 10**9


def parse_prices(text: str) -> dict[str, float]:
    """Return GPU -> dollars an hour, from a text such as ``a100-80gb=1.9,l40s=0.8``.

    A price without a name, such as ``1.9``, is for every GPU, and has the key "".

    Raises:
        ConfigError: an entry is not a price, or names no known GPU.
    """
    prices = {}
    for entry in text.split(","):
        gpu, _, dollars = entry.rpartition("=")
        if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", dollars) or gpu not in ("", *DEVICES):
            raise ConfigError(f"--price: {entry!r} is not a price of a GPU hour. Give dollars: 1.9, or a100-80gb=1.9,l40s=0.8.")
        prices[gpu] = float(dollars)
    return prices


@dataclass(frozen=True)
class WholeRun:
    """Planned length, time and cost of a run. Costs are dollars of all GPUs together. The ranges of time and cost follow from
    the range of the rate."""

    steps: int
    # where the number of steps comes from, such as max_train_steps
    basis: str
    seconds: float
    seconds_range: tuple[float, float]
    cost: float | None
    cost_range: tuple[float, float] | None

    def describe(self) -> str:
        text = f"{with_range(self.seconds, self.seconds_range, duration)} for {counted(self.steps, 'step')}: {self.basis}"
        if self.cost is None or self.cost_range is None:
            return text
        return f"{with_range(self.cost, self.cost_range, '${:,.2f}'.format)} for {text}"


def plan_whole_run(
    row: Row,
    config: RecipeConfig,
    samples: int,
    cluster: Cluster,
    tokens: int | None,
    price: float | None,
    lengths: np.ndarray | None = None,
) -> WholeRun | None:
    """Return the planned run of a row that fits. None if its length is not known and no price is given.

    Args:
        samples: samples of a step.
        tokens: tokens of the complete run; None: the length follows from the config and the size of its data. With a price and
            no known length, it is `TOKENS`.
        price: dollars of one GPU for an hour.
        lengths: tokens of each sample of the data, if they are known.
    """
    assert row.time is not None
    rows, rows_per_sample, basis = _count_rows(config, lengths)
    # The length is the tokens that the user names; otherwise the steps of the config; otherwise it follows from the data.
    if tokens is None and config.max_train_steps is not None:
        steps = config.max_train_steps
        basis = "max_train_steps"
    elif tokens is None and basis:
        # No step trains on held-out samples, nor on those beyond max_train_samples.
        if not config.validation_file:
            rows *= 1 - config.validation_split_percentage / 100
        rows = min(rows, (config.max_train_samples or math.inf) * rows_per_sample)
        steps = math.ceil(config.num_train_epochs * math.ceil(rows / samples))
        basis = f"{config.num_train_epochs:g} epochs, with {basis}"
    elif tokens is None and price is None:
        return None
    else:
        tokens = tokens or TOKENS
        steps = math.ceil(tokens / row.tokens_per_step)
        basis = f"{count(tokens)} tokens"
    seconds = steps * row.time.step
    # The range has factors of the planned rate. With the highest rate, the run takes the least time.
    lowest_factor, highest_factor = row.rate_range
    seconds_range = (seconds / highest_factor, seconds / lowest_factor)
    if price is None:
        return WholeRun(steps, basis, seconds, seconds_range, None, None)
    cost = price * cluster.ranks * seconds / 3600
    return WholeRun(steps, basis, seconds, seconds_range, cost, (cost / highest_factor, cost / lowest_factor))


def _count_rows(config: RecipeConfig, lengths: np.ndarray | None) -> tuple[float, float, str]:
    """Estimate the rows of the training data.

    Returns:
        the number of rows, the rows of one sample (below 1 if samples are packed), and a text that says what the numbers are
        based on. The text is "" if the number of rows is not known.
    """
    if lengths is not None:
        cut_lengths = np.minimum(lengths, config.row_length)
        rows_per_sample = cut_lengths.mean() / config.row_length if config.packing else 1.0
        basis = f"{counted(len(lengths), 'sample')} of {cut_lengths.mean():,.0f} tokens in the mean"
        return len(lengths) * rows_per_sample, rows_per_sample, basis
    file = Path(config.train_file or "").expanduser()
    # A compressed file, whose suffix is .gz, is not in the list below: the number of tokens does not follow from its size.
    suffix = file.suffix.lower()
    if not file.is_file() or suffix not in (*JSON_LINES, ".json", *TABLE, *TEXT):
        return 0.0, 1.0, ""
    rows = file.stat().st_size / BYTES_PER_TOKEN / config.row_length
    basis = f"{BYTES_PER_TOKEN} bytes of the file a token"
    # Running text is cut into blocks. Each is a sample and fills a row.
    if suffix in TEXT or _has_joined_documents(config, file):
        return rows, 1.0, basis
    # Counting samples reads the complete file, so it is done only if the result depends on their number.
    samples = 0
    if suffix in JSON_LINES and (config.max_train_samples or not config.packing):
        samples = sum(1 for _ in file_source(file).read())
    if config.packing:
        return rows, rows / max(samples, 1), basis
    if samples:
        return samples, 1.0, counted(samples, "sample")
    return 0.0, 1.0, ""


def _has_joined_documents(config: RecipeConfig, file: Path) -> bool:
    """Return whether the samples of a table or JSON file are documents, which are joined and cut into blocks."""
    if config.packing or config.format is not None:
        return not config.packing and config.format == "text"
    columns = {"text_column": config.text_column, "summary_column": config.summary_column}
    try:
        # `detect` takes the first readable sample, and a few lines may be broken.
        first_samples = [(name, row) for name, row, _ in itertools.islice(file_source(file).read(), DETECTED_SAMPLES)]
        return detect(first_samples, columns, {}) == "text"
    except DataError:
        # A plan needs no data, and the run reports what is wrong with it.
        return False
