"""Waiting for the end of a process that is no child of this one."""

from __future__ import annotations

import os
import select


def ends(pid: int) -> bool:
    """Return whether that process ends, within five minutes."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(300_000))
    finally:
        os.close(handle)
