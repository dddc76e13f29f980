"""``zerobook export``: write a checkpoint as a plain transformers folder, then reload and compare it.

zerobook export outputs/run --output exported
zerobook export outputs/run/checkpoints/step-000200 --output exported --dtype bfloat16
zerobook export outputs/run --checkpoint best --output adapter --keep_adapter
zerobook export outputs/run --output exported --push me/my-model --private
"""

import argparse
import sys
from pathlib import Path

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.cli.arguments import Parser
from zerobook.errors import CheckpointError, ConfigError
from zerobook.models.export import export_checkpoint
from zerobook.models.push import check_push, push
from zerobook.utils.terminal import say


def export(arguments: list[str]) -> int:
    """Run ``zerobook export ARGUMENTS``, and return the exit code."""
    parser = Parser("zerobook export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a run's output_dir, or one checkpoint's folder")
    parser.add_argument("--output", required=True, help="the folder to write; it must not exist, or be empty")
    add_checkpoint_flag(parser)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16"],
        help="of a model's weights; an adapter is in float32",
    )
    parser.add_argument("--keep_adapter", action="store_true", help="write the adapter alone, do not merge it")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code that comes with the checkpoint's model; the run's own setting does not count",
    )
    parser.add_argument("--push", metavar="NAME", help="upload the folder to the hub as this repository, such as me/my-model")
    parser.add_argument("--private", action="store_true", help="with --push: a new repository is private")
    flags = parser.parse_args(arguments)
    # Check the name before the export, which takes minutes.
    if flags.push:
        check_push(flags.push)
    elif flags.private:
        raise ConfigError("--private: it is for --push NAME, which is not given.")
    result = export_checkpoint(
        find_checkpoint(flags.path, flags.checkpoint),
        Path(flags.output).expanduser(),
        dtype=getattr(torch, flags.dtype),
        merge=not flags.keep_adapter,
        trust_remote_code=flags.trust_remote_code,
    )
    for note in result["notes"]:
        say(f"  note: {note}")
    say(f"wrote {result['folder']}")
    say(f"reloaded and compared: logits differ by at most {result['difference']:.1e}, relative to the largest one")
    if flags.push:
        say(f"uploaded to {push(result['folder'], flags.push, private=flags.private)}")
    return 0


def add_checkpoint_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses a checkpoint of a run. `find_checkpoint` reads it."""
    parser.add_argument(
        "--checkpoint", choices=["auto", "best"], help="of a run: the newest, or the best (default: as its final_model says)"
    )


def find_checkpoint(name: str, which: str | None) -> Path:
    """Return a checkpoint by its own folder, or the newest or best checkpoint of a run.

    Args:
        name: a checkpoint's folder, or a run's output_dir.
        which: of a run: ``auto`` (the newest) or ``best``; None: the checkpoint from which the run makes its final model.

    Raises:
        CheckpointError: the checkpoint is damaged, or the run has no complete one.
    """
    path = Path(name).expanduser().absolute()
    if (path / store.MANIFEST).exists():
        reason = store.find_damage(path, thorough=True)
        if reason is not None:
            raise CheckpointError(reason)
        return path
    if which is None:
        which = "auto"
        complete = store.list_complete(store.folder_of(path))
        # A resumed run may have changed the setting, so the config of the newest checkpoint counts.
        if complete and store.read_json(complete[-1] / "config.json")["config"].get("final_model") == "best":
            which = "best"
    resolution = resolve_resume(path, which, thorough=True)
    for reason in resolution.skipped.values():
        say(f"  skipped: {reason}", file=sys.stderr)
    if resolution.checkpoint is None:
        raise CheckpointError(f"{path}: there is no complete checkpoint. Give a run's output_dir, or a checkpoint's folder.")
    return resolution.checkpoint
