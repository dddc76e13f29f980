"""Speed of finetuning well-known shapes on one GPU: the part ``models`` of benchmarks/gpu.py.

For each model, the device's own rate of matrix products on the model's shapes comes first: no training is faster. Then the
recipe's tokens a second, memory, and the share of that rate and of the data sheet that its operations reach (MFU). Weights are
random, in bf16; a model is made on the device. Cases of one shape follow each other and share its files.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.gpu_setting import Case, Row, Setting, call
from benchmarks.published.trial import Arm, attempt
from zerobook.utils.devices import find_device

if TYPE_CHECKING:
    import torch

STEPS = 12
GIB = 2**30


class Shape(NamedTuple):
    """A model and its finetuning.

    Args:
        rows: of a micro-batch.
        factor: operations of a token for each weight, 6 where all weights are trained and 4 for adapters.
        seconds: what the case is expected to take.
        budget: bytes of GPU memory that the process may use; 0: all.
    """

    sizes: dict[str, Any]
    recipe: str
    rows: int
    length: int
    factor: int
    flags: dict[str, object]
    seconds: float
    strategy: str = "single"
    budget: int = 0


def _llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 128_256,
        "tie_word_embeddings": tied,
    }


BF16: dict[str, object] = {"mixed_precision": "bf16", "attn_implementation": "auto"}
ADAPTED: dict[str, object] = {**BF16, "lora_r": 16, "packing": "true"}
COMPILED: dict[str, object] = {"torch_compile": "true"}
LLAMA_1B = _llama(2048, 8192, 16, 32, 8, tied=True)
LLAMA_3B = _llama(3072, 8192, 28, 24, 8, tied=True)
LLAMA_8B = _llama(4096, 14336, 32, 32, 8)
GPT2_XL = {"n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50_257}
BLENDERBOT = {
    "d_model": 1280,
    "encoder_layers": 2,
    "decoder_layers": 12,
    "encoder_attention_heads": 32,
    "decoder_attention_heads": 32,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "vocab_size": 8008,
}
# Neighbours of the same sizes use one model's files. Rows are such that a GPU of 80 GB has room to spare: a layer keeps about
# 30 bytes a token for each of its width and 8 for each of its MLP's, so 4 rows of 8B would take 62 GB besides the weights.
SHAPES = {
    "1B, all weights, 2048": Shape(LLAMA_1B, "causal_lm", 8, 2048, 6, BF16, 60),
    "1B, all weights, 2048, compiled": Shape(LLAMA_1B, "causal_lm", 8, 2048, 6, BF16 | COMPILED, 100),
    "8B, LoRA, 2048": Shape(LLAMA_8B, "lora_finetune", 2, 2048, 4, ADAPTED, 110),
    "8B, QLoRA, 2048": Shape(LLAMA_8B, "lora_finetune", 2, 2048, 4, ADAPTED | {"load_in_4bit": "true"}, 80),
    "GPT-2 XL, offload, 24 GiB": Shape(
        GPT2_XL, "causal_lm", 16, 128, 6, {"mixed_precision": "fp16"}, 100, "zero3_offload_optimizer", 24 * GIB
    ),
    "3B, all weights, 4096": Shape(LLAMA_3B, "causal_lm", 1, 4096, 6, BF16 | {"activation_checkpointing": "selective"}, 80),
    "BlenderBot-400M, 128 to 128": Shape(BLENDERBOT, "seq2seq_chatbot", 64, 128, 6, {"mixed_precision": "bf16"}, 60),
    "BlenderBot-400M, 128 to 128, compiled": Shape(
        BLENDERBOT, "seq2seq_chatbot", 64, 128, 6, {"mixed_precision": "bf16"} | COMPILED, 120
    ),
}
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 8192,
}
"""Largest sizes of a model that tries the case itself."""


def models(setting: Setting) -> dict[str, Case]:
    return {name: Case(partial(_finetuned, setting, shape), shape.seconds) for name, shape in SHAPES.items()}


def _finetuned(setting: Setting, shape: Shape, limit: float, rows: dict[str, Row]) -> Row:
    until = time.monotonic() + limit
    shape = _adjusted(setting, shape)
    folder = setting.folder / "shape"
    facts = _made_model(setting, shape, folder, limit)
    if "error" in facts:
        return facts
    data = setting.materials.pairs
    lengths: dict[str, object] = {"max_seq_length": shape.length}
    if shape.recipe == "causal_lm":
        data = setting.materials.text
        lengths = {"block_size": shape.length}
    elif shape.recipe == "seq2seq_chatbot":
        lengths = {"max_source_length": shape.length, "max_target_length": shape.length}
    flags: dict[str, object] = {
        "model_name_or_path": folder,
        "train_file": data,
        "cache_dir": setting.folder / "data",
        "validation_split_percentage": 0,
        "per_device_train_batch_size": shape.rows,
        "max_train_steps": STEPS,
        "logging_steps": 4,
    }
    arm = Arm.of(shape.strategy, 1)
    seconds_left = max(1.0, until - time.monotonic())
    outcome = attempt(arm, shape.recipe, flags | lengths | shape.flags, shape.budget, seconds_left)
    if outcome.refused:
        return {"model": facts, "does not fit": outcome.refused}
    row: Row = {"model": facts, "seconds a step": outcome.step, "steps": outcome.steps}
    row |= {"peak": outcome.peak, "losses": outcome.losses}
    if shape.recipe == "seq2seq_chatbot":
        return row | {"samples/s": shape.rows / outcome.step}
    tokens = shape.rows * shape.length
    operations = tokens * (shape.factor * facts["weights multiplied"] + facts["attention"] * shape.length)
    row |= {"tokens/s": tokens / outcome.step, "TFLOPS": operations / outcome.step / 1e12}
    row["of the measured rate"] = operations / outcome.step / facts["products, operations/s"]
    if "data sheet, operations/s" in facts:
        row["MFU"] = operations / outcome.step / facts["data sheet, operations/s"]
    return row


def _adjusted(setting: Setting, shape: Shape) -> Shape:
    """Return the shape with the sizes and precision that this setting can run."""
    if setting.tiny:
        sizes = {key: min(value, TINY_SIZES.get(key, value)) for key, value in shape.sizes.items()}
        shape = shape._replace(sizes=sizes, rows=2, length=64, budget=0)
    if setting.cpu:
        shape = shape._replace(flags=shape.flags | {"mixed_precision": "no"})
        if "load_in_4bit" in shape.flags:
            shape = shape._replace(flags=shape.flags | {"dtype": "float32"})
    return shape


def _made_model(setting: Setting, shape: Shape, folder: Path, limit: float) -> Row:
    """Return facts of the model in ``folder``, which is made unless it has these sizes already."""
    tokens = shape.rows * shape.length
    facts_file = folder / "facts.json"
    if facts_file.exists():
        facts: Row = json.loads(facts_file.read_text())
        if (facts["sizes"], facts["tokens"]) == (shape.sizes, tokens):
            return facts
    # A disk may not hold two of them.
    shutil.rmtree(folder, ignore_errors=True)
    made = call(
        "benchmarks.gpu_models.make",
        limit,
        sizes=shape.sizes,
        tokens=tokens,
        folder=str(folder),
        materials=str(setting.folder),
        device=setting.device,
    )
    if "error" in made:
        return made
    facts = made | {"sizes": shape.sizes, "tokens": tokens}
    facts_file.write_text(json.dumps(facts))
    return facts


def make(sizes: dict[str, Any], tokens: int, folder: str, materials: str, device: str) -> Iterator[Row]:
    """Write a model of these sizes with random weights. Yield its facts and the device's rate on its matrices."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BlenderbotConfig, GPT2Config, LlamaConfig
    from transformers.utils import logging

    from benchmarks.published.materials import SPECIAL, Materials

    logging.disable_progress_bar()
    config: Any
    auto: Any = AutoModelForCausalLM
    if "n_embd" in sizes:
        config = GPT2Config(**SPECIAL, **sizes)
    elif "d_model" in sizes:
        config = BlenderbotConfig(**SPECIAL, **sizes, decoder_start_token_id=1, max_position_embeddings=1024)
        auto = AutoModelForSeq2SeqLM
    else:
        config = LlamaConfig(**SPECIAL, **sizes, max_position_embeddings=8192)
    with torch.device(device):
        model = auto.from_config(config, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    model.save_pretrained(folder)
    Materials(Path(materials)).tokenizer.save_pretrained(folder)
    shapes: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        # GPT-2's layers are of a class of transformers.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            shapes[tuple(module.weight.shape)] += 1
    width = sizes.get("hidden_size", sizes.get("n_embd", 0))
    layers = sizes.get("num_hidden_layers", sizes.get("n_layer", 0))
    del model
    facts: Row = {
        "weights multiplied": sum(rows * columns * count for (rows, columns), count in shapes.items()),
        "attention": 12 * layers * width,
        "products, operations/s": rate(shapes, tokens, device),
    }
    sheet = find_device(torch.cuda.get_device_name(0)) if device == "cuda" else None
    if sheet is not None:
        facts["data sheet, operations/s"] = sheet.flops
    yield facts


def seconds(work: Callable[[], object], device: str, *, rounds: int) -> float:
    """Return the median seconds of ``work`` over ``rounds``, after three that are not measured, until the device is done."""
    times = [elapsed(work, device) for _ in range(rounds + 3)]
    return statistics.median(times[3:])


def elapsed(work: Callable[[], object], device: str) -> float:
    """Return the seconds of ``work``, until the device is done."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def rate(shapes: Mapping[tuple[int, int], int], tokens: int, device: str) -> float:
    """Return operations a second of products with all of the model's matrices, those of one shape after each other.

    The times are medians of 5.

    Args:
        shapes: (rows, columns) of a matrix -> how many of them the model has.
        tokens: of a micro-batch.
    """
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    operations = 0.0
    total_seconds = 0.0
    for (rows, columns), count in shapes.items():
        inputs = torch.randn(tokens, columns, dtype=dtype, device=device)
        weight = torch.randn(columns, rows, dtype=dtype, device=device)
        operations += 2.0 * tokens * rows * columns * count
        # One product may be shorter than the time to start it and to wait for it, which a training does not wait for.
        total_seconds += seconds(partial(_multiply, inputs, weight, count), device, rounds=5)
    return operations / total_seconds


def _multiply(inputs: torch.Tensor, weight: torch.Tensor, count: int) -> None:
    import torch

    for _ in range(count):
        torch.matmul(inputs, weight)
