"""Warm processes that become workers: what they can become, and that a worker cannot tell."""

from __future__ import annotations

import ast
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from packtrain.core.platform import Process
from packtrain.supervise import standby
from packtrain.supervise.job import Job
from packtrain.supervise.messages import EndWorkers, Launch, RankEnded, RankPhase
from packtrain.supervise.processes import Processes
from packtrain.supervise.standby import argv_of
from packtrain.supervise.warm import AGAIN_NS, Standbys
from tests.supervise.agents import PLATFORM, ROOT, scene

PY = sys.executable
ENV = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")


@pytest.fixture
def base() -> Iterator[pathlib.Path]:
    """A folder whose path leaves room for sockets, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        yield pathlib.Path(folder)


@pytest.mark.parametrize("command, argv", [
    ((PY, "-P", "-m", "packtrain.train", "RUN"), ("-P", "-m", "packtrain.train", "RUN")),
    ((PY, "train.py", "-x"), ("train.py", "-x")),
    ((PY, "-u", "train.py"), ("-u", "train.py")),
    ((PY, "-c", "pass"), None), ((PY, "-m"), None), ((PY,), None), ((PY, "-I", "train.py"), None), ((PY, "-P"), None),
    ((PY, "-"), None), (("/bin/sh", "train.sh"), None), (("torchrun", "train.py"), None), ((), None),
])
def test_what_a_standby_can_become(command: tuple[str, ...], argv: tuple[str, ...] | None) -> None:
    """A module or a script of this interpreter, with options that can be made up for; nothing else."""
    assert argv_of(command, PY) == argv


class Warm:
    """Standbys of one node, warmed up."""

    def __init__(
        self, base: pathlib.Path, worker: tuple[str, ...], preload: str = "decimal", cwd: str = "", **more: object
    ) -> None:
        self.base = base
        job = Job(
            name="j", run_folder=str(base), worker=worker, carrier=(), version="1", preload=(preload,), cwd=cwd,
            **more,  # type: ignore[arg-type]
        )
        self.job = job
        self.standbys = Standbys(job, str(base), {**ENV, "OLD": "1"}, PLATFORM, Processes())
        self.log = base / "0.log"

    def ready(self) -> None:
        for _ in range(1500):
            self.standbys.look(1, quiet=True)
            if any(name.startswith("standby-") for name in os.listdir(self.base)):
                return
            PLATFORM.sleep(0.02)
        raise AssertionError((self.base / "standby.log").read_text())

    def taken(self, **env: str) -> Process:
        process = self.standbys.take({**ENV, **env}, str(self.log))
        assert process is not None
        return process


TELLS = (
    "import os, sys\nprint('decimal' in sys.modules, __name__, sys.argv[1:], os.environ['WHO'], os.getcwd())\n"
    "print('OLD' in os.environ)\n"
    "print(sys.path[0], file=sys.stderr)\nprint(os.path.basename(__file__))\nsys.exit(int(sys.argv[1]))\n"
)


@pytest.mark.parametrize("flags, first", [((), "here"), (("-P",), "")])
def test_a_script_cannot_tell(base: pathlib.Path, flags: tuple[str, ...], first: str) -> None:
    """Arguments, environment, folder, log, exit code and the first place of modules are those of the command."""
    (base / "w.py").write_text(TELLS)
    warm = Warm(base, (PY, *flags, str(base / "w.py"), "7"), cwd="/tmp")
    warm.ready()
    process = warm.taken(WHO="rank 3")
    assert process.wait(20) == 7
    lines = warm.log.read_text().splitlines()
    assert "True __main__ ['7'] rank 3 /tmp" in lines and "False" in lines and "w.py" in lines
    assert (str(base) in lines) == bool(first)


def test_a_module_is_run_as_the_interpreter_runs_it(base: pathlib.Path) -> None:
    """`-m`, found from the folder it stands in; a crash is a traceback in the log and exit code 1."""
    text = "import sys\nprint(__name__, sys.argv[1:], __spec__.name)\nraise ValueError('planted')\n"
    (base / "mod.py").write_text(text)
    warm = Warm(base, (PY, "-m", "mod", "a"), cwd=str(base))
    warm.ready()
    assert warm.taken().wait(20) == 1
    text = warm.log.read_text()
    assert "__main__ ['a'] mod" in text and "ValueError: planted" in text


def test_a_program_of_anybody_has_its_own_interpreter(base: pathlib.Path) -> None:
    """It is found as a shell finds it, and what a library reads at its import is there when it is imported."""
    (base / "early.py").write_text("import os\nTHREADS = os.environ.get('OMP_NUM_THREADS')\n")
    (base / "w.py").write_text("import early, sys\nprint(early.THREADS, sys.argv)\n")
    path = {**ENV, "PATH": os.path.dirname(PY), "PYTHONPATH": str(base)}
    warm = Warm(base, ("python", "w.py", "a"), preload="early", cwd=str(base), plain=True, procs=2, env=path)
    warm.standbys = Standbys(warm.job, str(base), path, PLATFORM, Processes())
    warm.ready()
    assert warm.taken().wait(20) == 0
    assert warm.log.read_text() == "1 ['w.py', 'a']\n"
    warm.standbys.end()


def test_a_standby_needs_nothing_of_ours() -> None:
    """The interpreter of a program may have none of our dependencies, and no packtrain."""
    tree = ast.parse(pathlib.Path(standby.__file__).read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in found} <= sys.stdlib_module_names


def test_one_that_is_not_ready_or_stuck_is_no_loss(base: pathlib.Path) -> None:
    """Not ready: it goes on getting warm. Stopped: it is killed, and may not wake up later as a second worker."""
    (base / "w.py").write_text(TELLS)
    warm = Warm(base, (PY, str(base / "w.py")))
    assert warm.standbys.take(ENV, str(warm.log)) is None
    warm.standbys.look(1, quiet=False)
    assert not warm.standbys.pids
    warm.ready()
    (pid,) = warm.standbys.pids
    os.kill(pid, signal.SIGSTOP)
    assert warm.standbys.take(ENV, str(warm.log)) is None and not warm.standbys.pids
    assert not psutil.pid_exists(pid) and not warm.log.exists()


def test_one_that_cannot_import_is_tried_again_later(base: pathlib.Path) -> None:
    """Its log says why; the pause is its bound."""
    warm = Warm(base, (PY, "w.py"), preload="no_such_module")
    warm.standbys.look(1, quiet=True)
    (first,) = warm.standbys.pids
    for _ in range(1500):
        warm.standbys.look(2, quiet=True)
        if not warm.standbys.pids:
            break
        PLATFORM.sleep(0.02)
    assert "no_such_module" in (base / "standby.log").read_text()
    warm.standbys.look(AGAIN_NS + 1, quiet=True)
    assert not warm.standbys.pids
    warm.standbys.look(AGAIN_NS + 2, quiet=True)
    assert warm.standbys.pids not in ([], [first])
    warm.standbys.end()
    assert not warm.standbys.pids


def test_the_next_attempt_of_an_agent_takes_its_standby(base: pathlib.Path) -> None:
    """The worker of attempt 3 was warm; told not to, a fresh one is started. None outlives its agent."""
    (base / "w.py").write_text(
        "import os, sys, time\nfrom packtrain.core import contract\nplace = contract.Place.from_env(os.environ)\n"
        "beats = contract.Beats(place.socket, place.attempt, place.rank)\nbeats.enter('step', 0)\n"
        "print('warm' if 'decimal' in sys.modules else 'cold', flush=True)\n"
        "for step in range(1, 9999):\n  time.sleep(0.02)\n  beats.step_done(step)\n"
    )

    def go(attempt: int, **options: bool) -> Launch:
        return Launch(attempt=attempt, begin=1, ranks=(0,), world_size=1, master="h:1", **options)

    with scene(base, (PY, str(base / "w.py")), preload=("decimal",)) as one:
        one.joined()
        for attempt, options in ((1, {}), (2, {"reuse_standby": False}), (3, {})):
            one.coordinator.ask(2 * attempt, go(attempt, **options))
            one.until(lambda n=attempt: any(e.attempt == n for e in one.coordinator.of(RankPhase)), "steps")
            one.until(lambda: any(name.startswith("standby-") for name in os.listdir(one.node_home)), "a standby")
            one.coordinator.ask(2 * attempt + 1, EndWorkers(attempt=attempt, reason=""))
            one.until(lambda n=attempt: any(e.attempt == n for e in one.coordinator.of(RankEnded)), "an end")
        assert [(one.run / f"logs/000{n}/0.log").read_text().strip() for n in (1, 2, 3)] == ["cold", "cold", "warm"]
        one.agents[0].kill()
        one.agents[0].wait(10)
        assert not psutil.wait_procs([psutil.Process(m.pid) for m in one.alive() if psutil.pid_exists(m.pid)], 10)[1]
