"""The connection between rank 0's process and each other process that was started with it: messages over a socket.

Commands and calls are pickled, so that whoever can connect decides which code runs. Between nodes both ends therefore
prove that they have the same secret before the first message. On one machine the kernel names the user at the other
end of a Unix socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from typing import Any, Literal

import msgspec

from pytest_llmgpu.ranks.futures import Event
from pytest_llmgpu.ranks.world import KEY, PORT, World

_GREETING = b"pytest-llmgpu\n"
_NONCE_BYTES = 32
_HANDSHAKE_S = 10.0
_RETRY_S = 0.1
_MOST_BYTES = 2**31
_SIOCGIFADDR = 0x8915  # from <linux/sockios.h>
_HEADER = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket (Linux: SO_PEERCRED, unix(7))."""
_CANNOT_LISTEN = {
    errno.EADDRINUSE: f"it is in use: set {PORT} to a free port, the same for all processes",
    errno.EADDRNOTAVAIL: "it is no address of the machine of rank 0",
}
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A node that is gone, without a last word, is noticed after 25 s."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a process to rank 0's."""

    version: str
    """The version of this package."""
    rank: int
    """See `World`."""
    size: int
    """See `World`."""
    local_rank: int
    """See `World`."""
    node: int
    """See `World`."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a rank."""

    number: int
    """The messages of its process have this number."""
    rank: int
    """The number of the rank."""
    environment: dict[str, str]
    """Variables for its process."""
    path: list[str]
    """The import path of rank 0's process."""


class Command(msgspec.Struct, frozen=True, tag=True):
    """Run a command on the rank."""

    content: bytes
    """The pickled command; only the rank unpickles it."""


Asked = Literal["stacks", "close", "kill", "take_output", "call"]
"""A method of the process of the rank, its output, or a call of a function in the process that started it."""


class Request(msgspec.Struct, frozen=True, tag=True):
    """Do something and reply."""

    number: int
    """The reply has this number."""
    what: Asked
    """What to do."""
    content: bytes = b""
    """The pickled function with its arguments."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The run is over."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """The process of the rank sent something."""

    number: int
    """See `Start`."""
    event: Event
    """A batch, an answer or the end."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request."""

    number: int
    """See `Request`."""
    done: bool
    """False if the request raised an exception."""
    content: bytes
    """The pickled result, or the pickled message of the exception."""


FromRankZero = Start | Command | Request | Goodbye
ToRankZero = Hello | Sent | Reply


class Connection:
    """Messages over a socket; several threads may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._deadline_s: float | None = None
        """The time until which the other end has to be known; None once it is."""

    @property
    def local_address(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; this waits while the other end does not read.

        Raises:
            OSError: The connection is lost.
        """
        content = msgspec.msgpack.encode(message)
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(content)) + content)

    def receive(self, kind: Any) -> Any:
        """Wait for a message of a kind (a record, or a union of records).

        Raises:
            EOFError: The other end closed the connection.
            OSError: The connection is lost.
            ValueError: The message is of no such kind.
        """
        (size_bytes,) = _HEADER.unpack(self.exactly(_HEADER.size))
        if size_bytes > _MOST_BYTES:
            raise ValueError(f"a message of {size_bytes} bytes is longer than {_MOST_BYTES}")
        return msgspec.msgpack.decode(self.exactly(size_bytes), type=kind)

    def exactly(self, size_bytes: int) -> bytearray:
        """Return this many bytes (see `receive`)."""
        content = bytearray(size_bytes)
        view = memoryview(content)
        while view:
            if self._deadline_s is not None:
                if (left_s := self._deadline_s - time.monotonic()) <= 0:
                    raise TimeoutError("it did not answer in time")
                self._socket.settimeout(left_s)
            received = self._socket.recv_into(view, min(len(view), 2**20))
            if not received:
                raise EOFError
            view = view[received:]
        return content

    def prove(self, key: bytes, *, listens: bool) -> None:
        """Prove to the other end that this one has the secret, and check the other end's proof.

        Raises:
            PermissionError: The other end has another secret.
            ConnectionError: The other end is another program, such as a scan of ports.
        """
        own = secrets.token_bytes(_NONCE_BYTES)
        self._socket.sendall(_GREETING + own)
        if self.exactly(len(_GREETING)) != _GREETING:
            raise ConnectionError("another program answers")
        other = bytes(self.exactly(_NONCE_BYTES))
        # The end that listens proves itself last: who does not have the secret gets no proof to guess it from.
        nonces = own + other if listens else other + own
        mine, theirs = (_proof(key, role + nonces) for role in ((b"L", b"C") if listens else (b"C", b"L")))
        if not listens:
            self._socket.sendall(mine)
        if not hmac.compare_digest(bytes(self.exactly(len(theirs))), theirs):
            raise PermissionError(errno.EACCES, f"the other end has another {KEY}")
        if listens:
            self._socket.sendall(mine)

    def check_user(self) -> None:
        """Check that the process at the other end of a Unix socket is of the same user.

        Raises:
            PermissionError: It is not.
        """
        _, user, _ = _CREDENTIALS.unpack(
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.getuid():
            raise PermissionError(errno.EACCES, f"the process at the other end is of another user ({user})")

    def authenticate(self, key: bytes | None, *, listens: bool) -> None:
        """Check the other end, within a time limit that also holds for the messages until `wait_without_limit`.

        Raises:
            PermissionError: It may not take part.
            OSError: It did not answer in time, or the connection is lost.
            EOFError: It closed the connection.
        """
        self._deadline_s = time.monotonic() + _HANDSHAKE_S
        self._socket.settimeout(_HANDSHAKE_S)
        if key is None:
            self.check_user()
        else:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
            self.prove(key, listens=listens)

    def wait_without_limit(self) -> None:
        """Let further messages take any time."""
        self._deadline_s = None
        self._socket.settimeout(None)

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets EOFError."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _proof(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, hashlib.sha256).digest()


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
        if world.key is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(_unix_name(world))
            listener.listen(world.size)
            return listener
        return bound(world.address, world.port)
    except OSError as error:
        reason = _CANNOT_LISTEN.get(error.errno or 0, error.strerror or error)
        raise ValueError(f"rank 0 cannot listen on {world.where}: {reason}") from None


def connect(world: World, limit_s: float) -> Connection:
    """Connect to rank 0's process, which may start later.

    Raises:
        ValueError: It does not listen within the time limit, or one of both ends may not take part.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            connection = Connection(_connected(world))
            try:
                connection.authenticate(world.key, listens=False)
            except (EOFError, OSError) as error:
                connection.close()
                if isinstance(error, TimeoutError):  # it listens, and its machine is busy
                    raise
                refused = f"it refused rank {world.rank}: has it the same {KEY}?"
                reason = refused if isinstance(error, EOFError) else error.strerror or str(error)
                raise ValueError(f"rank 0 at {world.where}: {reason}") from None
        except OSError as error:
            if time.monotonic() > deadline_s:
                reason = error.strerror or str(error)
                raise ValueError(f"rank 0 was not found at {world.where} within {limit_s:g} s: {reason}") from None
            time.sleep(_RETRY_S)
            continue
        connection.wait_without_limit()
        return connection


def _connected(world: World) -> socket.socket:
    if world.key is not None:
        connected = socket.create_connection((world.address, world.port), timeout=_HANDSHAKE_S)
        if connected.getsockname() == connected.getpeername():
            # Where nothing listens yet, TCP can connect a socket to itself: then rank 0 could not take the port.
            connected.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return connected
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(_unix_name(world))
    except OSError:
        connected.close()
        raise
    return connected
