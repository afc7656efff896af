"""What must not leave the machine in a report that gets published: names of users and hosts, and secrets."""

from __future__ import annotations

import getpass
import os
import re
import socket

__all__ = ["anonymous", "is_secret"]

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_COMPONENT_END = r"(?![^/:,;'\"\s])"


def is_secret(name: str) -> bool:
    """Return whether a variable's name says that its value is nobody's business: `NCCL_TOKEN`."""
    return _SECRET.search(name) is not None


def anonymous(text: str) -> str:
    """Return text with `~` for the home folder, and without the user's name in paths or the host's name."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where a user id has no home
    if len(home) > 1:
        text = re.sub(re.escape(home.rstrip("/")) + _COMPONENT_END, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in containers
        user = ""
    if user:
        text = re.sub(rf"(?<=/){re.escape(user)}{_COMPONENT_END}", "<user>", text)
    return re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
