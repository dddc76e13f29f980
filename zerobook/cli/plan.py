"""Command ``zerobook plan``: predict the memory, the traffic and the time of a run under every strategy file."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import re
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zerobook.cli.arguments import Parser, add_hardware_flags, parse_cluster
from zerobook.errors import ConfigError
from zerobook.plan import formulas, table
from zerobook.plan.failures import RATES, FailurePlan, plan_failures
from zerobook.plan.hardware import Cluster, nearest
from zerobook.utils.devices import Device, find_device
from zerobook.utils.shipped import find, names, path_from_here, shipped
from zerobook.utils.terminal import console, say
from zerobook.utils.units import parse_count, size

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig
    from zerobook.config_sources import ConfigSources
    from zerobook.launch.resolve import Hardware
    from zerobook.plan.advise import Advice, Candidate, Request
    from zerobook.plan.measure import Figure

USAGE = """zerobook plan [hardware] MODEL | recipes/NAME.py [the recipe's flags]

MODEL is a hub name, a folder, or a config.json; weights are not needed. It is planned with recipes/causal_lm.py, or
recipes/seq2seq_chatbot.py for an encoder-decoder; to plan another recipe, name it and give its flags after it.
A recipe is Python code: it is run to read its flags, and nothing is trained.

examples:
  zerobook plan --gpus 8 --gpu a100-80gb meta-llama/Llama-2-7b-hf --mixed_precision bf16
  zerobook plan --gpus 8 --nodes 2 --gpu_memory 80GB --interconnect 400Gbps --host_memory 1TB \\
      recipes/lora_finetune.py --model_name_or_path tiiuae/falcon-180B --mixed_precision bf16
  zerobook plan --gpu a100-80gb,h100-80gb,l40s --gpus 8 --nodes 1-4 --interconnect 400Gbps \\
      --price a100-80gb=1.9,h100-80gb=2.9 --tokens 300M meta-llama/Llama-2-7b-hf
  zerobook plan --formulas --parameters 7.5B --gpus 64

Where --gpu, --gpus or --nodes are several, one table compares the machines: l40s,h100-80gb and 1,2,8 and 1-4.
"""


def plan(argv: list[str]) -> int:
    """Print a row for each strategy file, or for each machine if there are several. Return 0 if one fits, else 1.

    With --formulas, print the formulas, and return 0. With --measure, return 0 if no run failed, else 1.
    """
    parser = Parser("zerobook plan", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_hardware_flags(parser)
    parser.add_argument("--here", action="store_true", help="this machine, as it is found")
    parser.add_argument("--formulas", action="store_true", help="the literature's formulas alone, for --parameters")
    parser.add_argument("--parameters", help="with --formulas: parameters of the model, such as 7.5B")
    parser.add_argument("--precision", choices=("mixed", "fp32"), help="with --formulas (default mixed)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there; - prints them alone")
    parser.add_argument("--recommend", action="store_true", help="recommend the fastest run that fits, with its launch line")
    parser.add_argument("--tokens", help="tokens of the whole run, such as 300M (default: by the data and num_train_epochs)")
    parser.add_argument("--price", help="dollars of a GPU hour, such as 1.9, or a100-80gb=1.9,l40s=0.8")
    parser.add_argument("--measure", action="store_true", help="with --here: run a few steps of each and compare")
    parser.add_argument("--strategies", metavar="NAMES", help="only these files of accelerate_configs/, with commas between")
    parser.add_argument(
        "--failures",
        metavar="RATE",
        help="print the expected failures, the best interval of saves and the goodput. RATE is "
        f"{', '.join(RATES)}, or the mean hours between failures of one GPU. Append ,save=SECONDS and ,restart=SECONDS if they "
        "are known (with several nodes, the default is llama3)",
    )
    # The planner's flags come before the model or recipe, and the recipe's flags after it.
    parser.add_argument("model", nargs=argparse.REMAINDER, help="a model or a recipe, and then the recipe's flags")
    flags = parser.parse_args(argv)
    model_arguments = flags.model
    _check_flags(flags, parser, model_arguments)
    clusters = [here(flags.gpus)] if flags.here else _list_clusters(flags)
    if flags.formulas:
        _show_formulas(flags, clusters[0])
        return 0
    if not model_arguments:
        raise ConfigError(
            "no model is named. Give a hub name, a config.json, or a recipe with its flags; see zerobook plan --help."
        )
    if flags.measure:
        return _measure(model_arguments, clusters[0], flags)
    # The garbage collector would take a tenth of a plan's time, and find little: the imports of torch and transformers make
    # many objects that stay.
    gc.disable()
    try:
        if len(clusters) > 1:
            return _compare_machines(model_arguments, clusters, flags)
        return _plan(model_arguments, clusters[0], flags)
    finally:
        gc.enable()


def _list_clusters(flags: argparse.Namespace) -> list[Cluster]:
    """Return the machines that the flags describe: each GPU, with each number of GPUs and of nodes."""
    gpu_names = flags.gpu.split(",") if flags.gpu else [None]
    clusters = []
    for gpu, gpus, nodes in itertools.product(gpu_names, _list_numbers(flags.gpus), _list_numbers(flags.nodes)):
        machine = vars(flags) | {"gpu": gpu, "gpus": gpus, "nodes": nodes}
        clusters.append(parse_cluster(argparse.Namespace(**machine)))
    return clusters


def _list_numbers(text: str | None) -> list[str | None]:
    """Return the numbers of ``1,2,8`` or ``1-4``, each as text; None as the only one if there is no text.

    Words that are not numbers are returned too. `parse_cluster` refuses them.
    """
    if not text:
        return [None]
    limits = re.fullmatch(r"(\d+)-(\d+)", text)
    if limits and int(limits[1]) <= int(limits[2]):
        return [str(number) for number in range(int(limits[1]), int(limits[2]) + 1)]
    return list(text.split(","))


def _show_formulas(flags: argparse.Namespace, cluster: Cluster) -> None:
    from zerobook.plan.formulas_table import show_formulas

    if flags.parameters is None:
        raise ConfigError("--formulas: the number of parameters is missing. Give --parameters 7.5B.")
    parameters = parse_count(flags.parameters, "--parameters")
    failures = _expect_failures(flags, cluster, formulas.CHECKPOINT_BYTES * parameters)
    show_formulas(parameters, cluster, mixed=flags.precision != "fp32", target=flags.json, failures=failures)


def _expect_failures(flags: argparse.Namespace, cluster: Cluster, checkpoint_bytes: float) -> FailurePlan | None:
    """Return the expected failures by ``--failures``, whose default for several nodes is llama3.

    None for one node without the flag, and if no checkpoint could be planned.
    """
    if checkpoint_bytes == 0 or (flags.failures is None and cluster.nodes == 1):
        return None
    return plan_failures(flags.failures or "llama3", cluster.ranks, cluster.nodes, checkpoint_bytes)


def _plan(model_arguments: list[str], cluster: Cluster, flags: argparse.Namespace) -> int:
    """Print the rows, and the recommendation. Return 0 if at least one of them fits, otherwise 1."""
    from zerobook.plan.advise import advise
    from zerobook.plan.rows import plan_recipe
    from zerobook.utils.bars import tqdm

    files = _strategy_files(flags.strategies)
    request, words = _read_request(model_arguments, files, cluster, flags, packs=flags.recommend)
    progress = tqdm(files, desc="planning", unit=" files", leave=False)
    traced, rows = plan_recipe(request.recipe, request.sources, cluster, progress, request.models)
    advice = advise(request, cluster) if flags.recommend else None
    # With ``--json -``, standard output has the JSON document alone.
    output = sys.stderr if flags.json == "-" else sys.stdout
    # All strategies save a checkpoint of the same size. A row that could not be planned has 0 bytes and 0 checkpoints.
    checkpoint_bytes = max(row.checkpoint / (row.checkpoints or 1) for row in rows)
    failures = _expect_failures(flags, cluster, checkpoint_bytes)
    if flags.json:
        values = table.record(traced, rows, cluster)
        if failures is not None:
            values["failures"] = asdict(failures)
        if advice is not None:
            values["advice"] = advice.record()
        table.write_json(flags.json, values)
    if flags.json != "-":
        table.show(traced, rows, cluster, failures)
    if advice is not None:
        _show_advice(advice, request, words, cluster, output)
        return int(advice.best is None)
    return int(not any(row.fits for row in rows))


# Print the recommendation with its launch line. ``words``: the recipe's flags as words of a command line.
def _show_advice(advice: Advice, request: Request, words: list[str], cluster: Cluster, output: TextIO) -> None:
    table.show_lines(advice.describe(cluster), file=output)
    if advice.best is not None:
        say(f"\nto launch it:\n  {_launch_line(request, words, advice.best, cluster)}", file=output)


def _compare_machines(model_arguments: list[str], clusters: list[Cluster], flags: argparse.Namespace) -> int:
    """Print a table of machines, the best first, and with --recommend the recommendation for the best.

    Return 0 if the model fits at least one of them, otherwise 1.
    """
    from zerobook.plan.advise import advise
    from zerobook.plan.machines import compare_machines, show_machines

    request, words = _read_request(model_arguments, _strategy_files(flags.strategies), clusters[0], flags, packs=True)
    machines = compare_machines(request, clusters)
    output = sys.stderr if flags.json == "-" else sys.stdout
    if flags.json:
        table.write_json(flags.json, [{"hardware": asdict(where)} | advice.record() for where, advice in machines])
    if flags.json != "-":
        show_machines(machines)
    # The machines are ranked. If the model does not fit the first one, it fits none.
    cluster, advice = machines[0]
    if flags.recommend and advice.best is not None:
        say(f"\non {cluster.name}:", file=output)
        _show_advice(advise(request.on(cluster), cluster), request, words, cluster, output)
    return int(advice.best is None)


_DESCRIPTION = ("nodes", "gpu", "gpu_memory", "host_memory", "disk", "interconnect", "intra_node")
# Flag that chooses a mode -> other flags that have no effect with it.
_EXCLUDED = {
    "here": (*_DESCRIPTION, "formulas"),
    "formulas": ("recommend", "measure", "strategies", "tokens", "price"),
    "measure": ("recommend", "failures", "tokens", "price"),
}


def _check_flags(flags: argparse.Namespace, parser: argparse.ArgumentParser, model_arguments: list[str]) -> None:
    """Raise `ConfigError` for flags that have no effect, are in the wrong place, or name files that cannot be written.

    Args:
        model_arguments: the model or recipe, and the recipe's flags.
    """
    values = vars(flags)
    problems = []
    for mode, excluded in _EXCLUDED.items():
        for flag in excluded:
            if values[mode] and values[flag]:
                problems.append(f"--{mode} and --{flag}: the second has no effect with the first. Leave one of them out.")
    # A list of GPU models, and a list (1,2) or range (1-4) of numbers, describe several machines.
    has_several_kinds = "," in (flags.gpu or "")
    has_several_counts = re.search("[,-]", f"{flags.gpus}{flags.nodes}") is not None
    has_several_machines = has_several_kinds or has_several_counts
    for mode in ("formulas", "failures"):
        if values[mode] and has_several_machines:
            problems.append(f"--{mode}: it is planned for one machine, and --gpu, --gpus or --nodes name several. Choose one.")
    for flag in ("tokens", "price"):
        if values[flag] and not (flags.recommend or has_several_machines):
            problems.append(f"--{flag}: it has an effect only with --recommend, or where machines are compared.")
    for flag in ("parameters", "precision"):
        if values[flag] and not flags.formulas:
            problems.append(f"--{flag}: it has an effect only with --formulas, which is not given.")
    if flags.measure and not flags.here:
        problems.append("--measure: it runs on this machine. Add --here. --gpus sets a smaller number of processes.")
    if flags.formulas and model_arguments:
        problems.append(f"--formulas and {model_arguments[0]}: formulas ask for --parameters alone. Leave one of them out.")
    # Flags after the model are read by the recipe, which does not know the planner's flags.
    plan_flags = {option for action in parser._actions for option in action.option_strings}
    for argument in model_arguments:
        flag = argument.split("=")[0]
        if flag in plan_flags:
            problems.append(f"{flag}: it is zerobook plan's own. Put it in front of {model_arguments[0]}.")
    if flags.json and flags.json != "-":
        file = Path(flags.json).absolute()
        if file.is_dir() or not os.access(file.parent, os.W_OK):
            problems.append(f"--json: {flags.json}: no such file can be written. Name a file in a folder that exists.")
    if problems:
        raise ConfigError(problems)


def here(processes: str | None) -> Cluster:
    """Return this machine as a cluster.

    Args:
        processes: the value of ``--gpus``; None: one process for each GPU, or without GPUs for each physical core.

    Raises:
        ConfigError: the number is not positive or more than there are GPUs, or torch cannot use one of these GPUs.
    """
    import shutil

    import psutil

    from zerobook.launch.resolve import Hardware

    if processes is not None and not (processes.isdecimal() and int(processes)):
        raise ConfigError(f"--gpus: {processes!r} is not a number of processes; give 1 or more.")
    hardware = Hardware.detect()
    # GPUs before the first one that torch cannot use are enough for a smaller number of processes.
    if hardware.unused and int(processes or hardware.gpus or 1) > hardware.first_unused:
        raise ConfigError(hardware.unused)
    host_memory = psutil.virtual_memory().available
    disk = shutil.disk_usage(Path.cwd()).free
    if not hardware.gpus:
        cores = int(processes or psutil.cpu_count(logical=False) or 1)
        # Assumed for a CPU: 50 GFLOPS, and 10 GB/s for the memory and for the link between processes.
        device = Device("CPU process", host_memory // cores, 5e10, 5e10, 1e10, 1e10)
        return Cluster(gpus=cores, device=device, link=1e10, host_memory=host_memory, disk=disk, cpu=True)

    gpus = int(processes or hardware.gpus)
    if gpus > hardware.gpus:
        raise ConfigError(
            f"--gpus: {processes}, and there are {hardware.gpus} here. Leave --here out to plan for another machine."
        )
    device = _describe_gpus(hardware, gpus)
    return Cluster(gpus=gpus, device=device, link=device.link, host_memory=host_memory, disk=disk)


# Return the first ``gpus`` GPUs of this machine as one device, with the memory that is free on each of them. Print notes.
def _describe_gpus(hardware: Hardware, gpus: int) -> Device:
    import torch

    # All ranks need as much memory, so the GPU with the least free memory decides.
    (free, total), busiest = min((torch.cuda.mem_get_info(index), index) for index in range(gpus))
    if free < 0.9 * total:
        print(
            f"note: {size(total - free)} of GPU {busiest}'s {size(total)} are taken by others; planned with what is free.",
            file=sys.stderr,
        )
    name = hardware.gpu_name or "GPU"
    listed_device = find_device(name)
    device = listed_device or nearest(total).speed_of(name, total)
    if listed_device is None:
        print(
            f"note: the speed of {name!r} is not known here; times are planned with that of {device.like}. With --gpu NAME or "
            "--gpu_memory in place of --here, and --intra_node, say what it is.",
            file=sys.stderr,
        )
    return replace(device, name=name, memory=free, bf16=hardware.bf16, fused=hardware.flash_attention)


def _read_request(
    model_arguments: list[str], files: list[Path], cluster: Cluster, flags: argparse.Namespace, *, packs: bool = False
) -> tuple[Request, list[str]]:
    """Read the model or the recipe. Return the planner's request, and the recipe's flags as words of a command line.

    Code is run only if the command line names it, since somebody else may have written the recipe's YAML.

    Args:
        packs: the adviser will plan packed rows where the recipe can pack.

    Raises:
        ConfigError: the YAML names an optimizer in a file, which a plan would have to run.
    """
    from zerobook.config_sources import changed, parse
    from zerobook.optimizer import names_code_in_yaml
    from zerobook.plan.advise import Request
    from zerobook.plan.sample_lengths import read_lengths
    from zerobook.plan.whole_run import parse_prices
    from zerobook.training.recipe_file import recipe_class

    # Read the recipe and its flags. A model is planned with the recipe for its kind.
    model, *words = model_arguments
    file = find(model, "recipes") if model in names("recipes") else Path(model)
    if file.suffix != ".py":
        file = shipped(f"recipes/{_recipe_name_for(model)}.py")
        words = ["--model_name_or_path", model, *words]
    kind = recipe_class(str(file))
    config, sources, _ = parse(kind.config_class, words, data=flags.measure)
    if names_code_in_yaml(config, sources):
        raise ConfigError(
            f"optimizer: {sources['optimizer']} names {config.optimizer}, and a plan would have to run it. Add --optimizer "
            f"{shlex.quote(config.optimizer)} if you trust it."
        )
    # A YAML must not allow the code of a model to run either.
    if sources.is_from_yaml("trust_remote_code"):
        config = config.model_copy(update={"trust_remote_code": False})
    # If the model has fewer positions than a default length, repeat this in the launch line.
    for key, positions in _shorter_lengths(config, sources).items():
        print(f"note: the model has {positions} positions, so this is planned with --{key} {positions}.", file=sys.stderr)
        words += [f"--{key}", str(positions)]
        config, sources = changed(config, sources, kind.config_class, {key: positions})
    tokens = parse_count(flags.tokens, "--tokens") if flags.tokens else None
    prices = parse_prices(flags.price) if flags.price else {}
    request = Request(file, kind(config), sources, files, tokens=tokens, prices=prices)
    # A measurement uses the run's precision and rows, so they are not changed for the planner.
    if flags.measure:
        return request, words
    request = replace(request, lengths=None if kind.encoder_decoder else read_lengths(config))
    return _shorten_rows(request, packs).on(cluster), words


# Return the request with shorter rows, and print a note, if no sample of the data fills a row.
def _shorten_rows(request: Request, packs: bool) -> Request:
    from zerobook.config_sources import changed

    config = request.recipe.config
    is_packed = config.packing or (packs and request.can_pack)
    # Packed rows are full, and the samples of a validation file may be longer.
    if request.lengths is None or is_packed or config.validation_file is not None:
        return request
    # Rows are padded to a multiple of 8.
    longest = -(-int(request.lengths.max()) // 8) * 8
    if longest >= config.row_length:
        return request
    print(f"note: no sample has more than {longest} tokens, so rows are planned with as many.", file=sys.stderr)
    config, sources = changed(config, request.sources, type(config), {config.length_key: longest})
    return replace(request, recipe=type(request.recipe)(config), sources=sources)


def _shorter_lengths(config: RecipeConfig, sources: ConfigSources) -> dict[str, int]:
    """Return key -> the model's number of positions, for each length that the user has not set and whose default is larger."""
    from zerobook.checkpoint.result import find_result
    from zerobook.plan.job import read_config
    from zerobook.utils.model_config import text_config

    name = config.model_name_or_path or config.initialised_from
    if name is None:
        return {}
    model_config = read_config(find_result(name).model, config.model_revision, trust=config.trust_remote_code)
    positions = getattr(text_config(model_config), "max_position_embeddings", None)
    lengths = {}
    for key in ("block_size", "max_seq_length", "max_source_length", "max_target_length"):
        if positions and not sources.is_set(key) and getattr(config, key, 0) > positions:
            lengths[key] = positions
    return lengths


# Return the name of the recipe that a model without a recipe is planned with.
def _recipe_name_for(model: str) -> str:
    from zerobook.plan.job import UnplannableModelError, read_config

    try:
        is_encoder_decoder = read_config(model).is_encoder_decoder
    except UnplannableModelError as error:
        # The model's class may be in its repository. --trust_remote_code, which would load it, is read later.
        is_encoder_decoder = error.facts.get("is_encoder_decoder", False)
    return "seq2seq_chatbot" if is_encoder_decoder else "causal_lm"


def _strategy_files(names: str | None) -> list[Path]:
    """Return the strategy files that ``--strategies`` names; all of them if it is not given."""
    files = {file.stem: file for file in sorted(shipped("accelerate_configs").glob("*.yaml"))}
    chosen = set(files)
    if names is not None:
        chosen = set(names.split(","))
    unknown = sorted(chosen - set(files))
    if unknown:
        raise ConfigError(f"--strategies: {', '.join(unknown)}: no such file. There are: {', '.join(files)}.")
    return [file for stem, file in files.items() if stem in chosen]


def _launch_line(request: Request, words: list[str], best: Candidate, cluster: Cluster) -> str:
    """Return the command that trains as recommended. If no flag names the data, it is the shell's variable $TRAIN_FILE.

    Args:
        words: the recipe's flags as words of a command line.
    """
    from zerobook.plan.rows import launch_flags

    config = request.recipe.config
    if best.recipe is not None:
        # Another recipe is recommended. Of the values that the user set, repeat those that this recipe has, too.
        words = []
        for key in type(config).model_fields:
            if key in type(best.config).model_fields and request.sources.is_set(key):
                words += _flag_words(key, getattr(config, key))
    strategy = path_from_here(shipped(f"accelerate_configs/{best.row.file}.yaml"))
    line = ["accelerate", "launch"]
    line += launch_flags(strategy, cluster, machine_rank="$RANK_OF_THIS_MACHINE", address="$FIRST_MACHINE")
    line.append(path_from_here(request.recipe_file(best.recipe)))
    line += words
    for key, value in best.flags.items():
        line += _flag_words(key, value)
    if not config.names_data():
        line += ["--train_file", "$TRAIN_FILE"]
    # In quotes, the shell would not replace a variable.
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in line)


# Return the words of a flag on the command line. A list has a word for each item.
def _flag_words(key: str, value: Any) -> list[str]:
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


def _measure(model_arguments: list[str], cluster: Cluster, flags: argparse.Namespace) -> int:
    """Print planned and measured figures side by side. Return 0 if no run failed, otherwise 1."""
    from rich.table import Table

    from zerobook.plan.job import make_job
    from zerobook.plan.measure import measure
    from zerobook.utils.bars import tqdm

    request, words = _read_request(model_arguments, _strategy_files(flags.strategies), cluster, flags)
    job = make_job(request.recipe)
    measurements = []
    for file in tqdm(request.files, desc="measuring", unit=" files", leave=False):
        measurements.append(measure(file, job, request.file, words, cluster, request.sources))
    # A strategy that cannot run here is not a failure.
    exit_code = int(any(run.failure and not run.failure.startswith("cannot run") for run in measurements))
    if flags.json:
        table.write_json(flags.json, [asdict(run) for run in measurements])
    if flags.json == "-":
        return exit_code

    # Strategies may have different figures. Each figure has a column, in the order of the first run that has it.
    names = list(dict.fromkeys(name for run in measurements for name in run.figures))
    comparison = Table(
        title=f"planned / measured on {cluster.name}: the rank that is furthest off", title_justify="left", box=None
    )
    comparison.add_column("strategy file", no_wrap=True)
    for header in ("ranks", *names):
        comparison.add_column(header, justify="right")
    for run in measurements:
        comparison.add_row(run.file, str(run.ranks), *(_compare_figure(run.figures.get(name)) for name in names))
    out = console(table.WIDTH)
    out.print(comparison)
    for run in measurements:
        if run.failure:
            out.print(f"{run.file}: {run.failure}")
    return exit_code


# Return the planned and the measured bytes with their difference, as text.
def _compare_figure(figure: Figure | None) -> str:
    if figure is None or (figure.planned == 0 and figure.measured == 0):
        return "-"
    if figure.planned == figure.measured:
        return f"{size(figure.measured)} ="
    return f"{size(figure.planned)} / {size(figure.measured)} ({figure.error:+.2%})"
