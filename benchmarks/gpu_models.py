"""Speed of finetuning well-known shapes on one GPU: the part ``models`` of benchmarks/gpu.py.

For each model, the device's own rate of matrix products on the model's shapes comes first: no training is faster. Then the
recipe's tokens a second, memory, and the share of that rate and of the data sheet that its operations reach (MFU). Weights are
random, in bf16; a model is made on the device, and its files are removed after its case.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_setting import Case, Row, Setting
from benchmarks.published.trial import Arm, attempt
from zerobook.utils import subprocess_launch
from zerobook.utils.devices import find_device

ROOT = Path(__file__).resolve().parents[1]
STEPS = 12
GIB = 2**30


class Shape(NamedTuple):
    """A model and its finetuning. ``factor``: operations of a token for each weight, 6 for all weights and 4 for adapters.

    ``budget``: bytes of GPU memory that the process may use; 0: all.
    """

    sizes: dict[str, int]
    recipe: str
    rows: int
    length: int
    factor: int
    flags: dict[str, object]
    strategy: str = "single"
    budget: int = 0


def _llama(width: int, inner: int, layers: int, heads: int, kv: int, *, tied: bool = False) -> dict[str, Any]:
    return {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "vocab_size": 128_256, "tie_word_embeddings": tied}  # fmt: skip


BF16 = {"mixed_precision": "bf16", "attn_implementation": "auto"}
ADAPTED: dict[str, object] = {**BF16, "lora_r": 16, "packing": "true"}
LLAMA_8B = _llama(4096, 14336, 32, 32, 8)
SHAPES = {
    "1B, all weights, 2048": Shape(_llama(2048, 8192, 16, 32, 8, tied=True), "causal_lm", 8, 2048, 6, {**BF16}),
    "3B, all weights, 4096": Shape(
        _llama(3072, 8192, 28, 24, 8, tied=True), "causal_lm", 2, 4096, 6, {**BF16, "activation_checkpointing": "selective"}
    ),
    "8B, LoRA, 2048": Shape(LLAMA_8B, "lora_finetune", 4, 2048, 4, {**ADAPTED}),
    "8B, QLoRA, 2048": Shape(LLAMA_8B, "lora_finetune", 4, 2048, 4, {**ADAPTED, "load_in_4bit": "true"}),
    "GPT-2 XL, offload, 24 GiB": Shape(
        {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50_257}, "causal_lm", 16, 128, 6,
        {"mixed_precision": "fp16"}, "zero3_offload_optimizer", 24 * GIB,
    ),
    "BlenderBot-400M, 128 to 128": Shape(
        {"d_model": 1280, "encoder_layers": 2, "decoder_layers": 12, "encoder_attention_heads": 32,
         "decoder_attention_heads": 32, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 8008},
        "seq2seq_chatbot", 64, 128, 6, {"mixed_precision": "bf16"},
    ),
}  # fmt: skip
TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
       "n_embd": 64, "n_layer": 2, "n_head": 4, "d_model": 64, "encoder_layers": 1, "decoder_layers": 2,
       "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}  # fmt: skip


def models(setting: Setting) -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, shape in SHAPES.items():
        for what, extra in (("", {}), (", compiled", {"torch_compile": "true"})):
            if not extra or (shape.strategy == "single" and shape.factor == 6 and "checkpointing" not in str(shape.flags)):
                found[name + what] = partial(_finetuned, setting, shape._replace(flags=shape.flags | extra))
    return found


def _finetuned(setting: Setting, shape: Shape, left: float, rows: dict[str, Row]) -> Row:
    until = time.monotonic() + left
    if setting.tiny:
        sizes = {key: min(value, TOY.get(key, value)) for key, value in shape.sizes.items()}
        shape = shape._replace(sizes=sizes | {"vocab_size": 8192}, rows=2, length=64, budget=0)
    if setting.cpu:
        shape = shape._replace(flags=shape.flags | {"mixed_precision": "no"})
        if "load_in_4bit" in shape.flags:
            shape = shape._replace(flags=shape.flags | {"dtype": "float32"})
    folder = setting.folder / "shape"
    try:
        made = _made(setting, shape, folder, until - time.monotonic())
        length = "max_seq_length" if shape.recipe == "lora_finetune" else "block_size"
        flags: dict[str, object] = {
            "model_name_or_path": folder, "per_device_train_batch_size": shape.rows, "max_train_steps": STEPS,
            "cache_dir": setting.folder / "data", "validation_split_percentage": 0, "logging_steps": 4,
        } | shape.flags  # fmt: skip
        made_of = setting.materials
        if shape.recipe == "seq2seq_chatbot":
            lengths = {"max_source_length": shape.length, "max_target_length": shape.length}
        else:
            lengths = {length: shape.length}
        flags |= lengths | {"train_file": made_of.text if shape.recipe == "causal_lm" else made_of.pairs}
        arm = Arm.of(shape.strategy, 1)
        outcome = attempt(arm, shape.recipe, flags, shape.budget, max(1.0, until - time.monotonic()))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    row: Row = {**made, "seconds a step": outcome.step, "peak": outcome.peak, "steps": outcome.steps, "losses": outcome.losses}
    if shape.recipe == "seq2seq_chatbot":
        return row | {"samples/s": shape.rows / outcome.step}
    tokens = shape.rows * shape.length
    needed = tokens * (shape.factor * made["weights multiplied"] + made["attention"] * shape.length)
    row |= {"tokens/s": tokens / outcome.step, "TFLOPS": needed / outcome.step / 1e12}
    row["of the measured rate"] = needed / outcome.step / made["products, operations/s"]
    if not setting.cpu and "data sheet, operations/s" in made:
        row["MFU"] = needed / outcome.step / made["data sheet, operations/s"]
    return row


def _made(setting: Setting, shape: Shape, folder: Path, left: float) -> Row:
    """Write the model and measure the device's rate on its shapes, in a process of its own."""
    asked = json.dumps({"sizes": shape.sizes, "folder": str(folder), "materials": str(setting.folder), "cpu": setting.cpu,
                        "tokens": shape.rows * shape.length})  # fmt: skip
    code = "import sys; from benchmarks import gpu_models; gpu_models.make(sys.argv[1])"
    status, text = subprocess_launch.run([sys.executable, "-c", code, asked], max(1.0, left), cwd=ROOT)
    if status:
        raise RuntimeError(f"the model could not be made: {subprocess_launch.last_error(text)}")
    return json.loads(text.strip().splitlines()[-1])


def make(asked: str) -> None:
    """Make a model of the sizes in ``asked`` (JSON), and print its facts and the device's rates as JSON."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BlenderbotConfig, GPT2Config, LlamaConfig
    from transformers.utils import logging

    from benchmarks.published.materials import SPECIAL, Materials

    logging.disable_progress_bar()
    given = json.loads(asked)
    sizes, device = given["sizes"], "cpu" if given["cpu"] else "cuda"
    kind: Any = GPT2Config if "n_embd" in sizes else BlenderbotConfig if "d_model" in sizes else LlamaConfig
    more = {"decoder_start_token_id": 1, "max_position_embeddings": 1024} if kind is BlenderbotConfig else {}
    more |= {"max_position_embeddings": 8192} if kind is LlamaConfig else {}
    config = kind(**(SPECIAL | sizes | more))
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.float32 if given["cpu"] else torch.bfloat16)
    model.save_pretrained(given["folder"])
    Materials(Path(given["materials"])).tokenizer.save_pretrained(given["folder"])
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    shapes = {tuple(m.weight.shape): sum(o.weight.shape == m.weight.shape for o in linear) for m in linear}
    weights = sum(rows * columns * count for (rows, columns), count in shapes.items())
    width = sizes.get("hidden_size", sizes.get("n_embd", 0))
    layers = sizes.get("num_hidden_layers", sizes.get("n_layer", 0))
    del model
    found: dict[str, Any] = {
        "weights multiplied": weights, "attention": 12 * layers * width,
        "products, operations/s": rate(shapes, given["tokens"], device),
    }  # fmt: skip
    if device == "cuda" and (facts := find_device(torch.cuda.get_device_name(0))):
        found["data sheet, operations/s"] = facts.flops
    print(json.dumps(found))


def seconds(work: Callable[[], object], device: str, *, rounds: int) -> float:
    """Return the median seconds of ``work`` over ``rounds``, after three that are not measured, until the device is done."""
    import torch

    times = []
    for _ in range(rounds + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def rate(shapes: dict[tuple[int, int], int], tokens: int, device: str) -> float:
    """Return operations a second of one product with each of the model's matrices, medians of 5.

    Args:
        shapes: (rows, columns) of a matrix -> how many of them the model has.
        tokens: of a micro-batch.
    """
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    operations = spent = 0.0
    for (rows, columns), count in shapes.items():
        one, other = (torch.randn(*size, dtype=dtype, device=device) for size in ((tokens, columns), (columns, rows)))
        operations += 2.0 * tokens * rows * columns * count
        spent += seconds(partial(torch.matmul, one, other), device, rounds=5) * count
    return operations / spent
