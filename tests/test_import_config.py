"""Other trainers' configs become a recipe's YAML, a strategy file and an account of every key."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Seq2SeqTrainingArguments, get_scheduler

from tests.test_resolve import plan_for
from zerobook.cli.main import main
from zerobook.config_sources import read
from zerobook.errors import ConfigError
from zerobook.interop.configs import command_lines, data, importer, strategies, table, translations
from zerobook.interop.configs.account import format_account
from zerobook.interop.configs.table import DEFAULT, NO_EFFECT, NOT_POSSIBLE, SAME, TRAINERS, TRANSLATED, UNKNOWN
from zerobook.launch.by_name import replace_names
from zerobook.launch.resolve import Hardware
from zerobook.models.load import choose_attention
from zerobook.training.recipe_file import recipe_class
from zerobook.training.schedule import learning_rate_schedule
from zerobook.utils.shipped import shipped

TABLES = sorted(set(TRAINERS.values()))
RECIPES = {
    name: recipe_class(str(shipped(f"recipes/{name}.py"))).config_class
    for name in ("causal_lm", "lora_finetune", "seq2seq_chatbot")
}


def imported(config, trainer="trl", folder=Path("/nowhere"), **options):
    return importer.import_config(config, folder / "theirs.yaml", trainer, **options)


def kinds_of(result):
    return {line.key: line.kind for line in result.lines}


def write(tmp_path, config):
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(config))
    return str(file)


# --- the tables


def test_every_training_argument_of_transformers_is_in_the_table():
    arguments = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert arguments <= table.load_table("transformers").entries.keys()


def test_the_defaults_of_the_table_are_those_of_transformers():
    fields = {field.name: field.default for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    defaults = table.load_table("transformers").defaults
    # A default that is null, false, 0 or empty needs no entry.
    expected = {key: getattr(value, "value", value) for key, value in fields.items() if key in defaults}
    assert defaults == expected


@pytest.mark.parametrize("name", TABLES)
def test_every_entry_leads_to_a_flag_a_function_or_a_sentence(name):
    flags = {key for config_class in RECIPES.values() for key in config_class.model_fields} | {importer.LENGTH}
    for key, entry in table.load_table(name).entries.items():
        counterparts = [entry.to] if entry.to else []
        for counterpart in entry.values.values():
            counterparts += counterpart
        assert set(counterparts) <= flags, key
        assert not entry.by or any(hasattr(module, entry.by) for module in (translations, data, strategies)), key
        assert entry.kind == SAME or entry.say or entry.otherwise, key


@pytest.mark.parametrize("name", TABLES)
def test_every_counterpart_of_a_value_is_taken_by_a_recipe(name):
    for entry in table.load_table(name).entries.values():
        for counterpart in entry.values.values():
            for flag, ours in counterpart.items():
                config_class = next(recipe for recipe in RECIPES.values() if flag in recipe.model_fields)
                config_class(**{flag: ours})


# --- values


HANDBOOK = {
    "model_name_or_path": "org/model",
    "torch_dtype": "bfloat16",
    "bf16": True,
    "dataset_name": "org/chats",
    "assistant_only_loss": True,
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": ["q_proj", "k_proj"],
    "learning_rate": "2.0e-04",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "max_length": 2048,
    "max_steps": -1,
    "eval_strategy": "no",
    "save_strategy": "epoch",
    "push_to_hub": True,
    "gradient_checkpointing": True,
    "neftune_noise_alpha": None,
    "label_smoothing_factor": 0.0,
}


def test_a_trl_config_becomes_the_values_of_a_recipe():
    result = imported(HANDBOOK)
    assert result.recipe == "lora_finetune" and not result.changes_training
    expected = {
        "model_name_or_path": "org/model",
        "mixed_precision": "bf16",
        "dataset_name": "org/chats",
        "adapter": "lora",
        "lora_r": 8,
        "lora_target_modules": ["q_proj", "k_proj"],
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.1,
        "warmup_from_zero": True,
        "max_seq_length": 2048,
        "save_steps": "epoch",
        "activation_checkpointing": "full",
        "validation_split_percentage": 0,
    }
    assert expected.items() <= result.values.items()


def test_defaults_of_the_trainer_are_written_out_where_the_recipe_has_others():
    result = imported({"model_name_or_path": "org/model", "dataset_name": "org/chats", "use_peft": True})
    expected = {"learning_rate": 2e-5, "warmup_ratio": 0.0, "lora_dropout": 0.05, "mixed_precision": "bf16"}
    assert expected.items() <= result.values.items()
    assert result.values["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "num_train_epochs" not in result.values


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        ("axolotl", {"base_model": "m", "sequence_len": 64}),
        ("llamafactory", {"model_name_or_path": "m", "stage": "sft"}),
        ("ms-swift", {"model": "m", "dataset": "d"}),
        ("trainer", {"model_name_or_path": "m", "dataset_name": "d"}),
    ],
)
def test_log_points_of_another_trainer_are_taken_over_where_its_config_sets_them(trainer, config):
    """A spike is noticed at a log point, and the default of transformers is 500 steps."""
    assert "logging_steps" not in imported(config, trainer).values
    assert imported(config | {"logging_steps": 500}, trainer).values["logging_steps"] == 500


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("learning_rate", 1e-5, SAME),
        ("max_length", 512, TRANSLATED),
        ("hub_model_id", "org/result", NO_EFFECT),
        ("neftune_noise_alpha", 5, NOT_POSSIBLE),
        ("neftune_noise_alpha", None, DEFAULT),
        ("label_smoothing_factor", 0.0, DEFAULT),
        ("lr_scheduler_type", "inverse_sqrt", NOT_POSSIBLE),
        ("learning_rate", -1, NOT_POSSIBLE),
        ("learning_rate", ["odd"], NOT_POSSIBLE),
        ("assistant_only_loss", False, TRANSLATED),
        ("no_such_key", 1, UNKNOWN),
        ("no_such_key", None, DEFAULT),
    ],
)
def test_each_key_has_its_kind(key, value, kind):
    result = imported(HANDBOOK | {key: value})
    assert kinds_of(result)[key] == kind
    assert result.changes_training == (kind in (NOT_POSSIBLE, UNKNOWN))


TORCHTUNE = {"model": {}, "tokenizer": {}, "checkpointer": {"checkpoint_dir": "org/model"}}
INSTRUCT = "torchtune.datasets.instruct_dataset"
ALPACA = "torchtune.datasets.alpaca_dataset"


@pytest.mark.parametrize(
    ("trainer", "config"),
    [("llamafactory", {"model_name_or_path": "m", "stage": "sft"}), ("ms-swift", {"model": "m", "dataset": "d"})],
)
def test_adapters_are_trained_where_the_other_trainer_trains_them_by_default(trainer, config):
    result = imported(config, trainer)
    assert result.recipe == "lora_finetune"
    assert (result.values["lora_r"], result.values["learning_rate"]) == (8, 1e-4 if trainer == "ms-swift" else 5e-5)


@pytest.mark.parametrize(("processes", "rows", "steps"), [(1, 1, 16), (1, 4, 4), (4, 1, 4), (8, 3, 1), (2, 32, 1)])
def test_ms_swift_accumulates_to_sixteen_rows_by_default(processes, rows, steps):
    words = f"NPROC_PER_NODE={processes} swift sft --model m --dataset d --per_device_train_batch_size {rows}"
    result = importer.import_config(*command_lines.read_command(words.split())[:3])
    assert result.values.get("gradient_accumulation_steps", 1) == steps


@pytest.mark.parametrize(
    ("trainer", "config", "learns_answers_alone"),
    [
        ("trl", {"model_name_or_path": "m", "dataset_name": "d"}, False),
        ("trl", {"model_name_or_path": "m", "dataset_name": "d", "assistant_only_loss": True}, True),
        ("alignment-handbook", {"dataset_mixture": {"datasets": [{"id": "d", "columns": ["messages"]}]}}, False),
        ("llamafactory", {"model_name_or_path": "m"}, True),
        ("llamafactory", {"model_name_or_path": "m", "train_on_prompt": True}, False),
        ("ms-swift", {"model": "m", "dataset": "d"}, True),
        ("ms-swift", {"model": "m", "dataset": "d", "loss_scale": "all"}, False),
        ("torchtune", TORCHTUNE | {"dataset": {"_component_": ALPACA}}, False),
        ("torchtune", TORCHTUNE | {"dataset": {"_component_": ALPACA, "train_on_input": False}}, True),
        ("torchtune", TORCHTUNE | {"dataset": {"_component_": INSTRUCT, "source": "d"}}, True),
        ("torchtune", TORCHTUNE | {"dataset": {"_component_": INSTRUCT, "source": "d", "train_on_input": True}}, False),
    ],
)
def test_the_tokens_of_a_chat_that_are_learnt_are_those_that_the_other_trainer_learns(trainer, config, learns_answers_alone):
    result = imported(config, trainer)
    assert RECIPES[result.recipe](**result.values).assistant_only_loss == learns_answers_alone
    assert not result.changes_training


def test_answers_to_prompts_are_refused_where_prompts_are_learnt_too():
    config = RECIPES["lora_finetune"](model_name_or_path="m", dataset_name="d", assistant_only_loss=False, eval_samples=3)
    assert any(problem.startswith("eval_samples: ") for problem in config.problems())


def test_a_list_of_data_sets_that_disagree_about_the_learnt_tokens_is_not_possible():
    parts = [{"_component_": ALPACA}, {"_component_": INSTRUCT, "source": "org/rows", "split": "train"}]
    result = imported(TORCHTUNE | {"dataset": parts}, "torchtune")
    assert kinds_of(result)["dataset"] == NOT_POSSIBLE

    parts[1]["train_on_input"] = True
    result = imported(TORCHTUNE | {"dataset": parts}, "torchtune")
    assert not result.changes_training
    assert [spec["path"] for spec in result.values["datasets"]] == ["tatsu-lab/alpaca", "org/rows"]


def test_a_key_whose_inner_keys_are_known_is_not_left_out_where_it_has_no_counterpart():
    parts = [{"path": "json", "data_files": ["a.jsonl", "b.jsonl"], "split": "train"}]
    assert kinds_of(imported({"model_name_or_path": "m", "datasets": parts}))["datasets"] == NOT_POSSIBLE


def test_settings_of_lora_say_nothing_where_no_adapter_is_trained():
    result = imported({"model_name_or_path": "org/model", "dataset_name": "org/texts", "lora_r": 8})
    assert result.recipe == "causal_lm" and kinds_of(result)["lora_r"] == NO_EFFECT


@pytest.mark.parametrize(("steps", "ratio"), [(7, 0), (0.1, 0), (0, 0.1), (7, 0.1)])
def test_the_imported_warm_up_is_that_of_transformers(steps, ratio):
    """The steps come first, and a number of steps below 1 is a share of them."""
    total = 40
    warmup = int(steps) if steps >= 1 else round(total * (steps or ratio))
    values = imported(HANDBOOK | {"warmup_steps": steps, "warmup_ratio": ratio}).values
    config = RECIPES["lora_finetune"](**values)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    theirs = get_scheduler("cosine", optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = learning_rate_schedule(
        "cosine", peak=1.0, warmup=config.warmup_steps(total), total=total, from_zero=config.warmup_from_zero
    )
    assert [ours(step) for step in range(total)] == pytest.approx(rates, abs=1e-12)


# --- other trainers

AXOLOTL = {
    "base_model": "org/model",
    "datasets": [
        {"path": "org/rows", "type": "alpaca", "split": "train[:100]"},
        {"path": "org/chats", "type": "chat_template"},
    ],
    "adapter": "qlora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
    "lora_target_modules": ["q_proj"],
    "sequence_len": 4096,
    "sample_packing": True,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "learning_rate": "2e-4",
    "val_set_size": 0.05,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "warmup_ratio": 0.1,
    "bf16": "auto",
    "wandb_project": None,
    "plugins": ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"],
}


def test_an_axolotl_config_becomes_the_values_of_a_recipe():
    result = imported(AXOLOTL, importer.recognise_trainer(AXOLOTL, "theirs.yaml"))
    assert not result.changes_training
    expected = {
        "model_name_or_path": "org/model",
        "datasets": [
            {"path": "org/rows", "name": "rows", "split": "train[:100]", "format": "instruction"},
            {"path": "org/chats", "name": "chats"},
        ],
        "adapter": "lora",
        "load_in_4bit": True,
        "lora_r": 32,
        "lora_target_modules": ["all-linear"],
        "max_seq_length": 4096,
        "packing": True,
        "per_device_train_batch_size": 2,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "cosine",
        "validation_split_percentage": 5,
        "eval_steps": 1 / 16,
        "save_steps": "epoch",
        "mixed_precision": "bf16",
    }
    assert expected.items() <= result.values.items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plugins", ["my.own.Plugin"]),
        ("train_on_inputs", True),
        ("unfrozen_parameters", ["lm_head"]),
        ("datasets", [{"path": "org/rows", "type": "jeopardy"}]),
        ("datasets", [{"path": "org/rows", "type": "input_output"}]),
        ("datasets", [{"path": "org/rows", "type": "alpaca_w_system.load_open_orca"}]),
        ("datasets", [{"path": "org/rows", "type": "alpaca_chat.load_qa"}]),
        ("datasets", [{"path": "org/rows", "type": "chat_template", "message_field_training": "mask"}]),
        ("datasets", [{"path": "org/rows", "type": "alpaca", "split": "train(50%)"}]),
        ("optimizer", "muon"),
        ("lora_target_modules", ["q_proj", "embed_tokens"]),
    ],
)
def test_what_axolotl_does_and_nothing_here_is_not_possible(key, value):
    assert imported(AXOLOTL | {key: value}, "axolotl").changes_training


@pytest.mark.parametrize(
    ("trainer", "key", "value"),
    [
        ("trl", "attn_implementation", "flash_attention_2"),
        ("trl", "attn_implementation", "kernels-community/vllm-flash-attn3"),
        ("trl", "use_flash_attention_2", True),
        ("trainer", "attn_implementation", "flash_attention_3"),
        ("axolotl", "attn_implementation", "kernels-community/flash-attn2"),
        ("axolotl", "flash_attention", True),
        ("llamafactory", "flash_attn", "fa2"),
        ("ms-swift", "attn_impl", "flash_attn"),
    ],
)
def test_flash_attention_of_another_trainer_does_not_need_the_package_here(trainer, key, value):
    names = {"axolotl": "base_model", "ms-swift": "model"}
    result = imported({names.get(trainer, "model_name_or_path"): "org/model", key: value}, trainer)
    assert kinds_of(result)[key] == TRANSLATED and not result.changes_training
    without_package = Hardware(gpus=1, gpu_name="H100")
    plan, _ = plan_for({}, without_package, kind=RECIPES[result.recipe], **result.values)
    assert not plan.problems
    config = RECIPES[result.recipe](**result.values)
    model_config = LlamaConfig()
    with_package = dataclasses.replace(without_package, flash_attention=True)
    assert choose_attention(config, model_config, LlamaForCausalLM, with_package, "bf16") == "flash_attention_2"
    assert choose_attention(config, model_config, LlamaForCausalLM, without_package, "bf16") is None


SLICE = "train[5%:20%]"


@pytest.mark.parametrize(
    ("trainer", "config"),
    [
        ("trl", {"dataset_name": "org/rows", "dataset_train_split": SLICE}),
        ("trl", {"datasets": [{"path": "org/rows", "split": SLICE}]}),
        ("alignment-handbook", {"dataset_mixture": {"datasets": [{"id": "org/rows", "split": SLICE}]}}),
        ("axolotl", {"datasets": [{"path": "org/rows", "type": "alpaca", "split": SLICE}]}),
        ("torchtune", {"dataset": {"_component_": ALPACA, "source": "org/rows", "split": SLICE}}),
    ],
)
def test_some_rows_of_a_split_are_an_entry_of_datasets(trainer, config):
    result = imported(config, trainer)
    assert result.values["datasets"][0]["split"] == SLICE
    assert not result.changes_training

    # Joined splits are an entry each.
    result = imported(json.loads(json.dumps(config).replace(SLICE, f"{SLICE} + test")), trainer)
    assert [entry["split"] for entry in result.values["datasets"]] == [SLICE, "test"]
    assert len({entry["name"] for entry in result.values["datasets"]}) == 2
    assert not result.changes_training


LLAMAFACTORY = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_target": "all",
    "dataset": "mine, theirs",
    "template": "llama3",
    "cutoff_len": 512,
    "max_samples": 1000,
    "learning_rate": 1.0e-4,
}


def write_info(folder, **columns):
    (folder / "data").mkdir()
    info = {"mine": {"file_name": "mine.json", "columns": columns}, "theirs": {"hf_hub_url": "org/theirs", "split": "train"}}
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    (folder / "data" / "mine.json").write_text("[]")


def test_a_llamafactory_config_becomes_the_values_of_a_recipe(tmp_path):
    write_info(tmp_path, prompt="instruction")
    result = imported(LLAMAFACTORY, importer.recognise_trainer(LLAMAFACTORY, "theirs.yaml"), folder=tmp_path / "examples")
    assert not result.changes_training
    expected = {
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_modules": ["all-linear"],
        "datasets": [
            {"path": str(tmp_path / "data" / "mine.json"), "name": "mine", "limit": 1000},
            {"path": "org/theirs", "name": "theirs", "split": "train", "limit": 1000},
        ],
        "max_seq_length": 512,
        "chat_template": "llama-3",
        # Its default recomputes activations.
        "activation_checkpointing": "full",
        "validation_split_percentage": 0,
    }
    assert expected.items() <= result.values.items()


def test_a_data_set_with_columns_of_other_names_is_not_possible(tmp_path):
    write_info(tmp_path, prompt="question_text")
    assert kinds_of(imported(LLAMAFACTORY, "llamafactory", folder=tmp_path))["dataset"] == NOT_POSSIBLE


def test_all_weights_are_trained_where_llamafactory_says_full(tmp_path):
    result = imported(LLAMAFACTORY | {"finetuning_type": "full"}, "llamafactory")
    assert result.recipe == "causal_lm" and result.values["block_size"] == 512


@pytest.mark.parametrize(("template", "kind"), [("qwen3", TRANSLATED), ("empty", NOT_POSSIBLE), ("alpaca", NOT_POSSIBLE)])
def test_a_template_of_no_model_family_is_not_the_models_own(template, kind):
    assert kinds_of(imported(LLAMAFACTORY | {"template": template}, "llamafactory"))["template"] == kind


@pytest.mark.parametrize(("optimizer", "momentum"), [({}, 0.0), ({"momentum": 0.8}, 0.8)])
def test_sgd_has_the_momentum_that_it_has_in_torchtune(optimizer, momentum):
    result = imported(TORCHTUNE | {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, **optimizer}}, "torchtune")
    assert (result.values["optimizer"], result.values["momentum"]) == ("sgd", momentum)


# --- values of other types than usual


@pytest.mark.parametrize(
    ("trainer", "key", "value", "flag"),
    [
        ("trl", "use_peft", "true", "adapter"),
        ("llamafactory", "quantization_bit", "4", "load_in_4bit"),
        ("axolotl", "evals_per_epoch", "4", "eval_steps"),
        ("axolotl", "warmup_steps", "10", "num_warmup_steps"),
    ],
)
def test_a_number_or_a_boolean_in_quotes_is_one(trainer, key, value, flag):
    base = {"trl": HANDBOOK, "llamafactory": {"model_name_or_path": "m"}, "axolotl": AXOLOTL}[trainer]
    quoted = imported(base | {key: value}, trainer)
    plain = imported(base | {key: yaml.safe_load(value)}, trainer)
    assert quoted.values == plain.values and quoted.values[flag]
    assert not quoted.changes_training


@pytest.mark.parametrize(
    ("trainer", "config", "key", "kind"),
    [
        ("trl", {"dataset_name": ["a", "b"]}, "dataset_name", NOT_POSSIBLE),
        ("trl", {"model_init_kwargs": {"use_cache": False}}, "model_init_kwargs.use_cache", NO_EFFECT),
        ("trl", {"datasets": [{"path": "a", "columns": ["messages"]}]}, "datasets[0].columns", TRANSLATED),
        ("trl", {"datasets": [{"path": "a", "odd": 1}]}, "datasets[0].odd", UNKNOWN),
        ("axolotl", {"reward_model": False}, "reward_model", DEFAULT),
        ("axolotl", {"plugins": "axolotl.integrations.liger.LigerPlugin"}, "plugins", TRANSLATED),
        ("axolotl", {"datasets": [{"path": "a", "type": "alpaca", "shards": 10}]}, "datasets[0].shards", NOT_POSSIBLE),
        ("axolotl", {"datasets": [{"path": "a", "type": "alpaca", "odd": {"x": 1}}]}, "datasets[0].odd.x", UNKNOWN),
        ("torchtune", {"dataset": {"_component_": INSTRUCT, "source": "a", "odd": 1}}, "dataset.odd", UNKNOWN),
        (
            "torchtune",
            {"dataset": {"_component_": INSTRUCT, "source": "a", "conversation_column": "turns"}},
            "dataset.conversation_column",
            NOT_POSSIBLE,
        ),
        (
            "torchtune",
            {"dataset": {"_component_": "torchtune.datasets.cnn_dailymail_articles_dataset"}},
            "dataset",
            NOT_POSSIBLE,
        ),
        ("ms-swift", {"dataset": "d", "loss_scale": "last_round"}, "loss_scale", NOT_POSSIBLE),
    ],
)
def test_nothing_that_is_in_or_beside_known_keys_is_left_out_in_silence(trainer, config, key, kind):
    result = imported(config, trainer)
    assert kinds_of(result)[key] == kind
    assert result.changes_training == (kind in (NOT_POSSIBLE, UNKNOWN))


def test_a_config_of_an_encoder_decoder_becomes_that_recipe():
    result = imported({"model_name_or_path": "org/t5", "max_source_length": 512, "source_prefix": "summarize: "}, "trainer")
    assert (result.recipe, result.values["source_prefix"]) == ("seq2seq_chatbot", "summarize: ")


def test_the_account_has_no_tokens_of_accounts():
    result = imported(HANDBOOK | {"hub_token": "hf_abcdef", "eos_token": "<|end|>"})
    text = format_account(result)
    assert "hf_abcdef" not in text and "<|end|>" in text


# --- command lines


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--source_prefix", "summarize: "], "source_prefix", "summarize: "),
        (["--source_prefix=summarize: "], "source_prefix", "summarize: "),
        (["--no_gradient_checkpointing"], "gradient_checkpointing", False),
        (["--no-bf16", "--seed", "1"], "bf16", False),
        (["--no_cuda"], "no_cuda", True),
        (["--learning_rate", "-1"], "learning_rate", -1),
        (["--datasets", "[{path: a}]"], "datasets", [{"path": "a"}]),
    ],
)
def test_a_flag_has_the_value_that_the_other_trainer_gives_it(words, key, value):
    command = command_lines.read_command(["trl", "sft", "--model_name_or_path", "m", *words])
    assert command.config[key] == value


def test_words_that_are_no_flags_are_in_the_account():
    command = command_lines.read_command(["trl", "sft", "stray", "--model_name_or_path", "m"])
    result = importer.import_config(*command[:3])
    assert [line.kind for line in result.lines if "stray" in line.key] == [UNKNOWN]


def test_variables_of_the_environment_may_come_before_the_program():
    words = "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --model m --dataset d"
    command = command_lines.read_command(words.split())
    assert command.trainer == "ms-swift"
    assert importer.import_config(*command[:3]).foreign.processes == 2


@pytest.mark.parametrize(
    ("line", "trainer", "recipe", "expected"),
    [
        (
            "trl sft --model_name_or_path org/model --dataset_name org/chats --packing --learning_rate=1e-4 --num_processes 4",
            "trl",
            "causal_lm",
            {"model_name_or_path": "org/model", "packing": True, "learning_rate": 1e-4, "mixed_precision": "bf16"},
        ),
        (
            "torchrun --nproc_per_node 4 examples/run_clm.py --model_name_or_path org/model --train_file a.txt --block_size 64 "
            "--do_train --warmup_steps 5",
            "trainer",
            "causal_lm",
            {"train_file": "a.txt", "block_size": 64, "num_warmup_steps": 5, "warmup_from_zero": True},
        ),
        (
            "accelerate launch --num_processes 4 run_summarization.py --model_name_or_path org/t5 --max_source_length 128 "
            "--dataset_name org/news --num_beams 4",
            "trainer",
            "seq2seq_chatbot",
            {"dataset_name": "org/news", "max_source_length": 128, "num_beams": 4},
        ),
        (
            "llamafactory-cli train FILE learning_rate=3e-5 finetuning_type=full launcher.nproc_per_node=4",
            "llamafactory",
            "causal_lm",
            {"learning_rate": 3e-5, "block_size": 512, "activation_checkpointing": "full"},
        ),
    ],
)
def test_a_command_line_becomes_the_values_of_a_recipe(line, trainer, recipe, expected, tmp_path):
    words = line.replace("FILE", write(tmp_path, LLAMAFACTORY)).split()
    command = command_lines.read_command(words)
    result = importer.import_config(*command[:3], recipe=command.recipe)
    assert (command.trainer, result.recipe) == (trainer, recipe)
    assert expected.items() <= result.values.items()
    if "launcher." not in line:
        assert result.foreign.processes == 4


def test_torchtunes_launcher_stands_before_its_recipe(tmp_path):
    config = write(tmp_path, TORCHTUNE | {"optimizer": {"lr": 1e-3}, "dataset": {"_component_": ALPACA}})
    words = f"tune run --standalone --nproc_per_node 4 lora_finetune_distributed --config {config}"
    settings = ["batch_size=3", "optimizer.lr=5e-5", "dataset.source=org/more"]
    command = command_lines.read_command([*words.split(), *settings])
    result = importer.import_config(*command[:3], recipe=command.recipe)
    assert command.trainer == "torchtune" and result.foreign.processes == 4
    assert result.values["per_device_train_batch_size"] == 3 and result.values["learning_rate"] == 5e-5
    assert result.values["dataset_name"] == "org/more"


@pytest.mark.parametrize("recipe", ["lora_dpo_distributed", "generate", ""])
def test_torchtunes_other_recipes_are_refused(recipe):
    with pytest.raises(importer.Refused, match="lora_finetune_distributed"):
        command_lines.read_command(["tune", "run", *recipe.split(), "--config", "mine.yaml"])


def test_the_name_of_one_of_torchtunes_own_configs_is_no_file():
    with pytest.raises(ConfigError, match="tune cp"):
        command_lines.read_command(["tune", "run", "lora_finetune_distributed", "--config", "llama3_1/8B_lora"])


def test_a_script_of_several_trainers_is_known_by_its_flags():
    words = "accelerate launch --num_processes 4 swift/cli/sft.py --model org/model --tuner_type full --dataset org/rows#500"
    command = command_lines.read_command(words.split())
    result = importer.import_config(*command[:3])
    assert command.trainer == "ms-swift" and result.recipe == "causal_lm"
    assert result.values["datasets"] == [{"path": "org/rows", "name": "rows", "limit": 500}]
    assert result.values["learning_rate"] == 1e-5


def test_another_script_is_read_by_its_flags(tmp_path):
    """Many scripts are built on transformers' Trainer."""
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP\n")
    words = f"accelerate launch --config_file {tmp_path}/mine.yaml fastchat/train/train_mem.py --model_name_or_path org/model"
    command = command_lines.read_command(
        [*words.split(), "--data_path", "chats.json", "--bf16", "True", "--model_max_length", "2048", "--odd_flag", "1"]
    )
    result = importer.import_config(*command[:3])
    expected = {"train_file": "chats.json", "mixed_precision": "bf16", "block_size": 2048}
    assert expected.items() <= result.values.items()
    assert kinds_of(result)["odd_flag"] == UNKNOWN
    assert result.strategy.name == f"{tmp_path}/mine.yaml"


def test_a_torchtune_config_becomes_the_values_of_a_recipe():
    config = {
        "output_dir": "outputs/tune",
        "model": {
            "_component_": "torchtune.models.llama3.lora_llama3_8b",
            "lora_rank": 8,
            "lora_attn_modules": ["q_proj", "output_proj"],
        },
        "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 512},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": "org/model",
            "output_dir": "${output_dir}",
        },
        "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "train_on_input": False, "packed": True},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 100,
        },
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "batch_size": 2,
        "epochs": 1,
        "clip_grad_norm": None,
        "dtype": "bf16",
    }
    result = imported(config, importer.recognise_trainer(config, "theirs.yaml"))
    assert not result.changes_training
    expected = {
        "model_name_or_path": "org/model",
        "dataset_name": "yahma/alpaca-cleaned",
        "adapter": "lora",
        "lora_target_modules": ["q_proj", "o_proj"],
        "max_seq_length": 512,
        "packing": True,
        "learning_rate": 3e-4,
        "num_warmup_steps": 100,
        "warmup_from_zero": True,
        # Its defaults.
        "max_grad_norm": 0,
        "weight_decay": 0.01,
        "validation_split_percentage": 0,
    }
    assert {key: result.values.get(key) for key in expected} == expected
    assert kinds_of(result)["checkpointer.output_dir"] == NO_EFFECT


def test_a_yaml_of_trl_may_have_the_keys_of_its_launcher():
    result = imported({"model_name_or_path": "m", "dataset_name": "d", "accelerate_config": "zero3", "num_processes": 4})
    assert (result.strategy.name, result.foreign.processes) == ("zero3", 4)
    assert not result.changes_training


@pytest.mark.parametrize(
    ("flags", "expected", "changes_training"),
    [
        ("--num_processes 4 --mixed_precision fp16", {"mixed_precision": "fp16"}, False),
        ("--num_processes 4 --mixed_precision no", {"mixed_precision": "no"}, False),
        ("--num_machines 2 --num_processes 16", {"mixed_precision": "no"}, True),
        ("--num_machines 1 --num_processes 8", {"mixed_precision": "no"}, False),
        ("--use_deepspeed --zero_stage 3 --num_processes 8", {}, True),
        ("--use_fsdp --num_processes 8", {}, True),
    ],
)
def test_what_the_launcher_says_about_the_training_is_not_left_out(flags, expected, changes_training):
    words = f"accelerate launch {flags} run_clm.py --model_name_or_path m --train_file a.txt".split()
    command = command_lines.read_command(words)
    result = importer.import_config(*command[:3], recipe=command.recipe)
    assert expected.items() <= result.values.items()
    assert result.changes_training == changes_training


@pytest.mark.parametrize(
    ("launcher_flags", "trainer_flags", "processes", "precision"),
    [
        ("", "", 8, "bf16"),
        ("--num_processes 2", "", 2, "bf16"),
        ("--mixed_precision fp16", "", 8, "fp16"),
        ("", "--fp16", 8, "fp16"),
        ("--mixed_precision no", "", 8, "no"),
    ],
)
def test_a_config_of_accelerate_has_the_processes_and_the_precision(
    tmp_path, launcher_flags, trainer_flags, processes, precision
):
    file = tmp_path / "accelerate.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n")
    line = f"accelerate launch --config_file {file} {launcher_flags} run_clm.py --config_name m --train_file a {trainer_flags}"
    command = command_lines.read_command(line.split())
    result = importer.import_config(*command[:3], recipe=command.recipe)
    assert (result.strategy.name, result.foreign.processes) == (str(file), processes)
    assert result.values["mixed_precision"] == precision


def test_the_trainers_own_deepspeed_config_comes_before_that_of_its_launcher(tmp_path):
    (tmp_path / "accelerate.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    (tmp_path / "zero.json").write_text(json.dumps(zero(3)))
    launcher = ["accelerate", "launch", "--config_file", f"{tmp_path}/accelerate.yaml"]
    words = ["run_clm.py", "--config_name", "m", "--train_file", "a", "--deepspeed", f"{tmp_path}/zero.json"]
    command = command_lines.read_command([*launcher, *words])
    result = importer.import_config(*command[:3], recipe=command.recipe)
    assert (result.strategy.name, result.foreign.processes) == ("zero3", 8)


def test_trls_own_strategy_names_are_known():
    command = command_lines.read_command(["trl", "sft", "--model_name_or_path", "m", "--accelerate_config", "zero3"])
    assert importer.import_config(*command[:3]).strategy.name == "zero3"


def test_a_command_is_imported_with_its_own_flags_behind_two_dashes(tmp_path, capsys):
    words = ["--output", str(tmp_path / "ours"), "--", "trl", "sft", "--model_name_or_path", "m", "--dataset_name", "d"]
    assert main(["import", "command", *words]) == 0
    assert yaml.safe_load((tmp_path / "ours" / "recipe.yaml").read_text())["dataset_name"] == "d"


@pytest.mark.parametrize(
    "words", [[], ["python", "train.py"], ["trl", "dpo", "--beta", "1"], ["llamafactory-cli", "chat", "a.yaml"]]
)
def test_other_commands_are_refused(words, capsys):
    assert main(["import", "command", "--", *words]) == 2
    assert re.search("Nothing was written|--from", capsys.readouterr().err)


# --- strategies


def zero(stage, **settings):
    return {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage, **settings}, "gradient_clipping": "auto"}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "ddp"),
        ({"deepspeed": zero(0)}, "ddp"),
        ({"deepspeed": zero(2)}, "zero2"),
        ({"deepspeed": zero(3, reduce_bucket_size="auto")}, "zero3"),
        ({"deepspeed": zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})}, "zero3_offload"),
        ({"deepspeed": zero(3, offload_param={"device": "none"})}, "zero3"),
        ({"deepspeed": "configs/ds_z3_offload.json"}, "zero3_offload"),
        ({"fsdp": "full_shard auto_wrap"}, "fsdp"),
        ({"fsdp": ["full_shard", "offload"]}, "fsdp_offload"),
        ({"fsdp": "shard_grad_op offload"}, "fsdp_offload"),
        ({"fsdp": "hybrid_shard auto_wrap"}, "fsdp_hybrid"),
        ({"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": True}}, "fsdp_offload"),
        ({"fsdp_config": {"reshard_after_forward": True}}, "fsdp"),
    ],
)
def test_a_shipped_strategy_file_is_chosen_where_it_says_the_same(keys, name):
    result = imported(HANDBOOK | keys)
    assert result.strategy == strategies.Strategy(name)
    assert not result.changes_training


def test_a_json_that_no_shipped_file_says_is_taken_over(tmp_path):
    """It is named from a folder above the config, where other trainers are started."""
    config = zero(2, reduce_bucket_size=1e6)
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "mine.json").write_text(json.dumps(config))
    result = imported(HANDBOOK | {"deepspeed": "json/mine.json"}, folder=tmp_path / "examples" / "sft")
    strategy = result.strategy
    assert strategy.content["deepspeed_config"]["deepspeed_config_file"] == strategies.JSON
    assert json.loads(result.foreign.files[strategies.JSON]) == config


def test_gradients_alone_are_sharded_where_the_config_says_so():
    strategy = imported(HANDBOOK | {"fsdp": "shard_grad_op auto_wrap"}).strategy
    assert strategy.content["fsdp_config"]["fsdp_reshard_after_forward"] is False


# --- the command


def test_the_written_recipe_is_read_without_problems(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"messages": []}\n')
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = HANDBOOK | {"dataset_name": "chats.jsonl", "chat_template": template, "fsdp": "shard_grad_op"}
    assert main(["import", "config", write(tmp_path, config), "--output", "ours"]) == 0
    written = sorted(file.name for file in Path("ours").iterdir())
    assert written == ["account.txt", "chat_template.jinja", "recipe.yaml", "strategy.yaml"]
    parsed = read(RECIPES["lora_finetune"], ["--config", "ours/recipe.yaml"])
    assert parsed.problems == []
    assert parsed.config.chat_template_text == template
    output = capsys.readouterr().out
    assert "zerobook launch --strategy ours/strategy.yaml --num_processes 1 lora_finetune --config ours/recipe.yaml" in output
    assert Path("ours/account.txt").read_text() in output


def test_the_printed_launch_names_what_is_shipped_and_starts_as_it_is_typed(tmp_path, capsys, monkeypatch):
    """Paths into the installed package would be long, and another one on the next machine."""
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"messages": []}\n')
    config = HANDBOOK | {"dataset_name": "chats.jsonl", "deepspeed": zero(3)}
    assert main(["import", "config", write(tmp_path, config), "--output", "ours"]) == 0
    (line,) = re.findall(r"zerobook launch (.*)", capsys.readouterr().out)
    assert line == "--strategy zero3 --num_processes 1 lora_finetune --config ours/recipe.yaml"
    _, strategy, *words = line.split()
    launched = replace_names(words, strategy)
    assert launched[:2] == ["--config_file", str(shipped("accelerate_configs/zero3.yaml"))]
    assert str(shipped("recipes/lora_finetune.py")) in launched


def test_files_are_written_and_the_exit_code_is_1_where_a_key_has_no_counterpart(tmp_path, capsys):
    arguments = ["import", "config", write(tmp_path, HANDBOOK | {"neftune_noise_alpha": 5}), "--output", str(tmp_path / "ours")]
    assert main(arguments) == 1
    assert (tmp_path / "ours" / "recipe.yaml").exists()
    assert "neftune_noise_alpha" in capsys.readouterr().out.partition("NOT POSSIBLE")[2]
    # Nothing is overwritten.
    assert main(arguments) == 2


def test_a_config_without_data_is_written_with_a_word_about_it(tmp_path, capsys):
    config = {key: value for key, value in HANDBOOK.items() if key != "dataset_name"}
    assert main(["import", "config", write(tmp_path, config), "--from", "trl", "--output", str(tmp_path / "ours")]) == 1
    assert "no training data" in capsys.readouterr().out
    assert (tmp_path / "ours" / "recipe.yaml").exists()


@pytest.mark.parametrize("key", ["eval_strategy", "save_strategy"])
def test_a_strategy_that_nobody_knows_has_no_counterpart(tmp_path, key):
    imported = importer.import_config(HANDBOOK | {key: "setps"}, tmp_path / "a.yaml", "trl")
    (line,) = [line for line in imported.lines if line.key == key]
    assert line.kind == table.NOT_POSSIBLE and "setps" in line.say
    assert importer.import_config(HANDBOOK | {key: "steps"}, tmp_path / "a.yaml", "trl").changes_training is False


def test_a_config_for_something_else_is_refused_by_name(tmp_path, capsys):
    assert main(["import", "config", write(tmp_path, HANDBOOK | {"beta": 0.1}), "--output", str(tmp_path / "ours")]) == 2
    assert "preference" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_a_config_of_nobody_is_refused(tmp_path, capsys):
    assert main(["import", "config", write(tmp_path, {"learning_rate": 1})]) == 2
    assert "--from" in capsys.readouterr().err


# --- any config

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
known_keys = st.sampled_from(sorted({key for name in TABLES for key in table.load_table(name).entries if "[" not in key}))
keys = known_keys | st.text(max_size=8) | st.integers() | st.booleans()


def mappings(values, max_size):
    """Mappings whose keys differ as text too, as those of a config do."""
    items = st.tuples(keys, values)
    return st.lists(items, max_size=max_size, unique_by=lambda item: str(item[0])).map(dict)


values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | mappings(inner, 3), max_leaves=8)


def leaves(value, path):
    """Yield the paths of all keys that hold no other keys."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(config=mappings(values, 6), trainer=st.sampled_from(list(TRAINERS)))
def test_any_mapping_is_imported_with_each_of_its_keys_in_the_account(config, trainer):
    try:
        result = imported(config, trainer)
    except importer.Refused:
        return
    expected = {path for key, value in config.items() for path in leaves(value, str(key))}
    assert expected <= {line.key for line in result.lines}
    assert yaml.safe_load(yaml.safe_dump(result.values)) == result.values
    assert all(isinstance(text, str) for text in result.foreign.files.values())
    assert not re.search(r"\bNone\b", " ".join(result.values))
