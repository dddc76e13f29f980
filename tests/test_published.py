"""The two examples of https://huggingface.co/blog/accelerate-deepspeed: their launch lines resolve to the published runs."""

from __future__ import annotations

import os
import re
import shlex

import pytest
import yaml

from scripts.reference import header
from tests.harness import ROOT
from tests.test_generation import PUBLISHED, PUBLISHED_RULES
from zerobook.cli.doctor import inspect_launch
from zerobook.data import formats
from zerobook.launch.resolve import Hardware

TITAN = {"gpu_name": "TITAN RTX", "bf16": False}
FOLDER = ROOT / "accelerate_configs" / "published"
SHOWN_IN = [
    ROOT / "README.md", ROOT / "docs" / "guides" / "recipes.md", ROOT / "ds_configs" / "published" / "README.md",
    ROOT / "recipes" / "seq2seq_chatbot.py", *sorted((ROOT / "recipes" / "configs").glob("*.yaml")),
]  # fmt: skip
GPT2_XL = shlex.split("""
    --config_name gpt2-xl --tokenizer_name gpt2-xl --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1
    --block_size 128 --output_dir /tmp/clm_deepspeed_stage3_offload__accelerate --learning_rate 5e-4
    --per_device_train_batch_size 16 --per_device_eval_batch_size 1 --num_train_epochs 1
""")
"""The printed command, without the flags of its tracker."""
EXAMPLES = {
    "zero2": {
        "recipe": "recipes/seq2seq_chatbot.py", "config": "recipes/configs/seq2seq_blenderbot.yaml", "flags": PUBLISHED,
        "json": "zero2_config_accelerate", "processes": 2, "stage": 2, "offload": "none", "batch": 200, "rate": 1e-6,
        "warm-up": 100, "power": 15, "params": {"torch_adam": True, "adam_w_mode": True},
    },
    "zero3_offload": {
        "recipe": "recipes/causal_lm.py", "config": "recipes/configs/causal_lm_gpt2_xl.yaml", "flags": GPT2_XL,
        "json": "zero3_offload_config_accelerate", "processes": 1, "stage": 3, "offload": "cpu", "batch": 16, "rate": 5e-4,
        "warm-up": 0, "power": 16, "params": {},
    },
}  # fmt: skip
"""File in accelerate_configs/published/ -> what its published run is."""


def shown() -> list:
    """Every launch line with one of these files, as it stands in its page or header."""
    found = []
    for page in SHOWN_IN:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        for number, line in enumerate(re.findall(r"accelerate launch (--config_file accelerate_configs/published/.*)", text)):
            found.append(pytest.param(line.rstrip("`"), id=f"{page.relative_to(ROOT)}-{number}"))
    return found


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the tests' own, on a machine without GPUs


def resolved(arguments: list[str], gpus: int):
    plan, problems, config, sources = inspect_launch(arguments, Hardware(gpus=gpus, **(TITAN if gpus else {})))
    assert plan is not None and not problems and not plan.problems
    return plan, config, sources


def check(plan, config, example) -> None:
    """Assert that a launch is the published run."""
    ds = plan.deepspeed_config
    assert (plan.kind, plan.zero_stage, plan.world_size) == ("deepspeed", example["stage"], example["processes"])
    assert (plan.device, plan.backend, plan.precision) == ("cuda", "nccl", "fp16")
    assert plan.precision_source == f"ds_configs/published/{example['json']}.json: fp16.enabled"
    assert (plan.offload_optimizer, plan.offload_param) == (example["offload"], "none")
    batch = config.per_device_train_batch_size
    assert ds["train_batch_size"] == batch * example["processes"] and ds["train_micro_batch_size_per_gpu"] == batch
    assert ds["gradient_accumulation_steps"] == config.gradient_accumulation_steps == 1
    assert ds["fp16"]["enabled"] is True and ds["fp16"]["initial_scale_power"] == example["power"]
    assert ds["optimizer"]["type"] == "AdamW" and config.num_train_epochs == 1
    params = {"lr": example["rate"], "weight_decay": 0.0} | example["params"]
    assert params.items() <= ds["optimizer"]["params"].items() and config.learning_rate == example["rate"]
    # DeepSpeed's own schedule where there is warm-up, which it cannot do without
    assert ("scheduler" in plan.deepspeed_config) == (example["warm-up"] > 0) and config.lr_scheduler_type == "linear"
    assert config.num_warmup_steps == example["warm-up"]


def test_each_example_is_shown_in_its_header_and_its_pages():
    lines = [case.values[0] for case in shown()]
    for name, example in EXAMPLES.items():
        said = header(ROOT / example["config"])["Launch"]
        line = (
            f"accelerate launch --config_file accelerate_configs/published/{name}.yaml --num_processes {example['processes']} "
            f"{example['recipe']} --config {example['config']}"
        )
        assert said == line
        assert sum(f"accelerate launch {shown}" == line for shown in lines) >= 3
    assert {f"{name}.yaml" for name in EXAMPLES} == {file.name for file in FOLDER.iterdir()}


@pytest.mark.parametrize("line", shown())
def test_a_shown_line_is_the_published_run_or_its_twin_on_a_cpu(line):
    arguments = shlex.split(line)
    example = EXAMPLES[os.path.basename(arguments[1]).removesuffix(".yaml")]
    if "--mixed_precision" in arguments:
        plan, _, _ = resolved(arguments, gpus=0)
        assert (plan.zero_stage, plan.device, plan.precision) == (example["stage"], "cpu", "no")
        assert (plan.world_size, plan.offload_optimizer) == (example["processes"], example["offload"])
        without = [word for word in arguments if word not in ("--mixed_precision", "no")]
        plan, problems, _, _ = inspect_launch(without, Hardware())
        assert not problems and [problem for problem in plan.problems if "--mixed_precision no" in problem]
    else:
        plan, config, _ = resolved(arguments, example["processes"])
        check(plan, config, example)
        assert config.per_device_train_batch_size == example["batch"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_printed_flags_are_the_config(name):
    example = EXAMPLES[name]
    launch = ["--config_file", f"accelerate_configs/published/{name}.yaml", example["recipe"]]
    printed, config, _ = resolved([*launch, *example["flags"]], example["processes"])
    check(printed, config, example)
    ours, ours_config, _ = resolved([*launch, "--config", example["config"]], example["processes"])
    # ds_configs/published/README.md names what differs in the data.
    free = dict.fromkeys(("output_dir", "dataset_name", "on_bad_sample")) | (
        {} if name == "zero3_offload" else dict.fromkeys(PUBLISHED_RULES)
    )
    assert config.model_dump() | free == ours_config.model_dump() | free
    assert printed.deepspeed_config == ours.deepspeed_config, "without --num_processes, too"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_override_of_a_header_resolves(name):
    example = EXAMPLES[name]
    override = shlex.split(header(ROOT / example["config"])["Override"].partition(":")[0])
    file = f"accelerate_configs/published/{name}.yaml"
    plan, config, _ = resolved(
        ["--config_file", file, example["recipe"], "--config", example["config"], *override], example["processes"]
    )
    check(plan, config, example)
    assert config.per_device_train_batch_size == example["batch"] // 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_accelerate_starts_deepspeed_with_the_published_number_of_processes(name, monkeypatch):
    """A launcher that takes one process for a plain one would train without ZeRO."""
    import torch.distributed.run
    from accelerate.commands.launch import launch_command, launch_command_parser

    started = []
    monkeypatch.setattr(torch.distributed.run, "run", lambda args: started.append((args, dict(os.environ))))
    launch_command(launch_command_parser().parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), "recipe.py"]))
    ((args, environ),) = started
    example = EXAMPLES[name]
    assert int(args.nproc_per_node) == example["processes"] and args.training_script == "recipe.py"
    assert environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == f"ds_configs/published/{example['json']}.json"
    assert environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(example["stage"] == 3).lower()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_header_of_a_published_strategy_file(name):
    said = header(FOLDER / f"{name}.yaml")
    assert all(said[key] for key in ("Purpose", "Source", "Changed", "Run on", "A laptop"))
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert "mixed_precision" not in content, "accelerate refuses it beside a DeepSpeed file"


def test_rows_of_the_published_data_are_pairs():
    """MuDoConv has the columns that its script takes as the first and the second."""
    row = {"texts": "chatbot: Hi", "labels": "Hello"}
    assert formats.parse(formats.detect(row), row) == formats.Pair("chatbot: Hi", "Hello")
