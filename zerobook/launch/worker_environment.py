"""The environment that ``accelerate launch`` would give to its workers, computed by accelerate's own code."""

from __future__ import annotations

import contextlib
import io

from zerobook.errors import ConfigError
from zerobook.launch import accelerate_file
from zerobook.launch.accelerate_cli import left_unsaid


def worker_environment(launch_flags: list[str]) -> tuple[dict[str, str], str | None]:
    """Return the environment that accelerate gives to rank 0, and ``--mixed_precision`` as typed, or None.

    Raises:
        ConfigError: accelerate refuses the flags or the file.
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
        if "training_script" in reason:  # the last flag took the script as its value
            reason = f"{launch_flags[-1]} has no value"
        raise ConfigError(f"accelerate launch does not take {' '.join(launch_flags)}: {reason}.") from None
    if args.training_script != flags[-1]:
        raise ConfigError(
            f"{args.training_script}: neither a flag of accelerate launch nor a recipe. Give flags, and then a recipe, such as "
            "recipes/causal_lm.py."
        )
    accelerate_file.check(args.config_file, args.num_processes)
    try:
        args, defaults, from_file = accelerate_launch._validate_launch_command(args)
        args.main_process_port = 0  # any free one: nothing is started
        if args.use_deepspeed and not args.cpu:
            fields = list(defaults.deepspeed_config) if defaults else []
            args.deepspeed_fields_from_accelerate_config = ",".join(fields + ["mixed_precision"] * from_file)
            _, environ = prepare.prepare_deepspeed_cmd_env(args)
            launched = True
        elif (args.use_fsdp or args.multi_gpu) and not args.cpu:
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
        environ |= {"LOCAL_RANK": "0", "RANK": "0", "LOCAL_WORLD_SIZE": str(local), "WORLD_SIZE": str(args.num_processes),
                    "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    return unsaid | environ, typed
