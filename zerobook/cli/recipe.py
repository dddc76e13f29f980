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
from zerobook.utils.units import count, counted, duration

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
_BYTES_PER_TOKEN = 4
"""Bytes of a data file for each token: about what tokenizers reach on English text."""


def recipe(argv: list[str]) -> int:
    """Write the config. Return 0, or 1 if nothing fits."""
    from zerobook.plan.choice import METHODS, choose

    parser = Parser("zerobook recipe", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", help="a hub name, a folder, or a config.json")
    add_hardware(parser)
    parser.add_argument("--method", choices=tuple(METHODS), help="what is trained (default: the first of them that fits)")
    parser.add_argument("--train_file", help="your data: a file")
    parser.add_argument("--dataset_name", help="data from the hub")
    parser.add_argument("--global_batch", type=positive, default=64, help="samples or packed rows of a step (default 64)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default 2048; of a source text 512)")
    parser.add_argument("--output", help="the file to write (default NAME_METHOD_HARDWARE.yaml in this folder)")
    flags = parser.parse_args(argv)
    cluster = described(flags)
    if flags.train_file and flags.dataset_name:
        raise ConfigError("--train_file and --dataset_name: the data is one of them. Leave one out.")
    # A path that cannot be written is refused before the planner, which takes longer.
    if flags.output:
        _check_output(Path(flags.output))
    # The weights are beside a config.json.
    if Path(flags.model).name == "config.json":
        flags.model = str(Path(flags.model).parent)
    # Without data, the config has a placeholder, which `_config_text` writes as a comment.
    data = {key: getattr(flags, key) for key in _DATA if getattr(flags, key)}
    choice = choose(
        flags.model,
        cluster,
        method=flags.method,
        global_batch=flags.global_batch,
        length=flags.length,
        data=data or {"dataset_name": "NAME"},
        progress=_show_progress,
    )
    if isinstance(choice, list):
        say(f"nothing fits {cluster.name}:")
        for reason in choice:
            say(f"  {reason}")
        return 1
    file = Path(flags.output or _default_name(flags.model, choice.method, cluster))
    _check_output(file)
    header = _header(choice, cluster, flags, file)
    file.write_text(_config_text(choice, header, file, has_data=bool(data)), encoding="utf-8")
    _show(choice, cluster, header, file, flags)
    return 0


def _show_progress(files: Iterable[Path], description: str) -> Iterable[Path]:
    from zerobook.utils.bars import tqdm

    return tqdm(list(files), desc=f"planning {description}", unit=" files", leave=False)


def _check_output(file: Path) -> None:
    """Raise `ConfigError` if the file exists, or has no folder."""
    if file.exists():
        raise ConfigError(f"--output: {file} exists, and nothing was written. Name another file, or remove it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--output: {file}: there is no folder {file.absolute().parent}.")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output: {file} is no .yaml file.")


def _default_name(model: str, method: str, cluster: Cluster) -> str:
    model_name = re.sub(r"[^\w.-]+", "-", Path(model).absolute().name.removesuffix(".json")).lower()
    device_name = re.sub(r"[^\w.-]+", "-", cluster.device.name)
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return f"{model_name}_{method}_{nodes}{cluster.gpus}x{device_name}.yaml"


def _shipped_path(name: str) -> str:
    """Return a shipped file's path, from the working folder if it is inside."""
    file = shipped(name)
    folder = Path.cwd()
    return os.path.relpath(file, folder) if file.is_relative_to(folder) else str(file)


def _launch_arguments(choice: Choice, cluster: Cluster, file: Path) -> str:
    words = ["--config_file", _shipped_path(f"accelerate_configs/{choice.row.file}.yaml")]
    words += ["--num_processes", str(cluster.ranks)]
    if cluster.nodes > 1:
        words += ["--num_machines", str(cluster.nodes), "--machine_rank", "0"]
        words += ["--main_process_ip", "10.0.0.1", "--main_process_port", "29500"]
    words += [_shipped_path(f"recipes/{choice.recipe}.py"), "--config", str(file)]
    return shlex.join(words)


def _header(choice: Choice, cluster: Cluster, flags: argparse.Namespace, file: Path) -> dict[str, str]:
    from zerobook.plan.choice import METHODS

    values = choice.values
    row = choice.row
    config = choice.traced.job.config
    assert row.memory is not None and row.time is not None
    micro_batch = values["per_device_train_batch_size"]
    accumulation = values["gradient_accumulation_steps"]
    samples = micro_batch * accumulation * cluster.ranks
    unit = "rows" if config.packing else "samples"
    lengths = f"{config.row_length:,} tokens"
    if "max_source_length" in values:
        lengths = f"{values['max_source_length']} tokens and {values['max_target_length']} of target"
    hardware = f"{counted(cluster.nodes, 'node')} of {cluster.gpus} x {cluster.device.name}"
    if flags.host_memory:
        hardware += f", {flags.host_memory} of host RAM a node"
    if cluster.nodes > 1:
        hardware += f", {flags.interconnect} between nodes"
    batch = f"{micro_batch} micro x {accumulation} accumulation x {cluster.ranks} processes"
    memory = f"{row.memory.total / 1e9:.1f} of {cluster.device.memory / 1e9:.0f} GB a GPU"
    return {
        "Purpose": f"{flags.model}, {METHODS[choice.method]}, on {cluster.name}",
        "Source": choice.source,
        "Hardware": hardware,
        "Status": "planned by zerobook recipe, not run",
        "Launch": f"accelerate launch {_launch_arguments(choice, cluster, file)}",
        "Batch": f"{batch} = {samples} {unit} of {lengths}",
        "Plan": f"{memory}; {duration(row.time.step)} a step, {row.tokens_per_second:,.0f} tokens/s",
        "Override": f"--gradient_accumulation_steps {2 * accumulation}: another global batch",
        "Limits": "; ".join(_limits(samples, cluster, flags)),
    }


def _limits(samples: int, cluster: Cluster, flags: argparse.Namespace) -> list[str]:
    """Return what the reader of the config has to know or change."""
    limits = ["the settings are published for other models and data, and not tuned for these"]
    if cluster.nodes > 1:
        other_ranks = "1" if cluster.nodes == 2 else f"1 to {cluster.nodes - 1}"
        limits.append(f"--machine_rank {other_ranks} on the other nodes, and the first node's address in place of 10.0.0.1")
        limits.append("output_dir on a shared file system")
    if flags.model.endswith(".json"):
        limits.append("model_name_or_path is a config without weights: name a folder or a model on the hub")
    if samples != flags.global_batch:
        batch = flags.global_batch
        limits.append(f"{samples} is the nearest to a global batch of {batch} that {cluster.ranks} processes divide")
    return limits


def _config_text(choice: Choice, header: dict[str, str], file: Path, *, has_data: bool) -> str:
    """Return the YAML with its header. Where no data is named, its key is a comment."""
    lines = [f"# {key + ':':<10} {value}" for key, value in header.items()]
    # These have no part in the plan.
    values: dict[str, Any] = dict(choice.values)
    values["num_train_epochs"] = 3
    values["save_steps"] = 100
    values["save_total_limit"] = 2
    values["output_dir"] = f"outputs/{file.stem}"
    for key, value in values.items():
        if key == "dataset_name" and not has_data:
            lines.append("# train_file: chats.jsonl  # your data, or dataset_name: a name on the hub")
        elif isinstance(value, float):
            # 1e-5, as people write it, and not 1e-05.
            lines.append(f"{key}: {value:g}".replace("e-0", "e-"))
        else:
            lines += yaml.safe_dump({key: value}, width=math.inf, allow_unicode=True).splitlines()
    if choice.recipe != "seq2seq_chatbot":
        lines.append("# chat_template: FILE.jinja  # where the model's tokenizer has none")
    return "\n".join(lines) + "\n"


def _describe_epoch(choice: Choice, cluster: Cluster, train_file: str | None) -> str | None:
    """Return steps and time of an epoch, estimated from the size of the data file; None if that says nothing."""
    from zerobook.data.files import JSON_LINES, TABLE, TEXT, file_source

    file = Path(train_file or "").expanduser()
    config = choice.traced.job.config
    assert choice.row.time is not None
    # The suffix of a compressed file is .gz, whose size says nothing.
    suffix = file.suffix.lower()
    if not file.is_file() or suffix not in (*JSON_LINES, ".json", *TABLE, *TEXT):
        return None
    if config.packing:
        rows: float = file.stat().st_size / _BYTES_PER_TOKEN / config.row_length
        basis = f"{_BYTES_PER_TOKEN} bytes of the file a token"
    elif suffix in JSON_LINES:
        samples = sum(1 for _ in file_source(file).read())
        rows = samples
        basis = counted(samples, "sample")
    else:
        return None
    # A part is held out.
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * cluster.ranks
    trained_rows = rows * (1 - config.validation_split_percentage / 100)
    steps = math.ceil(trained_rows / batch)
    return f"about {counted(steps, 'step')}, {duration(steps * choice.row.time.step)}, with {basis}"


def _show(choice: Choice, cluster: Cluster, header: dict[str, str], file: Path, flags: argparse.Namespace) -> None:
    from zerobook.plan.choice import METHODS

    say(f"{choice.traced.job.name}: {count(choice.traced.model.parameters)} parameters, on {cluster.name}\n")
    # What was chosen, in the order of the choices.
    memory, _, step = header["Plan"].partition("; ")
    method = METHODS[choice.method]
    if flags.method:
        method += ", as asked"
    precision = choice.values["mixed_precision"]
    if precision != "bf16":
        precision += f"; {cluster.device.name} has no bf16"
    if cluster.device.fused:
        precision += "; flash attention where the package is installed"
    rows = [("method", method)]
    rows += [reason for reason in choice.reasons if reason[0] == "not taken"]
    rows += [
        ("strategy", f"accelerate_configs/{choice.row.file}.yaml ({choice.row.name})"),
        ("precision", precision),
        ("batch", header["Batch"]),
    ]
    rows += [reason for reason in choice.reasons if reason[0] != "not taken"]
    rows += [
        ("settings", choice.source),
        ("memory", f"{memory}, planned for the fullest at its peak"),
        ("time", f"{step}, planned"),
    ]
    epoch = _describe_epoch(choice, cluster, flags.train_file)
    if epoch is not None:
        rows.append(("epoch", epoch))
    rows += [("note", limit) for limit in header["Limits"].split("; ")]

    # Long values continue under their beginning.
    key_width = max(len(key) for key, _ in rows) + 2
    wrapper = textwrap.TextWrapper(
        width=min(shutil.get_terminal_size((100, 0)).columns, 120),
        subsequent_indent=" " * (key_width + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for key, value in rows:
        wrapper.initial_indent = f"  {key:<{key_width}}"
        say(wrapper.fill(value))
    say(f"\nwrote {file}")
    if not (flags.train_file or flags.dataset_name):
        say("Name your data in it, train_file or dataset_name.")
    launch_arguments = header["Launch"].removeprefix("accelerate launch ")
    say(f"\nCheck it, then train:\n  zerobook doctor {launch_arguments}\n  accelerate launch {launch_arguments}")
