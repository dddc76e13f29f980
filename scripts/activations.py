"""Measure what each kind of activation checkpointing keeps and computes, and write docs/measured/activations.md.

usage: activations.py [PAGE]

One micro-batch runs forward and backward in this process, on the CPU, with random weights of a real model's sizes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

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
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
EXPERTS = SMOLLM2 | {
    "model_type": "mixtral",
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
JOBS = {
    "all weights of a model with the dimensions of SmolLM2-135M": ("causal_lm", SMOLLM2),
    "LoRA adapters of rank 16 on a base with the dimensions of SmolLM2-135M": ("lora_finetune", SMOLLM2),
    "a Mixtral with 4 layers of these dimensions, 8 experts, 2 for each token": ("causal_lm", EXPERTS),
}
"""Title of a table -> (recipe, config of the model)."""
TEXT = """# Activation checkpointing: measured

<!-- written by scripts/activations.py -->

One micro-batch of {rows} row of {tokens} tokens in fp32, forward and backward, in one process on the CPU. Models have
random weights.

- *kept*: bytes that are kept between the forward and the backward pass, by autograd or by the mode `selective`, which keeps
  some results itself. Every figure includes the logits, since checkpointing of layers does not make them smaller.
- *plan error*: *kept* as `zerobook plan` computes it, divided by the measured *kept*, minus 1.
- *in host memory*: bytes that `offload` would move to host memory on a GPU, from the planner. This run on a CPU moves none.
  *kept* leaves these bytes out all the same, since it stands for the memory of a GPU.
- *operations*: floating-point operations of both passes, from the planner, divided by those without checkpointing.

Gradients do not depend on the mode. `tests/test_recompute.py` compares them in one process, and
`tests/distributed/test_activation_checkpointing.py` compares losses and gradient norms under DDP, ZeRO-3 and FSDP2. The
relative tolerance is 10^-6.

Hardware: {hardware}. Date: {date}. {versions}.
"""


def main(page: Path = PAGE) -> None:
    torch.set_num_threads(1)
    hardware = f"{processor()}, {os.cpu_count()} cores, one of them used"
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "zerobook")
    parts = [TEXT.format(rows=SHAPE.rows, tokens=SHAPE.source, hardware=hardware, date=date.today(), versions=libraries)]
    columns = ["`--activation_checkpointing`", "kept", "plan error", "in host memory", "operations"]
    for title, (recipe, model_config) in JOBS.items():
        rows = [columns, ["---"] * len(columns), *measure_modes(recipe, model_config)]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        # Not `capitalize`, which would write LoRA in small letters.
        heading = f"{title[0].upper()}{title[1:]}"
        parts.append(f"## {heading}\n\n" + "\n".join(lines) + "\n")
    page.write_text("\n".join(parts))
    print(f"wrote {page}")


def measure_modes(recipe: str, model_config: dict[str, Any]) -> list[list[str]]:
    """Return the row of each mode of activation checkpointing."""
    recipe_type = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(model_config))
        flops_without = None
        for mode in MODES:
            config = recipe_type.config_class(model_name_or_path=str(file), activation_checkpointing=mode)
            job = make_job(recipe_type(config))
            planned = plan_trace(job, "cpu")
            planned_on_gpu = plan_trace(job, "cuda")
            measured = measure_trace(job)
            # The first mode is none.
            if flops_without is None:
                flops_without = planned.work.flops
            rows.append(
                [
                    f"`{mode}`",
                    size(measured.saved_bytes),
                    error(planned.saved_bytes, measured.saved_bytes),
                    size(planned_on_gpu.host_bytes) if planned_on_gpu.host_bytes else "",
                    f"{planned.work.flops / flops_without:.2f}",
                ]
            )
    return rows


def plan_trace(job: Job, kernels: str) -> Trace:
    """Return the trace of the planner, from tensors without contents. ``kernels`` are those of ``cpu`` or ``cuda``."""
    with job.build(SHAPE) as (model, batch):
        return trace_step(model, batch, job.objective.loss, "no", device=kernels)


def measure_trace(job: Job) -> Trace:
    """Return the trace of a forward and backward pass with real tensors."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(job.model_config, dtype=torch.float32)
    model.config.use_cache = False
    recompute.enable(model, job.config.activation_checkpointing)
    model = job.recipe.adapt(model).train()
    batch = {key: torch.ones_like(value) for key, value in job.recipe.example_batch(SHAPE).items()}
    return trace_step(model, batch, job.objective.loss, "no")


def size(amount: float) -> str:
    """Return an amount of bytes as text."""
    return f"{amount / 2**20:,.1f} MiB"


def error(planned: float, measured: float) -> str:
    """Return the error relative to the measured figure."""
    return f"{planned / measured - 1:+.2%}" if planned != measured else "0"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
