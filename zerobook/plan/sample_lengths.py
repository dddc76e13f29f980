"""Token lengths of the samples of a run's data, if the data and the model's tokenizer are on this machine."""

from pathlib import Path

import numpy as np

from zerobook.config import RecipeConfig
from zerobook.data import embedded
from zerobook.data.sources import open_source
from zerobook.errors import ConfigError, DataError

# Size of a data file up to which its samples are tokenized for a plan, which takes a few seconds.
READ_BYTES = 8 << 20


def read_lengths(config: RecipeConfig) -> np.ndarray | None:
    """Return the tokens of each sample of ``config``'s training data, before samples are cut to the length of a row.

    None if they cannot be counted in a few seconds, and for running text, which is cut into blocks.
    """
    from zerobook.data.examine import examine
    from zerobook.data.templates import CausalEncoder
    from zerobook.models.load import open_tokenizer

    file = Path(config.train_file or "").expanduser()
    model = config.tokenizer_name or config.model_name_or_path or ""
    if not file.is_file() or file.stat().st_size > READ_BYTES:
        return None
    # A tokenizer on the hub is not downloaded for a plan.
    folder = embedded.smollm2() if model.startswith(embedded.PREFIX) else Path(model).expanduser()
    if not folder.is_dir():
        return None
    try:
        tokenizer, _ = open_tokenizer(
            str(folder),
            template=config.chat_template_text,
            revision=config.model_revision,
            trust_remote_code=config.trust_remote_code,
            tokens=config.new_tokens,
        )
        examined = examine(
            open_source(str(file)).train,
            CausalEncoder(tokenizer, length=None),
            length=config.row_length,
            format=config.format,
            columns={"text_column": config.text_column, "summary_column": config.summary_column},
        )
    except (ConfigError, DataError):
        # A plan needs no data, and the run reports what is wrong with it.
        return None
    if examined.format == "text" or not len(examined.lengths):
        return None
    return examined.lengths
