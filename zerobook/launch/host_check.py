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
    hosts, number = int(args.num_machines or 1), int(args.machine_rank or 0)
    if hosts < 2:
        raise ConfigError(f"--all_ranks: the launch has {hosts} machine. Give --num_machines.")
    if not args.main_process_ip:
        raise ConfigError("--main_process_ip: not given. It is the first machine's address, as the others reach it.")
    if not 0 <= number < hosts:
        raise ConfigError(f"--machine_rank: {number}, but {hosts} machines have ranks 0 to {hosts - 1}.")
    return Place(number, hosts, args.main_process_ip, int(args.main_process_port or 29500))


def check(here: Place, own: dict[str, Any], output_dir: Path | None, patience: float = PATIENCE_S) -> HostReport:
    """Meet the other hosts, compare them, and measure their links. To be called on all hosts.

    Args:
        own: `zerobook.launch.preflight.facts` of this host.
        output_dir: folder that all hosts must see; None where none is named.
        patience: seconds to wait for the other hosts.

    Raises:
        ConfigError: this host cannot take part.
    """
    store = _open(here, patience)
    report = HostReport()
    with _listener() as (address, port):
        _claim(store, here, own | {"address": address, "port": port, "machines": here.hosts})
        report.hosts = _wait_for_all(store, here, patience)
        clock = time.time()  # all hosts get here at the same moment
        blind = _shared(store, here, output_dir, str(own["host"]))
        report.problems += _unreached(store, here, str(own["host"])) + ([blind] if blind else [])
        found = _collect(store, here, "found", {"problems": report.problems, "clock": clock}, patience)
        _told(store, here, "tried", True, patience)  # this host listens until all have tried to reach it
    if here.number == 0:
        for host, theirs in zip(report.hosts, found, strict=True):
            host["clock"] = theirs["clock"]
        problems, report.warnings = differences(report.hosts)
        report.problems = [problem for theirs in found for problem in theirs["problems"]] + problems
    if _told(store, here, "measure", not any(theirs["problems"] for theirs in found), patience):
        _measure(store, here, report)
    _leave(store, here, patience)
    return report


def _open(here: Place, patience: float) -> Store:
    """Open the store on the first host, or connect to it."""
    import torch.distributed as dist

    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(here.address, here.port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError(f"--main_process_ip {here.address}: this host cannot resolve it ({error.strerror}).") from error
    resolved = ", ".join(sorted(found))
    if here.number == 0:
        own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
        if not found & own:
            raise ConfigError(
                f"--main_process_ip {here.address} is {resolved}, which is no address of this host. The host with "
                f"--machine_rank 0 has to be the one with that address. This host has {', '.join(sorted(_outside(own)))}."
            )
        try:
            return dist.TCPStore(here.address, here.port, is_master=True, wait_for_workers=False,
                                 timeout=timedelta(seconds=patience))  # fmt: skip
        except RuntimeError as error:
            raise ConfigError(f"--main_process_port {here.port}: {_port_user(here.port, error)}") from error
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        raise ConfigError(
            f"--main_process_ip {here.address} resolves to {resolved} on {socket.gethostname()}: that is this host itself. "
            "Give the first host's address, or correct the name in /etc/hosts."
        )
    _until_reached(here, resolved, patience)
    return _connect(here, resolved, patience)


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


def _until_reached(here: Place, resolved: str, patience: float) -> None:
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((here.address, here.port), CONNECT_S).close()
            return
        except OSError as error:
            waited = time.monotonic() - begun
            if waited > patience:
                raise ConfigError(
                    f"{socket.gethostname()} cannot reach {here.where} ({resolved}), tried for {waited:.0f} s: {_why(error)}."
                ) from error
        time.sleep(0.5)


def _why(error: OSError) -> str:
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
    found = set()
    for address in addresses:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            continue  # of the hardware
        if not (parsed.is_loopback or parsed.is_link_local):
            found.add(address)
    return found


@contextmanager
def _listener() -> Iterator[tuple[str, int]]:
    """Return a context in which this host listens where its ranks would: (address, port)."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        own = [entry.address for entry in psutil.net_if_addrs().get(name, []) if entry.family == socket.AF_INET]
        if not own:
            raise ConfigError(f"GLOO_SOCKET_IFNAME={name}: this host has no such interface with an IPv4 address.")
        address = own[0]
    else:
        try:
            address = str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
        except OSError:
            address = "127.0.0.1"  # as gloo does
    with socket.create_server((address, 0), backlog=2 * NEIGHBOURS) as server:
        yield address, server.getsockname()[1]


def _claim(store: Store, here: Place, own: Mapping[str, Any]) -> None:
    """Take this host's number, and give its facts to the others."""
    if store.add(f"claimed/{here.number}", 1) > 1:
        (other,) = (facts["host"] for facts in _facts(store, [here.number]))
        store.set(f"twice/{here.number}", str(own["host"]))
        raise ConfigError(
            f"--machine_rank {here.number} was given to {other} and to {own['host']}. Every host needs a rank of its own, from "
            f"0 to {here.hosts - 1}."
        )
    store.set(f"host/{here.number}", json.dumps(own))


def _facts(store: Store, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Return what the hosts of these numbers say about themselves."""
    texts = store.multi_get([f"host/{number}" for number in numbers])
    return [messages.read(text, FactsOfHost) for text in texts]


def _wait_for_all(store: Store, here: Place, patience: float) -> list[dict[str, Any]]:
    """Wait until all hosts are there. Return their facts on the first host, and an empty list on the others.

    Raises:
        ConfigError: some hosts did not come.
    """
    if here.number:
        store.wait(["all"], timedelta(seconds=2 * patience))
        if said := store.get("all").decode(errors="replace"):
            _leave(store, here, patience)
            raise ConfigError(said)
        return []
    absent, twice, until = list(range(here.hosts)), list[int](), time.monotonic() + patience
    while absent := [number for number in absent if not store.check([f"host/{number}"])]:
        twice = [number for number in range(here.hosts) if store.check([f"twice/{number}"])]
        if twice or time.monotonic() > until:
            came = [facts["host"] for facts in _facts(store, [number for number in range(here.hosts) if number not in absent])]
            why = "".join(f"--machine_rank {number} was given to two hosts. " for number in twice) + (
                f"No host came with --machine_rank {', '.join(map(str, absent))} within {patience:.0f} s; {', '.join(came)} "
                "came. Run the same command on all hosts."
            )
            _refuse(store, here, why, absent)
        time.sleep(0.2)
    hosts = _facts(store, range(here.hosts))
    for host in hosts:
        if host["machines"] != here.hosts:
            numbers = f"{host['machines']} on {host['host']}, and {here.hosts} on {hosts[0]['host']}"
            _refuse(store, here, f"--num_machines: {numbers}. Give the same on all machines.")
    store.set("all", "")
    return hosts


def _refuse(store: Store, here: Place, why: str, absent: Sequence[int] = ()) -> NoReturn:
    """End the check on all hosts that came, with an error."""
    store.set("all", why)
    _leave(store, here, CONNECT_S, absent)
    raise ConfigError(why)


def _unreached(store: Store, here: Place, own: str) -> list[str]:
    """Return a problem for each of the next hosts that does not answer where its ranks would listen."""
    numbers = [(here.number + distance) % here.hosts for distance in range(1, min(here.hosts - 1, NEIGHBOURS) + 1)]
    others = _facts(store, numbers)
    with ThreadPoolExecutor(NEIGHBOURS) as pool:
        return [problem for problem in pool.map(lambda other: _reach(other, own), others) if problem]


def _reach(other: Mapping[str, Any], own: str) -> str | None:
    """Return the problem if ``other`` does not answer."""
    if ipaddress.ip_address(other["address"]).is_loopback:
        return (
            f"{other['host']}: its host name resolves to {other['address']}, which {own} cannot reach. Set GLOO_SOCKET_IFNAME "
            "there to the interface that others reach, as in GLOO_SOCKET_IFNAME=eth0, or correct the name in /etc/hosts."
        )
    try:
        socket.create_connection((other["address"], other["port"]), CONNECT_S).close()
    except OSError as error:
        return (
            f"{own} cannot reach {other['host']} at {other['address']}:{other['port']}: {_why(error)}. Ranks use any free port."
        )
    return None


def _shared(store: Store, here: Place, output_dir: Path | None, own: str) -> str | None:
    """Return a problem if this host does not see what the first one writes into ``output_dir``."""
    if output_dir is None:
        return None
    if here.number == 0:
        token, problem = f".seen-by-all-{uuid4().hex}", None
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            (output_dir / token).touch()
        except OSError as error:
            problem = f"output_dir: {output_dir.absolute()} cannot be written to on {own}: {error.strerror}."
        store.set("token", json.dumps([own, "" if problem else token]))
        store.wait([f"looked/{number}" for number in range(1, here.hosts)])
        (output_dir / token).unlink(missing_ok=True)
        return problem
    store.wait(["token"])
    first, token = messages.read(store.get("token"), tuple[str, str])
    seen = not token or _within(3.0, lambda: (output_dir / token).exists())
    store.set(f"looked/{here.number}", "")
    if seen:
        return None
    return (
        f"output_dir: what {first} writes into {output_dir.absolute()} is not visible on {own}. Checkpoints are read by all "
        "hosts: give an --output_dir on a disk that they share, as an absolute path."
    )


def _within(seconds: float, done: Callable[[], bool]) -> bool:
    """Return whether ``done`` comes true; network file systems show new files late."""
    until = time.monotonic() + seconds
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _collect(store: Store, here: Place, what: str, value: FindingsOfHost, patience: float) -> list[FindingsOfHost]:
    """Return every host's ``value`` on the first host; an empty list on the others."""
    store.set(f"{what}/{here.number}", json.dumps(value))
    if here.number:
        return []
    keys = [f"{what}/{number}" for number in range(here.hosts)]
    store.wait(keys, timedelta(seconds=patience))
    return [messages.read(store.get(key), FindingsOfHost) for key in keys]


def _told(store: Store, here: Place, what: str, value: bool, patience: float) -> bool:
    """Return the first host's ``value`` on all hosts."""
    if here.number == 0:
        store.set(what, str(int(value)))
    store.wait([what], timedelta(seconds=patience))
    return store.get(what) == b"1"


def _measure(store: Store, here: Place, report: HostReport) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", store=dist.PrefixStore("links", store), rank=here.number, world_size=here.hosts, timeout=timedelta(seconds=60)
    )
    rate = links.ring_rate(torch.device("cpu"))
    own_rate = torch.tensor([rate], dtype=torch.float64)
    rates = [torch.empty_like(own_rate) for _ in range(here.hosts)]
    dist.all_gather(rates, own_rate)
    if here.number == 0:
        between, _ = links.links([host["host"] for host in report.hosts], [float(other) for other in rates])
        report.links = links.summary(between, [])
        report.warnings += links.slow_links(between)
    dist.barrier()
    dist.destroy_process_group()


def _leave(store: Store, here: Place, patience: float, absent: Sequence[int] = ()) -> None:
    """End together: the store ends with the first host's process."""
    store.set(f"left/{here.number}", "")
    if here.number == 0:
        _within(patience, lambda: store.check([f"left/{number}" for number in range(here.hosts) if number not in absent]))
