"""Command ``zerobook recipe``: write a config and the launch line for a model on a cluster, chosen by the planner."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zerobook.cli.arguments import Parser, add_hardware, described, positive
from zerobook.errors import ConfigError
from zerobook.utils.shipped import shipped
from zerobook.utils.terminal import say
from zerobook.utils.units import count, duration

if TYPE_CHECKING:
    from zerobook.plan.choice import Choice
    from zerobook.plan.hardware import Cluster

USAGE = """zerobook recipe MODEL [hardware] [--method full|lora|qlora] [data] [--output FILE.yaml]

MODEL is a hub name, a folder, or a config.json; weights are not needed. The planner chooses the method, the strategy file,
the micro-batch and activation checkpointing. The file and the launch line are to be read, and changed.

examples:
  zerobook recipe meta-llama/Llama-2-7b-hf --gpus 8 --gpu a100-80gb --train_file chats.jsonl
  zerobook recipe tiiuae/falcon-180B --gpus 8 --nodes 2 --gpu a100-80gb --interconnect 400Gbps --method lora \\
      --dataset_name databricks/databricks-dolly-15k
"""
_DATA = ("train_file", "dataset_name")
_BYTES_A_TOKEN = 4
"""Bytes of a data file for each token: about what tokenizers reach on English text."""


def recipe(argv: list[str]) -> int:
    """Write the config. Return 0, or 1 if nothing fits."""
    from zerobook.plan.choice import METHODS, choose

    parser = Parser("zerobook recipe", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", help="a hub name, a folder, or a config.json")
    add_hardware(parser)
    parser.add_argument("--method", choices=METHODS, help="what is trained (default: the first of them that fits)")
    parser.add_argument("--train_file", help="your data: a file")
    parser.add_argument("--dataset_name", help="data from the hub")
    parser.add_argument("--global_batch", type=positive, default=64, help="samples or packed rows of a step (default 64)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default 2048; of a source text 512)")
    parser.add_argument("--output", help="the file to write (default NAME_METHOD_HARDWARE.yaml in this folder)")
    asked = parser.parse_args(argv)
    where = described(asked)
    if asked.train_file and asked.dataset_name:
        raise ConfigError("--train_file and --dataset_name: the data is one of them. Leave one out.")
    if asked.output:
        _check(Path(asked.output))
    if Path(asked.model).name == "config.json":  # the weights are beside it
        asked.model = str(Path(asked.model).parent)
    data = {key: getattr(asked, key) for key in _DATA if getattr(asked, key)}
    chosen = choose(
        asked.model, where, method=asked.method, global_batch=asked.global_batch, length=asked.length,
        data=data or {"dataset_name": "NAME"}, progress=_bar,
    )  # fmt: skip
    if isinstance(chosen, list):
        say(f"nothing fits {where.name}:")
        for why in chosen:
            say(f"  {why}")
        return 1
    name = re.sub(r"[^\w.-]+", "-", Path(asked.model).absolute().name.removesuffix(".json")).lower()
    file = Path(asked.output or f"{name}_{chosen.method}_{_short(where)}.yaml")
    _check(file)
    header = _header(chosen, where, asked, file)
    file.write_text(_text(chosen, header, file, named=bool(data)), encoding="utf-8")
    _show(chosen, where, header, file, asked)
    return 0


def _bar(files: Iterable[Path], what: str) -> Iterable[Path]:
    from zerobook.utils.bars import tqdm

    return tqdm(list(files), desc=f"planning {what}", unit=" files", leave=False)


def _check(file: Path) -> None:
    """Raise `ConfigError` if the file exists, or has no folder."""
    if file.exists():
        raise ConfigError(f"--output: {file} exists, and nothing was written. Name another file, or remove it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--output: {file}: there is no folder {file.absolute().parent}.")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output: {file} is no .yaml file.")


def _short(where: Cluster) -> str:
    device = re.sub(r"[^\w.-]+", "-", where.device.name)
    return f"{f'{where.nodes}x' if where.nodes > 1 else ''}{where.gpus}x{device}"


def _path(name: str) -> str:
    """Return a shipped file's path, from the working folder if it is inside."""
    file, here = shipped(name), Path.cwd()
    return os.path.relpath(file, here) if file.is_relative_to(here) else str(file)


def _launch(chosen: Choice, where: Cluster, file: Path) -> str:
    nodes = f"--num_machines {where.nodes} --machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500".split()
    words = ["--config_file", _path(f"accelerate_configs/{chosen.row.file}.yaml"), "--num_processes", str(where.ranks)]
    words += nodes if where.nodes > 1 else []
    words += [_path(f"recipes/{chosen.recipe}.py"), "--config", str(file)]
    return shlex.join(words)


def _header(chosen: Choice, where: Cluster, asked: argparse.Namespace, file: Path) -> dict[str, str]:
    from zerobook.plan.choice import WORDS

    values, row, config = chosen.values, chosen.row, chosen.traced.job.config
    assert row.memory is not None and row.time is not None
    micro, accumulation = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    total, what = micro * accumulation * where.ranks, "rows" if config.packing else "samples"
    lengths = f"{values['max_source_length']} tokens and {values['max_target_length']} of target" if (
        "max_source_length" in values) else f"{config.row_length:,} tokens"  # fmt: skip
    host = f", {asked.host_memory} of host RAM a node" if asked.host_memory else ""
    network = f", {asked.interconnect} between nodes" if where.nodes > 1 else ""
    limits = ["the settings are published for other models and data, and not tuned for these"]
    if where.nodes > 1:
        others = "1" if where.nodes == 2 else f"1 to {where.nodes - 1}"
        limits.append(f"--machine_rank {others} on the other nodes, and the first node's address in place of 10.0.0.1")
        limits.append("output_dir on a shared file system")
    if asked.model.endswith(".json"):
        limits.append("model_name_or_path is a config without weights: name a folder or a model on the hub")
    if total != asked.global_batch:
        limits.append(f"{total} is the nearest to a global batch of {asked.global_batch} that {where.ranks} processes divide")
    return {
        "Purpose": f"{asked.model}, {WORDS[chosen.method]}, on {where.name}",
        "Source": chosen.source,
        "Hardware": f"{where.nodes} node{'s' * (where.nodes > 1)} of {where.gpus} x {where.device.name}{host}{network}",
        "Status": "planned by zerobook recipe, not run",
        "Launch": f"accelerate launch {_launch(chosen, where, file)}",
        "Batch": f"{micro} micro x {accumulation} accumulation x {where.ranks} processes = {total} {what} of {lengths}",
        "Plan": f"{row.memory.total / 1e9:.1f} of {where.device.memory / 1e9:.0f} GB a GPU; {duration(row.time.step)} a step, "
                f"{row.tokens_per_second:,.0f} tokens/s",
        "Override": f"--gradient_accumulation_steps {2 * accumulation}: another global batch",
        "Limits": "; ".join(limits),
    }  # fmt: skip


def _text(chosen: Choice, header: dict[str, str], file: Path, *, named: bool) -> str:
    """Return the YAML with its header. Where no data is named, its key is a comment."""
    lines = [f"# {key + ':':<10} {value}" for key, value in header.items()]
    values: dict[str, Any] = chosen.values | {
        "num_train_epochs": 3, "save_steps": 100, "save_total_limit": 2, "output_dir": f"outputs/{file.stem}",
    }  # fmt: skip
    for key, value in values.items():
        if key == "dataset_name" and not named:
            lines.append("# train_file: chats.jsonl  # your data, or dataset_name: a name on the hub")
        else:
            if isinstance(value, float):
                lines.append(f"{key}: {value:g}".replace("e-0", "e-"))
            else:
                lines += yaml.safe_dump({key: value}, width=math.inf, allow_unicode=True).splitlines()
    if chosen.recipe != "seq2seq_chatbot":
        lines.append("# chat_template: FILE.jinja  # where the model's tokenizer has none")
    return "\n".join(lines) + "\n"


def _epoch(chosen: Choice, where: Cluster, train_file: str | None) -> str | None:
    """Return steps and time of an epoch, estimated from the size of the data file; None if that says nothing."""
    from zerobook.data.files import JSON_LINES, TABLE, TEXT, file_source

    file, config, row = Path(train_file or "").expanduser(), chosen.traced.job.config, chosen.row
    kind = file.suffix.lower()  # a compressed file ends in .gz
    assert row.time is not None
    if not file.is_file() or kind not in (*JSON_LINES, ".json", *TABLE, *TEXT) or not (config.packing or kind in JSON_LINES):
        return None
    if config.packing:
        rows, by = file.stat().st_size / _BYTES_A_TOKEN / config.row_length, f"{_BYTES_A_TOKEN} bytes of the file a token"
    else:
        rows = sum(1 for _ in file_source(file).read())
        by = f"{rows:,} sample{'s' * (rows != 1)}"
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * where.ranks
    steps = math.ceil(rows * (1 - config.validation_split_percentage / 100) / batch)
    return f"about {steps:,} step{'s' * (steps != 1)}, {duration(steps * row.time.step)}, with {by}"


def _show(chosen: Choice, where: Cluster, header: dict[str, str], file: Path, asked: argparse.Namespace) -> None:
    from zerobook.plan.choice import WORDS

    say(f"{chosen.traced.job.name}: {count(chosen.traced.parameters)} parameters, on {where.name}\n")
    memory, _, step = header["Plan"].partition("; ")
    epoch = _epoch(chosen, where, asked.train_file)
    half = chosen.values["mixed_precision"]
    missing = "" if half == "bf16" else f"; {where.device.name} has no bf16"
    flash = "; flash attention where the package is installed" if where.device.fused else ""
    rows = [
        ("method", WORDS[chosen.method] + (", as asked" if asked.method else "")),
        *((key, why) for key, why in chosen.reasons if key == "not taken"),
        ("strategy", f"accelerate_configs/{chosen.row.file}.yaml ({chosen.row.name})"),
        ("precision", f"{half}{missing}{flash}"),
        ("batch", header["Batch"]),
        *((key, why) for key, why in chosen.reasons if key != "not taken"),
        ("settings", chosen.source),
        ("memory", f"{memory}, planned for the fullest at its peak"),
        ("time", f"{step}, planned"),
        *([("epoch", epoch)] if epoch else []),
        *(("note", limit) for limit in header["Limits"].split("; ")),
    ]
    wide = max(len(key) for key, _ in rows) + 2
    for key, value in rows:
        options = {"initial_indent": f"  {key:<{wide}}", "subsequent_indent": " " * (wide + 2)}
        width = min(shutil.get_terminal_size((100, 0)).columns, 120)
        say(textwrap.fill(value, width, break_long_words=False, break_on_hyphens=False, **options))  # type: ignore[arg-type]
    say(f"\nwrote {file}")
    if not (asked.train_file or asked.dataset_name):
        say("Name your data in it, train_file or dataset_name.")
    words = header["Launch"].removeprefix("accelerate launch ")
    say(f"\nCheck it, then train:\n  zerobook doctor {words}\n  accelerate launch {words}")
