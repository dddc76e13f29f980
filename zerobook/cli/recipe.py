"""Command ``zerobook recipe``: write a config and the launch line for a model on a cluster, chosen by the planner."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from zerobook.cli.arguments import Parser, add_hardware_flags, parse_cluster, positive
from zerobook.errors import ConfigError
from zerobook.plan import table
from zerobook.utils import subprocess_launch
from zerobook.utils.shipped import path_from_here, shipped
from zerobook.utils.terminal import say
from zerobook.utils.units import count, counted

if TYPE_CHECKING:
    from zerobook.plan.advise import Advice, Candidate, Request
    from zerobook.plan.hardware import Cluster

USAGE = """zerobook recipe MODEL [hardware] [--method full|lora|qlora] [data] [--output FILE.yaml]

MODEL is a hub name, a folder, or a config.json; weights are not needed. The planner chooses the method, the strategy file,
the micro-batch and activation checkpointing. Read the file and the launch line before you run them, and change what you need.

examples:
  zerobook recipe meta-llama/Llama-2-7b-hf --gpus 8 --gpu a100-80gb --train_file chats.jsonl
  zerobook recipe tiiuae/falcon-180B --gpus 8 --nodes 2 --gpu a100-80gb --interconnect 400Gbps --method lora \\
      --dataset_name databricks/databricks-dolly-15k
"""
_DATA = ("train_file", "dataset_name")
# Value of --method -> keys of the config that it sets.
_METHOD_VALUES: dict[str | None, dict[str, Any]] = {"qlora": {"load_in_4bit": True}, "lora": {"adapter": "lora"}}
# Number of parameters above which the QLoRA paper halves the learning rate and the dropout of adapters.
_LARGE_MODEL = 20e9
# (method, is_encoder_decoder) -> (publication, the training settings that it reports).
_PUBLISHED: dict[tuple[str, bool], tuple[str, dict[str, Any]]] = {
    ("full", False): (
        "rate, schedule and weight decay of Llama 2's paper, section 3.1 (https://arxiv.org/abs/2307.09288), batches of 64",
        {"learning_rate": 2e-5, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    ),
    ("lora", False): (
        "rate, rank and schedule of QLoRA's paper, table 9 (https://arxiv.org/abs/2305.14314), batches of 16",
        {"lora_r": 64, "lora_alpha": 16, "lora_dropout": 0.1, "learning_rate": 2e-4, "lr_scheduler_type": "constant"},
    ),
    ("full", True): (
        "rate and schedule of https://www.philschmid.de/fine-tune-flan-t5, batches of 8",
        {"learning_rate": 5e-5, "lr_scheduler_type": "linear"},
    ),
    ("lora", True): (
        "rate and rank of https://www.philschmid.de/fine-tune-flan-t5-peft, batches of 8",
        {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "learning_rate": 1e-3, "lr_scheduler_type": "linear"},
    ),
}


def recipe(argv: list[str]) -> int:
    """Write the config, and print the plan and the launch line. Return 0, or 1 if nothing fits."""
    from zerobook.plan.advise import advise

    flags = _parser().parse_args(argv)
    cluster = parse_cluster(flags)
    if flags.train_file and flags.dataset_name:
        raise ConfigError("--train_file and --dataset_name: the data is one of them. Leave one out.")
    # Check the path before the planning, which takes long. The default path has the chosen method in its name, and is checked
    # after the planning.
    if flags.output:
        _check_output(Path(flags.output))
    # The model is the folder of a config.json, which may have weights too.
    if Path(flags.model).name == "config.json":
        flags.model = str(Path(flags.model).parent)

    # Plan, and merge the values of the config.
    values = _unplanned_values(flags, cluster)
    request = _make_request(values, flags, cluster)
    advice = advise(request, cluster)
    if flags.method is None:
        advice = _prefer_method_without_offload(advice, request, cluster)
    best = advice.best
    if best is None:
        say(f"nothing fits {cluster.name}:")
        table.show_lines(advice.describe(cluster))
        return 1
    source, settings = _published_settings(best.method, request.recipe.encoder_decoder)
    # The QLoRA paper halves both for large models.
    if best.traced.model.parameters >= _LARGE_MODEL and "lora_r" in settings:
        settings |= {"lora_dropout": 0.05, "learning_rate": 1e-4}
    # Values of the planner replace those from before it, and the published settings replace both.
    values = values | best.flags | settings
    # The chosen method may need another recipe than was planned first. Leave out keys that it does not have.
    values = {key: value for key, value in values.items() if key in type(best.config).model_fields}

    # Write the config.
    file = Path(flags.output or _default_name(flags.model, best.method, cluster))
    _check_output(file)
    launch_line = _launch_line(best, request, cluster, file)
    limits = _limits(best.samples, cluster, flags)
    header = _header_entries(best, source, cluster, flags, launch_line, limits)
    has_data = bool(flags.train_file or flags.dataset_name)
    file.write_text(_config_text(values, header, file, best, has_data=has_data), encoding="utf-8")

    # Print the plan and the next commands.
    say(f"{best.traced.job.name}: {count(best.traced.model.parameters)} parameters, on {cluster.name}\n")
    table.show_lines([*advice.describe(cluster), ("settings", source), *(("note", limit) for limit in limits)])
    say(f"\nwrote {file}")
    if not has_data:
        say("Name your data in it, train_file or dataset_name.")
    say(f"\nCheck it, then train:\n  zerobook doctor {launch_line}\n  accelerate launch {launch_line}")
    return 0


def _parser() -> Parser:
    from zerobook.plan.advise import METHODS

    parser = Parser("zerobook recipe", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("model", help="a hub name, a folder, or a config.json")
    add_hardware_flags(parser)
    parser.add_argument("--method", choices=tuple(METHODS), help="what is trained (default: the first of them that fits)")
    parser.add_argument("--train_file", help="your data: a file")
    parser.add_argument("--dataset_name", help="data from the hub")
    parser.add_argument("--global_batch", type=positive, default=64, help="samples or packed rows of a step (default 64)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default 2048; of a source text 512)")
    parser.add_argument("--output", help="the file to write (default NAME_METHOD_HARDWARE.yaml in this folder)")
    return parser


def _prefer_method_without_offload(advice: Advice, request: Request, cluster: Cluster) -> Advice:
    """Return the advice, with its best candidate and its alternative of another method swapped if the best needs offload."""
    if advice.best is None or not advice.best.row.offloads or advice.alternative is None:
        return advice
    return replace(
        advice,
        best=advice.alternative,
        second=None,
        alternative=advice.best,
        run=request.whole_run(advice.alternative, cluster),
    )


def _unplanned_values(flags: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """Return the values of the config before the planning: those that follow from the flags, the model and the cluster."""
    from zerobook.plan.job import read_config

    # If no data is named, the config has a placeholder, for which `_config_text` writes a comment.
    data = {key: getattr(flags, key) for key in _DATA if getattr(flags, key)}
    values: dict[str, Any] = {"model_name_or_path": flags.model, **(data or {"dataset_name": "NAME"})}
    model_config = read_config(flags.model)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if model_config.is_encoder_decoder:
        positions = positions or 512
        values |= {"max_source_length": flags.length or min(512, positions), "max_target_length": min(128, positions)}
    else:
        # The recipe for all weights calls the length of a row block_size.
        key = "block_size" if flags.method in (None, "full") else "max_seq_length"
        values |= {key: flags.length or min(2048, positions or 2048), "packing": True}
    # The global batch divided by the ranks, rounded to the nearest integer.
    samples_per_rank = max(1, (flags.global_batch + cluster.ranks // 2) // cluster.ranks)
    values |= {
        "mixed_precision": cluster.half_precision,
        "gradient_accumulation_steps": samples_per_rank,
        "per_device_train_batch_size": 1,
    }
    return values | _METHOD_VALUES.get(flags.method, {})


def _make_request(values: dict[str, Any], flags: argparse.Namespace, cluster: Cluster) -> Request:
    """Return the planner's request for the method that ``--method`` names; without it, for training all weights.

    Args:
        values: the config, by `_unplanned_values`.
    """
    from zerobook.config_sources import parse
    from zerobook.plan.advise import Request
    from zerobook.plan.sample_lengths import read_lengths
    from zerobook.training.recipe_file import recipe_class

    method = flags.method or "full"
    encoder_decoder = "max_source_length" in values
    if encoder_decoder and method == "qlora":
        raise ConfigError("--method: qlora: the encoder-decoder recipe has no quantised base. Choose full or lora.")
    name = "causal_lm" if method == "full" else "lora_finetune"
    if encoder_decoder:
        name = "seq2seq_chatbot"
    recipe_file = shipped(f"recipes/{name}.py")
    kind = recipe_class(str(recipe_file))
    config, sources, _ = parse(kind.config_class, subprocess_launch.flags(values), data=False)
    # Mark both as defaults, so that the planner may divide the samples of a step into micro-batches in another way.
    sources["per_device_train_batch_size"] = sources["gradient_accumulation_steps"] = "default"

    files = sorted(shipped("accelerate_configs").glob("*.yaml"))
    lengths = None if encoder_decoder else read_lengths(config)
    return Request(
        recipe_file,
        kind(config),
        sources,
        files,
        settings=lambda method: _published_settings(method, encoder_decoder)[1],
        lengths=lengths,
    )


def _published_settings(method: str, encoder_decoder: bool) -> tuple[str, dict[str, Any]]:
    """Return (publication, training settings that it reports) for a method and a kind of model."""
    source, settings = _PUBLISHED["full" if method == "full" else "lora", encoder_decoder]
    return source, settings | {"validation_split_percentage": 1}


def _check_output(file: Path) -> None:
    """Raise `ConfigError` if the file exists, its folder does not exist, or its name does not end in .yaml or .yml."""
    if file.exists():
        raise ConfigError(f"--output: {file} exists, and nothing was written. Name another file, or remove it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--output: {file}: there is no folder {file.absolute().parent}.")
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output: {file} is not a .yaml file.")


def _default_name(model: str, method: str, cluster: Cluster) -> str:
    model_name = re.sub(r"[^\w.-]+", "-", Path(model).absolute().name.removesuffix(".json")).lower()
    device_name = re.sub(r"[^\w.-]+", "-", cluster.device.name)
    nodes = f"{cluster.nodes}x" if cluster.nodes > 1 else ""
    return f"{model_name}_{method}_{nodes}{cluster.gpus}x{device_name}.yaml"


def _launch_line(best: Candidate, request: Request, cluster: Cluster, file: Path) -> str:
    """Return the arguments of ``accelerate launch`` as a line of a shell."""
    from zerobook.plan.rows import launch_flags

    strategy = path_from_here(shipped(f"accelerate_configs/{best.row.file}.yaml"))
    # The line is for the first machine. The address and the port are examples, which the user replaces.
    words = launch_flags(strategy, cluster, machine_rank="0", address="10.0.0.1")
    if cluster.nodes > 1:
        words += ["--main_process_port", "29500"]
    words += [path_from_here(request.recipe_file(best.recipe)), "--config", str(file)]
    return shlex.join(words)


# Return label -> text of the comment lines at the top of the config.
def _header_entries(
    best: Candidate, source: str, cluster: Cluster, flags: argparse.Namespace, launch_line: str, limits: list[str]
) -> dict[str, str]:
    from zerobook.plan.advise import METHODS

    hardware = f"{counted(cluster.nodes, 'node')} of {cluster.gpus} x {cluster.device.name}"
    if flags.host_memory:
        hardware += f", {flags.host_memory} of host RAM a node"
    if cluster.nodes > 1:
        hardware += f", {flags.interconnect} between nodes"
    return {
        "Purpose": f"{flags.model}, {METHODS[best.method]}, on {cluster.name}",
        "Source": source,
        "Hardware": hardware,
        "Status": "planned by zerobook recipe, not run",
        "Launch": f"accelerate launch {launch_line}",
        "Batch": best.describe_batch(),
        "Plan": f"{best.describe_memory(cluster)}; {best.describe_time()}",
        "Override": f"--gradient_accumulation_steps {2 * best.config.gradient_accumulation_steps}: another global batch",
        "Limits": "; ".join(limits),
    }


def _limits(samples: int, cluster: Cluster, flags: argparse.Namespace) -> list[str]:
    """Return notes on what the reader of the config has to know or change.

    Args:
        samples: samples of a step, as planned.
    """
    limits = ["the settings are published for other models and data, and not tuned for these"]
    if cluster.nodes > 1:
        other_ranks = "1" if cluster.nodes == 2 else f"1 to {cluster.nodes - 1}"
        limits.append(f"--machine_rank {other_ranks} on the other nodes, and the first node's address in place of 10.0.0.1")
        limits.append("output_dir on a shared file system")
    if flags.model.endswith(".json"):
        limits.append("model_name_or_path is a config without weights: name a folder or a model on the hub")
    if samples != flags.global_batch:
        limits.append(
            f"{samples} is the nearest to a global batch of {flags.global_batch} that {cluster.ranks} processes divide"
        )
    return limits


def _config_text(planned_values: dict[str, Any], header: dict[str, str], file: Path, best: Candidate, *, has_data: bool) -> str:
    """Return the YAML with its header.

    Args:
        file: the file to write; the output_dir is called after it.
        has_data: the user has named the data. Otherwise ``planned_values`` has a placeholder, and the YAML has a comment.
    """
    lines = [f"# {key + ':':<10} {value}" for key, value in header.items()]
    # These settings change neither the memory nor the time of a step, so the planner does not get them.
    values = {
        **planned_values,
        "num_train_epochs": 3,
        "output_dir": f"outputs/{file.stem}",
    }
    for key, value in values.items():
        # Write a comment instead of the placeholder of `_unplanned_values`. The user names the data.
        if key == "dataset_name" and not has_data:
            lines.append("# train_file: chats.jsonl  # your data, or dataset_name: a name on the hub")
        elif isinstance(value, float):
            # Python writes 1e-05 for 1e-5.
            lines.append(f"{key}: {value:g}".replace("e-0", "e-"))
        else:
            lines += yaml.safe_dump({key: value}, width=math.inf, allow_unicode=True).splitlines()
    if not best.traced.job.recipe.encoder_decoder:
        lines.append("# chat_template: FILE.jinja  # if the model's tokenizer has none")
    return "\n".join(lines) + "\n"
