"""The ``zerobook`` command. Nothing heavy is imported before a subcommand is chosen."""

import argparse
import os
import sys
from importlib import import_module

HELP = """Training recipes on Hugging Face Accelerate: plan a run, train, recover from failures, and see what happened.

before a run:
  init        a folder to work in: recipes, strategy files and a config to start from
  import      a recipe's config, a strategy file and a launch line from another trainer's config
  data        look at a data file, or prepare a recipe's data ahead
  plan        memory, traffic and time of a run under every strategy file
  recipe      a config and a launch line for a model on your GPUs, chosen by the planner
  doctor      how a strategy file is resolved on this machine, and every conflict in it

a run:
  launch      accelerate launch with names and short errors; also for a run that goes on when machines are lost
  runlog      what happened to a run, why, and what it cost; the report
  checkpoint  what a run has saved, whether it is complete, and what is kept

its result:
  chat        talk to a trained model in the terminal
  eval        loss of a run's model on a file, and accuracy on multiple-choice task files
  export      a checkpoint as a plain transformers folder

Recipes are started by name in any folder, or with accelerate in a clone or in a folder that zerobook init has made:
  zerobook launch --strategy zero2 --num_processes 2 lora_finetune --help
  accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/lora_finetune.py --help
"""

# command -> (module, function). The function takes the arguments after the command, and returns the exit code.
COMMANDS = {
    "init": ("zerobook.cli.init", "init"),
    "import": ("zerobook.cli.import_config", "import_foreign"),
    "doctor": ("zerobook.cli.doctor", "doctor"),
    "launch": ("zerobook.cli.launch", "launch"),
    "plan": ("zerobook.cli.plan", "plan"),
    "recipe": ("zerobook.cli.recipe", "recipe"),
    "data": ("zerobook.cli.data", "data"),
    "checkpoint": ("zerobook.cli.checkpoint", "checkpoint"),
    "runlog": ("zerobook.cli.runlog", "runlog"),
    "export": ("zerobook.cli.export", "export"),
    "chat": ("zerobook.cli.chat", "chat"),
    "eval": ("zerobook.cli.eval", "evaluate"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code. An error of the user is printed without a traceback. Ctrl-C gives 130."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        from zerobook.utils.nearest import nearest

        hint = nearest(arguments[0], COMMANDS, "zerobook ")
        print(f"zerobook {arguments[0]}: no such command.{hint} zerobook --help lists all.", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser("zerobook", description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    # The command parses the other arguments itself.
    flags = parser.parse_args(arguments[:1])
    if flags.version:
        from zerobook import __version__

        print(__version__)
        return 0
    if flags.command is None:
        parser.print_help()
        return 0
    from zerobook.errors import ZerobookError
    from zerobook.utils.library_messages import hush
    from zerobook.utils.terminal import say, say_traceback

    hush()
    sys.excepthook = say_traceback
    try:
        module, function = COMMANDS[flags.command]
        code = getattr(import_module(module), function)(arguments[1:])
        # If the reader of the output has closed it, a flush raises the error here, and not when the interpreter ends.
        sys.stdout.flush()
        return code
    except ZerobookError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output, such as head, has closed it. Without a stdout that works, the interpreter would fail to
        # flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A file or folder cannot be read or written.
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
