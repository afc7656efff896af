"""Start one rank; a launcher runs this module.

Arguments: the id of the process that is served, then the file descriptors of the pipes for commands and answers.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from multiprocessing.connection import Connection

from pytest_llmgpu.processes import die_with_parent
from pytest_llmgpu.ranks.serving import serve

if __name__ == "__main__":
    parent, commands, events = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)
    # The stacks of all threads would fill the part of the log that a failure keeps, after the reason of an abort.
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)
    serve(Connection(commands, writable=False), Connection(events, readable=False))
