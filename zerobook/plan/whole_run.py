"""A whole run: its steps, its hours and its cost, each with the range of the planned rate."""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerobook.config import RecipeConfig
from zerobook.data.files import JSON_LINES, TABLE, TEXT, file_source
from zerobook.errors import ConfigError
from zerobook.plan.hardware import Cluster
from zerobook.plan.rows import Row
from zerobook.utils.devices import DEVICES
from zerobook.utils.units import count, counted, duration, with_range

BYTES_PER_TOKEN = 4
"""Bytes of a data file for each token: about what tokenizers reach on English text."""
TOKENS = 10**9
"""Tokens of a run of unknown length, if its cost is requested."""


def parse_prices(text: str) -> dict[str, float]:
    """Return GPU -> dollars an hour of ``a100-80gb=1.9,l40s=0.8``, or of ``1.9``, whose key is "": every GPU.

    Raises:
        ConfigError: not a price, or the name of no GPU.
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
    """Planned length, time and cost of a run. The ranges follow from the range of the rate; costs are dollars of all GPUs."""

    steps: int
    # what the steps follow from
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
    """Return the planned run of a row that fits; None if nothing says its length, and no price is given.

    Args:
        samples: of a step.
        tokens: of the whole run; None: the config and the size of its data say the length.
        price: dollars of one GPU for an hour.
        lengths: tokens of each sample of the data, if they are known.
    """
    assert row.time is not None
    rows, rows_per_sample, basis = _count_rows(config, lengths)
    # Tokens that the user names go first, then the number of steps, then the size of the data.
    if tokens is None and config.max_train_steps is not None:
        steps = config.max_train_steps
        basis = "max_train_steps"
    elif tokens is None and basis:
        # A part is held out, and another may be left out.
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
    # Both are relative to the planned rate: with the highest rate, the run takes the least time.
    lowest_rate, highest_rate = row.rate_range
    seconds_range = (seconds / highest_rate, seconds / lowest_rate)
    if price is None:
        return WholeRun(steps, basis, seconds, seconds_range, None, None)
    cost = price * cluster.ranks * seconds / 3600
    return WholeRun(steps, basis, seconds, seconds_range, cost, (cost / highest_rate, cost / lowest_rate))


def _count_rows(config: RecipeConfig, lengths: np.ndarray | None) -> tuple[float, float, str]:
    """Return the rows of the training data, those of one sample, and what the numbers follow from; "" if the file does not say
    it. A block of a text is a sample."""
    if lengths is not None:
        kept = np.minimum(lengths, config.row_length)
        rows_per_sample = kept.mean() / config.row_length if config.packing else 1.0
        basis = f"{counted(len(lengths), 'sample')} of {kept.mean():,.0f} tokens in the mean"
        return len(lengths) * rows_per_sample, rows_per_sample, basis
    file = Path(config.train_file or "").expanduser()
    # The suffix of a compressed file is .gz, whose size says nothing.
    suffix = file.suffix.lower()
    if not file.is_file() or suffix not in (*JSON_LINES, ".json", *TABLE, *TEXT):
        return 0.0, 1.0, ""
    rows = file.stat().st_size / BYTES_PER_TOKEN / config.row_length
    basis = f"{BYTES_PER_TOKEN} bytes of the file a token"
    if suffix in TEXT:
        return rows, 1.0, basis
    # A large file is read only where its samples count.
    samples = 0
    if suffix in JSON_LINES and (config.max_train_samples or not config.packing):
        samples = sum(1 for _ in file_source(file).read())
    if config.packing:
        return rows, rows / max(samples, 1), basis
    if samples:
        return samples, 1.0, counted(samples, "sample")
    return 0.0, 1.0, ""
