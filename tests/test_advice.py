"""Advice: the questions that people ask, and that the answer is the best of the planner's own table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.planning import FILES, MODELS, ROOT, WIDE, rows_of, shortened
from zerobook.config_sources import ConfigSources
from zerobook.plan.advise import Advice, Request, advise
from zerobook.plan.hardware import Cluster, cluster
from zerobook.plan.rows import SAME_RATE
from zerobook.training.recipe_file import recipe_class
from zerobook.utils.units import size

pytestmark = pytest.mark.usefixtures("traced_once")
full = pytest.mark.full
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "head_dim": 128,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
SLOW = {"interconnect": "400Gbps"}
BLENDERBOT = {"max_source_length": 128, "max_target_length": 128}
LONG = {"block_size": 131072, "per_device_train_batch_size": 1}
QUESTIONS = {
    "Qwen3-8B, LoRA, 24 GB": ("lora_finetune", "qwen3_8b", {"gpu": "rtx-4090"}, {}),
    "Llama-3.1-70B on 2 x 8 A100": ("causal_lm", "llama3.1_70b", {"gpus": "8", "nodes": "2", "gpu": "a100-80gb", **SLOW}, {}),
    "Falcon-40B, QLoRA, 48 GB": ("lora_finetune", "falcon_40b", {"gpu": "a6000"}, {"load_in_4bit": True}),
    "Llama-2-7B on 4 A100 of 40 GB": ("causal_lm", "llama2_7b", {"gpus": "4", "gpu": "a100-40gb"}, {}),
    "Mixtral, LoRA, 8 H100": ("lora_finetune", "mixtral_8x7b", {"gpus": "8", "gpu": "h100-80gb"}, {}),
    "GPT-2 XL, 24 GB": ("causal_lm", "gpt2_xl", {"gpu": "rtx-3090"}, {}),
    "BlenderBot, 2 of 24 GB": ("seq2seq_chatbot", "blenderbot_400m", {"gpus": "2", "gpu": "titan-rtx"}, BLENDERBOT),
    "8B at 131k tokens": ("causal_lm", "llama3.1_8b", {"gpus": "8", "gpu": "h100-80gb"}, LONG),
    "SmolLM2 on 2 x 2 L40S": ("causal_lm", "smollm2_1.7b", {"gpus": "2", "nodes": "2", "gpu": "l40s", **SLOW}, {}),
    "Qwen3-30B-A3B, LoRA, 8 H100": ("lora_finetune", "qwen3_30b_a3b", {"gpus": "8", "gpu": "h100-80gb"}, {}),
}
"""Question -> (recipe, model, cluster, flags)."""


def ask(recipe: str, model: Path, where: Cluster, flags: dict, files: Sequence[Path] = FILES) -> tuple[Request, Advice]:
    kind = recipe_class(str(ROOT / "recipes" / f"{recipe}.py"))
    config = kind.config_class(model_name_or_path=str(model), mixed_precision=where.half_precision, **flags)
    sources = ConfigSources(dict.fromkeys(kind.config_class.model_fields, "default"))
    sources.update(dict.fromkeys([*flags, "model_name_or_path", "mixed_precision"], "flag"))
    request = Request(ROOT / "recipes" / f"{recipe}.py", kind(config), sources, list(files))
    return request, advise(request, where)


def assert_best_of_table(request: Request, advice: Advice, where: Cluster) -> None:
    """Plan the recommended settings under all strategy files: none that fits as the recommended one does is faster."""
    best = advice.best
    assert best is not None and best.row.fits
    _, rows = request.plan(best.recipe, best.flags, where, FILES)
    planned = {row.file: row for row in rows}
    assert planned[best.row.file].tokens_per_second == best.row.tokens_per_second
    for row in rows:
        idles = (row.file == "single") != (where.ranks == 1) and not row.offloads
        if row.fits and not row.tight and not idles and (best.row.offloads or not row.offloads):
            assert best.row.tokens_per_second * SAME_RATE >= row.tokens_per_second, row.file


EXPECTED = {
    "Qwen3-8B, LoRA, 24 GB": ("lora", False),
    "Llama-3.1-70B on 2 x 8 A100": ("full", True),
    "Falcon-40B, QLoRA, 48 GB": ("qlora", False),
    "Llama-2-7B on 4 A100 of 40 GB": ("full", True),
    "Mixtral, LoRA, 8 H100": ("lora", False),
    "BlenderBot, 2 of 24 GB": ("full", False),
    "8B at 131k tokens": ("full", False),
    "SmolLM2 on 2 x 2 L40S": ("full", False),
    "Qwen3-30B-A3B, LoRA, 8 H100": ("lora", False),
}
"""Question -> the method that is recommended, and whether the strategy offloads weights or optimizer state."""
SAMPLE = {"Llama-2-7B on 4 A100 of 40 GB", "SmolLM2 on 2 x 2 L40S"}
"""Questions of every test run."""


@pytest.mark.parametrize("question", [pytest.param(name, marks=[] if name in SAMPLE else full) for name in EXPECTED])
def test_the_answer_is_the_best_of_the_planners_table(question, tmp_path):
    recipe, model, hardware, flags = QUESTIONS[question]
    (tmp_path / "qwen3_30b_a3b.json").write_text(json.dumps(QWEN3_30B))
    folder = tmp_path if model == "qwen3_30b_a3b" else MODELS
    where = cluster(**hardware)
    request, advice = ask(recipe, folder / f"{model}.json", where, flags)
    assert advice.best is not None
    assert (advice.best.method, advice.best.row.offloads) == EXPECTED[question]
    assert_best_of_table(request, advice, where)


@full
def test_all_weights_of_gpt2_xl_are_trained_on_24_gb_and_lora_is_the_alternative():
    """Optimizer state in host memory or of 8 bits makes room: training all weights is not given up for LoRA."""
    recipe, model, hardware, flags = QUESTIONS["GPT-2 XL, 24 GB"]
    where = cluster(**hardware)
    request, advice = ask(recipe, MODELS / f"{model}.json", where, flags)
    assert advice.best is not None and advice.best.method == "full"
    assert advice.best.row.offloads or advice.best.config.optimizer == "adamw_8bit"
    assert_best_of_table(request, advice, where)


def test_offload_is_recommended_where_nothing_fits_without_it_and_lora_is_the_alternative():
    where = cluster(gpu="rtx-3090")
    request, advice = ask("causal_lm", WIDE, where, {"per_device_train_batch_size": 8, "optimizer": "adamw"})
    assert advice.best is not None and advice.best.row.file == "zero2_offload" and advice.best.method == "full"
    assert advice.alternative is not None and advice.alternative.method == "lora"
    assert f"{size(advice.best.row.memory.host)} of host RAM a node" in dict(advice.describe(where))["memory"]
    assert "host RAM" not in advice.alternative.describe(where)
    assert_best_of_table(request, advice, where)


def test_a_smaller_micro_batch_is_not_taken_where_recomputed_activations_are_faster(tmp_path):
    """With offload, each micro-batch waits for the weights, so recomputing activations costs less than small micro-batches."""
    model = shortened(tmp_path, "llama2_7b", num_hidden_layers=8)
    where = cluster(gpus="2", gpu="rtx-3090", gpu_memory="16GB")
    files = [file for file in FILES if file.stem == "fsdp_offload"]
    flags = {"optimizer": "adamw", "block_size": 2048, "per_device_train_batch_size": 8}
    _, advice = ask("causal_lm", model, where, flags, files)
    assert advice.best is not None and advice.best.row.offloads
    assert advice.best.flags["activation_checkpointing"] == "full"
    assert "per_device_train_batch_size" not in advice.best.flags, "the one that was asked for"


def test_activations_in_host_memory_cross_pcie_which_takes_time():
    where = cluster(gpu="a100-80gb")
    flags = {"mixed_precision": "bf16", "per_device_train_batch_size": 1}
    recomputed = rows_of("causal_lm", WIDE, where, ("zero2",), **flags, activation_checkpointing="full")["zero2"]
    offloaded = rows_of("causal_lm", WIDE, where, ("zero2",), **flags, activation_checkpointing="offload")["zero2"]
    assert offloaded.memory.host > recomputed.memory.host == 0
    assert offloaded.time.offload > recomputed.time.offload == 0


def test_a_run_with_room_is_recommended_and_a_faster_one_that_is_tight_is_named():
    flags = {"optimizer": "adamw", "block_size": 256, "per_device_train_batch_size": 1}
    planned = {"mixed_precision": "bf16", "activation_checkpointing": "offload", "per_device_eval_batch_size": 1}
    roomy = rows_of("causal_lm", WIDE, cluster(gpu="a100-80gb"), ("single",), **planned, **flags)["single"]
    where = cluster(gpu_memory=f"{int(roomy.memory.total / 0.95)}B")
    _, advice = ask("causal_lm", WIDE, where, flags)
    assert advice.best is not None and advice.best.row.offloads and not advice.best.row.tight
    assert advice.second is not None and advice.second.row.file == "single" and advice.second.row.tight
    assert "tight" in dict(advice.describe(where))["second best"]


def test_rows_are_not_shared_among_ranks_where_a_smaller_micro_batch_has_room():
    files = [file for file in FILES if file.stem in ("fsdp", "fsdp_context")]
    _, advice = ask("causal_lm", MODELS / "llama2_7b.json", cluster(gpus="8", gpu="a100-80gb"), {}, files)
    assert advice.best is not None and advice.best.row.file == "fsdp" and not advice.best.row.tight


@pytest.mark.parametrize("nodes, second", [("1", None), ("2", "zero3_hpz")])
def test_hpz_is_no_second_choice_on_one_node_where_it_is_zero3(nodes, second):
    files = [file for file in FILES if file.stem in ("zero3", "zero3_hpz")]
    where = cluster(gpus="4", nodes=nodes, gpu="a100-80gb", interconnect="3200Gbps")
    _, advice = ask("causal_lm", WIDE, where, {"block_size": 256}, files)
    names = {candidate.row.file for candidate in (advice.best, advice.second) if candidate is not None}
    assert names == {"zero3", second} - {None}


def test_hpz_on_one_node_is_advised_on_if_the_other_file_leaves_gpus_idle():
    files = [file for file in FILES if file.stem in ("single", "zero3_hpz")]
    _, advice = ask("causal_lm", WIDE, cluster(gpus="4", gpu="a100-80gb"), {"block_size": 256}, files)
    assert advice.best is not None and advice.best.row.file == "zero3_hpz"
    assert advice.second is None
