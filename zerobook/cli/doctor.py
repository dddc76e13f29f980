"""``zerobook doctor``: how a strategy file is resolved on this machine, before anything is started.

Takes the arguments of ``accelerate launch``: its flags, and optionally a recipe with its own flags.
Accelerate's own code reads the file; `zerobook.launch.resolve` does the rest, as in a real run.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobook.checkpoint.resume import find_earlier_result, find_earlier_run
from zerobook.cli.arguments import Parser
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources, read
from zerobook.data import embedded
from zerobook.errors import ConfigError
from zerobook.launch import account, host_check, ops, preflight
from zerobook.launch.accelerate_cli import describe_unreachable_host, split_at_recipe
from zerobook.launch.by_name import replace_names
from zerobook.launch.host_check import PATIENCE_S
from zerobook.launch.resolve import Hardware, merge_problems, resolve
from zerobook.launch.worker_environment import inspect
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.training.recipe_file import recipe_class
from zerobook.utils import hub
from zerobook.utils.host_memory import too_many_copies
from zerobook.utils.terminal import console, make_table
from zerobook.utils.units import counted

if TYPE_CHECKING:
    from rich.console import Console

USAGE = f"""zerobook doctor [--strategy NAME] [accelerate launch's flags] [recipes/NAME.py [its flags]]

A recipe is Python code: it is run to read its flags, and nothing is trained.

  --json       print one JSON object: the strategy, notes and problems.
  --all_ranks  also meet the other machines of the launch, compare them with this one, and measure the links between them.
               Run it on every machine, with the flags of the launch. It waits {PATIENCE_S:.0f} s for the others.

examples:
  zerobook doctor
  zerobook doctor --strategy zero3 --num_processes 2
  zerobook doctor --config_file accelerate_configs/zero2.yaml recipes/causal_lm.py --config my.yaml
  zerobook doctor --all_ranks --config_file accelerate_configs/zero3.yaml --num_machines 2 --num_processes 16 \
    --machine_rank 0 --main_process_ip 10.0.0.1 recipes/causal_lm.py --config my.yaml
"""


def doctor(argv: list[str]) -> int:
    """Print what the machine has, and how a launch with these flags is resolved. Return 1 if there are problems, else 0."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    parser = Parser("zerobook doctor", allow_abbrev=False, add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all_ranks", action="store_true")
    parser.add_argument("--strategy")
    flags, argv = parser.parse_known_args(argv)
    # The remaining arguments are those of the launch. Replace names of strategy files and recipes in them by paths, as
    # `zerobook launch` does.
    argv = replace_names(argv, flags.strategy)
    out = console()
    # With --json, only the object is printed to stdout.
    out.quiet = flags.json

    # Examine the machine and the launch.
    hardware = Hardware.detect()
    problems = _examine_machine(out, hardware)
    plan: LaunchPlan | None = None
    if argv:
        plan, launch_problems = _examine_launch(out, argv, hardware, all_ranks=flags.all_ranks)
        problems += launch_problems
    elif flags.all_ranks:
        problems.append("--all_ranks: give the flags of the launch as well.")
    elif hardware.unused:
        problems.append(hardware.unused)

    # Print the problems.
    if flags.json:
        findings: dict[str, Any] = {"strategy": None, "notes": [], "problems": problems}
        if plan is not None:
            findings |= {"strategy": plan.line, "notes": plan.notes}
        print(json.dumps(findings))
    for number, problem in enumerate(problems, 1):
        out.print(f"problem {number}:", style="bold red", end=" ")
        out.print(problem)
    if problems:
        out.print(counted(len(problems), "problem"), style="bold red")
    else:
        out.print("no problems found", style="bold green")
    return 1 if problems else 0


def _examine_launch(
    out: Console, argv: list[str], hardware: Hardware, *, all_ranks: bool
) -> tuple[LaunchPlan | None, list[str]]:
    """Print how a launch is resolved. With ``all_ranks``, compare the machines of the launch.

    Returns:
        (plan, problems). The plan is None if the launch has no strategy that could be resolved.
    """
    plan, problems, config, sources = inspect_launch(argv, hardware)
    if plan is not None:
        problems = problems + plan.problems
        _print_strategy(out, plan, config, sources)
        # List the effect of each key. A launch with problems does not start, so its keys have none.
        if not problems:
            launch_flags, _, _ = split_at_recipe(argv)
            # accelerate's parser requires a script. The effects of the keys do not depend on it, so any name will do.
            out.print(account.table(account.entries(plan, config, sources, flags=[*launch_flags, "script.py"])))
    # Without a recipe, the config is of the base class, and its output_dir is only the default.
    if type(config) is not RecipeConfig:
        earlier = find_earlier_run(config) or find_earlier_result(config)
        if earlier:
            problems.append(earlier)
    # Without a correct address and rank, the machines cannot connect.
    can_connect = not any(problem.startswith(("--main_process_ip", "--machine_rank")) for problem in problems)
    if all_ranks and can_connect:
        problems += _compare_hosts(out, argv, plan, config)
    return plan, problems


def inspect_launch(argv: list[str], hardware: Hardware) -> tuple[LaunchPlan | None, list[str], RecipeConfig, ConfigSources]:
    """Resolve a launch as its processes would, without starting them.

    Args:
        argv: arguments of ``accelerate launch``.

    Returns:
        (plan, problems, the recipe's config, the source of each of its values). The problems are those that are not in
        ``plan.problems``. The plan is None if the launch has no strategy; the problems are then all.
    """
    launch_flags, recipe, recipe_flags = split_at_recipe(argv)
    config: RecipeConfig = RecipeConfig()
    sources = ConfigSources(dict.fromkeys(RecipeConfig.model_fields, "default"))
    config_problems: list[str] = []
    if recipe:
        try:
            parsed = read(recipe_class(recipe).config_class, recipe_flags)
            config = parsed.config
            sources = parsed.sources
            config_problems = parsed.problems
        except ConfigError as error:
            # Resolve the launch nevertheless, so that its problems are reported together with these.
            config_problems = error.problems
    # Accelerate's own code turns the flags and the strategy file into the environment of the workers.
    workers = inspect(launch_flags)
    plan, config, sources = resolve(workers.environ, hardware, config, sources, workers.precision, starts=False)
    problems = merge_problems(config_problems, workers.problems)
    # Drop those problems of the plan whose key has a problem already. `merge_problems` returns ``problems`` first, and then the
    # remaining problems of the plan.
    plan.problems = merge_problems(problems, plan.problems)[len(problems) :]
    if not workers.has_strategy:
        return None, problems + plan.problems, config, sources
    loopback = describe_unreachable_host(plan, workers.environ)
    if loopback:
        plan.notes.append(loopback)
    # The warning computes the size of weights that are not quantised.
    if config.base_format is None and not problems:
        warning = _warn_of_copies(plan, config, ranks_of_host=int(workers.environ.get("LOCAL_WORLD_SIZE", 1)))
        if warning:
            plan.notes.append(warning)
    return plan, problems, config, sources


# Return a warning if several ranks load a copy of the model, and the copies do not fit into the host's memory; else None.
def _warn_of_copies(plan: LaunchPlan, config: RecipeConfig, ranks_of_host: int) -> str | None:
    name = config.model_name_or_path
    if not name:
        return None
    folder = embedded.converted(name) or hub.folder(name, config.model_revision)
    return too_many_copies(folder, config.dtype, plan.copies_at_load(ranks_of_host))


def _examine_machine(out: Console, hardware: Hardware) -> list[str]:
    """Print the hardware and the software of this machine, and return their problems."""
    import psutil

    from zerobook.utils.versions import versions

    if hardware.gpus:
        gpus = f"{hardware.gpus} x {hardware.gpu_name}, bf16 {hardware.bf16}"
    # The machine may have GPUs that this torch cannot use. `hardware.unused` is then the reason.
    elif hardware.unused:
        gpus = "none that torch sees"
    else:
        gpus = "none"
    flash_attention = "does not run here: there is no GPU"
    if hardware.flash_attention:
        flash_attention = "runs here"
    elif hardware.gpus:
        flash_attention = f"does not run here: {hardware.no_flash_attention}"
    memory = psutil.virtual_memory()
    ram = f"{memory.total / 2**30:.0f} GiB ({memory.available / 2**30:.0f} free)"
    compiled_ops = sorted({library.parent.name for library in ops.cache_root().glob("**/*.so")})

    table = make_table("this machine", (), show_header=False)
    table.add_row("GPUs", gpus)
    table.add_row("flash attention 2", flash_attention)
    table.add_row("CPU cores, RAM", f"{psutil.cpu_count()}, {ram}")
    table.add_row("free disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB")
    table.add_row("versions", ", ".join(f"{library} {version}" for library, version in versions().items()))
    table.add_row("compiled ops", ", ".join(compiled_ops) or "none yet; make setup compiles them")
    out.print(table)

    problems = []
    for lock in ops.list_locks():
        # The lock of a process that is compiling now is not a problem.
        if ops.is_stale(lock):
            problems.append(
                f"{lock}: a killed compilation left this lock, and runs that need the op would wait for it forever. Remove "
                f"it (make setup and launched runs do so): rm {lock}"
            )
    if shutil.which("c++") is None and shutil.which("g++") is None:
        problems.append("there is no C++ compiler; DeepSpeed's offload ops cannot be compiled. Install g++.")
    return problems


def _compare_hosts(out: Console, argv: list[str], plan: LaunchPlan | None, config: RecipeConfig) -> list[str]:
    """Connect to the other machines of the launch, print a table of all machines, and return the problems found."""
    launch_flags, recipe, _ = split_at_recipe(argv)
    try:
        here = host_check.place(launch_flags)
        facts = preflight.facts(config, plan.name if plan else "unknown", recipe)
        with out.status(f"waiting for {here.hosts} machines at {here.where}"):
            findings = host_check.check_hosts(here, facts, Path(config.output_dir) if recipe else None)
    except ConfigError as error:
        return error.problems
    if findings.hosts:
        table = make_table("machines", ("rank", "host", "GPUs", "driver", "memory, GiB", "clock"))
        for number, host in enumerate(findings.hosts):
            table.add_row(
                str(number),
                host["host"],
                host["gpus"],
                str(host["driver"] or "-"),
                f"{host['memory'] / 2**30:.0f}",
                time.strftime("%H:%M:%S", time.gmtime(host["clock"])),
            )
        out.print(table)
        out.print(findings.links)
    # Only the first machine gets the facts of all machines, and compares them.
    elif here.number:
        out.print(f"the findings about all machines are printed on the first one, {here.address}")
    for warning in findings.warnings:
        out.print("warning:", style="yellow", end=" ")
        out.print(warning)
    return findings.problems


# Print the resolved strategy, the batch arithmetic and the notes of a launch.
def _print_strategy(out: Console, plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources) -> None:
    from zerobook.data.batch_loader import BatchLayout

    table = make_table("the run", (), show_header=False)
    layout = BatchLayout.from_plan(config, plan)
    processes = f"{plan.world_size} on {plan.device}"
    if plan.backend:
        processes += f" over {plan.backend}"
    offload_names = {"none": "device memory"}
    rows = {
        "strategy": plan.name,
        "processes": processes,
        "ZeRO stage": "-" if plan.zero_stage is None else plan.zero_stage,
        "optimizer state in": offload_names.get(plan.offload_optimizer, plan.offload_optimizer),
        "parameters in": offload_names.get(plan.offload_param, plan.offload_param),
        "precision": f"{plan.precision} (from {plan.precision_source})",
        "DeepSpeed config": plan.config_file or "-",
        "batch": f"{layout.arithmetic} (accumulation from {sources['gradient_accumulation_steps']})",
    }
    for key, value in rows.items():
        table.add_row(key, str(value))
    out.print(table)
    for note in plan.notes:
        out.print(f"  note: {note}")
