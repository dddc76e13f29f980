"""Check of the hosts of a launch before it: ``zerobook doctor --all_ranks`` on every host.

One process a host meets the others at the launch's own address and port. So a wrong address, a port in use, two hosts of one
number or a firewall have a message of their own, where a launch would wait for minutes.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

import psutil
from pydantic import with_config
from typing_extensions import TypedDict

from zerobook.errors import ConfigError
from zerobook.launch import links
from zerobook.launch.preflight import differences
from zerobook.utils import messages

if TYPE_CHECKING:
    from torch.distributed import Store

PATIENCE_S = 30.0
"""Seconds to wait for the other hosts, which are started by hand or by a script."""
NEIGHBOURS = 32
"""Hosts that each host tries to reach: the next ones in the order of their numbers. All of them, if there are not more."""
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
    """The facts that a host sends to the others: `zerobook.launch.preflight.facts`, and where it listens."""

    host: str
    address: str
    port: int
    machines: int


class FindingsOfHost(TypedDict):
    """The findings that a host sends to the first one, after it has tried to reach the next ones."""

    problems: list[str]
    clock: float


def place(launch_flags: list[str]) -> Place:
    """Return the position that flags of ``accelerate launch`` and their file give to this host.

    Raises:
        ConfigError: they name one host, no address, or a rank that there is not.
    """
    from accelerate.commands import launch as accelerate_launch

    parser = accelerate_launch.launch_command_parser()
    args, *_ = accelerate_launch._validate_launch_command(parser.parse_args([*launch_flags, "script.py"]))
    hosts = int(args.num_machines or 1)
    number = int(args.machine_rank or 0)
    if hosts < 2:
        raise ConfigError(f"--all_ranks: the launch has {hosts} machine. Give --num_machines.")
    if not args.main_process_ip:
        raise ConfigError("--main_process_ip: not given. It is the first machine's address, as the others reach it.")
    if not 0 <= number < hosts:
        raise ConfigError(f"--machine_rank: {number}, but {hosts} machines have ranks 0 to {hosts - 1}.")
    return Place(number, hosts, args.main_process_ip, int(args.main_process_port or 29500))


def check(here: Place, facts: dict[str, Any], output_dir: Path | None, patience: float = PATIENCE_S) -> HostReport:
    """Meet the other hosts, compare them, and measure their links. To be called on all hosts.

    Args:
        facts: `zerobook.launch.preflight.facts` of this host.
        output_dir: folder that all hosts must see; None where none is named.
        patience: seconds to wait for the other hosts.

    Raises:
        ConfigError: this host cannot take part.
    """
    store = _open(here, patience)
    report = HostReport()
    name = str(facts["host"])
    with _listener() as (address, port):
        _claim_number(store, here, facts | {"address": address, "port": port, "machines": here.hosts})
        report.hosts = _wait_for_all(store, here, patience)
        # All hosts get here at the same moment.
        clock = time.time()
        folder_problem = _check_shared_folder(store, here, output_dir, name)
        report.problems += _try_next_hosts(store, here, name)
        if folder_problem:
            report.problems.append(folder_problem)
        findings = _collect(store, here, "found", {"problems": report.problems, "clock": clock}, patience)
        # This host listens until all have tried to reach it.
        _broadcast(store, here, "tried", True, patience)
    if here.number == 0:
        for host, findings_of_host in zip(report.hosts, findings, strict=True):
            host["clock"] = findings_of_host["clock"]
        problems, report.warnings = differences(report.hosts)
        report.problems = [problem for findings_of_host in findings for problem in findings_of_host["problems"]] + problems
    # Links can be measured only where all hosts reach each other. The first host knows, and tells the others.
    is_connected = not any(findings_of_host["problems"] for findings_of_host in findings)
    if _broadcast(store, here, "measure", is_connected, patience):
        _measure_links(store, here, report)
    _leave(store, here, patience)
    return report


def _open(here: Place, patience: float) -> Store:
    """Open the store on the first host, or connect to it."""
    import torch.distributed as dist

    try:
        entries = socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--main_process_ip {here.address}: this host cannot resolve it ({error.strerror}).") from error
    resolved = {str(entry[4][0]) for entry in entries}
    listed = ", ".join(sorted(resolved))
    if here.number == 0:
        interfaces = psutil.net_if_addrs().values()
        # An IPv6 address may end in the name of its interface, as in fe80::1%eth0.
        host_addresses = {entry.address.partition("%")[0] for interface in interfaces for entry in interface}
        if not resolved & host_addresses:
            raise ConfigError(
                f"--main_process_ip {here.address} is {listed}, which is no address of this host. The host with "
                f"--machine_rank 0 has to be the one with that address. This host has "
                f"{', '.join(sorted(_outside(host_addresses)))}."
            )
        limit = timedelta(seconds=patience)
        try:
            return dist.TCPStore(here.address, here.port, is_master=True, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise ConfigError(f"--main_process_port {here.port}: {_port_user(here.port, error)}") from error
    if all(ipaddress.ip_address(address).is_loopback for address in resolved):
        raise ConfigError(
            f"--main_process_ip {here.address} resolves to {listed} on {socket.gethostname()}: that is this host itself. "
            "Give the first host's address, or correct the name in /etc/hosts."
        )
    _wait_until_reached(here, listed, patience)
    return _connect(here, listed, patience)


def _connect(here: Place, resolved: str, patience: float) -> Store:
    """Connect to the first host's store. Another program that listens there may never answer."""
    import torch.distributed as dist

    stores: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            limit = timedelta(seconds=patience)
            stores.append(dist.TCPStore(here.address, here.port, is_master=False, wait_for_workers=False, timeout=limit))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(patience)
    if not stores:
        raise ConfigError(
            f"{here.where} ({resolved}) can be reached from {socket.gethostname()}, but does not answer as this command does. "
            "Is the port in use by another program on the first host?"
        )
    return stores[0]


def _wait_until_reached(here: Place, resolved: str, patience: float) -> None:
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((here.address, here.port), CONNECT_S).close()
            return
        except OSError as error:
            waited = time.monotonic() - start
            if waited > patience:
                raise ConfigError(
                    f"{socket.gethostname()} cannot reach {here.where} ({resolved}), tried for {waited:.0f} s: {_cause(error)}."
                ) from error
        time.sleep(0.5)


def _cause(error: OSError) -> str:
    """Return the likely cause of a failed connection."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there. Is the same command running on the first host, with this port"
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "no answer: a firewall, or a wrong address"
    return str(error.strerror or error)


def _port_user(port: int, error: RuntimeError) -> str:
    """Return who uses a port that cannot be opened."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
            name = psutil.Process(connection.pid).name()
            return f"in use on this host by {name}, process {connection.pid}. Give another one on all hosts."
    return f"it cannot be opened on this host: {str(error).splitlines()[0]}"


def _outside(addresses: set[str]) -> set[str]:
    """Return the addresses that other hosts may reach."""
    reachable = set()
    for address in addresses:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            # It is the address of the hardware.
            continue
        if not (parsed.is_loopback or parsed.is_link_local):
            reachable.add(address)
    return reachable


@contextmanager
def _listener() -> Iterator[tuple[str, int]]:
    """Return a context in which this host listens where its ranks would: (address, port)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        entries = psutil.net_if_addrs().get(name, [])
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if not addresses:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={name}: this host has no such interface with an IPv4 address.")
        address = addresses[0]
    else:
        try:
            address = str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
        except OSError:
            # gloo does the same.
            address = "127.0.0.1"
    with socket.create_server((address, 0), backlog=2 * NEIGHBOURS) as server:
        yield address, server.getsockname()[1]


def _claim_number(store: Store, here: Place, facts: Mapping[str, Any]) -> None:
    """Take this host's number, and give its facts to the others."""
    if store.add(f"claimed/{here.number}", 1) > 1:
        other = _read_facts(store, [here.number])[0]["host"]
        store.set(f"twice/{here.number}", str(facts["host"]))
        raise ConfigError(
            f"--machine_rank {here.number} was given to {other} and to {facts['host']}. Every host needs a rank of its own, "
            f"from 0 to {here.hosts - 1}."
        )
    store.set(f"host/{here.number}", json.dumps(facts))


def _read_facts(store: Store, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return what the hosts of these numbers say about themselves."""
    texts = store.multi_get([f"host/{number}" for number in numbers])
    return [messages.read(text, FactsOfHost) for text in texts]


def _wait_for_all(store: Store, here: Place, patience: float) -> list[dict[str, Any]]:
    """Wait until all hosts are there. Return their facts on the first host, and an empty list on the others.

    Raises:
        ConfigError: some hosts did not come.
    """
    if here.number:
        # The first host says when all are there: an empty text, or why the check ends.
        store.wait(["all"], timedelta(seconds=2 * patience))
        refusal = store.get("all").decode(errors="replace")
        if refusal:
            _leave(store, here, patience)
            raise ConfigError(refusal)
        return []
    numbers = range(here.hosts)
    deadline = time.monotonic() + patience
    while True:
        absent = [number for number in numbers if not store.check([f"host/{number}"])]
        if not absent:
            break
        repeated = [number for number in numbers if store.check([f"twice/{number}"])]
        if repeated or time.monotonic() > deadline:
            present = [number for number in numbers if number not in absent]
            names = ", ".join(facts["host"] for facts in _read_facts(store, present))
            reason = "".join(f"--machine_rank {number} was given to two hosts. " for number in repeated)
            reason += (
                f"No host came with --machine_rank {', '.join(map(str, absent))} within {patience:.0f} s; {names} came. Run "
                "the same command on all hosts."
            )
            _refuse(store, here, reason, absent)
        time.sleep(0.2)
    hosts = _read_facts(store, numbers)
    for host in hosts:
        if host["machines"] != here.hosts:
            sizes = f"{host['machines']} on {host['host']}, and {here.hosts} on {hosts[0]['host']}"
            _refuse(store, here, f"--num_machines: {sizes}. Give the same on all machines.")
    store.set("all", "")
    return hosts


def _refuse(store: Store, here: Place, reason: str, absent: Sequence[int] = ()) -> NoReturn:
    """End the check on all hosts that came, with an error."""
    store.set("all", reason)
    _leave(store, here, CONNECT_S, absent)
    raise ConfigError(reason)


def _try_next_hosts(store: Store, here: Place, name: str) -> list[str]:
    """Return a problem for each of the next hosts that does not answer where its ranks would listen."""
    count = min(here.hosts - 1, NEIGHBOURS)
    numbers = [(here.number + distance) % here.hosts for distance in range(1, count + 1)]
    neighbours = _read_facts(store, numbers)
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        problems = pool.map(lambda neighbour: _try_host(neighbour, name), neighbours)
        return [problem for problem in problems if problem]


def _try_host(other: Mapping[str, Any], name: str) -> str | None:
    """Return the problem if ``other`` does not answer this host, whose name is ``name``."""
    if ipaddress.ip_address(other["address"]).is_loopback:
        return (
            f"{other['host']}: its host name resolves to {other['address']}, which {name} cannot reach. Set GLOO_SOCKET_IFNAME "
            "there to the interface that others reach, as in GLOO_SOCKET_IFNAME=eth0, or correct the name in /etc/hosts."
        )
    try:
        socket.create_connection((other["address"], other["port"]), CONNECT_S).close()
    except OSError as error:
        where = f"{other['address']}:{other['port']}"
        return f"{name} cannot reach {other['host']} at {where}: {_cause(error)}. Ranks use any free port."
    return None


def _check_shared_folder(store: Store, here: Place, output_dir: Path | None, name: str) -> str | None:
    """Return a problem if this host does not see what the first one writes into ``output_dir``."""
    if output_dir is None:
        return None
    if here.number == 0:
        token = f".seen-by-all-{uuid4().hex}"
        problem = None
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / token).touch()
        except OSError as error:
            problem = f"output_dir: {output_dir.absolute()} cannot be written to on {name}: {error.strerror}."
        # Without a file there is nothing to look for: the others get an empty name.
        store.set("token", json.dumps([name, "" if problem else token]))
        store.wait([f"looked/{number}" for number in range(1, here.hosts)])
        (output_dir / token).unlink(missing_ok=True)
        return problem
    store.wait(["token"])
    first_host, token = messages.read(store.get("token"), tuple[str, str])
    is_visible = not token or _wait_until(lambda: (output_dir / token).exists(), 3.0)
    store.set(f"looked/{here.number}", "")
    if is_visible:
        return None
    return (
        f"output_dir: what {first_host} writes into {output_dir.absolute()} is not visible on {name}. Checkpoints are read by "
        "all hosts: give an --output_dir on a disk that they share, as an absolute path."
    )


def _wait_until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``is_done`` comes true in time; network file systems show new files late."""
    deadline = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _collect(store: Store, here: Place, key: str, value: FindingsOfHost, patience: float) -> list[FindingsOfHost]:
    """Return every host's ``value`` on the first host; an empty list on the others."""
    store.set(f"{key}/{here.number}", json.dumps(value))
    if here.number:
        return []
    keys = [f"{key}/{number}" for number in range(here.hosts)]
    store.wait(keys, timedelta(seconds=patience))
    return [messages.read(store.get(key), FindingsOfHost) for key in keys]


def _broadcast(store: Store, here: Place, key: str, value: bool, patience: float) -> bool:
    """Return the first host's ``value`` on all hosts."""
    if here.number == 0:
        store.set(key, str(int(value)))
    store.wait([key], timedelta(seconds=patience))
    return store.get(key) == b"1"


def _measure_links(store: Store, here: Place, report: HostReport) -> None:
    """Measure the rate from each host to the next, and report it on the first one. Collective."""
    import torch
    import torch.distributed as dist

    links_store = dist.PrefixStore("links", store)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=links_store, rank=here.number, world_size=here.hosts, timeout=limit)
    rate = torch.tensor([links.ring_rate(torch.device("cpu"))], dtype=torch.float64)
    rates = [torch.empty_like(rate) for _ in range(here.hosts)]
    dist.all_gather(rates, rate)
    if here.number == 0:
        names = [host["host"] for host in report.hosts]
        between, _ = links.links(names, [float(rate_of_host) for rate_of_host in rates])
        report.links = links.summary(between, [])
        report.warnings += links.slow_links(between)
    dist.barrier()
    dist.destroy_process_group()


def _leave(store: Store, here: Place, patience: float, absent: Sequence[int] = ()) -> None:
    """End together: the store ends with the first host's process."""
    store.set(f"left/{here.number}", "")
    if here.number == 0:
        keys = [f"left/{number}" for number in range(here.hosts) if number not in absent]
        _wait_until(lambda: store.check(keys), patience)
