"""Measure what each kind of activation checkpointing keeps and computes, and write docs/measured/activations.md.

usage: activations.py [PAGE]

One micro-batch runs forward and backward in this process, on the CPU, with random weights of a real model's sizes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch

from zerobook.models import recompute
from zerobook.plan.job import Job, make_job
from zerobook.plan.trace import Trace, trace_step
from zerobook.training.recipe import BatchShape
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.versions import versions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the installed package

from benchmarks.machine import processor  # noqa: E402

PAGE = ROOT / "docs" / "measured" / "activations.md"
SHAPE = BatchShape(1, 256, 0, padded=False)
MODES = ("none", "full", "every:2", "selective", "offload")
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {
    "model_type": "mixtral", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
JOBS = {
    "all weights of a model with the dimensions of SmolLM2-135M": ("causal_lm", SMOLLM2),
    "LoRA adapters of rank 16 on a base with the dimensions of SmolLM2-135M": ("lora_finetune", SMOLLM2),
    "a Mixtral with 4 layers of these dimensions, 8 experts, 2 for each token": ("causal_lm", EXPERTS),
}
TEXT = """# Activation checkpointing: measured

<!-- written by scripts/activations.py -->

One micro-batch of {rows} row of {tokens} tokens in fp32, forward and backward, in one process on the CPU. Models have
random weights.

- *kept*: bytes that autograd and `selective` keep between the forward and the backward pass. Every row includes the logits,
  which checkpointing of layers cannot save.
- *plan error*: *kept* as `zerobook plan` computes it, divided by the measured *kept*, minus 1.
- *in host memory*: bytes that `offload` would move to host memory on a GPU, from the planner. On a CPU it moves nothing. So
  the row of `offload` does not count them in *kept*, as on a GPU.
- *operations*: floating-point operations of both passes, from the planner, divided by those without checkpointing.

Gradients are the same in every row: `tests/test_recompute.py` and `tests/distributed/test_activation_checkpointing.py`, which
launches one process, DDP, ZeRO-3 and FSDP2, compare them to 10^-6.

Hardware: {hardware}. Date: {date}. {versions}.
"""


def main(page: Path = PAGE) -> None:
    torch.set_num_threads(1)
    hardware = f"{processor()}, {os.cpu_count()} cores, one of them used"
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    parts = [TEXT.format(rows=SHAPE.rows, tokens=SHAPE.source, hardware=hardware, date=date.today(), versions=found)]
    head = ["`--activation_checkpointing`", "kept", "plan error", "in host memory", "operations"]
    for name, (recipe, facts) in JOBS.items():
        rows = [head, ["---"] * len(head), *table(recipe, facts)]
        parts.append(f"## {name[:1].upper()}{name[1:]}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n")
    page.write_text("\n".join(parts))
    print(f"wrote {page}")


def table(recipe: str, facts: dict) -> Iterator[list[str]]:
    """Yield a row for each mode."""
    kind, plain = recipe_class(str(ROOT / "recipes" / f"{recipe}.py")), 0.0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(facts))
        for mode in MODES:
            work = make_job(kind(kind.config_class(model_name_or_path=str(file), activation_checkpointing=mode)))
            planned, on_gpu, found = (planned_trace(work, "cpu"), planned_trace(work, "cuda"), measured(work))
            plain = plain or planned.work.flops
            yield [
                f"`{mode}`", size(found.saved_bytes), error(planned.saved_bytes, found.saved_bytes),
                size(on_gpu.host_bytes) if on_gpu.host_bytes else "", f"{planned.work.flops / plain:.2f}",
            ]  # fmt: skip


def planned_trace(work: Job, kernels: str) -> Trace:
    with work.build(SHAPE) as (model, batch):
        return trace_step(model, batch, work.objective.loss, "no", device=kernels)


def measured(work: Job) -> Trace:
    """Return the trace of real tensors."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(work.model_config, dtype=torch.float32)
    model.config.use_cache = False
    recompute.enable(model, work.config.activation_checkpointing)
    model = work.recipe.adapt(model).train()
    batch = {key: torch.ones_like(value) for key, value in work.recipe.example_batch(SHAPE).items()}
    return trace_step(model, batch, work.objective.loss, "no")


def size(amount: float) -> str:
    return f"{amount / 2**20:,.1f} MiB"


def error(planned: float, found: float) -> str:
    return f"{planned / found - 1:+.2%}" if planned != found else "0"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
