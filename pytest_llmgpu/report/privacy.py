"""Removal of user names, host names, paths and secrets from reports, which may be published."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path

__all__ = ["anonymous", "is_secret", "short_paths"]

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_COMPONENT_END = r"(?![^/:,;'\"\s])"
# A quoted path can contain blanks. An unquoted one does not begin inside a word, a URL or another path.
_ABSOLUTE_PATH = re.compile(
    r"""(?<=")/[^"\n]+(?=") | (?<=')/[^'\n]+(?=') | (?:(?<![\w.~/-])|(?<=file://))/(?!/)[^\s:,;'"()<>\[\]]+""",
    re.VERBOSE,
)
_PACKAGES = ("site-packages", "dist-packages")
_KEPT_COMPONENTS = 2


def is_secret(name: str) -> bool:
    """Return whether the name of a variable looks like that of a secret: `NCCL_TOKEN`."""
    return _SECRET.search(name) is not None


def short_paths(text: str, rootdir: Path) -> str:
    """Return text with short paths instead of absolute ones.

    A path in `rootdir` becomes relative to it. A path in an installed package starts with the name of the package:
    `.../torch/nn/modules/linear.py`. Other paths keep their last two components: `.../lib/libcuda.so`.
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
    """Return text with `~` for the home folder, `<user>` for the user name in paths and `<host>` for the host name."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises if the user has no home folder
    if len(home) > 1:
        text = re.sub(re.escape(home.rstrip("/")) + _COMPONENT_END, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        user = ""
    if user:
        # pytest's tmp_path is in a folder like `pytest-of-ada`.
        text = re.sub(rf"(?:(?<=/)|(?<=/pytest-of-)){re.escape(user)}{_COMPONENT_END}", "<user>", text)
    return re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
