"""`resolve`: where an environment leads, and every disagreement between YAML, JSON and flags."""

from __future__ import annotations

import copy
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig
from tests.harness import ROOT, staged
from tests.versions import shipped_strategies
from zerobook.checkpoint import store
from zerobook.cli.doctor import inspect_launch
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.errors import ConfigError
from zerobook.launch import account, ops
from zerobook.launch.resolve import Hardware, resolve
from zerobook.strategy.launch_plan import LaunchPlan

CPU = Hardware()
A100 = Hardware(gpus=8, gpu_name="A100", flash_attention=True)
WORKER = {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}


HYBRID = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
}


def plan_for(environ, hardware=CPU, explicit=None, kind=RecipeConfig, **given) -> tuple[LaunchPlan, RecipeConfig]:
    config = kind(**given)
    sources = ConfigSources({k: f"flag --{k}" if k in given else "default" for k in kind.model_fields})
    plan, resolved, _ = resolve(environ, hardware, config, sources, explicit)
    assert config == kind(**given), "the config that is resolved is not changed"
    return plan, resolved


@pytest.mark.parametrize(
    "kind, word", [("bert", "encoder"), ("distilbert", "encoder"), ("blip", "no class"), ("vit", "no class"), ("llama", None),
                   ("bart", None), ("llava", None), ("mllama", None), ("unknown", None)]
)  # fmt: skip
def test_a_model_that_does_not_write_text_is_refused_before_the_start(tmp_path, kind, word):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))

    problems = plan_for(WORKER, model_name_or_path=str(tmp_path))[0].problems

    assert len(problems) == (word is not None) and (word is None or (kind in problems[0] and word in problems[0]))


def deepspeed(tmp_path, **config) -> dict[str, str]:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}} | config))
    return WORKER | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}


def test_plain_processes():
    assert plan_for({})[0].name == "one process"
    plan, _ = plan_for(WORKER)
    assert (plan.name, plan.backend, plan.world_size) == ("DDP", "gloo", 2)
    assert plan_for(WORKER, A100)[0].backend == "nccl"


def test_a_gpu_that_only_emulates_bf16_does_not_count_as_having_it(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    plan, _ = plan_for({"ACCELERATE_MIXED_PRECISION": "bf16"}, Hardware.detect())
    assert plan.problems == ["mixed_precision: bf16 is not supported by V100. Use fp16."]


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A machine with a GPU of some compute capability, and a package ``flash_attn`` with some contents."""
    import torch
    import transformers.utils

    def detected(capability=(8, 0), package=None, known=True) -> Hardware:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability if index else (9, 0))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
        monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: known)
        if package is not None:
            (tmp_path / "flash_attn.py").write_text(package)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
        return Hardware.detect()

    yield detected
    sys.modules.pop("flash_attn", None)


FLASH = "flash_attn_func = flash_attn_varlen_func = print"


@pytest.mark.parametrize(
    "machine, said",
    [
        ({"package": FLASH}, None),
        ({}, "is not installed"),
        ({"package": FLASH, "capability": (7, 5)}, "compute capability 7.5"),
        ({"package": "raise ImportError('undefined symbol: _ZN3c10')"}, "undefined symbol: _ZN3c10"),
        ({"package": "raise OSError('libcudart.so.11.0: cannot open')"}, "libcudart.so.11.0"),
        ({"package": "def attention(): ..."}, "flash_attn_func"),
        ({"package": FLASH, "known": False}, "transformers"),
    ],
)
def test_flash_attention_is_there_where_it_runs(gpu, machine, said):
    """A T4 has a package that imports and no kernels; a build for another torch is installed and does not import."""
    hardware = gpu(**machine)
    assert hardware.flash_attention is (said is None)
    plan, _ = plan_for({}, hardware, attn_implementation="flash_attention_2", mixed_precision="bf16")
    assert [said in problem for problem in plan.problems] == ([] if said is None else [True])


@pytest.mark.parametrize(
    "kind, given, refused",
    [
        (RecipeConfig, {}, True),
        (RecipeConfig, {"mixed_precision": "bf16"}, False),
        (RecipeConfig, {"dtype": "bfloat16"}, True),  # trained weights are fp32 without mixed precision
        (LoraConfig, {}, True),
        (LoraConfig, {"dtype": "bfloat16"}, False),
        (LoraConfig, {"dtype": "auto"}, False),  # its config says, once it is read
        (LoraConfig, {"mixed_precision": "bf16"}, False),
    ],
)
def test_flash_attention_is_refused_in_fp32(kind, given, refused):
    plan, _ = plan_for({}, A100, kind=kind, attn_implementation="flash_attention_2", **given)
    assert ["fp32" in problem for problem in plan.problems] == ([True] if refused else [])


SRUN = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "8(x2)", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}


def test_a_number_of_processes_without_the_rank_on_the_machine_is_refused():
    (problem,) = plan_for({"WORLD_SIZE": "2", "RANK": "0"}, A100)[0].problems

    assert "WORLD_SIZE is 2" in problem and "LOCAL_RANK" in problem
    assert not plan_for({"WORLD_SIZE": "1", "RANK": "0"}, A100)[0].problems


def test_srun_that_shows_each_task_one_gpu_is_refused_with_the_flag_that_helps():
    one = Hardware(gpus=1, gpu_name="A100")
    for local in ("0", "7"):  # all ranks say the same: one that went on would wait for the others
        (problem,) = plan_for(SRUN | {"SLURM_LOCALID": local, "LOCAL_RANK": local}, one)[0].problems
        assert "8 processes on this machine, of which this one sees 1 GPU" in problem
        assert "--gpu-bind=none" in problem and "--num_processes" not in problem
    assert not plan_for(SRUN, A100)[0].problems
    assert not plan_for(SRUN | {"SLURM_TASKS_PER_NODE": "1(x16)"}, one)[0].problems
    mixed = SRUN | {"SLURM_NTASKS": "6", "WORLD_SIZE": "6", "SLURM_TASKS_PER_NODE": "4,2"}
    assert not plan_for(mixed, Hardware(gpus=2, gpu_name="A100"))[0].problems, "it may be the second node"
    for tasks in ("1", "2"):
        launcher = {"SLURM_LOCALID": "0", "SLURM_NTASKS": tasks, "SLURM_TASKS_PER_NODE": tasks, "LOCAL_RANK": "0",
                    "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
        (problem,) = plan_for(launcher, one)[0].problems
        assert "--num_processes 1" in problem and "srun" not in problem, "accelerate launch, in a job"
    (problem,) = plan_for({"LOCAL_RANK": "3", "WORLD_SIZE": "4"}, one)[0].problems
    assert "LOCAL_RANK 3" in problem and "1 GPU" in problem


def test_use_cpu_never_drops_sharding(tmp_path):
    plan, _ = plan_for(deepspeed(tmp_path) | {"ACCELERATE_USE_CPU": "true"}, A100)
    assert (plan.kind, plan.zero_stage, plan.device, plan.backend) == ("deepspeed", 2, "cpu", "gloo")


@pytest.mark.parametrize("file", shipped_strategies())
@pytest.mark.parametrize("hardware", [CPU, A100], ids=["cpu", "8xA100"])
def test_every_shipped_file_resolves_on_a_laptop_and_on_eight_gpus(file, hardware, monkeypatch):
    file = ROOT / "accelerate_configs" / f"{file}.yaml"
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the tests' own, on a machine without GPUs
    processes = 1 if file.stem == "single" else 4 if hardware is CPU else 8
    plan, problems, _, _ = inspect_launch(["--config_file", str(file), "--num_processes", str(processes)], hardware)
    assert plan is not None and not problems and not plan.problems
    assert plan.world_size == processes
    stem = file.stem
    assert plan.kind == {"single": "single", "ddp": "ddp"}.get(stem, "deepspeed" if stem.startswith("zero") else "fsdp")
    assert plan.zero_stage == (int(stem[4]) if stem.startswith("zero") else None)
    if plan.kind == "fsdp":
        groups = {"fsdp_hybrid": (2, processes // 2), "fsdp_tensor": (1, processes // 2)}
        assert (plan.replicate, plan.shard) == groups.get(stem, (1, processes))
    assert ("offload" in stem or "nvme" in stem) == (plan.offload_optimizer != "none")
    text = json.dumps(plan.deepspeed_config or {})
    assert '"enabled": "auto"' not in text and '"nvme_path": "auto"' not in text
    comment = file.read_text().split("compute_environment")[0]
    for heading in ("Purpose:", "Memory:", "Traffic:", "Choose:", "Run on:"):
        assert f"# {heading}" in comment


def hpz(tmp_path, size, world=16, node=8, **zero):
    """The plan of ZeRO-3 with that partition size, on ``world`` processes, ``node`` on each node."""
    environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "zero_hpz_partition_size": size} | zero)
    return plan_for(environ | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(node)}, A100, mixed_precision="bf16")[0]


@pytest.mark.parametrize(
    "size, world, node, resolved, name",
    [("auto", 16, 8, 8, "ZeRO-3 hpZ 2x8"), (4, 16, 8, 4, "ZeRO-3 hpZ 4x4"), (2, 4, 4, 2, "ZeRO-3 hpZ 2x2"),
     (1, 16, 8, 1, "ZeRO-3"), (0, 16, 8, 1, "ZeRO-3")],
)  # fmt: skip
def test_hpz_makes_groups_of_a_nodes_processes(tmp_path, size, world, node, resolved, name):
    plan = hpz(tmp_path, size, world, node)
    assert not plan.problems and not plan.notes and (plan.secondary, plan.name) == (resolved, name)
    assert plan.deepspeed_config["zero_optimization"]["zero_hpz_partition_size"] == resolved


def test_hpz_that_saves_nothing_is_said(tmp_path):
    for world, node, why in ((8, 8, "8 of 8 processes"), (4, 1, "1 of 4 processes")):
        plan = hpz(tmp_path, "auto", world, node)
        (note,) = plan.notes
        assert not plan.problems and plan.secondary == 1 and plan.name == "ZeRO-3"
        assert plan.deepspeed_config["zero_optimization"]["zero_hpz_partition_size"] == 1
        assert "hpZ is off: " in note and why in note and "ds.json" in note
    assert hpz(tmp_path, 8, 8, 8).secondary == 8, "as asked for"


@pytest.mark.parametrize(
    "size, more, said",
    [
        (3, {}, ["is 3,", "do not divide 16 processes", "Pass --num_processes 18"]),
        (32, {}, ["groups of 32 do not divide 16 processes", "Pass --num_processes 64"]),
        ("auto", {"world": 12}, ['is "auto"', "groups of 8", "12 processes", "Pass --num_processes 16,"]),
        (-2, {}, ["is -2, expected"]),
        (True, {}, ["is true, expected"]),
        ("eight", {}, ['is "eight", expected the number of processes of a node, or "auto"']),
        (8, {"stage": 2}, ["with stage 2", "Set stage 3"]),
        ("auto", {"stage": 2, "world": 8}, ["with stage 2", "Set stage 3"]),
        (8, {"offload_param": {"device": "nvme"}}, ["offload_param on nvme", "Offload parameters to cpu"]),
    ],
)
def test_impossible_groups_are_refused(tmp_path, size, more, said):
    (problem,) = hpz(tmp_path, size, **more).problems
    assert problem.startswith(f"{tmp_path}/ds.json: zero_optimization.zero_hpz_partition_size is ")
    assert all(words in problem for words in said), problem


def test_deepspeeds_quantisation_is_refused_on_a_cpu(tmp_path):
    keys = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    environ = deepspeed(tmp_path, zero_optimization={"stage": 3} | dict.fromkeys(keys, True))
    problems = plan_for(environ)[0].problems
    assert len(problems) == 3 and plan_for(environ | {"ACCELERATE_USE_CPU": "true"}, A100)[0].problems == problems
    for key, problem in zip(keys, problems, strict=True):
        assert f"zero_optimization.{key} is true; DeepSpeed quantises on GPUs only. Set it to false" in problem
    assert not plan_for(environ, A100)[0].problems
    assert not plan_for(deepspeed(tmp_path, zero_optimization={"stage": 3, keys[0]: False}))[0].problems


def test_precision_has_one_home(tmp_path):
    fp16 = deepspeed(tmp_path, fp16={"enabled": "true", "initial_scale_power": 15})
    assert plan_for(fp16, A100)[0].precision == "fp16"
    plan, _ = plan_for(fp16, CPU)
    (problem,) = plan.problems
    assert "ds.json: fp16.enabled)" in problem and "--mixed_precision no" in problem
    for given, explicit in (({"mixed_precision": "no"}, None), ({}, "no"), ({"mixed_precision": "bf16"}, None)):
        plan, _ = plan_for(fp16, CPU, explicit, **given)
        assert not plan.problems and plan.deepspeed_config["fp16"]["enabled"] is False
        assert plan.deepspeed_config["fp16"]["initial_scale_power"] == 15
        assert any("fp16.enabled says fp16" in note for note in plan.notes)
    plan, _ = plan_for(deepspeed(tmp_path) | {"ACCELERATE_MIXED_PRECISION": "bf16"}, A100)
    assert plan.precision == "bf16" and plan.deepspeed_config["bf16"]["enabled"] is True
    both = deepspeed(tmp_path, fp16={"enabled": True}, bf16={"enabled": True})
    assert any("both fp16.enabled and bf16.enabled" in p for p in plan_for(both, A100)[0].problems)


@pytest.mark.parametrize(
    ("hardware", "given", "advice"),
    [
        (A100, {}, "--mixed_precision bf16"),
        (replace(A100, bf16=False), {}, "--mixed_precision fp16"),
        (A100, {"mixed_precision": "no"}, None),
        (CPU, {}, None),
    ],
)
def test_fp32_on_a_gpu_that_nobody_chose_is_said(hardware, given, advice):
    plan, _ = plan_for(WORKER, hardware, **given)

    assert plan.precision == "no"
    assert [advice in note for note in plan.notes if note.startswith("mixed_precision")] == ([True] if advice else [])


def test_precision_follows_the_nearest_word(tmp_path):
    """A flag of the recipe, then one of the launcher, then the recipe's YAML, then the Accelerate YAML."""

    def resolved(typed, source, launcher):
        config = RecipeConfig(mixed_precision=typed)
        sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default") | {"mixed_precision": source})
        return resolve(WORKER | {"ACCELERATE_MIXED_PRECISION": "bf16"}, A100, config, sources, launcher)[0]

    by_flag = resolved("fp16", "flag --mixed_precision", "no")
    assert by_flag.precision == "fp16"
    assert by_flag.notes == [
        "precision: flag --mixed_precision says fp16, launcher's --mixed_precision says no; fp16 is used",
    ]
    by_launcher = resolved("fp16", "run.yaml", "NO")
    assert (by_launcher.precision, by_launcher.precision_source) == ("no", "launcher's --mixed_precision")
    assert any("run.yaml says fp16" in note for note in by_launcher.notes)
    by_recipe = resolved("fp16", "run.yaml", None)
    assert (by_recipe.precision, by_recipe.precision_source) == ("fp16", "run.yaml")
    assert any("Accelerate YAML says bf16" in note for note in by_recipe.notes)


def test_more_processes_than_gpus_are_refused(tmp_path):
    two = Hardware(gpus=2, gpu_name="A100")
    nodes = WORKER | {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    (problem,) = plan_for(nodes, two)[0].problems
    assert "4 processes on this machine, which has 2 GPUs" in problem and "Pass --num_processes 4." in problem
    for environ, hardware in ((nodes, A100), (nodes, CPU), (nodes | {"ACCELERATE_USE_CPU": "true"}, two)):
        assert not plan_for(environ, hardware)[0].problems


@pytest.mark.parametrize("stage", [0, 4, "auto", None, True, "2"])
def test_a_stage_that_the_recipes_do_not_run_is_refused(tmp_path, stage):
    (problem,) = plan_for(deepspeed(tmp_path, zero_optimization={"stage": stage}))[0].problems
    assert f"ds.json: zero_optimization.stage is {json.dumps(stage)}; the recipes run stages 1, 2 and 3" in problem
    if isinstance(stage, str):
        inline = WORKER | {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "auto"}
        assert len(plan_for(inline)[0].problems) == 1


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


def test_an_optimizer_section_that_fixes_values_is_taken_or_refused(tmp_path):
    section = {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-6}}
    plan, config = plan_for(deepspeed(tmp_path, optimizer=section), adam_beta1=0.8)
    assert not plan.problems
    assert (config.learning_rate, config.adam_beta1, config.adam_beta2, config.adam_epsilon) == (3e-4, 0.8, 0.99, 1e-6)
    assert plan.deepspeed_config["optimizer"]["params"]["betas"] == [0.8, 0.99]
    plan, _ = plan_for(deepspeed(tmp_path, optimizer=section), adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8)
    assert len(plan.problems) == 2
    assert "optimizer.params.eps is 1e-06, but adam_epsilon is 1e-08 (from flag --adam_epsilon)" in plan.problems[0]
    assert "optimizer.params.betas[0] is 0.8, but adam_beta1 is 0.9 (from flag --adam_beta1)" in plan.problems[1]
    for params, expected in (({"betas": 0.9}, "expected two numbers"), ({"lr": "fast"}, 'lr is "fast", expected a number')):
        plan, _ = plan_for(deepspeed(tmp_path, optimizer={"type": "AdamW", "params": params}))
        assert len(plan.problems) == 1 and expected in plan.problems[0]


def test_a_setting_that_the_optimizer_does_not_read_is_a_problem(tmp_path):
    plan, _ = plan_for({}, optimizer="sgd", adam_beta2=0.95, momentum=0.8)
    assert [p.split(":")[0] for p in plan.problems] == ["adam_beta2"]
    assert "the optimizer is sgd" in plan.problems[0]
    plan, _ = plan_for({}, momentum=0.8)
    assert [p.split(":")[0] for p in plan.problems] == ["momentum"]
    assert not plan_for({}, optimizer="sgd")[0].problems, "defaults are not the user's"
    own = tmp_path / "own.py"
    own.write_text("from zerobook.optimizer import SGD\n\n\nclass Own(SGD):\n    pass\n")
    assert not plan_for({}, optimizer=f"{own}:Own", momentum=0.8, adam_beta1=0.8)[0].problems


NO_NVCC = dict.fromkeys(("async_io", "fused_adam"), "it needs nvcc")


def test_no_optimizer_of_a_json_needs_an_op_that_cannot_be_compiled(tmp_path):
    gpus = replace(A100, missing_ops=NO_NVCC)
    for hardware in (CPU, gpus, A100):  # the same optimizer everywhere
        plan, _ = plan_for(deepspeed(tmp_path, optimizer={"type": "AdamW", "params": {"lr": "auto"}}), hardware)
        params = plan.deepspeed_config["optimizer"]["params"]
        assert params["torch_adam"] is True and params["fused"] is True and not plan.problems
        assert any("in place of DeepSpeed's FusedAdam" in note for note in plan.notes)
    plan, _ = plan_for(deepspeed(tmp_path, optimizer={"type": "AdamW"}, fp16={"enabled": True}), gpus)
    assert plan.precision == "fp16" and plan.deepspeed_config["optimizer"]["params"]["fused"] is True
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    plan, _ = plan_for(deepspeed(tmp_path, optimizer={"type": "AdamW"}, zero_optimization=offloaded), gpus)
    assert "torch_adam" not in plan.deepspeed_config["optimizer"]["params"], "DeepSpeedCPUAdam needs no nvcc"
    for key in ("torch_adam", "bias_correction"):
        environ = deepspeed(tmp_path, optimizer={"type": "AdamW", "params": {key: False}})
        (problem,) = plan_for(environ, gpus)[0].problems
        assert "optimizer.params" in problem and "fused_adam" in problem and "it needs nvcc" in problem
        assert not plan_for(environ, A100)[0].problems and not plan_for(environ, CPU)[0].problems
    plan, _ = plan_for(deepspeed(tmp_path, optimizer="AdamW"), gpus)
    assert len(plan.problems) == 1 and 'optimizer is "AdamW"' in plan.problems[0], "a section that is none is one problem"


def test_nvme_without_its_op_is_one_problem(tmp_path):
    nvme = {"device": "nvme", "nvme_path": "/fast"}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}
    environ = deepspeed(tmp_path, zero_optimization=zero)
    (problem,) = plan_for(environ, replace(A100, missing_ops=NO_NVCC))[0].problems
    assert "async_io" in problem and "it needs nvcc" in problem and "offload to cpu" in problem
    assert not plan_for(environ, A100)[0].problems and not plan_for(environ, CPU)[0].problems
    (problem,) = plan_for(environ, replace(CPU, missing_ops={"async_io": "it needs libaio"}))[0].problems
    assert "async_io" in problem and "it needs libaio" in problem


def test_each_run_swaps_in_a_folder_of_its_own(tmp_path):
    """DeepSpeed names its files by rank and number only, so two runs in one folder would read each other's weights."""
    nvme = {"device": "nvme", "nvme_path": "/fast"}
    environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_optimizer": nvme, "offload_param": nvme})

    folders = {}
    for output_dir in ("one", "two"):
        plan, _ = plan_for(environ, output_dir=str(tmp_path / output_dir))
        (folders[output_dir],) = plan.swap_folders
        zero = plan.deepspeed_config["zero_optimization"]
        assert {zero[key]["nvme_path"] for key in ("offload_optimizer", "offload_param")} == {folders[output_dir]}

    assert len(set(folders.values())) == 2
    assert {Path(folder).parent for folder in folders.values()} == {Path("/fast")}
    # A run that goes on finds the same folder.
    assert plan_for(environ, output_dir=str(tmp_path / "two"))[0].swap_folders == [folders["two"]]


def test_nvme_needs_memory_that_may_be_locked(tmp_path):
    """DeepSpeed aborts the process if it cannot lock its buffers, as in a container with Docker's defaults."""
    nvme = {"device": "nvme", "nvme_path": "/fast", "buffer_count": 5, "buffer_size": 1e6}
    limited = replace(A100, lockable_bytes=8 << 20)
    for precision, needed in (("bf16", 10_000_000), ("no", 20_000_000)):
        environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_param": nvme})
        environ["ACCELERATE_MIXED_PRECISION"] = precision
        (problem,) = plan_for(environ, limited)[0].problems
        assert "ulimit -l" in problem and "8.39 MB" in problem
        assert plan_for(environ, replace(A100, lockable_bytes=needed - 1))[0].problems
        assert not plan_for(environ, replace(A100, lockable_bytes=needed))[0].problems
        assert not plan_for(environ, A100)[0].problems

    # The size of the optimizer's buffers depends on the model, which is not known yet.
    optimizer = {"device": "nvme", "nvme_path": "/fast"}
    environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_optimizer": optimizer})
    assert "ulimit -l" in plan_for(environ, limited)[0].problems[0]
    assert not plan_for(environ, replace(A100, lockable_bytes=1 << 40))[0].problems
    # Wrong values are problems, and no traceback.
    for wrong in ({"nvme_path": 5}, {"buffer_count": None}, {"buffer_size": "many"}):
        environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_param": nvme | wrong})
        assert plan_for(environ, limited)[0].problems
    environ = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}})
    assert not plan_for(environ, limited)[0].problems


@pytest.mark.parametrize("on_gpus", [False, True])
def test_an_op_is_missing_where_the_compiler_finds_no_libaio(monkeypatch, tmp_path, on_gpus):
    header = tmp_path / "libaio.h"
    header.touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("CFLAGS", f"-nostdinc -I{tmp_path}")
    assert ops.find_missing_ops(on_gpus=on_gpus) == {}
    header.unlink()
    missing = ops.find_missing_ops(on_gpus=on_gpus)
    assert list(missing) == ["async_io"] and "libaio-dev" in missing["async_io"]


def test_a_deepspeed_that_is_told_of_a_cpu_is_refused_on_gpus(tmp_path):
    told = {"DS_ACCELERATOR": "cpu"}
    (problem,) = plan_for(deepspeed(tmp_path) | told, A100)[0].problems
    assert "DS_ACCELERATOR" in problem and "cpu" in problem and "cuda" in problem and "Unset DS_ACCELERATOR" in problem
    for environ, hardware in (
        (deepspeed(tmp_path) | {"DS_ACCELERATOR": "cuda"}, A100), (deepspeed(tmp_path) | told, CPU), (WORKER | told, A100),
        (deepspeed(tmp_path) | told | {"ACCELERATE_USE_CPU": "true"}, A100),
    ):  # fmt: skip
        assert not plan_for(environ, hardware)[0].problems


@pytest.mark.parametrize("section", [{"type": "Lamb"}, {"type": "OneBitAdam", "params": {}}, {}])
def test_an_optimizer_without_two_moments_is_refused(tmp_path, section):
    (problem,) = plan_for(deepspeed(tmp_path, optimizer=section))[0].problems
    assert "ds.json: optimizer.type is" in problem and "Write AdamW, or remove the section" in problem


def test_a_schedule_that_is_unknown_or_has_several_rates_is_refused(tmp_path):
    plan, _ = plan_for(deepspeed(tmp_path, scheduler={"type": "OneCycle", "params": {}}))
    assert "scheduler.type 'OneCycle' is not known here" in plan.problems[0]
    rates = {"warmup_min_lr": 0, "warmup_max_lr": [1e-3, 1e-4]}
    plan, _ = plan_for(deepspeed(tmp_path, scheduler={"type": "WarmupLR", "params": rates}))
    assert "scheduler.params: DeepSpeed refuses" in plan.problems[0] and "[0.001, 0.0001]" in plan.problems[0]
    plan, _ = plan_for(deepspeed(tmp_path, scheduler={"type": "WarmupLR", "params": rates | {"warmup_max_lr": "auto"}}))
    assert not plan.problems


def test_a_json_that_never_clips_still_has_the_norm_computed(tmp_path):
    for given in ({}, {"max_grad_norm": 0.0}):
        plan, config = plan_for(deepspeed(tmp_path, gradient_clipping=0), **given)
        assert not plan.problems and config.max_grad_norm == 0
        assert plan.deepspeed_config["gradient_clipping"] > 1e20


@pytest.fixture
def earlier(tmp_path):
    """A checkpoint of a run that asked for 8 x 4 on two processes; its config.json as given."""
    with staged(tmp_path / "run", 4) as staging:
        asked = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
        (staging / "config.json").write_text(json.dumps({"asked": asked}))
        (staging / store.PROGRESS).write_text(json.dumps({"global_batch": 64}))
    return {"output_dir": str(tmp_path / "run"), "resume_from_checkpoint": "auto"}


@pytest.mark.parametrize("place", ["yaml", "json"])
def test_a_resumed_run_keeps_its_batch_wherever_accumulation_is_said(tmp_path, earlier, place):
    def resumed(world, accumulation):
        environ = deepspeed(tmp_path, **({"gradient_accumulation_steps": accumulation} if place == "json" else {}))
        if place == "yaml":
            environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(accumulation)
        return plan_for(environ | {"WORLD_SIZE": str(world)}, **earlier)

    plan, config = resumed(4, 4)
    assert not plan.problems and "global batch kept at 64 on 4 processes: 8 x 2 accumulation x 4" in plan.notes
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (8, 2)
    assert plan.deepspeed_config["gradient_accumulation_steps"] == 2 and plan.deepspeed_config["train_batch_size"] == 64
    assert plan.asked["gradient_accumulation_steps"] == 4, "or the next resume would take the cut for a person's change"
    plan, config = resumed(2, 8)
    assert not plan.problems and config.gradient_accumulation_steps == 8
    assert any("128 samples a step from here on, 64 before step-000004 (sizes were changed)" in n for n in plan.notes)


def test_a_resumed_runs_cut_wins_over_a_json_that_fixes_all_sizes(tmp_path, earlier):
    fixed = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    plan, _ = plan_for(deepspeed(tmp_path, **fixed) | {"WORLD_SIZE": "16"}, **earlier)
    assert not plan.problems
    sizes = {key: plan.deepspeed_config[key] for key in fixed}
    assert sizes == {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}


def test_a_checkpoint_that_cannot_be_read_is_one_of_the_problems(earlier):
    folder = store.folder_of(earlier["output_dir"]) / "step-000004"
    (folder / "config.json").unlink()
    (problem,) = plan_for(WORKER, **earlier | {"resume_from_checkpoint": str(folder)})[0].problems
    assert problem.startswith("resume_from_checkpoint: ") and "config.json: missing" in problem


@pytest.mark.parametrize(
    "content, expected",
    [
        ("{", "not a valid DeepSpeed config"),
        ("[1]", "found a list"),
        ("{}", None),
        ('{"a": 1}', "zero_optimization is missing"),
    ],
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
    for what in ("OPTIMIZER", "PARAM"):
        environ[f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE"] = "nvme"
    environ["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] = "/local"
    zero = plan_for(environ)[0].deepspeed_config["zero_optimization"]
    assert Path(zero["offload_param"]["nvme_path"]).parent == Path("/local")
    assert zero["offload_optimizer"]["nvme_path"] == "outputs/run/nvme_offload"


@pytest.mark.parametrize(
    "environ, given, expected",
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}, "Set fsdp_version: 2"),
        ({}, {"attn_implementation": "flash_attention_2"}, "there is no GPU here"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "'fp8' is not supported"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16 does not train on a CPU"),
        (HYBRID, {}, "2 replicas on 2 processes leave nothing to shard inside one. Pass --num_processes 4 or more"),
        (HYBRID | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "0"}, {}, "0 replicas do not divide 2 processes"),
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


OFFLOADING = {"cpu_checkpointing": True}


@pytest.mark.parametrize("given", [{}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "offload"}])
def test_cpu_checkpointing_of_a_json_is_offload(tmp_path, given):
    plan, config = plan_for(deepspeed(tmp_path, activation_checkpointing=OFFLOADING), A100, **given)
    assert not plan.problems and config.activation_checkpointing == "offload"
    plan, config = plan_for(deepspeed(tmp_path, activation_checkpointing={"cpu_checkpointing": False}), A100, **given)
    assert not plan.problems and config.activation_checkpointing == given.get("activation_checkpointing", "none")


@pytest.mark.parametrize("asked", ["none", "selective", "every:2"])
def test_cpu_checkpointing_beside_another_choice_is_refused(tmp_path, asked):
    environ = deepspeed(tmp_path, activation_checkpointing=OFFLOADING)
    (problem,) = plan_for(environ, A100, activation_checkpointing=asked)[0].problems
    assert "activation_checkpointing.cpu_checkpointing is true" in problem and f"is {asked} (from flag" in problem


def test_what_deepspeeds_checkpoint_function_alone_does_is_refused_by_its_key(tmp_path):
    off = {"partition_activations": False, "number_checkpoints": None, "contiguous_memory_optimization": False,
           "cpu_checkpointing": False, "synchronize_checkpoint_boundary": False, "profile": False}  # fmt: skip
    assert not plan_for(deepspeed(tmp_path, activation_checkpointing=off), A100)[0].problems
    for key in [key for key in off if key != "cpu_checkpointing"]:
        section = off | {key: 4 if key == "number_checkpoints" else True}
        (problem,) = plan_for(deepspeed(tmp_path, activation_checkpointing=section), A100)[0].problems
        assert f"ds.json: activation_checkpointing.{key} is " in problem and "Remove it" in problem
    section = {"partition_activation": True, "cpu_checkpointing": "yes"}
    unknown, wrong = plan_for(deepspeed(tmp_path, activation_checkpointing=section), A100)[0].problems
    assert "partition_activation is true" in unknown and "true or false" in wrong
    (problem,) = plan_for(deepspeed(tmp_path, activation_checkpointing=True), A100)[0].problems
    assert "activation_checkpointing is true, expected an object" in problem


def test_offload_on_a_cpu_is_said_to_be_full():
    plan, _ = plan_for(WORKER, activation_checkpointing="offload")
    assert not plan.problems and any("offload" in note for note in plan.notes)


@pytest.mark.parametrize("world, micro, accumulation", [(1, 4, 16), (2, 4, 8), (16, 4, 1), (2, 1, 32)])
def test_the_accumulation_follows_from_the_global_batch(world, micro, accumulation):
    environ = {"LOCAL_RANK": "0", "WORLD_SIZE": str(world)} if world > 1 else {}
    plan, config = plan_for(environ, global_batch_size=64, per_device_train_batch_size=micro)
    assert config.gradient_accumulation_steps == accumulation and not plan.problems
    assert config.accumulation_steps_on(world) == accumulation, "what the planner takes"


@pytest.mark.parametrize("given, said", [
    ({"global_batch_size": 63}, "global_batch_size: 63 is no multiple of 8 samples x 2 processes = 16. Give 48 or 64,"),
    ({"global_batch_size": 4}, "global_batch_size: 4 is no multiple of 8 samples x 2 processes = 16. Give 16,"),
    ({"global_batch_size": 64, "gradient_accumulation_steps": 2}, "and 8 x 2 x 2 is 32. Drop one of the two."),
])  # fmt: skip
def test_a_global_batch_that_cannot_be_is_refused(given, said):
    (problem,) = plan_for(WORKER, **given)[0].problems
    assert said in problem


def test_adapters_have_a_rate_of_their_own_by_default(tmp_path):
    plain = {"model_name_or_path": "m", "output_dir": str(tmp_path / "run")}
    _, config = plan_for({}, kind=LoraConfig, **plain)
    assert (config.learning_rate, config.warmup_ratio) == (2e-4, 0.03)
    _, config = plan_for({}, kind=LoraConfig, adapter="ia3", num_warmup_steps=5, **plain)
    assert (config.learning_rate, config.warmup_ratio, config.num_warmup_steps) == (3e-3, 0, 5)
    _, config = plan_for({}, kind=LoraConfig, learning_rate=1e-5, warmup_ratio=0.0, **plain)
    assert (config.learning_rate, config.warmup_ratio) == (1e-5, 0)
    assert plan_for({}, **{"model_name_or_path": "m"})[1].learning_rate == 5e-5, "all weights are trained"


def model_folder(folder, base=None):
    folder.mkdir(parents=True)
    (folder / ("adapter_config.json" if base else "config.json")).write_text(
        json.dumps({"base_model_name_or_path": base, "peft_type": "LORA"} if base else {"model_type": "llama"}))  # fmt: skip
    return str(folder)


def test_a_run_is_named_by_its_folder(tmp_path):
    model = model_folder(tmp_path / "full" / "model")
    adapter = model_folder(tmp_path / "lora" / "adapter", base=model)
    for name in (str(tmp_path / "full"), model):
        plan, config = plan_for({}, kind=LoraConfig, model_name_or_path=name)
        assert (config.model_name_or_path, config.adapter_path, plan.problems) == (model, None, [])
    for name in (str(tmp_path / "lora"), adapter):
        plan, config = plan_for({}, kind=LoraConfig, model_name_or_path=name)
        assert (config.model_name_or_path, config.adapter_path, plan.problems) == (model, adapter, [])
        assert any("is an adapter for" in note and "zerobook export" in note for note in plan.notes)
    facts = {"base_model_name_or_path": "somebody/base", "peft_type": "LORA", "revision": "v1"}
    (Path(adapter) / "adapter_config.json").write_text(json.dumps(facts))
    assert plan_for({}, kind=LoraConfig, model_name_or_path=adapter)[1].model_revision == "v1"
    assert plan_for({}, kind=LoraConfig, model_name_or_path=adapter, model_revision="v2")[1].model_revision == "v2"
    (problem,) = plan_for({}, kind=LoraConfig, model_name_or_path=adapter, lora_r=8)[0].problems
    assert "lora_r is given too" in problem
    (problem,) = plan_for({}, kind=CausalLMConfig, model_name_or_path=adapter)[0].problems
    assert "this run trains all weights" in problem and "zerobook export" in problem


def test_a_run_without_a_model_says_what_is_missing_and_the_way_out(tmp_path):
    run = tmp_path / "run"
    with staged(run, 4):
        pass
    for name in (run, run / "checkpoints" / "step-000004"):
        (problem,) = plan_for({}, model_name_or_path=str(name))[0].problems
        assert f"zerobook export {run / 'checkpoints' / 'step-000004'} --output" in problem
    (tmp_path / "empty").mkdir()
    (problem,) = plan_for({}, model_name_or_path=str(tmp_path / "empty"))[0].problems
    assert "neither config.json (a model) nor adapter_config.json" in problem


def test_data_can_be_looked_at_beside_the_checkpoints_of_a_run(tmp_path):
    from zerobook.errors import ConfigError
    from zerobook.launch.build import resolve_this_process

    (tmp_path / "text.txt").write_text("some text")
    config = RecipeConfig(train_file=str(tmp_path / "text.txt"), output_dir=str(tmp_path / "run"))
    sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))
    with staged(tmp_path / "run", 4):
        pass
    with pytest.raises(ConfigError, match="holds 1 checkpoint"):
        resolve_this_process(config, sources)
    assert resolve_this_process(config, sources, trains=False)[1].output_dir == config.output_dir


EVERY_SECTION = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zero_hpz_partition_size": 1,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "aio": {"block_size": 1048576},
}


def keys_of(content: dict, parents: tuple[str, ...] = ()):
    for key, value in content.items():
        yield (*parents, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*parents, key))


def leaf_keys(content: dict) -> set[str]:
    return {
        ".".join(path)
        for path in keys_of(content)
        if not (isinstance(value_at(content, path), dict) and value_at(content, path))
    }


def value_at(content: dict, path: tuple[str, ...]):
    for key in path:
        content = content[key]
    return content


@pytest.mark.parametrize("odd", [{}, [], [[]], {"a": []}, None, "x", -1, True, 1.5, float("nan")], ids=repr)
def test_a_value_of_any_type_is_taken_or_named(tmp_path, odd):
    for *sections, key in keys_of(EVERY_SECTION):
        config = copy.deepcopy(EVERY_SECTION)
        section = config
        for name in sections:
            section = section[name]
        section[key] = odd
        environ = deepspeed(tmp_path, **config)
        recipe_config = RecipeConfig()
        sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))

        # What cannot be read at all is an error; what can be is resolved, and each key has an entry in the account.
        with suppress(ConfigError):
            plan, resolved_config, resolved_sources = resolve(environ, CPU, recipe_config, sources)
            assert all(isinstance(problem, str) and problem for problem in plan.problems)
            if not plan.problems:
                entries = account.entries(plan, resolved_config, resolved_sources, flags=["x.py"])
                assert {entry.key for entry in entries} == leaf_keys(config) and all(entry.effect for entry in entries)
