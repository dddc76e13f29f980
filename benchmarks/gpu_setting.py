"""The setting of the cases of benchmarks/gpu.py: the device, its models and data, and the form of their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.published.materials import Materials, seq2seq_sides

Row = dict[str, Any]
Case = Callable[[float, dict[str, Row]], Row]
"""Function of the seconds that the case may take and the earlier rows of its part. A row with ``died`` failed; one with
``not run`` says why it was not run."""


@dataclass
class Setting:
    """Device and folder of the cases. ``tiny`` models are for trying the cases themselves."""

    tiny: bool
    cpu: bool
    folder: Path

    @cached_property
    def materials(self) -> Materials:
        return Materials(self.folder)

    def model(self, name: str) -> Path:
        """Return the folder of a model with random weights, of about 0.3 10^9 parameters or tiny. ``small`` is always tiny."""
        from transformers import BartConfig, GPT2Config, LlamaConfig

        special = self.materials.special
        width, layers, heads = (64, 2, 4) if self.tiny or name == "small" else (1024, 24, 16)
        llama = LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            **special,
        )
        bart = {"d_model": width, "decoder_start_token_id": 2, "max_position_embeddings": 1024}
        configs = {
            "small": llama,
            "llama": llama,
            "gpt2": GPT2Config(n_embd=width, n_layer=layers, n_head=heads, **special),
            "bart": BartConfig(**bart, **seq2seq_sides(layers // 2, heads, width), **special),
        }
        return self.materials.model(name, configs[name])

    @property
    def text(self) -> dict[str, object]:
        """Flags of a run that trains on text without held-out data."""
        return {"train_file": self.materials.text, "cache_dir": self.folder / "data", "validation_split_percentage": 0}
