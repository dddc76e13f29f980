"""`resolve`: where an environment leads, and every disagreement between YAML, JSON and flags."""

from __future__ import annotations

import json

import pytest

from recipes.lora_finetune import LoraConfig
from tests.harness import ROOT
from zerobook.config import RecipeConfig, Resolved
from zerobook.doctor import inspect_launch
from zerobook.resolve import Hardware, LaunchPlan, resolve

CPU = Hardware()
A100 = Hardware(gpus=8, gpu_name="A100", flash_attention=True)
WORKER = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}


def plan_for(environ, hardware=CPU, explicit=None, kind=RecipeConfig, **given) -> tuple[LaunchPlan, RecipeConfig]:
    config = kind(**given)
    sources = Resolved({k: f"flag --{k}" if k in given else "default" for k in kind.model_fields})
    return resolve(environ, hardware, config, sources, explicit), config


def deepspeed(tmp_path, **config) -> dict[str, str]:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | config))
    return WORKER | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


def test_plain_processes():
    assert plan_for({})[0].name == "one process"
    plan, _ = plan_for(WORKER)
    assert (plan.name, plan.backend, plan.world_size) == ("DDP", "gloo", 2)
    assert plan_for(WORKER, A100)[0].backend == "nccl"


def test_use_cpu_never_drops_sharding(tmp_path):
    plan, _ = plan_for(deepspeed(tmp_path) | {"ACCELERATE_USE_CPU": "true"}, A100)
    assert (plan.kind, plan.zero_stage, plan.device, plan.backend) == ("deepspeed", 2, "cpu", "gloo")


@pytest.mark.parametrize("file", sorted((ROOT / "accelerate_configs").glob("*.yaml")), ids=lambda f: f.stem)
@pytest.mark.parametrize("hardware", [CPU, A100], ids=["cpu", "8xA100"])
def test_every_shipped_file_resolves_on_a_laptop_and_on_eight_gpus(file, hardware, monkeypatch):
    monkeypatch.chdir(ROOT)
    processes = 1 if file.stem == "single" else 4 if hardware is CPU else 8
    plan, problems, _, _ = inspect_launch(["--config_file", str(file), "--num_processes", str(processes)], hardware)
    assert plan is not None and not problems and not plan.problems
    assert plan.world_size == processes
    stem = file.stem
    assert plan.kind == {"single": "single", "ddp": "ddp"}.get(stem, "deepspeed" if stem.startswith("zero") else "fsdp")
    assert plan.zero_stage == (int(stem[4]) if stem.startswith("zero") else None)
    if plan.kind == "fsdp":
        assert (plan.replicate, plan.shard) == ((2, processes // 2) if stem == "fsdp_hybrid" else (1, processes))
    assert ("offload" in stem or "nvme" in stem) == (plan.offload_optimizer != "none")
    text = json.dumps(plan.deepspeed_config or {})
    assert '"enabled": "auto"' not in text and '"nvme_path": "auto"' not in text
    comment = file.read_text().split("compute_environment")[0]
    for heading in ("Purpose:", "Memory:", "Traffic:", "Choose:", "Run on:"):
        assert f"# {heading}" in comment


def test_precision_has_one_home(tmp_path):
    fp16 = deepspeed(tmp_path, fp16={"enabled": "true", "initial_scale_power": 15})
    assert plan_for(fp16, A100)[0].precision == "fp16"
    plan, _ = plan_for(fp16, CPU)
    (problem,) = plan.problems
    assert "ds.json: fp16.enabled is true" in problem and "--mixed_precision no" in problem
    for given, explicit in (({"mixed_precision": "no"}, None), ({}, "no"), ({"mixed_precision": "bf16"}, None)):
        plan, _ = plan_for(fp16, CPU, explicit, **given)
        assert not plan.problems and plan.deepspeed_config["fp16"]["enabled"] is False
        assert plan.deepspeed_config["fp16"]["initial_scale_power"] == 15
        assert any("fixes fp16.enabled" in note for note in plan.notes)
    plan, _ = plan_for(deepspeed(tmp_path) | {"ACCELERATE_MIXED_PRECISION": "bf16"}, A100)
    assert plan.precision == "bf16" and plan.deepspeed_config["bf16"]["enabled"] is True
    both = deepspeed(tmp_path, fp16={"enabled": True}, bf16={"enabled": True})
    assert any("both fp16.enabled and bf16.enabled" in p for p in plan_for(both, A100)[0].problems)


def test_batch_sizes_that_disagree_in_three_layers_are_all_named(tmp_path):
    environ = deepspeed(tmp_path, train_batch_size=99, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=5)
    environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "2"
    plan, _ = plan_for(environ, gradient_accumulation_steps=4, per_device_train_batch_size=8, max_grad_norm=0.5)
    text = "\n".join(plan.problems)
    assert len(plan.problems) == 3
    assert "2 in the Accelerate YAML or launcher, 5 in" in text and "4 in flag --gradient_accumulation_steps" in text
    assert "train_micro_batch_size_per_gpu is 3, but per_device_train_batch_size is 8" in text
    assert "train_batch_size is 99, but 8 per device x 4 accumulation x 2 processes = 64" in text


def test_a_value_that_only_one_layer_says_is_taken(tmp_path):
    plan, config = plan_for(deepspeed(tmp_path, gradient_accumulation_steps=4, gradient_clipping=0.3))
    assert not plan.problems
    assert config.gradient_accumulation_steps == 4 and config.max_grad_norm == 0.3
    assert plan.deepspeed_config["train_batch_size"] == 8 * 4 * 2
    plan, _ = plan_for(deepspeed(tmp_path, gradient_clipping=0.3), max_grad_norm=1.0)
    assert any("gradient_clipping is 0.3, but max_grad_norm is 1.0" in p for p in plan.problems)


def test_optimizer_section_is_filled_from_the_flags(tmp_path):
    section = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
    plan, _ = plan_for(deepspeed(tmp_path, optimizer=section), learning_rate=2e-4, adam_beta2=0.95)
    params = plan.deepspeed_config["optimizer"]["params"]
    assert (params["lr"], params["weight_decay"], params["betas"]) == (2e-4, 0.0, [0.9, 0.95])


@pytest.mark.parametrize(
    "content, expected",
    [("{", "not valid JSON"), ("[1]", "expected a JSON object"), ("{}", None), ('{"a": 1}', "zero_optimization is missing")],
)
def test_a_bad_json_is_named(tmp_path, content, expected):
    file = tmp_path / "ds.json"
    file.write_text(content)
    environ = WORKER | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    plan, _ = plan_for(environ)
    assert expected is None or any(expected in p and "ds.json" in p for p in plan.problems)
    gone, _ = plan_for(environ | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"})
    assert any("nowhere.json: the DeepSpeed config cannot be read" in p for p in gone.problems)


def test_an_inline_deepspeed_config_of_accelerate_config_works():
    environ = WORKER | {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0",
    }
    plan, config = plan_for(environ)
    assert (plan.zero_stage, plan.offload_optimizer, plan.offload_param) == (3, "cpu", "none")
    assert config.gradient_accumulation_steps == 4 and not plan.problems


@pytest.mark.parametrize(
    "environ, given, expected",
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "Set fsdp_version: 2"),
        ({}, {"device_map": "auto"}, "cannot be combined with 2 processes"),
        ({}, {"attn_implementation": "flash_attention_2"}, "there is no GPU here"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "'fp8' is not supported"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16 does not train on a CPU"),
    ],
)
def test_choices_that_cannot_work(environ, given, expected):
    plan, _ = plan_for(WORKER | environ, **given)
    assert any(expected in p for p in plan.problems)


def test_quantised_weights_are_refused_where_they_would_be_moved(tmp_path):
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    plan, _ = plan_for(deepspeed(tmp_path, zero_optimization=zero), kind=LoraConfig, load_in_4bit=True)
    assert any("loses the quantisation state" in p for p in plan.problems)
    plan, _ = plan_for(deepspeed(tmp_path), kind=LoraConfig, load_in_4bit=True)
    assert not plan.problems
