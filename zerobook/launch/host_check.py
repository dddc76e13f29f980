"""Check of the hosts of a launch before it: ``zerobook doctor --all_ranks`` on every host.

One process a host meets the others at the launch's own address and port. So a wrong address, a port in use, a missing host or a
firewall have a message of their own, where a launch would wait for minutes.
"""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from pydantic import with_config
from torch.distributed import Store
from typing_extensions import TypedDict

from zerobook.errors import ConfigError
from zerobook.launch import flag_checks, links
from zerobook.launch.accelerate_cli import SCRIPT, describe_loopback, parse_flags
from zerobook.launch.preflight import differences
from zerobook.utils import files, messages

PATIENCE_S = 30.0
"""Seconds to wait for the other hosts, which are started by hand or by a script."""
CONNECT_S = 3.0


@dataclass(frozen=True)
class Place:
    """Position of this host in the launch: its number, the number of hosts, and where they meet."""

    number: int
    hosts: int
    address: str
    port: int

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass
class HostReport:
    """Findings about the hosts. On all but the first host, they are those of this host alone."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    links: str = ""


@with_config(extra="allow")
class FactsOfHost(TypedDict):
    """The facts that a host sends to the others: `zerobook.launch.preflight.facts`."""

    host: str


def place(launch_flags: list[str]) -> Place:
    """Return the position that flags of ``accelerate launch`` and their file give to this host.

    Raises:
        ConfigError: they name one host, or no address.
    """
    args = flag_checks.validated(parse_flags([*launch_flags, SCRIPT]))
    hosts = int(args.num_machines or 1)
    if hosts < 2 or not args.main_process_ip:
        raise ConfigError(
            f"--all_ranks: num_machines is {hosts}, and main_process_ip is {args.main_process_ip}. Give 2 or more, and the "
            "first machine's address."
        )
    return Place(int(args.machine_rank or 0), hosts, args.main_process_ip, int(args.main_process_port or 29500))


def check_hosts(here: Place, facts: dict[str, Any], output_dir: Path | None, patience: float = PATIENCE_S) -> HostReport:
    """Meet the other hosts, compare them, and measure their links. To be called on all hosts.

    Args:
        facts: `zerobook.launch.preflight.facts` of this host.
        output_dir: folder that all hosts must see; None if none is named.
        patience: seconds to wait for the other hosts.

    Raises:
        ConfigError: this host cannot take part.
    """
    store = _open(here, patience)
    report = HostReport()
    # The store counts, so the second host with this number sees it.
    if store.add(f"claimed/{here.number}", 1) > 1:
        raise ConfigError(
            f"--machine_rank {here.number} was given to another host and to {facts['host']}. Every host needs a rank of its "
            f"own, from 0 to {here.hosts - 1}."
        )
    hosts = _exchange(store, here, "facts", facts, FactsOfHost, patience)
    # The exchange of facts ends on all hosts at the same moment, so their clocks can be compared.
    clocks = _exchange(store, here, "clock", time.time(), float, patience)
    name_problem = describe_loopback(os.environ)
    if name_problem:
        report.problems.append(f"{name_problem}.")
    folder_problem = _check_shared_folder(store, here, output_dir, hosts[0]["host"], facts["host"])
    if folder_problem:
        report.problems.append(folder_problem)
    # One host reports, so that each difference is printed once.
    if here.number == 0:
        for host, clock in zip(hosts, clocks, strict=True):
            host["clock"] = clock
        report.hosts = hosts
        problems, report.warnings = differences(hosts)
        report.problems += problems
    _measure_links(store, here, report)
    # The store ends with the first host's process, which waits until the others have read from it.
    store.set(f"left/{here.number}", "")
    if here.number == 0:
        # The report is complete, so a host that ended without this sign is no error.
        with suppress(RuntimeError):
            store.wait([f"left/{number}" for number in range(here.hosts)], timedelta(seconds=patience))
    return report


def _open(here: Place, patience: float) -> Store:
    """Open the store on the first host, or connect to it."""
    _reach(here, patience)
    stores: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=patience)
            is_first = here.number == 0
            stores.append(dist.TCPStore(here.address, here.port, is_master=is_first, wait_for_workers=False, timeout=limit))

    # Another program that listens there may never answer, so the connection is made in a thread that can be left.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience)
    if not stores:
        raise ConfigError(
            f"{here.where} does not answer as this command does. Is the port in use by another program on the first host?"
        )
    return stores[0]


def _reach(here: Place, patience: float) -> None:
    """Check that the first host can listen at the launch's address, and that the others reach it.

    Raises:
        ConfigError: it cannot, or they do not within ``patience`` seconds.
    """
    name = socket.gethostname()
    try:
        entries = socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--main_process_ip {here.address}: this host cannot resolve it ({error.strerror}).") from error
    family = entries[0][0]
    address = str(entries[0][4][0])
    if here.number == 0:
        try:
            socket.create_server((address, here.port), family=family).close()
        except OSError as error:
            raise ConfigError(
                f"{here.where}: {name} cannot listen there: {error.strerror}. Give the address of the host with --machine_rank "
                "0, and with --main_process_port a port that is free on it."
            ) from error
        return
    # The first host may be started after this one.
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, here.port), CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{name} cannot reach {here.where} ({address}), tried for {patience:.0f} s: {error.strerror or error}. "
                    "Run the same command on the first host, and let firewalls pass its port."
                ) from error
        time.sleep(0.5)


def _exchange(store: Store, here: Place, key: str, value: object, kind: Any, patience: float) -> list[Any]:
    """Give this host's ``value`` to all hosts, and return those of all, by number. Collective.

    Raises:
        ConfigError: some hosts did not come.
    """
    store.set(f"{key}/{here.number}", json.dumps(value))
    keys = [f"{key}/{number}" for number in range(here.hosts)]
    try:
        store.wait(keys, timedelta(seconds=patience))
        return [messages.read(store.get(key_of_host), kind) for key_of_host in keys]
    except RuntimeError as error:
        # The store may be gone, and then it does not say who came.
        reason = "The first host has ended, and has printed why."
        with suppress(RuntimeError):
            absent = ", ".join(str(number) for number, key_of_host in enumerate(keys) if not store.check([key_of_host]))
            reason = f"No host came with --machine_rank {absent} within {patience:.0f} s."
        raise ConfigError(f"{reason} Run the same command on all hosts, with the same --num_machines.") from error


def _check_shared_folder(store: Store, here: Place, output_dir: Path | None, first_host: str, name: str) -> str | None:
    """Return a problem if this host does not see what the first one writes into ``output_dir``. Collective."""
    if output_dir is None:
        return None
    token = f".seen-by-all-{uuid4().hex}"
    problem = None
    if here.number == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / token).touch()
        except OSError as error:
            problem = f"output_dir: {output_dir.absolute()} cannot be written to on {name}: {error.strerror}."
            # Without a file there is nothing to look for: the others get an empty name.
            token = ""
    token = _exchange(store, here, "token", token, str, PATIENCE_S)[0]
    if token and not files.is_seen(output_dir / token):
        problem = (
            f"output_dir: what {first_host} writes into {output_dir.absolute()} is not visible on {name}. Checkpoints are read "
            "by all hosts: give an --output_dir on a disk that they share, as an absolute path."
        )
    # The file stays until all hosts have looked for it.
    _exchange(store, here, "looked", "", str, PATIENCE_S)
    if here.number == 0 and token:
        (output_dir / token).unlink(missing_ok=True)
    return problem


def _measure_links(store: Store, here: Place, report: HostReport) -> None:
    """Connect all hosts to each other, and measure the rate from each to the next. Reported on the first one. Collective."""
    import torch

    links_store = dist.PrefixStore("links", store)
    try:
        dist.init_process_group(
            "gloo", store=links_store, rank=here.number, world_size=here.hosts, timeout=timedelta(seconds=60)
        )
    except RuntimeError as error:
        report.problems.append(
            f"{socket.gethostname()} and the other hosts do not reach each other: {str(error).splitlines()[0]}. Let firewalls "
            "pass all ports between them, and set GLOO_SOCKET_IFNAME to the interface that the others reach."
        )
        return
    measured = torch.tensor(links.measure_ring(torch.device("cpu")), dtype=torch.float64)
    of_hosts = [torch.empty_like(measured) for _ in range(here.hosts)]
    dist.all_gather(of_hosts, measured)
    if here.number == 0:
        names = [host["host"] for host in report.hosts]
        between, _ = links.links(names, [values.tolist() for values in of_hosts])
        report.links = links.summary(between, [])
        report.warnings += links.warn_of_slow_links(between)
    # No host ends the group while another one still uses it.
    dist.barrier()
    dist.destroy_process_group()
