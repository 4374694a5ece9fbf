"""Ports and interfaces of a job: nothing fixed, nothing guessed by name."""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import subprocess
from pathlib import Path

from ..errors import QuadsError

FIRST_PORT, PORTS_PER_JOB = 20000, 16
_SIOCGIFADDR = 0x8915


def port_candidates(job: str, offset: int = 0) -> list[int]:
    """Ports to try for a job, derived from its id, all below the range that the kernel gives to clients.

    ``offset`` gives another process of the same job another start. The ranges of two jobs with ids close to each other
    do not overlap.
    """
    low = _ephemeral_start()
    blocks = max((low - FIRST_PORT) // PORTS_PER_JOB, 1)
    number = int(job) if job.isdigit() else sum(job.encode())
    first = FIRST_PORT + number % blocks * PORTS_PER_JOB
    ports = [first + (offset + i) % PORTS_PER_JOB for i in range(PORTS_PER_JOB)]
    # a block full of other people's servers: go on in a far one
    far = FIRST_PORT + (number + blocks // 2) % blocks * PORTS_PER_JOB
    return ports + [far + (offset + i) % PORTS_PER_JOB for i in range(PORTS_PER_JOB)]


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768


def free_port(candidates: list[int]) -> int:
    """The first candidate that nobody listens on, on any address of this node. QuadsError when all are taken."""
    for port in candidates:
        with socket.socket() as s:
            # as servers do: connections of a dead server in TIME_WAIT do not block a new one
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("0.0.0.0", port))
                s.listen(1)
            except OSError:
                continue
            return port
    raise QuadsError(
        f"all {len(candidates)} candidate ports are taken",
        where=f"{socket.gethostname()}:{candidates[0]}..",
        do="look for left-over servers on the node (`ss -tlnp`)",
    )


def address_of(host: str) -> str:
    """IPv4 address of node ``host`` as this node resolves it, else as SLURM knows it (NodeAddr)."""
    try:
        return socket.gethostbyname(host)
    except OSError as e:
        known = _slurm_address(host)
        if known is not None:
            return known
        raise QuadsError(f"cannot resolve {host}: {e}", where=socket.gethostname(), do="check the site's DNS") from e


def _slurm_address(host: str) -> str | None:
    """What SLURM calls the node by: sites whose node names are in no DNS set NodeAddr."""
    try:
        done = subprocess.run(["scontrol", "show", "node", host], capture_output=True, text=True, timeout=60)
        found = re.search(r"NodeAddr=(\S+)", done.stdout)
        return socket.gethostbyname(found[1]) if found and found[1] != host else None
    except (OSError, subprocess.TimeoutExpired):  # no SLURM here, or an address that does not resolve either
        return None


def outward(master: str, nodes: list[str]) -> tuple[str, bool]:
    """(address to route to, whether the nodes are on several hosts), by this node's view of ``master``'s address.

    A host file often names the master's own loopback on the master: another node's address shows the way then. Where
    every node is a loopback, SLURM runs several nodes on one host.
    """
    if len(nodes) < 2 or not master.startswith("127."):
        return master, len(nodes) > 1
    outside = (a for n in nodes if not (a := address_of(n)).startswith("127."))
    other = next(outside, None)
    return (master, False) if other is None else (other, True)


def source_address(target: str) -> str:
    """The local IPv4 address from which the kernel would send to ``target`` (nothing is sent)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((target, 9))
            return s.getsockname()[0]
        except OSError as e:
            raise QuadsError(
                f"no route to {target}: {e.strerror}", where=socket.gethostname(), do="check the network"
            ) from e


def interfaces() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


def choose_interface(master: str, wanted: str | None, *, several_nodes: bool) -> tuple[str, str]:
    """(interface, address) that this node uses towards ``master``: the wanted one, else by route.

    Raises QuadsError when the wanted one does not exist here, or is the loopback of a job on several nodes.
    """
    known, node = interfaces(), socket.gethostname()
    usable = ", ".join(f"{n} ({a})" for n, a in known.items() if not a.startswith("127.")) or "none"
    if wanted is not None:
        if wanted not in known:
            raise QuadsError(
                f"network interface {wanted} does not exist or has no address",
                where=node,
                do=f"choose one of: {usable}",
            )
        if several_nodes and known[wanted].startswith("127."):
            raise QuadsError(f"interface {wanted} cannot reach other nodes", where=node, do=f"choose one of: {usable}")
        return wanted, known[wanted]
    address = source_address(master)
    name = next((n for n, a in known.items() if a == address), None)
    if name is None or (several_nodes and address.startswith("127.")):
        raise QuadsError(
            f"the master {master} is reached from {address}, which is no usable interface",
            where=node,
            do=f"set site.interface to one of: {usable}",
        )
    return name, address
