"""What every test stands on: bounded, repeatable properties; a summary of room budgets; and why a test was not run."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

TESTS = pathlib.Path(__file__).parent

# Seconds a room's tests may take together on 2 cores, installation aside. Printed, never asserted: a busy machine is
# not a wrong program.
BUDGET_S = {
    "core + data": 60, "train": 150, "checkpoint": 100, "supervise": 110, "monitor": 50, "qualify": 50,
}
GIVEN_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ROOMS = {"core": "core + data", "seam": "core + data", "data": "core + data"}

settings.register_profile(
    "packtrain", derandomize=True, deadline=None, max_examples=60, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("packtrain")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stop-after-minutes", type=float, default=0.0,
        help="skip what has not begun by then, with a line that says so; 0: no limit",
    )


class SoakClock:
    """Seconds left to the session; long tests end their loops early instead of being cut off."""

    def __init__(self, minutes: float) -> None:
        self._end_s = time.monotonic() + minutes * 60 if minutes else float("inf")

    def left_s(self) -> float:
        return self._end_s - time.monotonic()


CLOCK = pytest.StashKey[SoakClock]()
SECONDS = pytest.StashKey[dict[str, float]]()
NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[CLOCK] = SoakClock(config.getoption("--stop-after-minutes"))
    config.stash[SECONDS] = defaultdict(float)
    config.stash[NOTES] = []


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    """A program's `main` called in this process takes signals for itself; an ignored one passes to every child after.

    So does a shell that starts its background jobs with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in GIVEN_BACK}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that one test's workers compiled serve the others, and the person's own cache is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture
def memory_disk() -> None:
    """Skips where there is no file system in memory to keep images on."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no memory file system here")


@pytest.fixture
def soak_clock(request: pytest.FixtureRequest) -> SoakClock:
    return request.config.stash[CLOCK]


@pytest.fixture
def notes(request: pytest.FixtureRequest) -> list[str]:
    """Lines a test wants to see in the terminal summary: what it counted, or what it left out."""
    return request.config.stash[NOTES]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.stash[CLOCK].left_s() <= 0:
        pytest.skip("the minutes given with --stop-after-minutes were used up before this test began")
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")


def room_of(path: pathlib.Path) -> str:
    """The budget a test file counts against: the folder under tests/, or the name of the budget it shares."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else "elsewhere"
    return ROOMS.get(folder, folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    begun_s = time.perf_counter()
    result = yield
    item.config.stash[SECONDS][room_of(item.path)] += time.perf_counter() - begun_s
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    spent = config.stash[SECONDS]
    if spent:
        terminalreporter.section("seconds by room (budget on 2 quiet cores)")
    for room, seconds in sorted(spent.items()):
        budget = f"of {BUDGET_S[room]}" if room in BUDGET_S else "no budget"
        over = "  OVER" if room in BUDGET_S and seconds > BUDGET_S[room] else ""
        terminalreporter.write_line(f"{room:12s} {seconds:7.1f}  {budget}{over}")
    for line in config.stash[NOTES]:
        terminalreporter.write_line(line)
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.write_line(f"not run: {report.nodeid}: {why.removeprefix('Skipped: ')}")
