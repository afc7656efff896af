"""The link between rank 0's process and each other process that was started with it: pickled messages over a socket.

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
import secrets
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from pytest_llmgpu.ranks.job_variables import KEY, PORT, World

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
        self._socket = connected
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

    @property
    def local_address(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, message: object) -> None:
        """Send a message; this waits while the other end does not read.

        Raises:
            OSError: The connection is lost.
        """
        with self._lock:
            self._connection.send(message)

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError: The other end closed the connection.
            OSError: The connection is lost.
        """
        return self._connection.recv()

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets EOFError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _unix_name(world: World) -> str:
    """Return the name of the socket on one machine; it is in no folder, and ends with its process (unix(7))."""
    return f"\0llmgpu-{os.getuid()}-{world.port}"


def bound(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine and on no other one; port 0 is a free one."""
    family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(found[:2], family=family, backlog=socket.SOMAXCONN)


def interface_of(address: str) -> dict[str, str]:
    """Return the variable with which gloo uses the network interface of an address; empty if it is not known.

    Without it gloo looks up the name of the host, which is not known in many containers. NCCL finds the fastest
    interface by itself.
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

    Raises:
        ValueError: The address is not of this machine, or the port is in use.
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

    Raises:
        ValueError: It does not listen within the time limit, or one of both ends may not take part.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        connected = socket.socket(socket.AF_UNIX) if world.key is None else None
        try:
            if connected is None:
                connected = socket.create_connection((world.address, world.port), timeout=_HANDSHAKE_S)
                if connected.getsockname() == connected.getpeername():
                    # TCP can connect a socket to itself where nothing listens: then rank 0 could not take the port.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            else:
                connected.connect(_unix_name(world))
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
