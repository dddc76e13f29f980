"""The machine, scale and materials that tables are run with."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks.published.materials import Materials, seq2seq_sides
from benchmarks.published.trial import LIMIT_S, ROOT, Arm, Outcome, TrialError, attempt
from zerobook.config_sources import parse
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import make_job
from zerobook.plan.measure import Measurement, measure
from zerobook.training.recipe_file import recipe_class
from zerobook.utils import subprocess_launch

CONFIGS = ROOT / "benchmarks" / "models"


@dataclass
class Bench:
    """Machine, scale, materials and limits of the tables.

    Args:
        tiny: small models of the same classes, for CPU processes; otherwise the published sizes, for GPUs.
        ranks: the largest number of processes.
        budget: bytes of a process; None means each table's own budget.
        quick: try the published batches only, without a search for larger ones.
        until: `time.monotonic` at which runs are stopped; unset: each run has its own limit.
        say: shows the user what is run now.
    """

    folder: Path
    tiny: bool
    ranks: int
    where: Cluster
    budget: int | None
    say: Callable[[str], None]
    quick: bool = False
    until: float = math.inf
    _measured: dict[tuple, Measurement] = field(default_factory=dict)

    @cached_property
    def materials(self) -> Materials:
        return Materials(self.folder, 2000 if self.tiny else 8000)

    @property
    def precision(self) -> dict[str, object]:
        """Flags for the precision of the published runs; empty on a CPU, which trains in fp32."""
        return {} if self.where.cpu else {"mixed_precision": "fp16"}

    @cached_property
    def blenderbot(self) -> Path:
        """The dialogue model of table A: BlenderBot-400M's config, or one of 33 10^6 parameters."""
        from transformers import BlenderbotConfig

        width, heads = 512, 8
        special = self.materials.special | {"decoder_start_token_id": 1}
        if not self.tiny:
            return self.materials.model("blenderbot", self._published("blenderbot_400m"))
        sides = seq2seq_sides(6, heads, width) | {"encoder_layers": 2}
        config = BlenderbotConfig(d_model=width, max_position_embeddings=64, scale_embedding=True, **sides, **special)
        return self.materials.model("blenderbot", config)

    @cached_property
    def gpt2(self) -> Path:
        """The language model of table B: GPT-2 XL's config, or one of 26 10^6 parameters."""
        from transformers import GPT2Config

        if not self.tiny:
            return self.materials.model("gpt2", self._published("gpt2_xl"))
        return self.materials.model(
            "gpt2", GPT2Config(n_embd=512, n_layer=8, n_head=8, n_positions=128, **self.materials.special)
        )

    @cached_property
    def llama(self) -> Path:
        """The model whose states, traffic and dtypes are measured; its size does not matter there."""
        from transformers import LlamaConfig

        width = 128 if self.tiny else 2048
        config = LlamaConfig(
            hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            **self.materials.special,
        )  # fmt: skip
        return self.materials.model("llama", config)

    def _published(self, name: str) -> Any:
        import transformers

        facts = json.loads((CONFIGS / f"{name}.json").read_text())
        kind = transformers.AutoConfig.for_model(**facts)
        for key, value in self.materials.special.items():
            if key != "vocab_size":
                setattr(kind, key, value)
        return kind

    def replicated(self, ranks: int) -> Arm:
        """Return the arm that shards nothing, named after what runs: accelerate does not wrap one process on a GPU in DDP."""
        if ranks == 1 and not self.where.cpu:
            return Arm.of("single", 1, "one process")
        return Arm.of("ddp", ranks, "DDP")

    @property
    def worlds(self) -> list[int]:
        """Numbers of processes for which states and traffic are measured: powers of two."""
        return [2**power for power in range(self.ranks.bit_length()) if 2**power <= self.ranks]

    @property
    def plain(self) -> dict[str, object]:
        """Flags of a run that trains `llama` on text without held-out data."""
        return {
            "model_name_or_path": self.llama, "train_file": self.materials.text, "cache_dir": self.folder / "data",
            "block_size": 64, "validation_split_percentage": 0,
        }  # fmt: skip

    def attempt(self, arm: Arm, recipe: str, flags: dict[str, object], budget: int) -> Outcome:
        """Run `benchmarks.published.trial.attempt` within the time that is left.

        Raises:
            TrialError: the run failed, and not because of its budget; or no time was left for it.
        """
        return attempt(arm, recipe, flags, budget, self._seconds(f"{arm.name}, {recipe}"))

    def _seconds(self, what: str) -> float:
        """Return the seconds that a run may take."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TrialError(f"{what}: not begun, the time for all runs was over")
        return min(left, LIMIT_S)

    def measured(self, file: str, ranks: int, **flags: object) -> Measurement:
        """Measure a few steps of `llama` with `zerobook.plan.measure`, each combination once.

        Raises:
            TrialError: the run failed.
        """
        given = self.plain | {"per_device_train_batch_size": 2, **flags}
        key = (file, ranks, *sorted(flags.items()))
        if key not in self._measured:
            limit = self._seconds(f"{file}, {ranks} processes")
            self.say(f"{file}, {ranks} processes" + "".join(f", {name} {value}" for name, value in flags.items()))
            recipe, line = ROOT / "recipes" / "causal_lm.py", subprocess_launch.flags(given)
            kind = recipe_class(str(recipe))
            config, sources, _ = parse(kind.config_class, line)
            where = replace(self.where, gpus=ranks)
            found = measure(
                ROOT / "accelerate_configs" / f"{file}.yaml", make_job(kind(config)), recipe, line, where, sources, limit
            )
            if found.failure:
                raise TrialError(f"{file}, {ranks} processes: {found.failure}")
            self._measured[key] = found
        return self._measured[key]

    def variant(self, file: str, ranks: int, name: str, **changes: Any) -> Arm:
        """Return the arm of a strategy file with other values in its DeepSpeed JSON's ``zero_optimization``. A dict changes
        part of a section there."""
        source = ROOT / "accelerate_configs" / f"{file}.yaml"
        launch = yaml.safe_load(source.read_text())
        facts = json.loads((ROOT / launch["deepspeed_config"]["deepspeed_config_file"]).read_text())
        zero = facts["zero_optimization"]
        for key, value in changes.items():
            zero[key] = zero.get(key, {}) | value if isinstance(value, dict) else value
        target = self.folder / "strategies" / f"{file}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".json").write_text(json.dumps(facts, indent=1))
        launch["deepspeed_config"]["deepspeed_config_file"] = str(target.with_suffix(".json"))
        target.write_text(yaml.safe_dump(launch))
        return Arm(name, ("--config_file", str(target)), ranks)
