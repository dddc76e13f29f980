"""Functions that the tables name in ``by``: each turns a value of another trainer into flags here.

A function takes the config and the value of the key. It returns flag -> value, or raises `NoCounterpart` with what to do. Keys
that together mean one thing have the same function, which reads all of them from the config.
"""

from __future__ import annotations

from typing import Any

from zerobook.interop.configs.foreign import Foreign, NoCounterpart
from zerobook.utils.chat_template import NAMES

Flags = dict[str, Any]


# --- steps and rates


def warmup(foreign: Foreign, value: Any) -> Flags:
    """Return the warm-up of ``warmup_steps`` and ``warmup_ratio``, of which the steps come first."""
    steps = foreign.get("warmup_steps", 0)
    ratio = foreign.get("warmup_ratio", 0)
    if 0 < steps < 1:
        ratio = steps
        steps = 0
    if not steps and not ratio:
        # An adapter's recipe would warm up by itself.
        return {"warmup_ratio": 0.0}
    key = "num_warmup_steps" if steps else "warmup_ratio"
    return {key: steps or ratio, "warmup_from_zero": True}


def precision(foreign: Foreign, value: Any) -> Flags:
    """Return the precision of ``bf16``, ``fp16`` and the dtype of the weights."""
    is_bf16 = foreign.config.get("bf16", foreign.config.get("bfloat16"))
    is_fp16 = foreign.get("fp16", foreign.get("float16"))
    dtype = str(foreign.get("torch_dtype") or foreign.get("dtype")).removeprefix("torch.")
    if is_bf16 is None and not is_fp16:
        is_bf16 = foreign.get("bf16") or dtype in ("bfloat16", "bf16")
    if is_bf16 in (True, "auto", "full"):
        return {"mixed_precision": "bf16"}
    is_half = is_fp16 is True or dtype in ("float16", "fp16")
    return {"mixed_precision": "fp16" if is_half else "no"}


def eval_interval(foreign: Foreign, value: Any) -> Flags:
    """Return the interval of evaluations."""
    strategy = foreign.config.get("evaluation_strategy") or foreign.get("eval_strategy")
    return {"eval_steps": _interval(strategy, foreign.get("eval_steps") or foreign.get("logging_steps"))}


def save_interval(foreign: Foreign, value: Any) -> Flags:
    """Return the interval of checkpoints."""
    return {"save_steps": _interval(foreign.get("save_strategy"), foreign.get("save_steps"))}


def _interval(strategy: Any, steps: Any) -> Any:
    # YAML reads the word no as false.
    if strategy in ("no", False):
        return 0
    if strategy in ("epoch", "steps"):
        return strategy if strategy == "epoch" else steps
    # A checkpoint of each best state.
    return "auto"


def per_epoch(foreign: Foreign, value: Any) -> Flags:
    """Return N times in an epoch as an epoch, or as a share of the run."""
    key = foreign.entry.to
    if value in (0, 1):
        return {key: "epoch" if value else 0}
    share = 1 / (value * foreign.get("num_epochs", 1))
    return {key: round(share, 6) if share < 1 else 0}


# --- model and data


def adapter(foreign: Foreign, value: Any) -> Flags:
    """Return the kind of LoRA that the switches of the config choose."""
    kinds = {"dora": ("use_dora", "peft_use_dora"), "rslora": ("use_rslora", "peft_use_rslora"), "pissa": ("pissa_init",)}
    chosen = [kind for kind, keys in kinds.items() if any(foreign.get(key) for key in keys)]
    if len(chosen) > 1:
        raise NoCounterpart(f"An adapter is one of {', '.join(chosen)}.")
    return {"adapter": chosen[0] if chosen else "lora"}


def percent(foreign: Foreign, value: Any) -> Flags:
    """Return a held-out share in percent."""
    if value >= 1:
        raise NoCounterpart("A number of rows cannot be held out. Give their percentage, or a validation_file.")
    return {"validation_split_percentage": round(100 * value, 6)}


def chat_template(foreign: Foreign, value: Any) -> Flags:
    """Return a chat template: the name of one, a file, or its text, which is written into a file."""
    text = str(value)
    if "{" in text:
        foreign.files["chat_template.jinja"] = text
        return {"chat_template": "chat_template.jinja"}
    path = foreign.locate(text)
    if path is not None:
        # A tokenizer's folder has its template in a file.
        return {"chat_template": str(path / "chat_template.jinja" if path.is_dir() else path)}
    if text in NAMES:
        return {"chat_template": text}
    foreign.sentence = (
        "The model's own template is used, which is meant to be the same. Compare with zerobook data inspect, and write "
        "another one into a file for chat_template."
    )
    return {}
