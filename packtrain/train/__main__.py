"""`python -m packtrain.train RUN [--fresh]`: one worker process. See worker.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from packtrain.core.contract import Place
from packtrain.core.platform import Platform
from packtrain.train.sections import Sections
from packtrain.train.worker import main


def keep_programs(platform: Platform, place: Place, spec: Sections) -> None:
    import jax

    from packtrain.train import cached, compiled
    from packtrain.train.assemble import nodes_of

    code = cached.code_hash(platform)
    world = cached.world_of(spec, nodes_of(place), place.world_size, code, jax.__version__)
    print(compiled.keep(platform, os.environ, place.world_size > 1, world), flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks to the log, however stuck the interpreter is
    code = main(sys.argv[1:], os.environ, keep_programs)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: threads of a half-dead world could hold it up past the grace
