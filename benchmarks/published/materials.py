"""Models with random weights, and text and pairs to train them on, made without a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from zerobook.utils.files import modes_by_umask

TEXT = "text.txt"
PAIRS = "pairs.jsonl"
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


class Materials:
    """A folder with data, from the Python standard library's own source text, and models that fit its tokenizer.

    Args:
        vocabulary: the largest number of tokens of the byte-level tokenizer.
    """

    def __init__(self, folder: Path, vocabulary: int = 8000):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
        text = "\n".join(file.read_text(errors="ignore") for file in files)
        lines = [line for line in text.splitlines() if line.strip()]
        self.text, self.pairs = folder / TEXT, folder / PAIRS
        self.text.write_text(text)
        found = (
            {"source": " ".join(lines[i : i + 12]), "target": " ".join(lines[i + 12 : i + 18])}
            for i in range(0, len(lines) - 18, 3)
        )
        self.pairs.write_text("".join(json.dumps(pair) + "\n" for pair in found))
        self.tokenizer = _tokenizer(lines, vocabulary)

    def model(self, name: str, config: Any) -> Path:
        """Write a model of ``config``, a config of transformers, with random weights and this tokenizer. Return its folder.

        The config's vocabulary has to hold the tokenizer's.
        """
        import torch
        import transformers

        target = self.folder / name
        if not target.exists():
            transformers.utils.logging.disable_progress_bar()
            kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
            torch.manual_seed(0)
            kind.from_config(config).save_pretrained(target)
            self.tokenizer.save_pretrained(target)
            modes_by_umask(target)
        return target

    @property
    def special(self) -> dict[str, int]:
        """Values of a model's config that depend on the tokenizer."""
        return SPECIAL | {"vocab_size": len(self.tokenizer)}


def _tokenizer(lines: list[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def seq2seq_sides(layers: int, heads: int, width: int) -> dict[str, int]:
    """Return sizes for BART's and BlenderBot's configs, the same for encoder and decoder; feed-forward four times as wide."""
    parts = (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))
    return {f"{side}_{what}": number for side in ("encoder", "decoder") for what, number in parts}
