"""`packtrain attach RUN`: watch a run that lives on its own."""

from __future__ import annotations

from packtrain.cli.options import Run


def attach(run: Run) -> int:
    """Watch a run that lives on its own.

    Exit codes as `packtrain train` has them; 0 where it is left to itself.
    """
    from packtrain.cli import folders, program, spec
    from packtrain.cli.lives import lives
    from packtrain.cli.world import rejoin
    from packtrain.core.platform import LocalPlatform
    from packtrain.train.sections import newest_spec

    platform, folder = LocalPlatform(), folders.find_run(run)
    if program.is_program(platform, folder):
        return program.rejoin(platform, lives(platform, folder))
    train = spec.read(newest_spec(platform, folder)).train
    return rejoin(platform, lives(platform, folder), train.steps, train.minutes_max)
