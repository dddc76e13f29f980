"""Table F: activation checkpointing, the memory that it saves and the time that it costs."""

from __future__ import annotations

from benchmarks.published.bench import Bench
from benchmarks.published.formulas import activations
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm, fingerprint

SOURCE = (
    "Memory: Korthikanti et al., arXiv 2205.05198, equations 1 and 4, fused attention. Time: NVIDIA's guide "
    "(https://docs.nvidia.com/nemo/megatron-bridge/latest/training/activation-recomputation.html), 30 % more for a layer; "
    "Hugging Face's (https://huggingface.co/docs/transformers/en/grad_checkpointing), about 20 %."
)
STEPS = 9


def run(bench: Bench) -> Table:
    """Run the same steps with activations kept and with activations recomputed."""
    from transformers import AutoConfig

    rows, block = (4, 64) if bench.tiny else (8, 512)
    config = AutoConfig.from_pretrained(bench.gpt2)
    arm = Arm.of("single", 1, "one process")
    flags = bench.plain | {"model_name_or_path": bench.gpt2, "block_size": block}
    flags |= {"per_device_train_batch_size": rows, "max_train_steps": STEPS}
    if not bench.where.cpu:
        flags["mixed_precision"] = "bf16"
    element = 4 if bench.where.cpu else 2
    table = Table(
        "F", "Activation checkpointing", SOURCE,
        f"GPT-2, {config.n_layer} layers of {config.n_embd}, {'fp32' if element == 4 else 'bf16'}, one process, "
        f"{rows} x {block} tokens; the median of {STEPS - 1} steps; saved activations are counted when they are saved, with "
        "logits and loss.",
    )  # fmt: skip
    seconds, saved = [], []
    for words, checkpointing in (("kept", False), ("recomputed", True)):
        bench.say(f"F: activations {words}")
        given = flags | {"activation_checkpointing": str(checkpointing).lower()}
        outcome = bench.attempt(arm, "causal_lm", given, 0)
        same = {
            key: value
            for key, value in given.items()
            if key in ("per_device_train_batch_size", "block_size", "mixed_precision")
        }
        held = bench.measured("single", 1, model_name_or_path=bench.gpt2, activation_checkpointing=checkpointing, **same)
        seconds.append(outcome.step)
        saved.append(held.figures["activations saved"].measured)
        by_formula = activations(
            config.n_layer, rows, block, config.n_embd, config.n_head, element=element, fused=True, checkpointing=checkpointing
        )
        here = {"saved activations, MB": saved[-1] / 1e6, "s a step": outcome.step}
        here |= {"peak, MB": outcome.peak / 1e6} if outcome.peak else {}
        table.lines.append(
            Line(
                f"activations {words}",
                {"layers' activations, MB": by_formula / 1e6},
                here,
                fingerprint(arm, "causal_lm", given),
            )
        )
    table.findings = findings(seconds, saved)
    table.notes.append(
        "A forward pass has half as many operations as a backward pass, so a second forward pass is 33 % more operations. The "
        "time of a step also includes the optimizer. The published formula includes the activations of the layer that is "
        "recomputed during the backward pass. The measured figure has those that the forward pass saves."
    )
    return table


def findings(seconds: list[float], saved: list[float]) -> list[Finding]:
    """Return the findings of both runs, given seconds a step and bytes saved; the run that keeps its activations comes
    first."""
    more = seconds[1] / seconds[0] - 1
    share = f"{1 - saved[1] / saved[0]:.0%} of what is saved for the backward pass"
    return [
        Finding("Checkpointing saves memory", saved[1] < saved[0], share),
        Finding("It costs about 20 % of a step's time (Hugging Face's guide)", 0.15 <= more <= 0.25, f"{more:+.0%}"),
        Finding("It costs about 30 % of a step's time (NVIDIA's guide)", 0.25 <= more <= 0.35, f"{more:+.0%}"),
    ]
