"""Device, models and data, cases, and calls in processes of their own, which the parts of benchmarks/gpu.py share."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.published.materials import Materials, seq2seq_sides
from zerobook.utils import subprocess_launch

ROOT = Path(__file__).resolve().parents[1]
OUTPUT_TAIL = 6000
"""Characters of a failed process's output that are recorded."""
ROW_MARK = "row: "
"""Begins the lines of a process's output that are rows; libraries print others, also after the last row."""

Row = dict[str, Any]
"""Figures of a case. One with ``error`` failed; one with ``skipped`` says why it was not run."""
Measure = Callable[[float, dict[str, Row]], Row]
"""Function of the seconds that the case may take and the earlier rows of its part."""


@dataclass(frozen=True)
class Case:
    """A measurement that is recorded when it ends.

    Args:
        seconds: what it is expected to take on one H100; with ``--minutes``, it starts only if so many are left.
        reference: name of the case whose row it is compared with, and which runs before it.
    """

    measure: Measure
    seconds: float
    reference: str | None = None


@dataclass
class Setting:
    """Device and folder of the cases. ``tiny`` models are for trying the cases themselves."""

    tiny: bool
    cpu: bool
    folder: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"

    @cached_property
    def materials(self) -> Materials:
        return Materials(self.folder)

    def model(self, name: str) -> Path:
        """Return the folder of a model with random weights, of about 0.3 10^9 parameters or tiny. ``small`` is always tiny."""
        from transformers import BartConfig, GPT2Config, LlamaConfig

        special = self.materials.special
        is_small = self.tiny or name == "small"
        width = 64 if is_small else 1024
        layers = 2 if is_small else 24
        heads = 4 if is_small else 16
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
        # Cases that run beside each other may want the same one.
        with self._lock:
            return self.materials.model(name, configs[name])

    @property
    def text(self) -> dict[str, object]:
        """Flags of a run that trains on text without held-out data."""
        return {"train_file": self.materials.text, "cache_dir": self.folder / "data", "validation_split_percentage": 0}


def failure(code: int, text: str, limit: float) -> Row:
    """Return the ``error`` of a process with this exit status and output; empty if it succeeded."""
    if code == 0:
        return {}
    error = f"exit status {code}: {subprocess_launch.last_error(text)}"
    if code == subprocess_launch.TIMED_OUT:
        error = f"stopped after {limit:.0f} s"
    return {"error": error, "output": text[-OUTPUT_TAIL:]}


def call(function: str, limit: float, **arguments: object) -> Row:
    """Run a function ``MODULE.NAME`` in a process of its own, whose memory on the device ends with it.

    The function yields its row each time that it has grown. If it fails or is stopped, the row so far is returned, with the
    error.
    """
    code = "import sys; from benchmarks.gpu_setting import emit; emit(*sys.argv[1:])"
    line = [sys.executable, "-c", code, function, json.dumps(arguments)]
    status, text = subprocess_launch.run(line, limit, cwd=ROOT)
    rows = [line for line in text.splitlines(keepends=True) if line.startswith(ROW_MARK) and line.endswith("\n")]
    row: Row = json.loads(rows[-1].removeprefix(ROW_MARK)) if rows else {}
    return row | failure(status, text, limit)


def emit(function: str, arguments: str) -> None:
    """Print each row that ``function`` yields with ``arguments``, in JSON."""
    module, name = function.rsplit(".", 1)
    for row in getattr(importlib.import_module(module), name)(**json.loads(arguments)):
        print(f"{ROW_MARK}{json.dumps(row)}", flush=True)
