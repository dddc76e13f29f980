"""The same training: what another trainer does with a config, and what the imported config does here.

All rows are in one step, so that their order does not matter. Losses, gradient norms and rates of ten steps are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness import launch
from zerobook.cli.main import main

pytestmark = pytest.mark.launch
STEPS = 10
CLOSE = 1e-5
BASE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 3.0e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "seed": 42,
    "use_cpu": True,
    "bf16": False,
}
"""Arguments of transformers' Trainer."""
PACK = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": 1024}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": ["q_proj", "v_proj"]}


def token_rows(tokenizer, chats):
    """Return the chats as token ids, with labels on the assistant's turns and the tokens that end them."""
    rows = []
    for messages in chats:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        # Characters of the assistant's turns.
        spans = []
        position = 0
        for message in messages:
            start = text.index(message["content"], position)
            position = start + len(message["content"]) + len("<|im_end|>")
            if message["role"] == "assistant":
                spans.append((start, position))
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        labels = []
        for token, (first, last) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            is_learnt = any(start <= first and last <= end for start, end in spans)
            labels.append(token if is_learnt else -100)
        rows.append({"input_ids": encoded["input_ids"], "labels": labels})
    return rows


def collate(rows):
    import torch

    length = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    batch = {name: torch.full((len(rows), length), value) for name, value in filled.items()}
    for index, row in enumerate(rows):
        size = len(row["input_ids"])
        batch["input_ids"][index, :size] = torch.tensor(row["input_ids"])
        batch["labels"][index, :size] = torch.tensor(row["labels"])
        batch["attention_mask"][index, :size] = 1
    return batch


def log_of(trainer):
    """Return (loss, norm, rate) of each step."""
    trainer.train()
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry
    ]


def read_chats(file):
    return [json.loads(line)["messages"] for line in file.read_text().splitlines()]


def train_with_trainer(tiny, output, adapter):
    """Train with transformers' Trainer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

    model = AutoModelForCausalLM.from_pretrained(tiny / "llama", dtype="float32")
    if adapter:
        from peft import LoraConfig, get_peft_model

        set_seed(BASE["seed"])
        settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        model.save_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    rows = token_rows(tokenizer, read_chats(tiny / "few.jsonl"))
    arguments = TrainingArguments(output_dir=str(output), disable_tqdm=True, **BASE)
    return log_of(Trainer(model, arguments, train_dataset=rows, data_collator=collate))


def train_imported(config, trainer, tmp_path, adapter=None):
    """Import the config, and train with what it becomes."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(config))
    assert main(["import", "config", str(theirs), "--from", trainer, "--output", str(tmp_path / "ours")]) == 0
    recipe_yaml = tmp_path / "ours" / "recipe.yaml"
    values = yaml.safe_load(recipe_yaml.read_text())
    recipe = "lora_finetune" if "adapter" in values else "causal_lm"
    if adapter:
        # The random weights that an adapter begins with are those of the other run.
        values = {key: value for key, value in values.items() if not key.startswith(("adapter", "lora_"))}
        recipe_yaml.write_text(yaml.safe_dump(values | {"adapter_path": str(adapter)}))
    run = launch("single", 1, recipe, tmp_path / "run", config=recipe_yaml, validation_split_percentage=0)
    return [(step["loss"], step["grad_norm"], step["learning_rate"]) for step in run.steps]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs) == STEPS
    for step, (our_step, their_step) in enumerate(zip(ours, theirs, strict=True)):
        assert our_step == pytest.approx(their_step, rel=CLOSE, abs=CLOSE * BASE["learning_rate"]), step


@pytest.mark.parametrize("trains_adapters", [False, True], ids=["all_weights", "lora"])
def test_an_imported_config_trains_as_transformers_trainer_does(trains_adapters, tiny, tmp_path):
    adapter = tmp_path / "adapter" if trains_adapters else None
    theirs = train_with_trainer(tiny, tmp_path / "theirs", adapter)

    config = BASE | {"model_name_or_path": str(tiny / "llama"), "train_file": str(tiny / "few.jsonl")}
    trainer = "trainer"
    if trains_adapters:
        # Trainer has no keys for adapters, and TRL has.
        del config["train_file"]
        config |= {**LORA, "dataset_name": str(tiny / "few.jsonl"), "gradient_checkpointing": False}
        # Trainer gets rows that learn the assistant's turns. TRL learns all tokens by default.
        config["assistant_only_loss"] = True
        trainer = "trl"
    ours = train_imported(config, trainer, tmp_path, adapter)

    assert_same(ours, theirs)
    # The training did something.
    assert ours[-1][0] < 0.99 * ours[0][0]


@pytest.mark.full
@pytest.mark.parametrize("trains_adapters", [False, True], ids=["all_weights", "lora"])
@pytest.mark.parametrize(
    "keys",
    [
        {"assistant_only_loss": True},
        # All tokens of a chat are learnt by default.
        {},
        # All rows are in one pack, which is a step.
        {"assistant_only_loss": True, "packing": True, **PACK},
        {"packing": True, **PACK},
    ],
    ids=["rows", "all_tokens", "packed", "packed_all_tokens"],
)
def test_an_imported_config_trains_as_trl_does(trains_adapters, keys, tiny, tmp_path):
    """``make trl`` installs TRL into a folder of its own, ``.cache/trl``, or ZEROBOOK_TRL names one."""
    folder = os.environ.get("ZEROBOOK_TRL", str(Path(__file__).resolve().parents[2] / ".cache" / "trl"))
    if not (Path(folder) / "trl").is_dir():
        pytest.skip(f"not run: there is no TRL in {folder}; make trl installs it")
    sys.path.append(folder)
    try:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        pytest.skip(f"not run: TRL cannot be imported: {error}")
    finally:
        sys.path.remove(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny / "llama")
    if "assistant_only_loss" in keys:
        # The same template with marks, by which TRL finds the turns to learn.
        start = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n"
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "{{ m['content'] }}<|im_end|>\n", start + "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
        )
    keys = {"max_length": 256, "gradient_checkpointing": False} | keys
    arguments = SFTConfig(output_dir=str(tmp_path / "theirs"), disable_tqdm=True, **BASE | keys)
    peft_config = None
    if trains_adapters:
        peft_config = LoraConfig(
            r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    trainer = SFTTrainer(
        str(tiny / "llama"),
        arguments,
        train_dataset=Dataset.from_list([{"messages": chat} for chat in read_chats(tiny / "few.jsonl")]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    adapter = None
    if trains_adapters:
        adapter = tmp_path / "adapter"
        trainer.model.save_pretrained(adapter)
    theirs = log_of(trainer)

    config = BASE | keys | {"model_name_or_path": str(tiny / "llama"), "dataset_name": str(tiny / "few.jsonl")}
    config |= LORA if trains_adapters else {}
    ours = train_imported(config, "trl", tmp_path, adapter)

    assert_same(ours, theirs)


LLAMA_FACTORY_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}User: {{ m['content'] }}\n\nAssistant:"
    "{% else %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""LLaMA-Factory's template ``deepseek``. Nothing follows the token that ends a turn, so both learn the same tokens."""


@pytest.mark.full
@pytest.mark.parametrize("trains_adapters", [False, True], ids=["all_weights", "lora"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"train_on_prompt": True},
        # All rows are in one pack, which is a step.
        {"neat_packing": True, "flash_attn": "sdpa", "cutoff_len": 1024, "per_device_train_batch_size": 1,
         "gradient_accumulation_steps": 1},
    ],
    ids=["rows", "all_tokens", "packed"],
)  # fmt: skip
def test_an_imported_config_trains_as_llamafactory_does(trains_adapters, keys, tiny, tmp_path):
    """``make llamafactory`` installs LLaMA-Factory into an environment of its own, or ZEROBOOK_LLAMA_FACTORY names one."""
    default = Path(__file__).resolve().parents[2] / ".cache" / "llamafactory"
    command = Path(os.environ.get("ZEROBOOK_LLAMA_FACTORY", default)) / "bin" / "llamafactory-cli"
    if not command.exists():
        pytest.skip(f"not run: there is no {command}; make llamafactory installs it")
    model = tmp_path / "model"
    shutil.copytree(tiny / "llama", model)
    (model / "chat_template.jinja").write_text(LLAMA_FACTORY_TEMPLATE)
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {"file_name": str(tiny / "few.jsonl"), "formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": tags}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"few": entry}))
    config = BASE | {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "few",
        "dataset_dir": str(tmp_path),
        "template": "deepseek",
        "disable_gradient_checkpointing": True,
        "output_dir": str(tmp_path / "theirs"),
    } | keys  # fmt: skip
    adapter = None
    if trains_adapters:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        adapter = tmp_path / "adapter"
        settings = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype="float32"), settings).save_pretrained(adapter)
        config |= {"finetuning_type": "lora", "adapter_name_or_path": str(adapter)}
    theirs_yaml = tmp_path / "config.yaml"
    theirs_yaml.write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["DISABLE_VERSION_CHECK"] = "1"
    subprocess.run([command, "train", theirs_yaml], env=environment, check=True, timeout=900)
    log = json.loads((tmp_path / "theirs" / "trainer_state.json").read_text())["log_history"]
    theirs = [(entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in log if "loss" in entry]

    ours = train_imported(config, "llamafactory", tmp_path, adapter)

    if "train_on_prompt" in keys:
        # Trainer of transformers 5.6 divides by the number of labels. It includes the first token of each row, which has no
        # prediction.
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        chats = read_chats(tiny / "few.jsonl")
        labels = sum(len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats)
        share = (labels - len(chats)) / labels
        ours = [(loss * share, norm * share, rate) for loss, norm, rate in ours]

    assert_same(ours, theirs)
