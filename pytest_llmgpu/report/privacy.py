"""Removal of user names, host names, paths and secrets from reports, which may be published."""

from __future__ import annotations

import getpass
import os
import re
import socket
from pathlib import Path

_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_CREDENTIALS = re.compile(
    r"""(?<=://)[^/\s@'"]{1,500}(?=@)  # user and password in a URL
    | \bhf_[A-Za-z0-9]{8,} | \bgh[a-z]_[A-Za-z0-9]{8,} | \bgithub_pat_\w{8,} | \bglpat-[\w-]{8,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,} | \bsk-[\w-]{8,} | (?<=\bBearer\s)[^\s'"]+""",
    re.VERBOSE,
)
"""Secrets that have a form of their own: Hugging Face, GitHub, GitLab, AWS, OpenAI, HTTP."""
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
        package = max((number for number, name in enumerate(components, 1) if name in _PACKAGES), default=0)
        if 0 < package < len(components):
            return "/".join(("...", *components[package:]))
        for root in roots:
            if Path(path).is_relative_to(root):
                return str(Path(path).relative_to(root))
        return path if len(components) <= _KEPT_COMPONENTS else "/".join(("...", *components[-_KEPT_COMPONENTS:]))

    return _ABSOLUTE_PATH.sub(short, text)


def anonymous(text: str) -> str:
    """Return text without secrets and names.

    `***` replaces credentials, `~` the home folder, `<user>` the user name in paths, `<host>` the host name.
    """
    text = _CREDENTIALS.sub("***", text)
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises if the user has no home folder
    if len(home) > 1:
        text = re.sub(r"(?<![\w.~-])" + re.escape(home.rstrip("/")) + _COMPONENT_END, "~", text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name, as in some containers
        user = ""
    if user:
        # pytest's tmp_path is in a folder like `pytest-of-ada`.
        text = re.sub(rf"(?:(?<=/)|(?<=/pytest-of-)){re.escape(user)}{_COMPONENT_END}", "<user>", text)
    return re.sub(rf"(?<![\w-]){re.escape(socket.gethostname())}(?![\w-])", "<host>", text)
