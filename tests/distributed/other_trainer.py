"""Train a tiny model with transformers' Trainer, or with a loop on accelerate, as one does without Zerobook.

usage: accelerate launch other_trainer.py SPEC.json

The loss of each step over all ranks goes into ``losses.json`` in the output folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from zerobook.launch.build import remove_buffer_name
from zerobook.launch.ops import use_own_tools

STEPS = 6
HALF = 3


def rows_of(spec: dict[str, Any]) -> list[dict[str, list[int]]]:
    """The rows of the data file, tokenized as Zerobook does: only what comes after that is compared."""
    from transformers import AutoTokenizer

    from tests.tiny import causal_rows

    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    chats = [json.loads(line)["messages"] for line in Path(spec["data"]).read_text().splitlines()]
    return causal_rows(tokenizer, chats)


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        padding = length - len(row["input_ids"])
        batch["input_ids"].append([*row["input_ids"], *[0] * padding])
        batch["attention_mask"].append([*[1] * len(row["input_ids"]), *[0] * padding])
        batch["labels"].append([*row["labels"], *[-100] * padding])
    return {name: torch.tensor(values) for name, values in batch.items()}


def model_of(spec: dict[str, Any]) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec.get("dtype", "float32")))
    if spec.get("lora"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **spec["lora"]))
    return model


def mean_over_ranks(loss: torch.Tensor) -> float:
    loss = loss.detach().float().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(loss)
        loss /= torch.distributed.get_world_size()
    return float(loss)


def train_with_trainer(spec: dict[str, Any]) -> list[float]:
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class Recording(Trainer):
        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **options)
            losses.append(mean_over_ranks(loss))
            return loss

    arguments = TrainingArguments(
        output_dir=spec["output"],
        use_cpu=True,
        per_device_train_batch_size=spec["rows"] // spec["ranks"],
        max_steps=STEPS,
        save_steps=HALF,
        logging_steps=1,
        report_to=[],
        **spec["arguments"],
    )
    # The ranks meet before a model is made: ZeRO-3 divides it among them. On CPUs, transformers leaves that out.
    assert arguments.device.type == "cpu"
    if "deepspeed" in spec["arguments"]:
        import deepspeed

        deepspeed.init_distributed("gloo")
    trainer = Recording(model=model_of(spec), args=arguments, train_dataset=rows_of(spec), data_collator=collate)
    trainer.train(resume_from_checkpoint=spec.get("resume"))
    return losses


def train_with_accelerate(spec: dict[str, Any]) -> list[float]:
    """One batch of all rows, and ``save_state`` after half of the steps."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType

    # On CPUs, accelerate forms a group only where it is told that they are meant.
    PartialState(cpu=True)
    if "ACCELERATE_USE_FSDP" in os.environ:
        # accelerate chooses FSDP only where there are GPUs, though FSDP2 itself runs on gloo.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        os.environ["FSDP_STATE_DICT_TYPE"] = spec["state_dict"]
    accelerator = Accelerator()
    model = model_of(spec)
    rows = rows_of(spec)
    share = len(rows) // accelerator.num_processes
    optimizer = torch.optim.AdamW(model.parameters(), **spec["optimizer"])
    loader = torch.utils.data.DataLoader(rows, batch_size=share, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
    losses = []
    first = 0
    if spec.get("resume"):
        accelerator.load_state(spec["resume"])
        first = HALF
    for step in range(first, STEPS):
        if step == HALF and not spec.get("resume"):
            accelerator.save_state(str(Path(spec["output"]) / "state"))
        for batch in loader:
            labels = batch.pop("labels")
            logits = model(**batch).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            # Ranks are averaged, and the loss is the mean over the tokens of all of them.
            loss = loss * accelerator.num_processes / tokens
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
    return losses


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    # DeepSpeed would compile its operations again, into a folder of its own.
    use_own_tools()
    torch.manual_seed(0)
    losses = train_with_accelerate(spec) if spec["kind"] == "accelerate" else train_with_trainer(spec)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (Path(spec["output"]) / "losses.json").write_text(json.dumps(losses))
    # Nobody else does. The reduction of the losses comes after all ranks have opened the buffers.
    remove_buffer_name(os.environ)
    # gloo's threads may abort an interpreter that ends with them.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
