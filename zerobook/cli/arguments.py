"""Flags, and types of flags, that several commands take."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from zerobook.plan.hardware import Cluster


class Parser(argparse.ArgumentParser):
    """argparse's parser, with short errors that name the nearest flag or word, and a docstring as its description."""

    def __init__(self, prog: str, *, description: str | None = None, **options: Any):
        super().__init__(prog, description=description and description.replace("``", ""), **options)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with 2."""
        known = [flag for action in self._actions for flag in action.option_strings]
        wrong: list[str] = []
        if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message):
            wrong, known = [found[1]], re.findall(r"[\w-]+", found[2])
        elif message.startswith("unrecognized arguments: "):
            wrong = [word.partition("=")[0] for word in message.partition(": ")[2].split() if word.startswith("-")]
        near = [match for word in wrong for match in difflib.get_close_matches(word, known, n=1)]
        meant = f" Did you mean {', '.join(near)}?" if near else ""
        print(f"{self.prog}: {message}.{meant} {self.prog} --help shows what there is.", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    """Return an integer of at least 1; argparse prints the error of another text."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a cluster. `described` reads them."""
    from zerobook.utils.devices import DEVICES

    parser.add_argument("--gpus", help="GPUs of a node (default 1)")
    parser.add_argument("--nodes", help="nodes (default 1)")
    parser.add_argument("--gpu", help=f"GPU model: {', '.join(DEVICES)} (default a100-80gb)")
    parser.add_argument("--gpu_memory", help="memory of one GPU, such as 80GB")
    parser.add_argument("--host_memory", help="host RAM of a node, such as 1TB")
    parser.add_argument("--disk", help="room for checkpoints and offload, such as 4TB")
    parser.add_argument("--interconnect", help="network between nodes, such as 400Gbps")
    parser.add_argument("--intra_node", help="between GPUs of a node: nvlink, pcie, or a rate such as 64GB/s")


def described(asked: argparse.Namespace) -> Cluster:
    """Return the cluster that the flags of `add_hardware` describe. Raises `ConfigError` for values that make no sense."""
    from zerobook.plan.hardware import cluster

    return cluster(
        gpus=asked.gpus or "1", nodes=asked.nodes or "1", gpu=asked.gpu, gpu_memory=asked.gpu_memory,
        host_memory=asked.host_memory, disk=asked.disk, interconnect=asked.interconnect, intra_node=asked.intra_node,
    )  # fmt: skip
