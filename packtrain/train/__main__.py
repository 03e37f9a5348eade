"""`python -m packtrain.train RUN [--fresh]`: one worker process. See worker.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from packtrain.core.contract import Place
from packtrain.core.platform import LocalPlatform
from packtrain.train.worker import main


def keep_programs() -> None:
    from packtrain.train import compiled

    several = Place.from_env(os.environ).world_size > 1
    print(compiled.keep(LocalPlatform(), os.environ, several), flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks to the log, however stuck the interpreter is
    code = main(sys.argv[1:], os.environ, keep_programs)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: threads of a half-dead world could hold it up past the grace
