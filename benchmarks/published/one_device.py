"""Table B: a model that is too large for one device, DDP against ZeRO-3 with offload."""

from __future__ import annotations

from benchmarks.published.bench import ROOT, Bench
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import Arm, Outcome, Search, fingerprint, largest
from zerobook.utils.units import size

SOURCE = (
    "https://huggingface.co/blog/accelerate-deepspeed (June 2022), table 3: GPT-2 XL (1.5B) from a random initialisation, one "
    "24 GB Titan RTX, wikitext-2 in blocks of 128. 362 tokens/s follow from 1,168 steps of 16 x 128 tokens in 6608.35 s."
)
BUDGET = 400_000_000
"""Bytes of the process at the tiny scale: the model's states are 16 bytes a parameter, 430 10^6."""
EPOCH = 1168


def run(bench: Bench) -> Table:
    """Find the largest batch of each arm, and measure tokens a second with it (with 16 at the published size, where it
    fits)."""
    budget = bench.budget or (BUDGET if bench.tiny else 24 * 2**30)
    block, steps = (64, 4) if bench.tiny else (128, 12)
    flags = {
        "model_name_or_path": bench.gpt2, "train_file": bench.materials.text, "cache_dir": bench.folder / "data",
        "block_size": block, "validation_split_percentage": 0, "learning_rate": 5e-4, **bench.precision,
    }  # fmt: skip
    table = Table("B", "A model that one device does not hold", SOURCE, _settings(bench, budget, block, steps))
    fits: dict[str, Search] = {}
    arms = _arms(bench)
    with table.keeping_what_ran():
        for arm in arms:

            def tries(batch: int, arm: Arm = arm, steps: int = 2) -> Outcome:
                bench.say(f"B: {arm.name}, a batch of {batch}")
                sizes = {"per_device_train_batch_size": batch, "max_train_steps": steps}
                return bench.attempt(arm, "causal_lm", flags | sizes, budget)

            plain = arm is arms[0]
            printed = {"batch": "out of memory at 1"} if plain else {}
            if arm.name == "ZeRO-3, CPU offload":
                printed = {"batch": 16, "tokens/s": 362, "epoch, s": 6608.35}
            line = Line(arm.name, printed, config=fingerprint(arm, "causal_lm", flags))
            table.lines.append(line)
            most = 16 if bench.tiny or bench.quick else 64
            found = fits[arm.name] = largest(tries, start=1 if plain or bench.tiny else 16, most=most)
            line.here["largest batch"] = found.largest or "out of memory at 1"
            if found.largest:
                batch = found.largest if bench.tiny else min(16, found.largest)
                outcome = tries(batch, steps=steps)
                line.here |= {"batch": batch, "tokens/s": batch * block / outcome.step}
                if not bench.tiny and batch == 16:
                    line.here["epoch, s, from its median step"] = EPOCH * outcome.step
        table.findings = _findings(bench, fits, arms[0].name)
    table.notes = [f"{name}, a batch of {found.refused}: `{found.why}`" for name, found in fits.items() if found.refused]
    return table


def _arms(bench: Bench) -> list[Arm]:
    if not bench.tiny:
        published = ROOT / "ds_configs" / "published" / "zero3_offload_config_accelerate.json"
        offload = ("--use_deepspeed", "--deepspeed_config_file", str(published))
        return [bench.replicated(1), Arm("ZeRO-3, CPU offload", offload, 1)]
    # the shipped limits of buffers, sub-groups and gathered weights are larger than this whole model
    smaller = {
        "offload_param": {"buffer_size": 1_100_000}, "sub_group_size": 2_000_000, "stage3_max_live_parameters": 4_000_000,
        "stage3_max_reuse_distance": 0,
    }  # fmt: skip
    return [
        bench.replicated(1),
        Arm.of("zero3_offload", 1, "ZeRO-3, CPU offload"),
        bench.variant("zero3_nvme", 1, "ZeRO-3, NVMe offload", **smaller),
    ]


def _settings(bench: Bench, budget: int, block: int, steps: int) -> str:
    model = (
        "GPT-2 of 26M parameters, fp32; under NVMe offload swap buffers of 1.1M elements, sub-groups of 2M, 4M gathered at most"
        if bench.tiny
        else "GPT-2 XL, random weights, fp16"
    )
    return (
        f"{model}; one process of {size(budget)} for the model, its states and activations; blocks of {block} tokens; tokens a "
        f"second from the median of {steps - 1} steps behind the first."
    )


def _findings(bench: Bench, fits: dict[str, Search], plain: str) -> list[Finding]:
    most, called = fits[plain].largest, plain[0].upper() + plain[1:]
    claims = [Finding(f"{called} is out of memory at batch 1", most == 0, f"batch {most} fits" if most else "")]
    for name, found in fits.items():
        if name != plain:
            cause = f"batch {found.largest}" if found.largest else ""
            if not found.largest and bench.where.cpu and "CPU" in name:
                cause = "A CPU process has no device memory: what is offloaded to host memory stays in the same budget"
            claims.append(Finding(f"{name} fits where {plain} does not", found.largest > 0 and most == 0, cause))
    return claims
