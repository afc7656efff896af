"""What must not leave the machine in a report that gets published: names of users and hosts, and secrets."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path

__all__ = ["anonymous", "is_secret", "short_paths"]

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_COMPONENT_END = r"(?![^/:,;'\"\s])"
# In quotes a path may hold blanks. Without them it begins where no word, other path or URL goes on.
_ABSOLUTE_PATH = re.compile(
    r"""(?<=")/[^"\n]+(?=") | (?<=')/[^'\n]+(?=') | (?:(?<![\w.~/-])|(?<=file://))/(?!/)[^\s:,;'"()<>\[\]]+""",
    re.VERBOSE,
)
_PACKAGES = ("site-packages", "dist-packages")
_KEPT_COMPONENTS = 2


def is_secret(name: str) -> bool:
    """Return whether a variable's name says that its value is nobody's business: `NCCL_TOKEN`."""
    return _SECRET.search(name) is not None


def short_paths(text: str, rootdir: Path) -> str:
    """Return text in which no absolute path says where on the machine something lies.

    A path in `rootdir` becomes relative to it, one of an installed package begins with the package's name, and of any
    other the last two components stay: `.../torch/nn/modules/linear.py`, `.../lib/libcuda.so`.
    """
    roots = [root for root in dict.fromkeys((str(rootdir), str(rootdir.resolve()))) if root != "/"]

    def short(match: re.Match[str]) -> str:
        path = match[0]
        components = [component for component in path.split("/") if component]
        package = max(
            (len(components) - components[::-1].index(name) for name in _PACKAGES if name in components), default=0
        )
        if 0 < package < len(components):
            return "/".join(("...", *components[package:]))
        for root in roots:
            if Path(path).is_relative_to(root):
                return str(Path(path).relative_to(root))
        if len(components) > _KEPT_COMPONENTS:
            return "/".join(("...", *components[-_KEPT_COMPONENTS:]))
        return path

    return _ABSOLUTE_PATH.sub(short, text)


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
        # `pytest-of-ada` is the folder of pytest's tmp_path.
        text = re.sub(rf"(?:(?<=/)|(?<=/pytest-of-)){re.escape(user)}{_COMPONENT_END}", "<user>", text)
    return re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
