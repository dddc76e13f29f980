"""Write the tables of names into the pages docs/how-to/coming_from_*.md, by importing an example of each key.

usage: coming_from.py
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # scripts/ is not part of the installed package

from scripts.reference import sentence, table  # noqa: E402
from zerobook.interop.configs.importer import Line, import_config  # noqa: E402
from zerobook.interop.configs.table import KINDS, NO_EFFECT, NOT_POSSIBLE, TRAINERS, UNKNOWN, load_table  # noqa: E402

FOLDER = ROOT / "docs" / "how-to"
BEGIN = "<!-- written by scripts/coming_from.py -->"
END = "<!-- end of coming_from.py -->"
WIDTH = 120
PAGES = ("trl", "axolotl", "llamafactory")
"""Values of ``--from`` that have a page."""
SHARED = """
- {learning_rate: 2.0e-4}
- {gradient_accumulation_steps: 4}
- {weight_decay: 0.1}
- {max_grad_norm: 1.0}
- {adam_beta2: 0.95}
- {seed: 42}
- {output_dir: out}
- {save_total_limit: 3}
- {group_by_length: true}
- {max_steps: 1000}
- {eval_strategy: steps, eval_steps: 100}
- {save_strategy: epoch}
- {logging_steps: 10}
- {bf16: true}
- {report_to: wandb}
- {run_name: first}
- {resume_from_checkpoint: out/checkpoint-500}
- {load_best_model_at_end: true}
- {deepspeed: ds_z3_config.json}
- {fsdp: full_shard auto_wrap}
- {torch_compile: true}
- {neftune_noise_alpha: 5}
- {label_smoothing_factor: 0.1}
- {lr_scheduler_kwargs: {min_lr_rate: 0.1}}
"""
"""Keys of transformers' Trainer that the other trainers have, too."""
EXAMPLES = {
    "trl": """
- {model_name_or_path: org/model}
- {dataset_name: org/chats}
- {dataset_name: org/chats, dataset_train_split: "train_sft[:10%]"}
- {dataset_config: en}
- {datasets: [{path: json, data_files: chats.jsonl}]}
- {test_split_size: 0.05}
- {assistant_only_loss: false}
- {completion_only_loss: false}
- {chat_template_path: org/tokenizer}
- {max_length: 2048}
- {packing: true}
- {packing_strategy: wrapped}
- {padding_free: true}
- {use_peft: true, lora_r: 16, lora_alpha: 32, lora_dropout: 0.05}
- {use_peft: true, use_dora: true}
- {lora_target_modules: all-linear}
- {lora_modules_to_save: [lm_head]}
- {lora_target_parameters: [experts.down_proj]}
- {load_in_4bit: true}
- {attn_implementation: flash_attention_2}
- {dtype: bfloat16}
- {loss_type: dft}
- {per_device_train_batch_size: 4}
- {num_train_epochs: 2}
- {lr_scheduler_type: cosine}
- {lr_scheduler_type: cosine_with_min_lr}
- {warmup_steps: 0.03}
- {optim: adamw_bnb_8bit}
- {optim: muon}
- {gradient_checkpointing: true}
- {activation_offloading: true}
- {use_liger_kernel: true}
""",
    "axolotl": """
- {base_model: org/model}
- {datasets: [{path: org/chats, type: chat_template}]}
- {datasets: [{path: chats.jsonl, type: alpaca}]}
- {datasets: [{path: org/chats, type: chat_template, roles_to_train: [user, assistant]}]}
- {datasets: [{path: org/chats, type: chat_template, train_on_eos: last}]}
- {chat_template: chatml}
- {val_set_size: 0.05}
- {train_on_inputs: true}
- {sequence_len: 2048}
- {excess_length_strategy: drop}
- {sample_packing: true}
- {micro_batch_size: 2}
- {num_epochs: 2}
- {adapter: lora, lora_r: 16, lora_alpha: 32, lora_dropout: 0.05}
- {adapter: qlora}
- {peft_use_dora: true, adapter: lora}
- {lora_target_linear: true}
- {lora_modules_to_save: [lm_head]}
- {lora_model_dir: out/adapter}
- {loraplus_lr_ratio: 16}
- {optimizer: adamw_bnb_8bit}
- {optimizer: muon}
- {lr_scheduler: cosine}
- {lr_scheduler: rex}
- {warmup_ratio: 0.03}
- {attn_implementation: flash_attention_2}
- {gradient_checkpointing: offload}
- {evals_per_epoch: 4}
- {saves_per_epoch: 1}
- {early_stopping_patience: 3}
- {auto_resume_from_checkpoints: true}
- {use_wandb: true, wandb_project: mine}
- {plugins: [axolotl.integrations.liger.LigerPlugin]}
""",
    "llamafactory": """
- {model_name_or_path: org/model}
- {stage: sft}
- {finetuning_type: full}
- {finetuning_type: lora, lora_rank: 8, lora_alpha: 16}
- {finetuning_type: lora, use_dora: true}
- {finetuning_type: freeze}
- {finetuning_type: oft}
- {lora_target: all}
- {additional_target: lm_head}
- {adapter_name_or_path: out/adapter}
- {quantization_bit: 4}
- {dataset: my_chats}
- {eval_dataset: my_chats}
- {template: chatml}
- {template: qwen3}
- {cutoff_len: 2048}
- {max_samples: 1000, dataset: my_chats}
- {val_size: 0.1}
- {mask_history: true}
- {train_on_prompt: true}
- {packing: true}
- {neat_packing: true}
- {flash_attn: fa2}
- {per_device_train_batch_size: 4}
- {num_train_epochs: 2}
- {lr_scheduler_type: cosine}
- {warmup_ratio: 0.03}
- {disable_gradient_checkpointing: true}
- {pure_bf16: true}
- {optim: adamw_8bit}
- {use_galore: true}
- {loraplus_lr_ratio: 16}
- {use_unsloth: true}
- {enable_liger_kernel: true}
""",
}
"""Value of ``--from`` -> configs of one key, or of a few that mean something together."""
FILES = {
    "data/dataset_info.json": {"my_chats": {"hf_hub_url": "org/chats"}},
    "ds_z3_config.json": {"zero_optimization": {"stage": 3}},
}
"""Files that the examples name: LLaMA-Factory's list of data sets, and a DeepSpeed config."""


def tables(trainer: str) -> str:
    """Return Markdown: what becomes of the examples of a trainer, and how many other keys there are."""
    name = load_table(TRAINERS[trainer]).trainer
    same: list[str] = []
    translated: list[list[str]] = []
    missing: list[list[str]] = []
    used_keys: set[str] = set()
    for example in examples(trainer):
        lines = lines_of(trainer, example)
        used_keys |= example.keys()
        flags: dict[str, Any] = {}
        for line in lines:
            flags |= line.flags
        unmet = [line for line in lines if line.kind in (NOT_POSSIBLE, UNKNOWN)]
        if unmet:
            missing.append([settings(example), explanations(unmet)])
            continue
        text = explanations(lines)
        if list(example) == list(flags) and not text:
            same += [f"`{key}`" for key in flags]
        else:
            no_key = "no effect" if lines[0].kind == NO_EFFECT else "no key"
            translated.append([settings(example), settings(flags) or no_key, text])
    # Several examples may have the same key.
    same_keys = ", ".join(dict.fromkeys(same))
    parts = [textwrap.fill(f"The same name and meaning in both: {same_keys}.", WIDTH) + "\n"]
    parts.append(table([f"in {name}", "here", "what it means, and what changes"], translated))
    parts.append(f"Not possible here:\n\n{table([f'in {name}', 'what to do'], missing)}")
    parts.append(counts(trainer, used_keys))
    return "\n".join(parts)


def examples(trainer: str) -> list[dict[str, Any]]:
    """Return the example configs of a trainer: first those with keys that only this trainer has."""
    return [*yaml.safe_load(EXAMPLES[trainer]), *yaml.safe_load(SHARED)]


def lines_of(trainer: str, example: dict[str, Any]) -> list[Line]:
    """Return the account of an example: a line for each key, which says what becomes of it."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in FILES.items():
            file = Path(folder) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(content))
        recipe = "lora_finetune"
        if example.get("finetuning_type") == "full":
            recipe = "causal_lm"
        return import_config(example, Path(folder) / "config.yaml", trainer, recipe=recipe).lines


def explanations(lines: list[Line]) -> str:
    """Return what the lines say, each sentence once."""
    sentences = [linked(line.say) for line in lines if line.say]
    return " ".join(dict.fromkeys(sentences))


def settings(values: dict[str, Any]) -> str:
    """Return keys with values as a cell shows them."""
    return "<br>".join(f"`{key}: {_shown(value)}`" for key, value in values.items())


def _shown(value: Any) -> str:
    """Return a value as YAML in one line, without quotes."""
    # PyYAML ends a text that is a single scalar with a line of three dots.
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).strip()
    return text.removesuffix("\n...").replace("'", "")


def linked(say: str) -> str:
    """Return a sentence in which paths of pages are links."""
    return sentence(re.sub(r"docs/how-to/(\w+\.md)", r"[\1](\1)", say))


def counts(trainer: str, used_keys: set[str]) -> str:
    """Return a sentence about the keys of the trainer that the tables leave out."""
    table_of_trainer = load_table(TRAINERS[trainer])
    others = {key: entry for key, entry in table_of_trainer.entries.items() if key not in used_keys}
    kinds = Counter(entry.kind for entry in others.values())
    assert set(kinds) <= set(KINDS)
    counterparts = len(others) - kinds[NO_EFFECT] - kinds[NOT_POSSIBLE]
    text = (
        f"The importer knows {len(others)} more keys of {table_of_trainer.trainer}: {counterparts} have a counterpart, "
        f"{kinds[NO_EFFECT]} have no effect here, and {kinds[NOT_POSSIBLE]} are not possible. `zerobook import config` "
        "prints what becomes of each key of your config, and writes it into `account.txt`."
    )
    return textwrap.fill(text, WIDTH) + "\n"


def replaced(page: str, trainer: str) -> str:
    """Return the page with new tables between `BEGIN` and `END`."""
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n{tables(trainer)}{END}", page, flags=re.DOTALL)


def main() -> None:
    for trainer in PAGES:
        page = FOLDER / f"coming_from_{trainer}.md"
        page.write_text(replaced(page.read_text(), trainer))
        print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
