"""Any strategy, the same training: real launches of the shipped files against one process.

Every strategy file is launched with full finetuning and with LoRA, DoRA, PiSSA and IA3, and most with QLoRA. Between the
steps, every run evaluates, generates, saves and rolls back once: a fault that such a pause leaves behind shows in the steps
after it. ``make test`` takes the sample named below; ``make test-full`` takes all, and docs/measured/parity.md has its
differences.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import ROOT, Run, calls, launch
from tests.tiny import causal_rows, mean_loss
from tests.versions import NEEDS_MODEL_PARALLELISM

STRATEGIES = {
    "single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero2_offload": 2, "zero3": 2, "zero3_offload_optimizer": 2,
    "zero3_offload": 2, "zero3_nvme": 2, "fsdp": 2, "fsdp_offload": 2, "fsdp_hybrid": 4, "zero3_hpz": 4,
    "zero3_sequence": 2, "fsdp_context": 2, "fsdp_tensor": 2, "fsdp_experts": 2,
}  # fmt: skip
"""File in accelerate_configs/ -> processes it is launched on. Those in published/ fix fp16: test_published.py resolves them."""

SEQ2SEQ = {
    "recipe": "seq2seq_chatbot",
    "max_source_length": 64,
    "max_target_length": 32,
    "block_size": None,
    "learning_rate": 1e-2,
    # Attention does not change with a bias of its keys, whose gradients are nothing but rounding: Adam would blow it up.
    "adam_epsilon": 1e-6,
}
RECIPES = {
    "causal_lm": {},
    "lora_finetune": {},
    "dora": {"recipe": "lora_finetune", "adapter": "dora"},
    "pissa": {"recipe": "lora_finetune", "adapter": "pissa", "learning_rate": 3e-3},
    # Some of its 384 gradients are near the rounding of their sums. With a smaller epsilon, Adam makes whole steps of them.
    "ia3": {
        "recipe": "lora_finetune",
        "adapter": "ia3",
        "learning_rate": 0.3,
        "adam_epsilon": 1e-3,
        "lora_r": None,
        "lora_alpha": None,
    },
    "qlora": {"recipe": "lora_finetune", "load_in_4bit": True},
    "int8": {"recipe": "lora_finetune", "load_in_8bit": True},
    "moe": {"recipe": "causal_lm", "model": "mixtral"},
    "joined": {"recipe": "lora_finetune", "padding_free": True},
    "router": {"recipe": "causal_lm", "model": "qwen3_moe"},
    "gemma3": {"recipe": "causal_lm", "model": "gemma3", "learning_rate": 1e-2},
    "recurrent": {"recipe": "lora_finetune", "model": "recurrent"},
    "images": {"recipe": "causal_lm", "model": "mllama", "learning_rate": 1e-2},
    "composite": {"recipe": "causal_lm", "model": "gemma3_composite"},
    "composite_lora": {"recipe": "lora_finetune", "model": "gemma3_composite"},
    "marian": SEQ2SEQ | {"model": "marian"},
    "pegasus": SEQ2SEQ | {"model": "pegasus"},
    "mbart": SEQ2SEQ | {"model": "mbart"},
    "vocabulary": {"recipe": "causal_lm", "model": "vocabulary", "adam_epsilon": 1e-6, "max_train_steps": 6, "between": False},
}
"""Name of a case -> the recipe and its flags. ``vocabulary`` has an embedding of 28 million numbers, as real models do. The
process that ``joined`` is compared with pads its rows. The model of ``router`` has a loss that balances its experts."""

ARCHITECTURES = {"router", "gemma3", "recurrent", "images", "composite", "composite_lora", "marian", "pegasus", "mbart"}
"""Cases of one more kind of model each, for one strategy of each kind."""
KINDS = {"ddp", "zero2", "zero3", "fsdp"}

SHARED = {"zero3_sequence": 2, "fsdp_context": 2, "fsdp_tensor": 2}
"""Processes that read the same rows."""

NO_MOE = {"fsdp_tensor", "zero3_nvme"}
"""The first refuses Mixtral, whose experts are packed. The second would swap no weight of a model this small."""

IN_PARTS = {"fsdp_tensor", "fsdp_experts"}
"""They train all weights, and no adapters; a ConfigError says so."""

NO_QLORA = {"zero3_offload", "zero3_nvme", "fsdp_offload"}
"""They move parameters between devices, which loses the quantisation state; a ConfigError says so."""

HOLDS_INT8 = {"ddp", "zero1", "zero2", "zero2_offload"}
"""Those that shard weights do not shard int8 ones; a ConfigError says so."""

SAMPLE = {
    ("ddp", "causal_lm"),
    ("ddp", "images"),
    ("zero1", "pissa"),
    ("zero2", "causal_lm"),
    ("zero2", "int8"),
    ("zero2", "mbart"),
    ("zero2_offload", "causal_lm"),
    ("zero3", "causal_lm"),
    ("zero3", "qlora"),
    ("zero3", "router"),
    ("zero3", "recurrent"),
    ("zero3", "composite"),
    ("zero3", "pegasus"),
    ("zero3_offload_optimizer", "ia3"),
    ("zero3_offload", "lora_finetune"),
    ("zero3_nvme", "lora_finetune"),
    ("zero3_hpz", "causal_lm"),
    ("zero3_sequence", "causal_lm"),
    ("fsdp", "causal_lm"),
    ("fsdp", "joined"),
    ("fsdp", "gemma3"),
    ("fsdp", "marian"),
    ("fsdp_offload", "dora"),
    ("fsdp_hybrid", "lora_finetune"),
    ("fsdp_context", "lora_finetune"),
    ("fsdp_tensor", "causal_lm"),
    ("fsdp_experts", "moe"),
}
"""Each strategy file and each case once, but for ``composite_lora`` and ``vocabulary``, which takes long; full finetuning under
one strategy of each kind."""

NONE, CPU, NVME = ({"optimizer": where, "parameters": where} for where in ("none", "cpu", "nvme"))
ADAM_ON_CPU = {"optimizer": "cpu", "parameters": "none"}
ZERO = {"wrapper": "DeepSpeedEngine", "optimizer_class": "AdamW", "offload": NONE}
CPU_ADAM = {"wrapper": "DeepSpeedEngine", "optimizer_class": "DeepSpeedCPUAdam"}
FSDP = {"wrapper": "FSDPModule", "zero_stage": None, "reshard_after_forward": True}
LIVE = {
    "single": {"strategy": "one process", "wrapper": "none", "zero_stage": None},
    "ddp": {"strategy": "DDP", "wrapper": "DistributedDataParallel", "zero_stage": None},
    "zero1": {"strategy": "ZeRO-1", "zero_stage": 1, **ZERO},
    "zero2": {"strategy": "ZeRO-2", "zero_stage": 2, **ZERO},
    "zero3": {"strategy": "ZeRO-3", "zero_stage": 3, **ZERO},
    "zero3_hpz": {"strategy": "ZeRO-3 hpZ 2x2", "zero_stage": 3, **ZERO},
    "zero2_offload": {"zero_stage": 2, "offload": ADAM_ON_CPU, **CPU_ADAM},
    "zero3_offload_optimizer": {"zero_stage": 3, "offload": ADAM_ON_CPU, **CPU_ADAM},
    "zero3_offload": {"zero_stage": 3, "offload": CPU, **CPU_ADAM},
    "zero3_nvme": {"zero_stage": 3, "offload": NVME, **CPU_ADAM},
    "fsdp": {"strategy": "FSDP2", "mesh": [2], "offload": NONE, **FSDP},
    "fsdp_offload": {"strategy": "FSDP2 (cpu offload)", "mesh": [2], "offload": CPU, **FSDP},
    "fsdp_hybrid": {"strategy": "FSDP2 hybrid 2x2", "mesh": [2, 2], "offload": NONE, **FSDP},
    "zero3_sequence": {"strategy": "ZeRO-3 sequence 2", "zero_stage": 3, "sequence": 2, **ZERO},
    "fsdp_tensor": {"strategy": "FSDP2 tensor 2", "mesh": [1, 2], "offload": NONE, **FSDP},
    "fsdp_experts": {"strategy": "FSDP2 experts 2", "mesh": [2], "offload": NONE, **FSDP},
    "fsdp_context": {"strategy": "FSDP2 context 2", "mesh": [2], "context": 2, "offload": NONE, **FSDP},
}
"""Facts, read from the live objects, that show which strategy really ran."""

TOLERANCE = 1e-5
"""Relative, on every step's loss and global gradient norm, in fp32."""

INT8_TOLERANCE = 3e-4
"""The same for held-out losses of an int8 base with CPUAdam, whose weights differ by 8e-7: int8 layers round activations to
256 values, and random changes of 8e-7 of the adapters changed this model's loss by 5e-6 to 1.4e-4."""

MOMENT_TOLERANCE = 2e-4
"""On Adam's saved moments, relative to the largest of a tensor: they average ten gradients, the second one squares them,
and a gradient of an adapter is small beside the roundings of the weights that it comes from."""


FALLS = {"ia3": 0.85, "router": 0.85, "recurrent": 0.95}
"""Case -> share of the first loss that the last one is below, where it is not 0.75: ia3 trains 384 numbers, a router's
loss does not fall below its coefficient, and the base of ``recurrent`` is not trained."""


def largest_difference(ours: list[float], reference: list[float]) -> float:
    assert len(ours) == len(reference) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def cases():
    for strategy in STRATEGIES:
        if strategy == "single":
            continue
        for recipe in RECIPES:
            if (recipe == "qlora" and strategy in NO_QLORA) or (recipe == "vocabulary" and STRATEGIES[strategy] > 2):
                continue
            if strategy == "zero3_nvme" and RECIPES[recipe].get("adapter"):  # nothing of them is large enough to be swapped
                continue
            if recipe == "int8" and strategy not in HOLDS_INT8:
                continue
            if recipe == "joined" and SHARED.get(strategy, 1) > 1:  # a ConfigError says so
                continue
            if (recipe == "moe" and strategy in NO_MOE) or (strategy == "fsdp_experts" and recipe != "moe"):
                continue
            if recipe in ARCHITECTURES and strategy not in KINDS:
                continue
            if strategy in IN_PARTS and RECIPES[recipe].get("recipe", recipe) == "lora_finetune":
                continue
            marks = [] if (strategy, recipe) in SAMPLE else [pytest.mark.full]
            if strategy in IN_PARTS:
                marks.append(NEEDS_MODEL_PARALLELISM)
            yield pytest.param(strategy, recipe, marks=[pytest.mark.launch, *marks], id=f"{strategy}-{recipe}")


def test_every_strategy_file_is_covered():
    assert {f.stem for f in (ROOT / "accelerate_configs").glob("*.yaml")} == set(STRATEGIES)


def test_the_sample_has_each_strategy_file_and_each_case():
    assert {strategy for strategy, _ in SAMPLE} == set(STRATEGIES) - {"single"}
    assert {case for _, case in SAMPLE} == set(RECIPES) - {"composite_lora", "vocabulary"}


@pytest.mark.parametrize("strategy, case", list(cases()))
def test_same_training_as_one_process(launches, strategy, case):
    processes = STRATEGIES[strategy]
    flags = {"recipe": case, "model": "llama", "between": True} | RECIPES[case]
    if strategy == "zero3_nvme":  # swapping to disk starts at tensors of 1 MiB a rank
        flags |= {"model": "wide", "learning_rate": 1e-3 if case == "causal_lm" else 2.5e-3}
    recipe = flags["recipe"]
    # the loss of a router is one of a whole micro-batch, which must therefore be the same
    accumulation = processes if case == "router" else 1
    one, run = (
        launches(
            "single",
            1,
            4 // accumulation,
            accumulation,
            **{key: value for key, value in flags.items() if key != "padding_free"},
        ),
        launches(strategy, processes, 4 * SHARED.get(strategy, 1) // processes, 1, **flags),
    )

    assert [s["ids"] for s in run.steps] == [s["ids"] for s in one.steps]
    loss, norm = largest_difference(run.losses, one.losses), largest_difference(run.norms, one.norms)
    ours, reference = run.state(), one.state()
    weight, far = weight_differences(ours, reference)
    asked = run.event("run_start")["config"]
    held_out = held_out_difference(run, one) if flags["between"] else None
    held = [max(rank["parameters"] for rank in r.event("memory")["per_rank_bytes"]) for r in (run, one)]
    record("parity", strategy=strategy, recipe=case, processes=processes, loss=loss, norm=norm, held_out=held_out,
           weight=weight, fall=1 - run.losses[-1] / run.losses[0], model=flags["model"], rate=asked["learning_rate"],
           epsilon=asked["adam_epsilon"], held=held)  # fmt: skip
    assert loss < TOLERANCE and norm < TOLERANCE
    # Adam divides by the root of the squared gradient: where that is near zero, rounding moves a weight by a
    # share of the learning rate. Such weights are few, and bounded by a hundredth of one step.
    assert far < 1e-3 and weight < 1e-2 * max(s["learning_rate"] for s in one.steps)
    for moment in ("exp_avg", "exp_avg_sq"):
        assert moment_difference(ours, reference, moment) < MOMENT_TOLERANCE
    assert run.losses[-1] < FALLS.get(case, 0.75) * run.losses[0]
    for live, name in ((one.event("run_start")["live"], "single"), (run.event("run_start")["live"], strategy)):
        assert LIVE[name].items() <= live.items(), f"{name} runs as {live}"
    assert run.event("run_start")["live"]["strategy"] == run.event("run_start")["plan"]["name"], "what was announced"
    if not (case == "ia3" and strategy.startswith("fsdp")):  # FSDP2 shards rows, and some of IA3's tensors have one row
        trains_all = recipe == "causal_lm" and case not in ("composite", "images")
        assert_sharded(strategy, run, processes, trains_all=trains_all)
    if flags["between"]:
        rounded = case == "int8" and strategy == "zero2_offload"
        assert_same_between_the_steps(run, one, INT8_TOLERANCE if rounded else TOLERANCE)


def assert_same_between_the_steps(run: Run, one: Run, tolerance: float = TOLERANCE) -> None:
    """Held-out losses and generated tokens of every evaluation, and the steps that are done again after the rollback."""
    assert [s["step"] for s in run.steps] == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    (went_back,) = [e for e in run.events if e["type"] == "rollback" and e["phase"] == "outcome"]
    assert went_back["step"] == 4 and went_back["differing"] == {}
    assert largest_difference(run.losses[6:8], run.losses[4:6]) < 1e-6, "the rollback brought back the very state"
    ours, reference = evaluations(run), evaluations(one)
    assert [e["step"] for e in ours] == [e["step"] for e in reference] == [0, 2, 4, 6, 8, 10]
    assert held_out_difference(run, one) < tolerance and ours[-1]["loss"] < ours[0]["loss"]
    assert [e["samples"] for e in ours] == [e["samples"] for e in reference]


def evaluations(run: Run) -> list[dict[str, Any]]:
    return [e for e in run.events if e["type"] == "eval"]


def held_out_difference(run: Run, one: Run) -> float:
    return largest_difference(*([e["loss"] for e in evaluations(r)] for r in (run, one)))


def reference_run(folder: Path, run: Run, *, rate: float, clip: float, weight_decay: float = 0.1):
    """Losses, norms and weights of the samples of ``run`` in plain torch: nothing of the project's training is used.

    Linear over the steps with 2 of warm-up. ``clip`` is the bound on the norm; inf never clips.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    lines = (folder / "chats.jsonl").read_text().splitlines()[:8]
    rows = causal_rows(AutoTokenizer.from_pretrained(folder / "llama"), [json.loads(line)["messages"] for line in lines])
    matrices, vectors = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: (k + 1) / 2 if k < 2 else (len(run.steps) - k) / (len(run.steps) - 2)
    )
    losses, norms = [], []
    for step in run.steps:
        loss = mean_loss(model, [rows[i] for i in step["ids"]])
        loss.backward()
        # in fp64: what `clip_grad_norm_` loses in fp32 depends on the CPU, and is more than 1e-6 on some
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm.float())
        norms.append(norm.item())
        losses.append(loss.item())
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.named_parameters())


def assert_equals_reference(run: Run, reference, tolerance: float) -> None:
    losses, norms, weights = reference
    assert largest_difference(run.losses, losses) < tolerance
    assert largest_difference(run.norms, norms) < tolerance
    state = run.state()
    assert {name for name in state if name.startswith("weight/")} == {f"weight/{name}" for name in weights}
    # Adam divides by the root of the squared gradient: where that is near zero, rounding moves a weight by a share of the rate.
    thousandth_of_a_step = 1e-3 * max(step["learning_rate"] for step in run.steps)
    for name, weight in weights.items():
        assert (state[f"weight/{name}"] - weight).abs().max() < max(tolerance, thousandth_of_a_step), name


@pytest.mark.launch
def test_one_process_trains_as_plain_torch_does(launches):
    """Every other comparison is of the project with itself."""
    run = launches("single", 1, 4, 1)
    assert_equals_reference(run, reference_run(launches.tiny, run, rate=3e-3, clip=1.0), 1e-6)
    assert min(run.norms) > 1, "the norm must be clipped for this to prove anything"


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.full), pytest.param("fsdp", marks=pytest.mark.full)]
)
def test_the_load_of_experts_is_balanced_and_logged_as_in_one_process(launches, strategy):
    """The load is one of a micro-batch, so both runs have the same micro-batches."""
    flags = {"recipe": "causal_lm", "model": "mixtral", "router_aux_loss_coef": 0.02, "between": False}
    one, run = launches("single", 1, 2, 2, **flags), launches(strategy, 2, 2, 1, **flags)
    assert largest_difference(run.losses, one.losses) < TOLERANCE and largest_difference(run.norms, one.norms) < TOLERANCE
    for name in ("router_aux_loss", "expert_load"):
        ours, reference = ([step["metrics"][name] for step in r.steps] for r in (run, one))
        assert largest_difference(ours, reference) < TOLERANCE and len(set(ours)) > 1
    without = launches("single", 1, 2, 2, **flags | {"router_aux_loss_coef": 0})
    assert largest_difference(one.norms, without.norms) > 1e-3, "the loss that balances is trained"


@pytest.mark.launch
@pytest.mark.parametrize("strategy", ["zero3_pieces", pytest.param("ddp", marks=pytest.mark.full)])
def test_a_norm_bound_of_0_never_clips(launches, tmp_path_factory, strategy):
    """And under ZeRO-3 the model is cut into many buckets and sub-groups, as a large one is."""
    launcher = pieces(tmp_path_factory.mktemp("pieces"), 3) if strategy == "zero3_pieces" else strategy
    run = launches(launcher, 2, 2, 1, max_grad_norm=0)
    clipped = launches("single", 1, 4, 1)
    assert_equals_reference(run, reference_run(launches.tiny, run, rate=3e-3, clip=float("inf")), TOLERANCE)
    # Adam hides the gradient's scale, but not its moments
    assert moment_difference(run.state(), clipped.state(), "exp_avg") > 0.1
    if strategy == "zero3_pieces":
        assert run.event("run_start")["live"]["sub_groups"] > 3


def pieces(folder: Path, stage: int) -> list[str]:
    """Launcher flags for ZeRO with buckets and sub-groups of a fraction of the tiny model, which fits whole into the usual."""
    config = json.loads((ROOT / "ds_configs" / f"zero{stage}.json").read_text())
    config["zero_optimization"] |= {"reduce_bucket_size": 2e4, "stage3_prefetch_bucket_size": 2e4, "sub_group_size": 2e4}
    (folder / "pieces.json").write_text(json.dumps(config))
    return ["--use_deepspeed", "--zero3_init_flag", "true", "--deepspeed_config_file", str(folder / "pieces.json")]


def moment_difference(ours: dict, reference: dict, moment: str) -> float:
    """Largest difference of a moment, relative to the largest of its tensor. Attention does not change with a bias of its
    keys, whose gradients are therefore nothing but rounding."""
    names = [name for name in reference if name.startswith(f"{moment}/") and not name.endswith("k_proj.bias")]
    assert names
    return max(((ours[n] - reference[n]).abs().max() / reference[n].abs().max()).item() for n in names)


def weight_differences(ours: dict, reference: dict) -> tuple[float, float]:
    """(largest absolute difference of a weight, share of weights that differ by more than the tolerance)."""
    assert set(ours) == set(reference)
    largest, far, count = 0.0, 0, 0
    for name in reference:
        if name.startswith("weight/"):
            difference = (ours[name] - reference[name]).abs()
            largest = max(largest, difference.max().item())
            far += int((difference > TOLERANCE).sum())
            count += difference.numel()
    return largest, far / count


def assert_sharded(strategy: str, run: Run, processes: int, *, trains_all: bool) -> None:
    """Bytes that each rank holds are what the stage promises, plus padding that is stated here."""
    memory = run.event("memory")
    trained = 4 * memory["trained_parameters"]  # bytes of fp32
    tensors = {k: 4 * t.numel() for k, t in run.state().items() if k.startswith("weight/")}
    largest, padding = max(tensors.values()), 4 * 2 * processes * (len(tensors) + 1)
    shards = {"ddp": 1, "zero3_hpz": 4}.get(strategy, 2)
    # masters are the weights themselves but under DeepSpeed, which keeps fp32 copies
    optimizer = 3 if strategy.startswith("zero") else 2
    small = sum(size for size in tensors.values() if size <= 4 * 10 * 128)  # ZeRO-3 keeps vectors whole
    counters = 64 * (len(tensors) + 1)
    # a tensor that straddles two partitions is held whole by both
    straddling = largest if strategy in ("zero1", "zero2", "zero2_offload") else 0
    # beside the buffer that they are reduced into, the CPU's optimizer has a copy
    copies = 2 if strategy in ("zero3_offload", "zero3_offload_optimizer") else 1
    ranks = memory["per_rank_bytes"]
    masters = 4 * run.event("run_start")["live"]["masters"]
    if strategy == "zero3_nvme":
        on_disk = sum(rank["swapped_out"] for rank in ranks)
        assert on_disk >= 3 * trained - 3 * small, "masters and two moments must be on disk"
        for rank in ranks:  # the group of vectors is too small to be swapped, and its gradients have an fp32 copy
            assert rank["gradients"] <= (trained + small) / shards + 2 * padding  # the buffer that they are swapped out from
            assert rank["optimizer"] <= 3 * small / shards + padding
        assert masters <= small / shards + padding
        return
    if strategy == "fsdp_tensor":  # the processes of a group hold copies of vectors
        trained += small
    assert 0.9 * trained / shards <= masters <= trained / shards + padding
    for rank in ranks:
        assert 0.9 * copies * trained / shards <= rank["gradients"] <= copies * (trained / shards + padding) + straddling
        share = optimizer * trained / shards
        assert 0.9 * share <= rank["optimizer"] <= share + 3 * padding + counters
        if trains_all:
            sharded = strategy.startswith(("zero3", "fsdp"))
            second = (trained - small) / 2 if strategy == "zero3_hpz" else 0  # two processes share another copy
            part = trained / shards + second + small + padding if sharded else trained
            assert (0.9 * trained / shards + second if sharded else trained) <= rank["parameters"] <= part
    for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", optimizer)):
        assert sum(rank[kind] for rank in ranks) >= copies * trained, f"{kind}: together the ranks hold the whole"


@pytest.mark.launch
def test_zero3_gathers_every_layer_and_zero2_does_not(tiny, tmp_path):
    """With a persistence threshold of 0 nothing stays whole, and each step gathers forward and backward."""
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    strict = tmp_path / "zero3_strict.json"
    strict.write_text(json.dumps(config))
    flags = dict(
        model_name_or_path=tiny / "llama", train_file=tiny / "chats.jsonl", validation_split_percentage=0, block_size=64,
        per_device_train_batch_size=2, max_train_steps=4, spy={},
    )  # fmt: skip
    launcher = ["--use_deepspeed", "--zero3_init_flag", "true", "--deepspeed_config_file"]
    three = launch([*launcher, str(strict)], 2, "causal_lm", tmp_path / "three", **flags)
    two = launch("zero2", 2, "causal_lm", tmp_path / "two", **flags)

    assert three.event("run_start")["live"]["zero_stage"] == 3
    tensors = [t for name, t in three.state().items() if name.startswith("weight/")]
    whole = sum(4 * t.numel() for t in tensors)
    for rank in three.event("memory")["per_rank_bytes"]:
        assert rank["parameters"] <= whole / 2 + 4 * 2 * len(tensors)
    gathers = calls(tmp_path / "three")["all_gather_into_tensor"] / 4
    # coalesced per module and kind; at least once forward and once backward for each of the two layers
    assert gathers >= 2 * 2
    assert calls(tmp_path / "three")["reduce_scatter_tensor"] >= 4
    assert calls(tmp_path / "two").get("all_gather_into_tensor", 0) / 4 < gathers
    assert largest_difference(three.losses, two.losses) < TOLERANCE


@pytest.mark.launch
def test_ddp_sends_gradients_once_a_step(launches):
    """Whatever the accumulation: only the last micro-batch's backward reduces."""
    run = launches("ddp", 2, 1, 4, spy={})
    assert len(run.steps) == 10
    assert calls(run.output)["gradient buckets"] == 10  # the tiny model fits into one


def record(table: str, **row: Any) -> None:
    """Keep what was measured, where the environment asks for it, for the tables in docs/measured/."""
    file = os.environ.get("ZEROBOOK_PARITY_RECORD")
    if file:
        with Path(file).open("a") as handle:
            handle.write(json.dumps({"table": table, **row}) + "\n")
