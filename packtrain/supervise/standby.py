"""A warm process: the interpreter has started and the slow imports are done; told what to be, it becomes that in place.

    PYTHON -c START standby.py --socket PATH MODULE ...

Standard library only and started by path (warm.START): PYTHON is the one that the worker is for, and may lack all of
ours. It imports, touches no device, then listens on a unix socket in its agent's home: that the socket is there says
that it is ready. One line of JSON (`Work`) later it is the worker: same process, the worker's log, environment and
arguments. A program that reads its environment while a module is imported sees that of the job, not of its rank, in
modules which were imported here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

LINE_BYTES_MAX = 4 << 20
TAKEN = b"taken\n"
HARMLESS = ("-P", "-u")
"""Options of an interpreter that can be made up for after it has started."""


class Work(NamedTuple):
    """What to become: what follows the interpreter in a command, and where."""

    argv: list[str]
    env: dict[str, str]
    log_path: str
    cwd: str


def argv_of(command: Sequence[str], interpreter: str) -> tuple[str, ...] | None:
    """What follows the interpreter, where a standby can become that: a module or a script of this same interpreter."""
    if not command or os.path.realpath(command[0]) != os.path.realpath(interpreter) or command[0] != interpreter:
        return None
    rest = tuple(command[1:])
    what = [word for word in rest[: _options(rest) + 1] if word not in HARMLESS]
    if what == ["-m"]:
        return rest if len(rest) > _options(rest) + 1 else None
    return rest if what and not what[0].startswith("-") else None


def _options(argv: Sequence[str]) -> int:
    """How many words of the beginning are options that we know."""
    return next((n for n, word in enumerate(argv) if word not in HARMLESS), len(argv))


def become(work: Work) -> None:
    """Run it as `__main__`; does not return where it ends the process, and raises what it raises."""
    log = os.open(work.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    if work.cwd:
        os.chdir(work.cwd)
    os.environ.clear()
    os.environ.update(work.env)
    options = _options(work.argv)
    if "-u" in work.argv[:options]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    _run(work.argv[options:], safe_path="-P" in work.argv[:options])


def _run(argv: Sequence[str], safe_path: bool) -> None:
    """As the interpreter itself begins: the first place modules are looked for in is the script's folder, or here."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        if not safe_path:
            sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    if not safe_path:
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")


def _told(listener: socket.socket) -> Work:
    """Wait to be told; what is no work is not answered, and the next one may come."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(5.0)
            work = _read(connection)
            if work is not None:
                connection.sendall(TAKEN)
                return work


def _read(connection: socket.socket) -> Work | None:
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < LINE_BYTES_MAX:
            more = connection.recv(1 << 16)
            if not more:
                return None
            data += more
        return _work(json.loads(data))
    except (OSError, ValueError, RecursionError):
        return None


def _work(found: Any) -> Work | None:
    if not isinstance(found, dict) or set(found) != set(Work._fields):
        return None
    work = Work(**found)
    texts = [*work.argv, work.log_path, work.cwd, *work.env, *work.env.values()]
    return work if work.argv and all(isinstance(text, str) for text in texts) else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="packtrain.supervise.standby")
    parser.add_argument("--socket", required=True, help="path of the unix stream to listen on; must not exist")
    parser.add_argument("modules", nargs="+", help="what to import before it is needed")
    args = parser.parse_args(argv)
    for module in args.modules:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{args.socket}.new")
        listener.listen()
        os.rename(f"{args.socket}.new", args.socket)
        work = _told(listener)
    become(work)


if __name__ == "__main__":
    main()
