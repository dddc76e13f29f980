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

from zerobook.cli.arguments import Parser, add_hardware, described
from zerobook.errors import ConfigError
from zerobook.plan import formulas, table
from zerobook.plan.failures import RATES, FailurePlan, plan_failures
from zerobook.plan.hardware import Cluster, nearest
from zerobook.utils.devices import find_device
from zerobook.utils.shipped import find, names, path_from_here, shipped
from zerobook.utils.terminal import console, say
from zerobook.utils.units import parse_count, size

if TYPE_CHECKING:
    from zerobook.config import RecipeConfig
    from zerobook.config_sources import ConfigSources
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
    """Print a row for each strategy file. Return 0 if at least one fits, else 1."""
    parser = Parser("zerobook plan", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_hardware(parser)
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
        help=f"expected failures, best interval of saves, goodput: {', '.join(RATES)}, or hours between failures of a GPU; "
        "then ,save=SECONDS and ,restart=SECONDS where they are known (several nodes: default llama3)",
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
    # Importing torch and transformers makes many objects and little garbage: looking for it takes a tenth of a plan's time.
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
        clusters.append(described(argparse.Namespace(**machine)))
    return clusters


def _list_numbers(text: str | None) -> list[str | None]:
    """Return the numbers of ``1,2,8`` or ``1-4``. Words that are not numbers stay, to be refused with the others."""
    first, dash, last = (text or "").partition("-")
    if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return [str(number) for number in range(int(first), int(last) + 1)]
    return list(text.split(",")) if text else [None]


def _show_formulas(flags: argparse.Namespace, cluster: Cluster) -> None:
    from zerobook.plan.formulas_table import show_formulas

    if flags.parameters is None:
        raise ConfigError("--formulas: the number of parameters is missing. Give --parameters 7.5B.")
    parameters = parse_count(flags.parameters, "--parameters")
    failures = _expect_failures(flags, cluster, formulas.CHECKPOINT_BYTES * parameters)
    show_formulas(parameters, cluster, mixed=flags.precision != "fp32", target=flags.json, failures=failures)


def _expect_failures(flags: argparse.Namespace, cluster: Cluster, checkpoint_bytes: float) -> FailurePlan | None:
    """Return the failures of ``--failures``, or of a run on several nodes; None for one node without the flag, and where no
    checkpoint was planned."""
    is_wanted = flags.failures is not None or cluster.nodes > 1
    if not is_wanted or checkpoint_bytes == 0:
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
    # Strategies save the same state. A row that could not be planned has 0.
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


def _show_advice(advice: Advice, request: Request, words: list[str], cluster: Cluster, output: TextIO) -> None:
    table.show_lines(advice.describe(cluster), file=output)
    if advice.best is not None:
        say(f"\nto launch it:\n  {_launch_line(request, words, advice.best, cluster)}", file=output)


def _compare_machines(model_arguments: list[str], clusters: list[Cluster], flags: argparse.Namespace) -> int:
    """Print a table of machines, and the recommendation for the first of them. Return 0 if the model fits at least one,
    otherwise 1."""
    from zerobook.plan.advise import advise
    from zerobook.plan.machines import compare_machines, show_machines

    request, words = _read_request(model_arguments, _strategy_files(flags.strategies), clusters[0], flags, packs=True)
    machines = compare_machines(request, clusters)
    output = sys.stderr if flags.json == "-" else sys.stdout
    if flags.json:
        table.write_json(flags.json, [{"hardware": asdict(where)} | advice.record() for where, advice in machines])
    if flags.json != "-":
        show_machines(machines)
    cluster, advice = machines[0]
    if flags.recommend and advice.best is not None:
        say(f"\non {cluster.name}:", file=output)
        _show_advice(advise(request.on(cluster), cluster), request, words, cluster, output)
    return int(advice.best is None)


_DESCRIPTION = ("nodes", "gpu", "gpu_memory", "host_memory", "disk", "interconnect", "intra_node")
_EXCLUDED = {
    "here": (*_DESCRIPTION, "formulas"),
    "formulas": ("recommend", "measure", "strategies", "tokens", "price"),
    "measure": ("recommend", "failures", "tokens", "price"),
}
"""Mode -> flags that have no effect in it."""


def _check_flags(flags: argparse.Namespace, parser: argparse.ArgumentParser, model_arguments: list[str]) -> None:
    """Raise `ConfigError` for flags that have no effect, are in the wrong place, or name files that cannot be written."""
    values = vars(flags)
    problems = []
    for mode, excluded in _EXCLUDED.items():
        for flag in excluded:
            if values[mode] and values[flag]:
                problems.append(f"--{mode} and --{flag}: the second has no effect with the first. Leave one of them out.")
    # Several kinds of GPU, and lists or ranges of counts, describe several machines.
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
    # What follows the model is read by the recipe, which does not know the planner's flags.
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
    """Return this machine as a cluster of ``processes`` processes, the value of ``--gpus``; None means one for each GPU or
    physical core."""
    import shutil

    import psutil

    from zerobook.launch.resolve import Hardware
    from zerobook.utils.devices import Device

    if processes is not None and not (processes.isdecimal() and int(processes)):
        raise ConfigError(f"--gpus: {processes!r} is not a number of processes; give 1 or more.")
    hardware = Hardware.detect()
    if hardware.unused and int(processes or hardware.gpus or 1) > hardware.first_unused:
        raise ConfigError(hardware.unused)
    host_memory = psutil.virtual_memory().available
    disk = shutil.disk_usage(Path.cwd()).free
    if not hardware.gpus:
        cores = int(processes or psutil.cpu_count(logical=False) or 1)
        # Assumed rates of a CPU: 50 GFLOPS, and 10 GB/s of memory and between processes.
        device = Device("CPU process", host_memory // cores, 5e10, 5e10, 1e10, 1e10)
        return Cluster(gpus=cores, device=device, link=1e10, host_memory=host_memory, disk=disk, cpu=True)

    import torch

    gpus = int(processes or hardware.gpus)
    if gpus > hardware.gpus:
        raise ConfigError(
            f"--gpus: {processes}, and there are {hardware.gpus} here. Leave --here out to plan for another machine."
        )
    # Ranks hold the same, so the GPU with the least free memory decides.
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
    device = replace(device, name=name, memory=free, bf16=hardware.bf16, fused=hardware.flash_attention)
    return Cluster(gpus=gpus, device=device, link=device.link, host_memory=host_memory, disk=disk)


def _read_request(
    model_arguments: list[str], files: list[Path], cluster: Cluster, flags: argparse.Namespace, *, packs: bool = False
) -> tuple[Request, list[str]]:
    """Read the model or recipe, and return the request with the recipe's flags as they were typed.

    Code is run only if the command line names it: a recipe's YAML may be somebody else's.

    Raises:
        ConfigError: the YAML names code of which a plan needs to know the size.
    """
    from zerobook.config_sources import changed, parse
    from zerobook.optimizer import names_code_in_yaml
    from zerobook.plan.advise import Request
    from zerobook.plan.sample_lengths import read_lengths
    from zerobook.plan.whole_run import parse_prices
    from zerobook.training.recipe_file import recipe_class

    model, *words = model_arguments
    file = find(model, "recipes") if model in names("recipes") else Path(model)
    if file.suffix != ".py":
        file = shipped(f"recipes/{_recipe_for(model)}.py")
        words = ["--model_name_or_path", model, *words]
    kind = recipe_class(str(file))
    config, sources, _ = parse(kind.config_class, words, data=flags.measure)
    if names_code_in_yaml(config, sources):
        raise ConfigError(
            f"optimizer: {sources['optimizer']} names {config.optimizer}, and a plan would have to run it. Add --optimizer "
            f"{shlex.quote(config.optimizer)} if you trust it."
        )
    # A YAML may not allow code to run either.
    if sources.is_from_yaml("trust_remote_code"):
        config = config.model_copy(update={"trust_remote_code": False})
    for key, positions in _shorter_lengths(config, sources).items():
        print(f"note: the model has {positions} positions, so this is planned with --{key} {positions}.", file=sys.stderr)
        words += [f"--{key}", str(positions)]
        config, sources = changed(config, sources, kind.config_class, {key: positions})
    tokens = parse_count(flags.tokens, "--tokens") if flags.tokens else None
    prices = parse_prices(flags.price) if flags.price else {}
    request = Request(file, kind(config), sources, files, tokens=tokens, prices=prices)
    # A measurement takes the precision and the rows of the run.
    if flags.measure:
        return request, words
    request = replace(request, lengths=None if kind.encoder_decoder else read_lengths(config))
    # The adviser packs samples into rows, which are then full. Held-out samples may be longer.
    is_packed = config.packing or (packs and request.can_pack)
    if request.lengths is not None and not is_packed and config.validation_file is None:
        # Rows are padded to a multiple of 8.
        longest = -(-int(request.lengths.max()) // 8) * 8
        if longest < config.row_length:
            print(f"note: no sample has more than {longest} tokens, so rows are planned with as many.", file=sys.stderr)
            config, sources = changed(config, sources, kind.config_class, {config.length_key: longest})
            request = replace(request, recipe=kind(config), sources=sources)
    return request.on(cluster), words


def _shorter_lengths(config: RecipeConfig, sources: ConfigSources) -> dict[str, int]:
    """Return the model's positions for each length that nobody set and whose default is larger."""
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


def _recipe_for(model: str) -> str:
    from zerobook.plan.job import UnplannableModelError, read_config

    try:
        is_encoder_decoder = read_config(model).is_encoder_decoder
    except UnplannableModelError as error:
        # The class may be known with --trust_remote_code, which is read later.
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
    """Return the command that trains as recommended. Data that no flag names is a variable of the shell.

    Args:
        words: the recipe's flags as they were typed.
    """
    from zerobook.plan.rows import launch_flags

    config = request.recipe.config
    if best.recipe is not None:
        # The other recipe's flags have other names, so only those that it knows are repeated.
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
    # Variables of the shell are not quoted.
    return " ".join(map(_quote_but_variables, line))


def _quote_but_variables(word: str) -> str:
    return word if word.startswith("$") else shlex.quote(word)


def _flag_words(key: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [f"--{key}", *map(str, values)]


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

    # Strategies may have different figures. Each has one column, in the order of the first row with it.
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


def _compare_figure(figure: Figure | None) -> str:
    if figure is None or (figure.planned == 0 and figure.measured == 0):
        return "-"
    if figure.planned == figure.measured:
        return f"{size(figure.measured)} ="
    return f"{size(figure.planned)} / {size(figure.measured)} ({figure.error:+.2%})"
