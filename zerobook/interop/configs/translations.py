"""Functions that the tables name in ``by``: each turns a value of another trainer into flags here.

A function takes the config and the value of the key. It returns flag -> value, or raises `NoCounterpart` with a sentence that
says what to do. If several keys together mean one thing, the tables name the same function for each of them. It reads all of
them from the config and ignores the value.
"""

import math
from typing import Any

from zerobook.interop.configs.foreign import Foreign, NoCounterpart
from zerobook.utils.chat_template import NAMES
from zerobook.utils.written_values import as_list

Flags = dict[str, Any]
# Chat templates of LLaMA-Factory that do not belong to one model family.
GENERIC_TEMPLATES = ("default", "alpaca", "vicuna", "empty", "fewshot")


# --- steps and rates


def translate_warmup(foreign: Foreign, _value: Any) -> Flags:
    """Return the warm-up of ``warmup_steps`` or, without it, of ``warmup_ratio``."""
    steps = foreign.get("warmup_steps") or 0
    ratio = foreign.get("warmup_ratio") or 0
    # transformers reads a number of steps below 1 as a ratio.
    if 0 < steps < 1:
        ratio = steps
        steps = 0
    if not steps and not ratio:
        # The recipe for adapters warms up by default, so write the 0.
        return {"warmup_ratio": 0.0}
    key = "num_warmup_steps" if steps else "warmup_ratio"
    return {key: steps or ratio, "warmup_from_zero": True}


def translate_precision(foreign: Foreign, _value: Any) -> Flags:
    """Return the precision that ``bf16``, ``fp16`` and the dtype of the weights set."""
    # Read only the config's own value here. The trainer's default of bf16 counts below, if the config turns on neither.
    is_bf16 = foreign.config.get("bf16", foreign.config.get("bfloat16"))
    is_fp16 = foreign.get("fp16", foreign.get("float16"))
    dtype = str(foreign.get("torch_dtype") or foreign.get("dtype")).removeprefix("torch.")
    if is_bf16 is None and not is_fp16:
        is_bf16 = foreign.get("bf16") or dtype in ("bfloat16", "bf16")
    if is_bf16 in (True, "auto", "full"):
        return {"mixed_precision": "bf16"}
    if is_fp16 is True or dtype in ("float16", "fp16"):
        return {"mixed_precision": "fp16"}
    return {"mixed_precision": "no"}


def translate_eval_interval(foreign: Foreign, _value: Any) -> Flags:
    """Return the interval of evaluations."""
    strategy = foreign.config.get("evaluation_strategy") or foreign.get("eval_strategy")
    return {"eval_steps": _translate_interval(strategy, foreign.get("eval_steps") or foreign.get("logging_steps"))}


def translate_save_interval(foreign: Foreign, _value: Any) -> Flags:
    """Return the interval of checkpoints."""
    return {"save_steps": _translate_interval(foreign.get("save_strategy"), foreign.get("save_steps"))}


# Return the value of ``eval_steps`` or ``save_steps``.
def _translate_interval(strategy: Any, steps: Any) -> Any:
    # Some trainers need no strategy beside the steps.
    if strategy in (None, "steps"):
        return steps
    # YAML reads the word no as false. ``best`` saves at each lower loss, and the nearest counterpart is the default, ``auto``.
    intervals = {"no": 0, False: 0, "epoch": "epoch", "best": "auto"}
    if strategy not in intervals:
        raise NoCounterpart(f"{strategy!r} names no interval. Write steps, epoch or no as the strategy.")
    return intervals[strategy]


def translate_times_per_epoch(foreign: Foreign, value: Any) -> Flags:
    """Return a number of times per epoch, ``value``, as an interval that is a share of the run."""
    # An interval of 1 would be one step, and not the whole run.
    return {foreign.entry.to: round(min(1 / (value * foreign.get("num_epochs", 1)), 0.999), 6)}


# --- model and data

# Key of another trainer that turns on a kind of adapter -> that kind.
KINDS = {
    "use_dora": "dora",
    "peft_use_dora": "dora",
    "use_rslora": "rslora",
    "peft_use_rslora": "rslora",
    "pissa_init": "pissa",
}


def translate_adapter(foreign: Foreign, value: Any) -> Flags:
    """Return the kind of adapter: LoRA, or the variant that another key of the config turns on."""
    if value not in (True, "lora", "qlora"):
        raise NoCounterpart("All weights are trained, or adapters: LoRA, rsLoRA, DoRA, PiSSA or IA3.")
    chosen = [kind for key, kind in KINDS.items() if foreign.get(key)] or ["lora"]
    if len(chosen) > 1:
        raise NoCounterpart(f"An adapter is one of {', '.join(chosen)}.")
    flags: Flags = {"adapter": chosen[0]}
    if value == "qlora":
        flags["load_in_4bit"] = True
    return flags


def translate_axolotl_targets(foreign: Foreign, value: Any) -> Flags:
    """Return the modules that get adapters: all linear layers if ``lora_target_linear`` is set, or else the list ``value``."""
    if foreign.get("lora_target_linear"):
        # Axolotl adds these to all linear layers, which lora_target_modules cannot say.
        if {"embed_tokens", "lm_head"}.intersection(as_list(value)):
            raise NoCounterpart("Embeddings get no adapters beside all linear layers. List all modules instead.")
        value = "all-linear"
    return {"lora_target_modules": value}


def fill_unset(foreign: Foreign, value: Any) -> Flags:
    """Return ``value``; if it is ``default``, the value that the trainer computes from other keys.

    These are LLaMA-Factory's lora_alpha, and ms-swift's learning rate and accumulation.
    """
    if value == "default" and foreign.entry.to == "lora_alpha":
        value = 2 * foreign.get("lora_rank")
    elif value == "default" and foreign.entry.to == "gradient_accumulation_steps":
        value = math.ceil(16 / (foreign.get("per_device_train_batch_size") * foreign.processes))
    elif value == "default":
        # ms-swift trains all weights at a lower rate than adapters.
        value = {"full": 1e-5}.get(foreign.get("tuner_type"), 1e-4)
    return {foreign.entry.to: value}


def translate_torchtune_model(foreign: Foreign, value: Any) -> Flags:
    """Return whether adapters are trained, by the name of torchtune's function that builds the model."""
    builder = value.rpartition(".")[2]
    if "vision" in value:
        raise NoCounterpart("The recipes train language models.")
    if builder.startswith("qlora_"):
        return {"adapter": "lora", "load_in_4bit": True}
    if builder.startswith("lora_"):
        return {"adapter": "lora"}
    return {}


def translate_torchtune_targets(foreign: Foreign, _value: Any) -> Flags:
    """Return the modules that get adapters. torchtune's names become those of transformers for Llama."""
    model = foreign.get("model")
    names = [name.replace("output_proj", "o_proj") for name in model.get("lora_attn_modules") or []]
    if model.get("apply_lora_to_mlp"):
        names += ["gate_proj", "up_proj", "down_proj"]
    if model.get("apply_lora_to_output"):
        names.append("lm_head")
    return {"lora_target_modules": names}


def translate_torchtune_decay(foreign: Foreign, _value: Any) -> Flags:
    """Return the default weight decay of torch's AdamW, unless the config sets another one or another optimizer."""
    optimizer = foreign.get("optimizer") or {}
    if "weight_decay" in optimizer or "SGD" in str(optimizer.get("_component_")):
        return {}
    return {"weight_decay": 0.01}


def translate_axolotl_batch(foreign: Foreign, value: Any) -> Flags:
    """Return the accumulation: the number of micro-batches in a batch of ``value`` samples."""
    return {"gradient_accumulation_steps": value // foreign.get("micro_batch_size")}


def check_plugins(foreign: Foreign, value: Any) -> Flags:
    """Return no flags for Axolotl's plugins that do not change the training: those for speed and for trackers."""
    for name in as_list(value):
        if not any(word in name for word in ("cut_cross_entropy", "liger", "KernelsPlugin", "swanlab")):
            raise NoCounterpart(f"{name} may change the training. Remove it, or write your own hook.")
    return {}


def translate_held_out_share(foreign: Foreign, value: Any) -> Flags:
    """Return the held-out share of the data, ``value``, in percent."""
    if value >= 1:
        raise NoCounterpart("A number of rows cannot be held out. Give their percentage, or a validation_file.")
    return {"validation_split_percentage": round(100 * value, 6)}


def translate_chat_template(foreign: Foreign, value: Any) -> Flags:
    """Return the chat template, which ``value`` gives by its text, a path or a name. A text is written into a file."""
    text = str(value)
    # Jinja text has braces.
    if "{" in text:
        foreign.files["chat_template.jinja"] = text
        return {"chat_template": "chat_template.jinja"}
    path = foreign.locate(text)
    if path is not None:
        if path.is_dir():
            # A tokenizer's folder has its template in this file.
            path = path / "chat_template.jinja"
        return {"chat_template": str(path)}
    if text in NAMES:
        return {"chat_template": text}
    if text in GENERIC_TEMPLATES:
        raise NoCounterpart("No model has this template by itself. Write it into a file for chat_template.")
    foreign.sentence = (
        "The model's own template is used, which should be the same. If zerobook data inspect shows rows in another form than "
        "the other trainer's, save that trainer's template in a file and pass it as chat_template."
    )
    return {}
