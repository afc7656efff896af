"""The link between rank 0's process and each other process that was started with it: pickled messages over a socket.

The variables that torchrun or srun set name this process and the place where rank 0 listens: its address, the port, and
the key, for which there are rules here.

Whoever can connect decides which code runs. Between nodes both ends therefore prove that they have the same secret
before the first message is read; `multiprocessing.connection`, whose framing is used, proves it by MD5 before Python
3.12. On one machine the kernel names the user at the other end of a Unix socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec

KEY = "LLMGPU_KEY"
"""This variable has the secret that the processes of several nodes share."""
PORT = "LLMGPU_PORT"
"""This variable has the port of rank 0 if another one than the default is needed."""
JOIN_S = 300.0
"""The processes of a world start within this time: the first import from a network disk takes minutes."""
_LEAST_KEY_BYTES, _LEAST_DIFFERENT = 16, 6
_SLURM_PORTS = range(20_000, 32_000)
"""A job of Slurm takes one of these ports by its number; programs that connect get higher ones."""
_COUNTS, _SIZES, _PORTS = range(10**9), range(1, 10**9), range(1, 2**16)
_HOST = r"(?:[^,\[\]]|\[[0-9]+[0-9,-]*\])+"
_GREETING = b"pytest-llmgpu\n"
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0
_RETRY_S = 0.1
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (Linux: SO_PEERCRED, unix(7))."""
_CANNOT_LISTEN = {
    errno.EADDRINUSE: f"it is in use: set {PORT} to a free port, the same for all processes",
    errno.EADDRNOTAVAIL: "it is no address of the machine of rank 0",
}
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A node that is gone, without a last word, is noticed after 25 s."""


class World(msgspec.Struct, frozen=True, kw_only=True):
    """This process among those that were started together."""

    rank: int
    """The number of this process."""
    size: int
    """This many processes were started."""
    size_name: str
    """The variable or the option that has this number."""
    local_rank: int
    """The number of this process among those of its node."""
    node: int
    """The number of the node of this process."""
    address: str
    """Name or address of the node of rank 0."""
    port: int
    """Rank 0 listens here."""
    where: str
    """Port and address in words, with the variables that they are from."""
    key: bytes | None
    """The secret of all processes; None if they run on one machine as one user, which the kernel checks."""


def of_environment(environ: Mapping[str, str]) -> World:
    """Return what torchrun or Slurm set for this process; ValueError if a variable is missing or cannot be right."""
    if "RANK" in environ:
        size_name = "WORLD_SIZE"
        size = _number(environ, size_name, allowed=_SIZES)
        rank = _number(environ, "RANK", allowed=range(size))
        local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, allowed=range(1, size + 1))
        local_ranks = range(local_size) if "LOCAL_WORLD_SIZE" in environ else _COUNTS
        local_rank = _number(environ, "LOCAL_RANK", 0, allowed=local_ranks)
        node = _number(environ, "GROUP_RANK", rank // local_size)
        one_machine = local_size == size
    elif "SLURM_PROCID" in environ:
        size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
        size = _number(environ, size_name, allowed=_SIZES)
        rank = _number(environ, "SLURM_PROCID", allowed=range(size))
        local_rank = _number(environ, "SLURM_LOCALID", 0, allowed=range(size))
        node = _number(environ, "SLURM_NODEID", 0)
        one_machine = _number(environ, nodes, 1) == 1
    else:
        remedy = "start pytest by torchrun or srun, such as `torchrun --nproc-per-node=2 -m pytest`"
        raise ValueError(f"neither RANK and WORLD_SIZE nor SLURM_PROCID are set: {remedy}")
    port, port_source = (0, "") if size == 1 else _port(environ)
    address, address_source = ("localhost", "this machine") if one_machine else _address(environ)
    key = None if one_machine else environ.get(KEY, "").encode("utf-8", "surrogateescape")
    if key is not None and (len(key) < _LEAST_KEY_BYTES or len(set(key)) < _LEAST_DIFFERENT):
        found = f"has {len(key)} bytes, {len(set(key))} of them different" if key else "is not set"
        needed = f"a common secret of at least {_LEAST_KEY_BYTES} bytes, {_LEAST_DIFFERENT} of them different"
        remedy = "set it to the same value on each node, such as one line of `openssl rand -hex 32`"
        raise ValueError(f"{KEY} {found}, and the processes of several nodes need {needed}: {remedy}")
    return World(
        rank=rank,
        size=size,
        size_name=size_name,
        local_rank=local_rank,
        node=node,
        address=address,
        port=port,
        where=f"port {port} ({port_source}) of {address} ({address_source})",
        key=key,
    )


def _port(environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the port of rank 0 and its source."""
    if PORT in environ:
        return _number(environ, PORT, allowed=_PORTS), PORT
    if "RANK" in environ:
        # torch listens on MASTER_PORT itself.
        return _number(environ, "MASTER_PORT", allowed=range(_PORTS.stop - 1)) + 1, "MASTER_PORT + 1"
    step = _number(environ, "SLURM_JOB_ID", 0) * 31 + _number(environ, "SLURM_STEP_ID", 0)
    return _SLURM_PORTS[step % len(_SLURM_PORTS)], "by SLURM_JOB_ID"


def _address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the name or address of the node of rank 0 and its source."""
    if address := environ.get("MASTER_ADDR"):
        return address, "MASTER_ADDR"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if "RANK" not in environ and (hosts := environ.get(name)):
            # A comma outside of brackets ends the first host. Each pair of brackets begins with its first number.
            found = re.fullmatch(rf"({_HOST})(,{_HOST})*", hosts)
            if found is None:
                raise ValueError(f"{name}={hosts!r}: a list of hosts is needed, such as node[01-03,07],login")
            return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1]), f"first of {name}"
    raise ValueError("MASTER_ADDR is not set: it names the node of rank 0")


def _number(environ: Mapping[str, str], name: str, default: int | None = None, *, allowed: range = _COUNTS) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set")
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) not in allowed:
        bounded = f"from {allowed.start} to {allowed.stop - 1}"
        bounds = f"of at least {allowed.start}" if allowed.stop == _COUNTS.stop else bounded
        raise ValueError(f"{name}={text!r}: a whole number {bounds} is needed")
    return int(text)


class Link:
    """Messages to and from a process that may take part; several threads may send."""

    def __init__(self, connected: socket.socket, key: bytes | None, *, listens: bool) -> None:
        """Check the other end of a socket, which is closed if it may not take part.

        Raises:
            PermissionError: The other end has another secret, or is of another user.
            TimeoutError: It did not prove itself in time.
            OSError: It is another program, such as a scan of ports, or the connection is lost.
            EOFError: It closed the connection.
        """
        connected.settimeout(None)
        self.socket = connected
        self._connection = Connection(os.dup(connected.fileno()))
        self._lock = threading.Lock()
        late = threading.Event()

        def leave() -> None:
            late.set()
            self.close()

        # A limit of the whole proof: a stranger may send byte by byte, or nothing.
        timer = threading.Timer(_HANDSHAKE_S, leave)
        timer.daemon = True
        timer.start()
        try:
            if key is None:
                credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                _, user, _ = _CREDENTIALS.unpack(credentials)
                if user != os.getuid():
                    raise PermissionError(errno.EACCES, f"the process at the other end is of another user ({user})")
            else:
                for level, option, value in _OPTIONS:
                    connected.setsockopt(level, option, value)
                self._prove(key, listens=listens)
        except (OSError, EOFError):
            self.close()
            if late.is_set():
                raise TimeoutError("it did not answer in time") from None
            raise
        finally:
            timer.cancel()

    def _prove(self, key: bytes, *, listens: bool) -> None:
        """Prove to the other end that this one has the secret, and check the other end's proof."""
        own = secrets.token_bytes(_NONCE_BYTES)
        self._connection.send_bytes(_GREETING + own)
        greeting = self._connection.recv_bytes(len(_GREETING) + _NONCE_BYTES)
        if not greeting.startswith(_GREETING):
            raise ConnectionError("another program answers")
        other = greeting[len(_GREETING) :]
        # The end that listens proves itself last: who does not have the secret gets no proof to guess it from.
        nonces = own + other if listens else other + own
        roles = (b"L", b"C") if listens else (b"C", b"L")
        mine, theirs = (hmac.digest(key, role + nonces, "sha256") for role in roles)
        if not listens:
            self._connection.send_bytes(mine)
        if not hmac.compare_digest(self._connection.recv_bytes(len(theirs)), theirs):
            raise PermissionError(errno.EACCES, f"the other end has another {KEY}")
        if listens:
            self._connection.send_bytes(mine)

    def send(self, message: object) -> None:
        """Send a message; this waits while the other end does not read. OSError if the connection is lost."""
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for a message; EOFError if the other end closed the connection, OSError if it is lost."""
        return self._connection.recv()

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets EOFError."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _unix_name(world: World) -> str:
    """Return the name of the socket on one machine; it is in no folder, and ends with its process (unix(7))."""
    return f"\0llmgpu-{os.getuid()}-{world.port}"


def bound(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine and on no other one; port 0 is a free one."""
    family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(found[:2], family=family, backlog=socket.SOMAXCONN)


def interface_of(address: str) -> dict[str, str]:
    """Return the variable with which gloo uses the network interface of an address; empty if it is not known.

    Without it gloo looks up the name of the host, which many containers do not know. NCCL finds an interface itself.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return {"GLOO_SOCKET_IFNAME": name}
    return {}


def listen(world: World) -> socket.socket:
    """Return the socket where rank 0's process waits for the others.

    ValueError if the address is not of this machine, or the port is in use.
    """
    try:
        if world.key is not None:
            return bound(world.address, world.port)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_unix_name(world))
        listener.listen(world.size)
    except OSError as error:
        reason = _CANNOT_LISTEN.get(error.errno or 0, error.strerror or error)
        raise ValueError(f"rank 0 cannot listen on {world.where}: {reason}") from None
    return listener


def connect(world: World, limit_s: float) -> Link:
    """Connect to rank 0's process, which may start later.

    ValueError if it does not listen within the time limit, or one of both ends may not take part.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        connected = None
        try:
            if world.key is None:
                connected = socket.socket(socket.AF_UNIX)
                connected.connect(_unix_name(world))
            else:
                connected = socket.create_connection((world.address, world.port), timeout=_HANDSHAKE_S)
                if connected.getsockname() == connected.getpeername():
                    # TCP can connect a socket to itself where nothing listens: then rank 0 could not take the port.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return Link(connected, world.key, listens=False)
        except (EOFError, PermissionError) as error:
            reason = getattr(error, "strerror", None) or f"it refused rank {world.rank}: has it the same {KEY}?"
            raise ValueError(f"rank 0 at {world.where}: {reason}") from None
        except OSError as error:
            if connected is not None:
                connected.close()
            if time.monotonic() > deadline_s:
                reason = error.strerror or str(error)
                raise ValueError(f"rank 0 was not found at {world.where} within {limit_s:g} s: {reason}") from None
            time.sleep(_RETRY_S)
