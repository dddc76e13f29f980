"""Command ``zerobook plan``: what a run will hold, send and take under every strategy file, before it starts."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.cli.arguments import Parser, add_hardware, described
from zerobook.errors import ConfigError
from zerobook.plan import table
from zerobook.plan.hardware import Cluster, nearest
from zerobook.training.recipe_file import RUNS
from zerobook.utils.devices import find_device
from zerobook.utils.shipped import shipped
from zerobook.utils.terminal import console, say
from zerobook.utils.units import parse_count, size

if TYPE_CHECKING:
    from zerobook.config import ConfigSources
    from zerobook.plan.measure import Figure
    from zerobook.plan.recommend import Advice
    from zerobook.plan.rows import Row, Subject, Traced
    from zerobook.training.recipe import Recipe

USAGE = f"""zerobook plan [hardware] MODEL | recipes/NAME.py [the recipe's flags]

MODEL is a hub name, a folder, or a config.json; weights are not needed. It is planned with recipes/causal_lm.py, or
recipes/seq2seq_chatbot.py for an encoder-decoder; to plan another recipe, name it and give its flags after it.
To read its flags, {RUNS}; nothing is trained.

examples:
  zerobook plan --gpus 8 --gpu a100-80gb meta-llama/Llama-2-7b-hf --mixed_precision bf16
  zerobook plan --gpus 8 --nodes 2 --gpu_memory 80GB --interconnect 400Gbps --host_memory 1TB \\
      recipes/lora_finetune.py --model_name_or_path tiiuae/falcon-180B --mixed_precision bf16
  zerobook plan --formulas --parameters 7.5B --gpus 64
  zerobook plan --formulas --parameters 2851M --largest_layer 32.9M --gpus 8 --activations 32x1x1024x4096
"""


def plan(argv: list[str]) -> int:
    """Print a row for each strategy file. Return 0 where at least one fits, 1 where none does."""
    parser = Parser("zerobook plan", usage=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_hardware(parser)
    parser.add_argument("--here", action="store_true", help="this machine, as it is found")
    parser.add_argument("--formulas", action="store_true", help="the literature's formulas alone, for --parameters")
    parser.add_argument("--parameters", help="with --formulas: parameters of the model, such as 7.5B")
    parser.add_argument("--precision", choices=("mixed", "fp32"), help="with --formulas (default mixed)")
    parser.add_argument("--largest_layer", help="with --formulas: its parameters, for DeepSpeed's estimates under ZeRO-3")
    parser.add_argument("--activations", metavar="LAYERSxBATCHxLENGTHxWIDTH", help="with --formulas: of a transformer")
    parser.add_argument("--json", metavar="FILE", help="write the rows there; - prints them alone")
    parser.add_argument("--png", metavar="FILE", help="draw GPU memory as stacked bars")
    parser.add_argument("--recommend", action="store_true", help="recommend a strategy file and flags, with the rule for each")
    parser.add_argument("--measure", action="store_true", help="with --here: run a few steps of each and compare")
    parser.add_argument("--autotune", metavar="FOLDER", help="with --here: find the fastest by running it, and write it there")
    parser.add_argument("--global_batch", help="with --autotune: samples of a step")
    parser.add_argument("--strategies", metavar="NAMES", help="only these files of accelerate_configs/, with commas between")
    place = next((i for i, token in enumerate(argv) if not token.startswith("-") and _stands_alone(argv, i)), len(argv))
    asked = parser.parse_args(argv[:place])
    _check(asked, parser, argv[place:])
    where = here(asked.gpus) if asked.here else described(asked)
    if asked.formulas:
        if asked.parameters is None:
            raise ConfigError("--formulas: the number of parameters is missing. Give --parameters 7.5B.")
        table.show_formulas(
            parse_count(asked.parameters, "--parameters"), where, mixed=asked.precision != "fp32", target=asked.json,
            largest_layer=parse_count(asked.largest_layer, "--largest_layer") if asked.largest_layer else None,
            tokens=_tokens(asked.activations),
        )  # fmt: skip
        return 0
    if place == len(argv):
        raise ConfigError(
            "no model is named. Give a hub name, a config.json, or a recipe with its flags; see zerobook plan --help."
        )
    if asked.measure:
        return _measure(argv[place], argv[place + 1 :], where, asked)
    if asked.autotune:
        return _autotune(argv[place], argv[place + 1 :], where, asked)
    file, flags, recipe, sources = _read(argv[place], argv[place + 1 :], data=False)
    subject, rows, traced = _plan(recipe, sources, where, asked.strategies)
    advice = _advice(file, recipe, sources, where, asked.strategies, rows, traced) if asked.recommend else None
    # where JSON is printed, nothing else is
    tell = partial(say, file=sys.stderr if asked.json == "-" else sys.stdout)
    if asked.json:
        told = {} if advice is None else {"advice": advice.record()}
        table.write_json(asked.json, table.record(subject, rows, where) | told)
    if asked.json != "-":
        table.show(subject, rows, where)
    if asked.png:
        from zerobook.plan.picture import draw

        title = f"{subject.name}{', by formula' if subject.by_formula else ''}, a GPU of {where.name}"
        draw(rows, where, title, Path(asked.png))
        tell(f"wrote {asked.png}")
    if advice is not None:
        tell(advice.words())
        if advice.row is not None:
            tell(f"\nto launch it:\n  {_launch_line(file, flags, recipe, sources, advice, where)}")
    elif asked.recommend:
        tell("no advice: its rules are tried on a model that can be built, and this one was planned by formula.")
    return 0 if any(row.fits for row in rows) or (advice is not None and advice.row is not None) else 1


def _tokens(text: str | None) -> table.Tokens | None:
    """Return the sizes in ``--activations``. Raises `ConfigError`."""
    if text is None:
        return None
    sizes = [int(part) if part.isdigit() else 0 for part in text.lower().split("x")]
    if len(sizes) != 4 or min(sizes) < 1:
        raise ConfigError(f"--activations: {text}, expected LAYERSxBATCHxLENGTHxWIDTH, as 32x1x1024x4096.")
    return table.Tokens(*sizes)


_SWITCHES = ("--here", "--formulas", "--recommend", "--measure")


_DESCRIBED = ("nodes", "gpu", "gpu_memory", "host_memory", "disk", "interconnect", "intra_node")
_EXCLUDED = {
    "here": (*_DESCRIBED, "formulas"),
    "formulas": ("recommend", "png", "measure", "autotune", "strategies"),
    "measure": ("recommend", "png", "autotune"),
    "autotune": ("recommend", "png", "json"),
}
"""Mode -> flags that have no effect in it."""
_NEEDED = {
    "parameters": "formulas", "precision": "formulas", "largest_layer": "formulas", "activations": "formulas",
    "global_batch": "autotune",
}  # fmt: skip


def _check(asked: argparse.Namespace, parser: argparse.ArgumentParser, model: list[str]) -> None:
    """Raise `ConfigError` for flags that have no effect, are in the wrong place, or name files that cannot be written."""
    given = vars(asked)
    problems = [
        f"--{mode} and --{flag}: the second has no effect with the first. Leave one of them out."
        for mode, flags in _EXCLUDED.items()
        for flag in flags
        if given[mode] and given[flag]
    ]
    problems += [
        f"--{flag}: it has an effect only with --{mode}, which is not given."
        for flag, mode in _NEEDED.items()
        if given[flag] and not given[mode]
    ]
    if asked.formulas and model:
        problems.append(f"--formulas and {model[0]}: formulas ask for --parameters alone. Leave one of them out.")
    own = {option for action in parser._actions for option in action.option_strings}
    problems += [
        f"{word.split('=')[0]}: it is zerobook plan's own. Put it in front of {model[0]}."
        for word in model
        if word.split("=")[0] in own
    ]
    for flag in ("json", "png"):
        if given[flag] and given[flag] != "-" and not Path(given[flag]).absolute().parent.is_dir():
            problems.append(f"--{flag}: {given[flag]}: there is no folder {Path(given[flag]).absolute().parent}.")
    if asked.png and not asked.png.endswith(".png"):
        problems.append(f"--png: {asked.png} is no .png file.")
    if problems:
        raise ConfigError(problems)


def _stands_alone(argv: list[str], place: int) -> bool:
    """Return whether a token is the model or the recipe, and not the value of the flag before it."""
    before = argv[place - 1] if place else ""
    return not before.startswith("--") or "=" in before or before in _SWITCHES


def here(processes: str | None) -> Cluster:
    """Return this machine as a cluster of ``processes`` processes, the value of ``--gpus``; None means one for each GPU or
    physical core."""
    import shutil

    import psutil

    from zerobook.launch.resolve import Hardware
    from zerobook.utils.devices import Device

    found, host = Hardware.detect(), psutil.virtual_memory()
    if processes is not None and not (processes.isdecimal() and int(processes)):
        raise ConfigError(f"--gpus: {processes!r} is no number of processes; give 1 or more.")
    if found.unused:
        raise ConfigError(found.unused)
    disk = shutil.disk_usage(Path.cwd()).free
    if not found.gpus:
        cores = int(processes or psutil.cpu_count(logical=False) or 1)
        device = Device("CPU process", host.available // cores, 5e10, 5e10, 1e10, 1e10)
        return Cluster(gpus=cores, device=device, link=1e10, host_memory=host.available, disk=disk, cpu=True)
    import torch

    if int(processes or 0) > found.gpus:
        raise ConfigError(
            f"--gpus: {processes}, and there are {found.gpus} here. Leave --here out to plan for another machine."
        )
    gpus = int(processes or found.gpus)
    (free, total), busiest = min((torch.cuda.mem_get_info(index), index) for index in range(gpus))  # ranks hold the same
    if free < 0.9 * total:
        taken = f"{size(total - free)} of GPU {busiest}'s {size(total)} are taken by others"
        print(f"note: {taken}; planned with what is free.", file=sys.stderr)
    name = found.gpu_name or "GPU"
    listed = find_device(name)
    device = listed or nearest(total).speed_of(name, total)
    if listed is None:
        print(
            f"note: the speed of {name!r} is not known here; times are planned with that of {device.like}. With --gpu NAME or "
            "--gpu_memory in place of --here, and --intra_node, say what it is.",
            file=sys.stderr,
        )
    device = replace(device, name=name, memory=free, bf16=found.bf16, fused=found.flash_attention)
    return Cluster(gpus=gpus, device=device, link=device.link, host_memory=host.available, disk=disk)


def _read(first: str, flags: list[str], *, data: bool) -> tuple[Path, list[str], Recipe[Any], ConfigSources]:
    """Return the recipe's file, its flags, the recipe with the config from these flags, and the source of each value.

    Code is run only where the command line names it: a recipe's YAML may be somebody else's.

    Raises:
        ConfigError: the YAML names code of which a plan needs to know the size.
    """
    from zerobook.config import parse
    from zerobook.optimizer import names_code_in_yaml
    from zerobook.plan.job import NoClass, read_config
    from zerobook.training.recipe_file import recipe_class

    file = Path(first)
    if file.suffix != ".py":
        try:
            both = read_config(first).is_encoder_decoder
        except NoClass as error:
            both = error.facts.get("is_encoder_decoder", False)
        kind = "seq2seq_chatbot" if both else "causal_lm"
        file, flags = shipped(f"recipes/{kind}.py"), ["--model_name_or_path", first, *flags]
    made = recipe_class(str(file))
    config, sources, _ = parse(made.config_class, flags, data=data)
    if names_code_in_yaml(config, sources):
        raise ConfigError(
            f"optimizer: {sources['optimizer']} names {config.optimizer}, and a plan would have to run it. Add --optimizer "
            f"{shlex.quote(config.optimizer)} if you trust it."
        )
    if sources.from_yaml("trust_remote_code"):
        config = config.model_copy(update={"trust_remote_code": False})
    return file, flags, made(config), sources


def _files(chosen: str | None) -> list[Path]:
    files = sorted(shipped("accelerate_configs").glob("*.yaml"))
    names = {file.stem for file in files}
    wanted = names if chosen is None else set(chosen.split(","))
    if wanted - names:
        raise ConfigError(
            f"--strategies: {', '.join(sorted(wanted - names))}: no such file. There are: {', '.join(sorted(names))}."
        )
    return [file for file in files if file.stem in wanted]


def _rows(recipe: Recipe[Any], sources: ConfigSources, where: Cluster, chosen: str | None) -> tuple[Traced, list[Row]]:
    from zerobook.plan.rows import planned
    from zerobook.utils.bars import tqdm

    bar = tqdm(_files(chosen), desc="planning", unit=" files", leave=False)
    return planned(recipe, sources, where, bar)


def _plan(
    recipe: Recipe[Any], sources: ConfigSources, where: Cluster, chosen: str | None
) -> tuple[Subject, list[Row], Traced | None]:
    """Return what was planned, its rows, and its traces; None in place of traces for a plan by formula."""
    from zerobook.plan.job import NoClass

    try:
        traced, rows = _rows(recipe, sources, where, chosen)
        return traced.subject, rows, traced
    except NoClass as error:
        from zerobook.plan.fallback import fall_back

        return *fall_back(recipe, sources, error, _files(chosen), where), None


def _advice(
    file: Path, recipe: Recipe[Any], sources: ConfigSources, where: Cluster, chosen: str | None, rows: list[Row],
    traced: Traced | None,
) -> Advice | None:  # fmt: skip
    """Return the recommendation; None for a plan by formula, on which no rule can be tried."""
    from zerobook.config import changed
    from zerobook.plan.recommend import recommend
    from zerobook.training.recipe_file import recipe_class

    if traced is None:
        return None

    def replan(changes: dict[str, Any], other: str | None) -> tuple[Traced, list[Row]]:
        kind = type(recipe) if other is None else recipe_class(str(file.with_name(f"{other}.py")))
        config, origin = changed(recipe.config, sources, kind.config_class, changes)
        return _rows(kind(config), origin, where, chosen)

    return recommend(traced, rows, where, replan)


def _launch_line(
    file: Path, flags: list[str], recipe: Recipe[Any], sources: ConfigSources, advice: Advice, where: Cluster
) -> str:
    """Return the command that trains as recommended. Data that no flag names is a variable of the shell."""
    from zerobook.training.recipe_file import recipe_class

    assert advice.row is not None
    words = ["accelerate", "launch", "--config_file", f"accelerate_configs/{advice.row.file}.yaml"]
    words += ["--num_processes", str(1 if advice.row.file == "single" else where.ranks)]
    if where.nodes > 1:
        words += ["--num_machines", str(where.nodes), "--machine_rank", "$RANK_OF_THIS_MACHINE"]
        words += ["--main_process_ip", "$FIRST_MACHINE"]
    if advice.recipe is not None:  # its flags have other names
        file = file.with_name(f"{advice.recipe}.py")
        known = recipe_class(str(file)).config_class.model_fields
        given = {key: getattr(recipe.config, key) for key in type(recipe.config).model_fields if sources.given(key)}
        flags = [word for key, value in given.items() if key in known for word in _flag(key, value)]
    words += [f"recipes/{file.name}" if file.parent.name == "recipes" else str(file), *flags]
    words += [word for key, value in advice.flags.items() for word in _flag(key, value)]
    if not recipe.config.names_data():
        words += ["--train_file", "$TRAIN_FILE"]
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def _flag(key: str, value: Any) -> list[str]:
    return [f"--{key}", *map(str, value if isinstance(value, list) else [value])]


def _measure(first: str, flags: list[str], where: Cluster, asked: argparse.Namespace) -> int:
    """Print planned and measured figures side by side. Return 0 where no run failed, otherwise 1."""
    from rich.table import Table

    from zerobook.plan.job import job
    from zerobook.plan.measure import measure
    from zerobook.utils.bars import tqdm

    if not asked.here:
        raise ConfigError(
            "--measure: it runs on this machine. Give --here, and --gpus for fewer processes than there could be."
        )
    recipe_file, flags, recipe, sources = _read(first, flags, data=True)
    planned, found = job(recipe), []
    for file in tqdm(_files(asked.strategies), desc="measuring", unit=" files", leave=False):
        found.append(measure(file, planned, recipe_file, flags, where, sources))
    if asked.json:
        table.write_json(asked.json, [asdict(made) for made in found])
    alright = not any(made.died and not made.died.startswith("cannot run") for made in found)
    if asked.json == "-":
        return 0 if alright else 1
    names = list(dict.fromkeys(name for made in found for name in made.figures))
    compared = Table(title=f"planned / measured on {where.name}: the rank that is furthest off", title_justify="left", box=None)
    for column in ("strategy file", "ranks", *names):
        compared.add_column(column, justify="left" if column == "strategy file" else "right", no_wrap=column == "strategy file")
    for made in found:
        cells = [_beside(made.figures[name]) if name in made.figures else "-" for name in names]
        compared.add_row(made.file, str(made.ranks), *cells)
    out = console(table.WIDTH)
    out.print(compared)
    for made in found:
        if made.died:
            out.print(f"{made.file}: {made.died}")
    return 0 if alright else 1


def _autotune(first: str, flags: list[str], where: Cluster, asked: argparse.Namespace) -> int:
    """Print the candidates that were measured. Return 0 where at least one run succeeded, otherwise 1."""
    from zerobook.plan.autotune import autotune, write
    from zerobook.plan.job import job
    from zerobook.utils.bars import tqdm

    if not asked.here:
        raise ConfigError(
            "--autotune: it runs on this machine. Give --here, and --gpus for fewer processes than there could be."
        )
    if not (asked.global_batch or "").isdigit() or int(asked.global_batch) < 1:
        raise ConfigError(
            f"--global_batch: {asked.global_batch!r} is no number of samples. Give what a step is to have, such as 64."
        )
    recipe_file, flags, recipe, sources = _read(first, flags, data=True)
    with tqdm(desc="measuring", unit=" runs", leave=False) as bar:

        def progress(words: str) -> None:
            bar.set_postfix_str(words)
            bar.update()

        files = _files(asked.strategies)
        tuned = autotune(job(recipe), recipe_file, flags, files, where, sources, int(asked.global_batch), progress)
    say(f"{'samples/s':>10}  {'planned':>10}   at a global batch of {asked.global_batch} on {where.name}")
    for candidate in tuned.tried:
        samples = candidate.planned.tokens_per_second / candidate.planned.tokens_per_step * int(asked.global_batch)
        end = f" ({candidate.died})" if candidate.died else ""
        say(f"{candidate.rate:>10.4g}  {samples:>10.4g}   {candidate.words}{end}")
    if tuned.best is None:
        return 1
    if tuned.knee is not None and len(tuned.curve) > 1:
        shown = ", ".join(f"{micro}: {rate:.4g}" for micro, rate in tuned.curve)
        rising = tuned.knee == tuned.curve[-1][0]
        say(f"samples/s by micro-batch: {shown}; {'still rising' if rising else f'from {tuned.knee} on it hardly rises'}")
    strategy, override = write(tuned, recipe_file, where, Path(asked.autotune))
    say(f"wrote {strategy} and {override}")
    say(
        f"the learning rate stays at {recipe.config.learning_rate:g}: the global batch is what was asked for, however "
        "it is cut. Another batch wants another rate, which grows with its square root under Adam; very large models want a "
        "lower one."
    )
    return 0


def _beside(figure: Figure) -> str:
    if figure.planned == figure.measured:
        return f"{size(figure.measured)} =" if figure.measured else "-"
    return f"{size(figure.planned)} / {size(figure.measured)} ({figure.error:+.2%})"
