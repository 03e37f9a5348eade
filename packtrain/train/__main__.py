"""`python -m packtrain.train RUN [--fresh]`: one worker process. See worker.py."""

from __future__ import annotations

import os
import sys

from packtrain.train.worker import main

if __name__ == "__main__":
    code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter teardown: threads of a half-dead world could hold it up past the grace
