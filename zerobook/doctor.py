"""``zerobook doctor``: where a strategy file leads on this machine, before anything is started.

Takes what would follow ``accelerate launch``: its flags, and optionally a recipe with its own flags.
Accelerate's own code reads the file; `zerobook.resolve` does the rest, as in a real run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from zerobook import ops
from zerobook.config import RecipeConfig, Resolved, parse
from zerobook.errors import ConfigError
from zerobook.launcher import left_unsaid
from zerobook.resolve import Hardware, LaunchPlan, resolve

USAGE = """zerobook doctor [accelerate launch's flags] [recipes/NAME.py [its flags]]

examples:
  zerobook doctor
  zerobook doctor --config_file accelerate_configs/zero3.yaml --num_processes 2
  zerobook doctor --config_file accelerate_configs/zero2.yaml recipes/causal_lm.py --config my.yaml
"""


def doctor(argv: list[str]) -> int:
    """Print the machine's state, and the strategy's where one is named. Returns 0, or 1 where problems were found."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return 0
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    hardware = Hardware.detect()
    problems = _machine(console, hardware)
    if argv:
        plan, config_problems, config, sources = inspect_launch(argv, hardware)
        problems += config_problems + (plan.problems if plan else [])
        if plan is not None:
            _strategy(console, plan, config, sources)
    for number, problem in enumerate(problems, 1):
        console.print(f"[bold red]problem {number}:[/] ", end="")
        console.print(problem, markup=False)
    console.print("[bold green]no problems found[/]" if not problems else f"[bold red]{len(problems)} problem(s)[/]")
    return 1 if problems else 0


def inspect_launch(argv: list[str], hardware: Hardware) -> tuple[LaunchPlan | None, list[str], RecipeConfig, Resolved]:
    """What ``accelerate launch ARGV`` would hand to its workers, resolved.

    Returns:
        (plan, problems found before it, the recipe's config, the source of each of its values).
    """
    recipe, recipe_flags, launch_flags = None, [], list(argv)
    for index, token in enumerate(argv):
        if token.endswith(".py"):
            launch_flags, recipe, recipe_flags = list(argv[:index]), token, list(argv[index + 1 :])
            break
    problems: list[str] = []
    config: RecipeConfig = RecipeConfig()
    sources = Resolved(dict.fromkeys(RecipeConfig.model_fields, "default"))
    if recipe:
        try:
            config, sources, _ = parse(_config_class(recipe), recipe_flags)
        except ConfigError as error:
            problems += error.problems
    try:
        environ, precision = worker_environment(launch_flags)
    except ConfigError as error:
        return None, problems + error.problems, config, sources
    return resolve(environ, hardware, config, sources, precision), problems, config, sources


def worker_environment(launch_flags: list[str]) -> tuple[dict[str, str], str | None]:
    """The environment that accelerate gives to rank 0, and ``--mixed_precision`` where it was typed.

    Raises:
        ConfigError: where accelerate refuses the flags or the file.
    """
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as prepare

    parser = accelerate_launch.launch_command_parser()
    flags, said = [*launch_flags, "script.py"], io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = parser.parse_args(flags)
    except SystemExit:
        reason = said.getvalue().strip().rpartition("error: ")[2]
        if "training_script" in reason:  # the last flag took the script for its value
            reason = f"{launch_flags[-1]} has no value"
        raise ConfigError(f"accelerate launch does not take {' '.join(launch_flags)}: {reason}.") from None
    _check_accelerate_config(args.config_file)
    try:
        args, defaults, from_file = accelerate_launch._validate_launch_command(args)
        args.main_process_port = 0  # any free one: nothing is started
        if args.use_deepspeed:
            fields = list(defaults.deepspeed_config) if defaults else []
            args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * from_file)
            _, environ = prepare.prepare_deepspeed_cmd_env(args)
            launched = True
        elif args.use_fsdp or args.multi_gpu:
            environ = prepare.prepare_multi_gpu_env(args)
            launched = True
        else:
            _, environ = prepare.prepare_simple_launcher_cmd_env(args)
            launched = False
        typed, unsaid = left_unsaid(flags)
    except (ValueError, KeyError, AttributeError, TypeError, ConnectionError) as error:
        raise ConfigError(f"accelerate refuses this launch: {error}") from error
    if launched:
        local = args.num_processes // int(args.num_machines or 1)
        environ |= {"LOCAL_RANK": "0", "RANK": "0", "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(args.num_processes)}
    return unsaid | environ, typed


def _check_accelerate_config(file: str | None) -> None:
    """Raises ConfigError where accelerate would show a traceback: no such file, not valid YAML, not a mapping."""
    if file is None:
        return
    try:
        text = Path(file).read_text(encoding="utf-8")
        loaded = json.loads(text) if file.endswith(".json") else yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(
            f"{file}: the Accelerate config cannot be read ({error.strerror}). Shipped ones are in accelerate_configs/."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}{where}: not a valid Accelerate config: {getattr(error, 'problem', error)}.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{file}: expected an Accelerate config, a mapping of keys to values, found a {type(loaded).__name__}. "
            "Shipped ones are in accelerate_configs/."
        )


def _config_class(recipe: str) -> type[RecipeConfig]:
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(f"{recipe}: there is no such recipe.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    own = [c for _, c in inspect.getmembers(module, inspect.isclass)
           if issubclass(c, RecipeConfig) and c.__module__ == path.stem]  # fmt: skip
    if not own:
        raise ConfigError(f"{recipe}: it defines no config class, so it is not a recipe of this project.")
    return own[0]


def _machine(console: Any, hardware: Hardware) -> list[str]:
    import psutil
    from rich.table import Table

    from zerobook.versions import versions

    table = Table(title="this machine", title_justify="left", show_header=False)
    gpu = f"{hardware.gpus} x {hardware.gpu_name}, bf16 {hardware.bf16}" if hardware.gpus else "none"
    table.add_row("GPUs", gpu)
    table.add_row("flash attention", "installed" if hardware.flash_attention else "not usable here")
    memory = psutil.virtual_memory()
    table.add_row(
        "CPU cores, RAM", f"{psutil.cpu_count()}, {memory.total / 2**30:.0f} GiB ({memory.available / 2**30:.0f} free)"
    )
    table.add_row("free disk here", f"{shutil.disk_usage(Path.cwd()).free / 2**30:.0f} GiB")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in versions().items()))
    compiled = sorted({p.parent.name for p in ops.cache_root().glob("**/*.so")}) if ops.cache_root().is_dir() else []
    table.add_row("compiled ops", ", ".join(compiled) or "none yet; make setup compiles them")
    console.print(table)
    problems = []
    for lock in ops.locks():
        if ops.is_stale(lock):
            problems.append(
                f"{lock}: a compile that was killed left this lock, and runs that need the op would wait for it for ever. "
                f"Remove it (make setup and launched runs do): rm {lock}"
            )
    if shutil.which("c++") is None and shutil.which("g++") is None:
        problems.append("there is no C++ compiler; DeepSpeed's offload ops cannot be compiled. Install g++.")
    return problems


def _strategy(console: Any, plan: LaunchPlan, config: RecipeConfig, sources: Resolved) -> None:
    from rich.table import Table

    from zerobook.data.feed import Layout

    table = Table(title="the run", title_justify="left", show_header=False)
    layout = Layout(
        world_size=plan.world_size,
        rank=0,
        micro=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
    )
    rows = {
        "strategy": plan.name,
        "processes": f"{plan.world_size} on {plan.device}" + (f" over {plan.backend}" if plan.backend else ""),
        "ZeRO stage": "-" if plan.zero_stage is None else plan.zero_stage,
        "optimizer state in": "device memory" if plan.offload_optimizer == "none" else plan.offload_optimizer,
        "parameters in": "device memory" if plan.offload_param == "none" else plan.offload_param,
        "precision": f"{plan.precision} (from {plan.precision_source})",
        "DeepSpeed config": plan.config_file or "-",
        "batch": f"{layout.arithmetic} (accumulation from {sources['gradient_accumulation_steps']})",
    }
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)
    for note in plan.notes:
        console.print(f"  note: {note}", markup=False)
