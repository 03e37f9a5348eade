"""`packtrain storm-demo`: a run that is broken on purpose, on screen, and ends as if nothing had happened."""

from __future__ import annotations


def storm_demo() -> int:
    """Break a small run five ways and watch it heal.

    Two nodes and a spare, all on this machine, train a small model twice: undisturbed, then with a carrier, the
    coordinator, a worker (killed, then frozen) and a node taken away from it. Both must end with the same bits.
    Takes about two minutes on two cores. Exit codes: 0 the same bits, 70 other bits, 75 stopped, or try again.
    """
    from packtrain.cli import extras

    extras.require("train")
    from packtrain.cli.storm import storm

    return storm()
