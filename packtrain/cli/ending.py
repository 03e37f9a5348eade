"""How a command ends: one message on stderr and one exit code. A person's mistake never shows a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from packtrain.core.errors import EXIT_AGAIN, EXIT_DONE, EXIT_OURS, INTERRUPTED, AgainError, PacktrainError, UsageError

TYPER_INTERRUPTED = 130
"""What newer typers return for Ctrl-C in a command; older ones raise Abort. No command of ours returns it."""


def end(command: Callable[[], Any]) -> int:
    """Run `command`; its int result, or the exit code of what it raised, after saying what that was."""
    try:
        result = command()
        if result == TYPER_INTERRUPTED:
            raise KeyboardInterrupt
        if sys.stdout is not None:  # None: it was closed before we began, and nobody wants to read
            sys.stdout.flush()
    except PacktrainError as error:
        complain(error.render())
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        complain(INTERRUPTED)
        return EXIT_AGAIN
    except (BrokenPipeError, SystemExit):  # the parser, too, leaves when nobody reads its help any more
        _silence()
        return EXIT_DONE
    except Exception as error:
        if isinstance(error, OSError) and _is_full(error):
            complain(AgainError(f"output cannot be written: {error.strerror}").render())
            return EXIT_AGAIN
        return _usage(error) if hasattr(error, "show") and hasattr(error, "exit_code") else _bug(error)
    return result if isinstance(result, int) else EXIT_DONE


def complain(text: str) -> None:
    print(text, file=sys.stderr)


def _is_full(error: OSError) -> bool:
    """Whether a disk is full under what was written, most likely stdout: an open file is refused without its name."""
    if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return False
    _silence()
    return True


def _silence() -> None:
    """What still waits for stdout goes nowhere, or Python complains again when it flushes at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: Any) -> int:
    """An option or argument that the command line parser refused, told as our own errors are."""
    context, verb = getattr(error, "ctx", None), "packtrain"
    if context is not None:  # whatever the program was started as
        verb += context.command_path.removeprefix(context.find_root().command_path)
    refused = UsageError(error.format_message(), where=verb, fix=f"see `{verb} --help`")
    complain(refused.render())
    return refused.exit_code


def _bug(error: Exception) -> int:
    """Our fault: the traceback goes to a file, so that the message stays readable and nothing is lost."""
    import traceback

    from packtrain.core.platform import LocalPlatform

    text = "".join(traceback.format_exception(error))
    path = f"{os.environ.get('TMPDIR', '/tmp')}/packtrain-bug-{LocalPlatform().token(4)}.txt"
    try:
        LocalPlatform().write_new(path, text.encode(errors="backslashreplace"), 0o600)
    except OSError as refused:
        path = f"nowhere, {refused}:\n{text}"
    complain(
        f"[ours.bug] {type(error).__name__}: {error}\n"
        f"  where: the traceback is in {path}\n"
        f"  next:  this is a fault of packtrain; please report it with that file"
    )
    return EXIT_OURS
