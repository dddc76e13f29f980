"""Check of the hosts before a launch: ``zerobook doctor --all_ranks``, which is started on every host.

One process on each host meets the others at the address and port of the launch. So a wrong address, a port in use, a missing
host and a firewall each have a message, while a launch would wait for minutes.
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

# Seconds to wait for the other hosts. A person or a script may start them one after another.
PATIENCE_S = 30.0
# Seconds of one attempt to connect.
CONNECT_S = 3.0


@dataclass(frozen=True)
class Position:
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
    """The results of the check. On the first host, they are about all hosts; on another host, about that host only."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    links: str = ""


@with_config(extra="allow")
class FactsOfHost(TypedDict):
    """The facts that a host sends to the others: `zerobook.launch.preflight.facts`."""

    host: str


def place(launch_flags: list[str]) -> Position:
    """Return the position of this host according to flags of ``accelerate launch`` and the Accelerate config that they name.

    Raises:
        ConfigError: they describe a launch on one host, or have no address.
    """
    args = flag_checks.merge_flags_and_file(parse_flags([*launch_flags, SCRIPT]))
    hosts = int(args.num_machines or 1)
    if hosts < 2 or not args.main_process_ip:
        raise ConfigError(
            f"--all_ranks: num_machines is {hosts}, and main_process_ip is {args.main_process_ip}. Give 2 or more, and the "
            "first machine's address."
        )
    return Position(int(args.machine_rank or 0), hosts, args.main_process_ip, int(args.main_process_port or 29500))


def check_hosts(here: Position, facts: dict[str, Any], output_dir: Path | None, patience: float = PATIENCE_S) -> HostReport:
    """Meet the other hosts, compare them, and measure the links between them. Collective: all hosts call it.

    Args:
        here: the position of this host.
        facts: `zerobook.launch.preflight.facts` of this host.
        output_dir: folder that all hosts must see; None without a folder to check.
        patience: seconds to wait for the other hosts.

    Raises:
        ConfigError: this host cannot take part.
    """
    store = _connect_store(here, patience)
    report = HostReport()
    # The count is 2 or more if another host has claimed the same number before.
    if store.add(f"claimed/{here.number}", 1) > 1:
        raise ConfigError(
            f"--machine_rank {here.number} was given to another host and to {facts['host']}. Every host needs a rank of its "
            f"own, from 0 to {here.hosts - 1}."
        )
    hosts = _exchange(store, here, "facts", facts, FactsOfHost, patience)
    # The exchange of facts ends on all hosts at the same moment. So the clocks that they read now can be compared.
    clocks = _exchange(store, here, "clock", time.time(), float, patience)
    loopback_problem = describe_loopback(os.environ)
    if loopback_problem:
        report.problems.append(f"{loopback_problem}.")
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
    # The store ends with the process of the first host. So the first host waits until the others have read everything.
    store.set(f"left/{here.number}", "")
    if here.number == 0:
        # The report is complete, so it is no error if a host ends without setting its key.
        with suppress(RuntimeError):
            store.wait([f"left/{number}" for number in range(here.hosts)], timedelta(seconds=patience))
    return report


def _connect_store(here: Position, patience: float) -> Store:
    """Return the store through which the hosts exchange values. The first host opens it, and the others connect to it."""
    _check_address(here, patience)
    # The list stays empty if the connection fails, or is not made in time.
    stores: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=patience)
            is_first = here.number == 0
            stores.append(dist.TCPStore(here.address, here.port, is_master=is_first, wait_for_workers=False, timeout=limit))

    # If another program listens at the address, it may never answer. So connect in a thread, which can then be abandoned.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience)
    if not stores:
        raise ConfigError(
            f"{here.where} does not answer as this command does. Is the port in use by another program on the first host?"
        )
    return stores[0]


def _check_address(here: Position, patience: float) -> None:
    """Check that the first host can listen at the launch's address, or that another host can connect to it.

    Raises:
        ConfigError: this host cannot listen, or cannot connect within ``patience`` seconds.
    """
    try:
        entries = socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--main_process_ip {here.address}: this host cannot resolve it ({error.strerror}).") from error
    # An entry is (family, type, protocol, name, (address, port)).
    family = entries[0][0]
    address = str(entries[0][4][0])
    if here.number != 0:
        _wait_for_first_host(here, address, patience)
        return
    try:
        socket.create_server((address, here.port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"{here.where}: {socket.gethostname()} cannot listen there: {error.strerror}. Give the address of the host with "
            "--machine_rank 0, and with --main_process_port a port that is free on it."
        ) from error


def _wait_for_first_host(here: Position, address: str, patience: float) -> None:
    """Connect to the first host. Try repeatedly, since the first host may be started after this one."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, here.port), CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{socket.gethostname()} cannot reach {here.where} ({address}), tried for {patience:.0f} s: "
                    f"{error.strerror or error}. Run the same command on the first host, and let firewalls pass its port."
                ) from error
        time.sleep(0.5)


def _exchange(store: Store, here: Position, key: str, value: object, value_type: Any, patience: float) -> list[Any]:
    """Give this host's ``value`` to all hosts, and return the values of all hosts, in the order of their numbers. Collective.

    Raises:
        ConfigError: some hosts did not come.
    """
    store.set(f"{key}/{here.number}", json.dumps(value))
    keys = [f"{key}/{number}" for number in range(here.hosts)]
    try:
        store.wait(keys, timedelta(seconds=patience))
        return [messages.read(store.get(key_of_host), value_type) for key_of_host in keys]
    except RuntimeError as error:
        # If the store has ended, it cannot say which hosts are missing.
        reason = "The first host has ended, and has printed why."
        with suppress(RuntimeError):
            absent = ", ".join(str(number) for number, key_of_host in enumerate(keys) if not store.check([key_of_host]))
            reason = f"No host came with --machine_rank {absent} within {patience:.0f} s."
        raise ConfigError(f"{reason} Run the same command on all hosts, with the same --num_machines.") from error


def _check_shared_folder(store: Store, here: Position, output_dir: Path | None, first_host: str, name: str) -> str | None:
    """Return a problem if this host does not see a file that the first host writes into ``output_dir``. Collective.

    Args:
        first_host: the name of the first host.
        name: the name of this host.
    """
    if output_dir is None:
        return None
    file_name = f".seen-by-all-{uuid4().hex}"
    problem = None
    if here.number == 0:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / file_name).touch()
        except OSError as error:
            problem = f"output_dir: {output_dir.absolute()} cannot be written to on {name}: {error.strerror}."
            # An empty name tells the other hosts that there is no file to look for.
            file_name = ""
    # All hosts look for the file of the first host.
    file_name = _exchange(store, here, "token", file_name, str, PATIENCE_S)[0]
    if file_name and not files.is_seen(output_dir / file_name):
        problem = (
            f"output_dir: what {first_host} writes into {output_dir.absolute()} is not visible on {name}. Checkpoints are read "
            "by all hosts: give an --output_dir on a disk that they share, as an absolute path."
        )
    # The file stays until all hosts have looked for it.
    _exchange(store, here, "looked", "", str, PATIENCE_S)
    if here.number == 0 and file_name:
        (output_dir / file_name).unlink(missing_ok=True)
    return problem


def _measure_links(store: Store, here: Position, report: HostReport) -> None:
    """Connect all hosts to each other, and measure the rate from each host to the next. Collective.

    The report of the first host gets the results.
    """
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
    measurement = torch.tensor(links.measure_ring(torch.device("cpu")), dtype=torch.float64)
    measurements = [torch.empty_like(measurement) for _ in range(here.hosts)]
    dist.all_gather(measurements, measurement)
    if here.number == 0:
        names = [host["host"] for host in report.hosts]
        # With one process on each host, all links are between hosts.
        between_hosts, _ = links.build_links(names, [values.tolist() for values in measurements])
        report.links = links.summarize(between_hosts, [])
        report.warnings += links.warn_of_slow_links(between_hosts)
    # The barrier keeps a host from destroying the group while another one still uses it.
    dist.barrier()
    dist.destroy_process_group()
