"""Flags, and types of flags, that several commands take."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from zerobook.utils.nearest import nearest

if TYPE_CHECKING:
    from zerobook.plan.hardware import Cluster


class Parser(argparse.ArgumentParser):
    """argparse's parser, with short errors that name the nearest flag or word. A docstring can be its description."""

    def __init__(self, prog: str, *, description: str | None = None, **options: Any):
        # In a docstring, code is between double backticks. Under python -OO there are no docstrings.
        super().__init__(prog, description=(description or "").replace("``", ""), **options)

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with 2."""
        # argparse names the wrong words only in its message. Read them from there.
        choices = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choices is not None:
            wrong_words = [choices[1]]
            valid_words = re.findall(r"[\w-]+", choices[2])
        else:
            wrong_words = _unrecognized_flags(message)
            valid_words = [flag for action in self._actions for flag in action.option_strings]
        hint = "".join(nearest(word, valid_words) for word in wrong_words)
        print(f"{self.prog}: {message}.{hint} {self.prog} --help lists what can be written.", file=sys.stderr)
        sys.exit(2)


def _unrecognized_flags(message: str) -> list[str]:
    """Return the flags, without values, that argparse's message calls unrecognized."""
    heading, _, words = message.partition(": ")
    if heading != "unrecognized arguments":
        return []
    return [word.partition("=")[0] for word in words.split() if word.startswith("-")]


def positive(text: str) -> int:
    """Return the text of a flag as an integer of at least 1. argparse reports a text that is no number."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def add_hardware_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe a cluster. `parse_cluster` reads them."""
    from zerobook.utils.devices import DEVICES

    flags = {
        "--gpus": "GPUs of a node (default 1)",
        "--nodes": "nodes (default 1)",
        "--gpu": f"GPU model: {', '.join(DEVICES)} (default a100-80gb)",
        "--gpu_memory": "memory of one GPU, such as 80GB",
        "--host_memory": "host RAM of a node, such as 1TB",
        "--disk": "room for checkpoints and offload, such as 4TB",
        "--interconnect": "network between nodes, such as 400Gbps",
        "--intra_node": "between GPUs of a node: nvlink, pcie, or a rate such as 64GB/s",
    }
    for flag, meaning in flags.items():
        parser.add_argument(flag, help=meaning)


def parse_cluster(flags: argparse.Namespace) -> Cluster:
    """Return the cluster that the flags of `add_hardware_flags` describe. Raises `ConfigError` if a value is not valid."""
    from zerobook.plan.hardware import cluster

    return cluster(
        gpus=flags.gpus or "1",
        nodes=flags.nodes or "1",
        gpu=flags.gpu,
        gpu_memory=flags.gpu_memory,
        host_memory=flags.host_memory,
        disk=flags.disk,
        interconnect=flags.interconnect,
        intra_node=flags.intra_node,
    )
