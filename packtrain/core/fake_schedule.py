"""Choices, virtual time and the baton: what makes a run over a fake world repeatable and searchable.

Everything a fake world leaves open (who runs next, whether a fault strikes here, what a power cut spared) is one
`choices.pick(n)`. `explore` hands out every sequence of picks, depth first; `sample` seeded random ones. A failing run
is repeated by `Choices(script=choices.script)`.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

MASK = (1 << 64) - 1


class FakeCrash(BaseException):
    """The process dies here. A BaseException, so that no `except Exception` outlives its own death."""


class Chance:
    """splitmix64 (Steele, Lea, Flood 2014): a seeded generator in three lines, the same on every Python."""

    def __init__(self, *seed: object) -> None:
        self._state = 0xCBF29CE484222325
        for byte in repr(seed).encode():
            self._state = ((self._state ^ byte) * 0x100000001B3) & MASK

    def bits(self) -> int:
        """The next 64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK
        z = ((self._state ^ (self._state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, n: int) -> int:
        return self.bits() % n


class Choices:
    """A sequence of picks: first `script`, then zeros, or random ones when a `seed` is given.

    `rate`: how often a random *rare* pick (a fault, a preemption) is not 0.
    """

    def __init__(self, script: Sequence[int] = (), seed: object = None, rate: float = 0.1) -> None:
        self._ahead = list(script)
        self._chance = None if seed is None else Chance("choices", seed)
        self._rare_of_1000 = round(rate * 1000)
        self.taken: list[tuple[int, int]] = []
        """(pick, out of how many) so far."""

    @property
    def script(self) -> list[int]:
        return [pick for pick, _ in self.taken]

    def pick(self, n: int, rare: bool = False) -> int:
        """A number in [0, n); 0 should be the uneventful one. A single possibility is not recorded."""
        if n == 1:
            return 0
        at = len(self.taken)
        if at < len(self._ahead):
            pick = self._ahead[at]
            assert pick < n, f"pick {at} is {pick} of {n}: the run under test does not repeat itself"
        elif self._chance is None or (rare and self._chance.below(1000) >= self._rare_of_1000):
            pick = 0
        else:
            pick = 1 + self._chance.below(n - 1) if rare else self._chance.below(n)
        self.taken.append((pick, n))
        return pick

    def __repr__(self) -> str:
        return f"Choices(script={self.script})"


def explore(limit: int | None = None) -> Iterator[Choices]:
    """Every sequence of choices the loop body can meet, depth first; at most `limit` of them.

    The body must be a function of its choices. Use: `for choices in explore(): run_the_world(choices)`.
    """
    script: list[int] = []
    given = 0
    while limit is None or given < limit:
        choices = Choices(script)
        yield choices
        given += 1
        taken = choices.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        script = [pick for pick, _ in taken]
        script[-1] += 1


def sample(n: int, seed: object, rate: float = 0.1) -> Iterator[Choices]:
    """`n` seeded random sequences of choices."""
    for i in range(n):
        yield Choices(seed=(seed, i), rate=rate)


class FakeClock:
    """Virtual time in ns since the world began, and what is to happen later. Each operation takes `tick_ns`."""

    def __init__(self, tick_ns: int = 1000) -> None:
        self.now_ns = 0
        self.tick_ns = tick_ns
        self._later: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def tick(self) -> None:
        self.advance(self.now_ns + self.tick_ns)

    def at(self, when_ns: int, do: Callable[[], None]) -> None:
        """Call `do` when the clock reaches `when_ns`; equal times in the order they were asked for."""
        self._count += 1
        heapq.heappush(self._later, (when_ns, self._count, do))

    def next_ns(self) -> int | None:
        return self._later[0][0] if self._later else None

    def advance(self, to_ns: int) -> None:
        while self._later and self._later[0][0] <= to_ns:
            when, _, do = heapq.heappop(self._later)
            self.now_ns = max(self.now_ns, when)
            do()
        self.now_ns = max(self.now_ns, to_ns)


@dataclass(slots=True)
class Outcome:
    """How one writer ended: its value, or what it raised (a `FakeCrash` where it died)."""

    value: Any = None
    error: BaseException | None = None

    @property
    def crashed(self) -> bool:
        return isinstance(self.error, FakeCrash)


class _Worker:
    """A thread that waits for its turn and lives one writer's life after another: starting one costs 300 us."""

    idle: ClassVar[list[_Worker]] = []

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.life: Callable[[], None] | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            self.turn.acquire()
            life, self.life = self.life, None
            assert life is not None
            life()
            del life


class _Slot:
    def __init__(self) -> None:
        self.worker = _Worker.idle.pop() if _Worker.idle else _Worker()
        self.turn = self.worker.turn
        self.ended = False
        self.ready: Callable[[], bool] | None = None
        self.wake_ns: int | None = None
        self.outcome = Outcome()

    def runnable(self, now_ns: int) -> bool:
        if self.ended:
            return False
        return self.ready is None or self.ready() or (self.wake_ns is not None and now_ns >= self.wake_ns)


class Baton:
    """Runs writers as threads of which one moves at a time; at each operation `choices` may pass the baton on.

    At most `preemptions_max` times is a writer that could go on made to wait (most bugs need two: CHESS, OSDI 2008);
    a writer that sleeps, waits or ends hands over for free. `shared(op, path)` narrows the operations before which a
    preemption is tried. Passing the baton costs about 20 us, not passing it almost nothing.
    """

    def __init__(
        self, choices: Choices, clock: FakeClock, preemptions_max: int = 2,
        shared: Callable[[str, str], bool] = lambda op, path: True,
    ) -> None:
        self.choices, self.clock = choices, clock
        self.preemptions_left = preemptions_max
        self._shared = shared
        self._slots: list[_Slot] = []
        self._current: _Slot | None = None
        self._stuck = False
        self._passing_time = False
        self._done = threading.Lock()

    def run(self, *programs: Callable[[], Any]) -> list[Outcome]:
        """Run all to their ends; AssertionError when every one of them waits for what can never come."""
        self._slots = [_Slot() for _ in programs]
        self._stuck = False
        for slot, program in zip(self._slots, programs):
            slot.worker.life = partial(self._live, slot, program)
        self._done.acquire()
        self._pass_on()
        self._done.acquire()
        self._done.release()
        self._current = None
        assert not self._stuck, f"every writer waits for another: {self.choices!r}"
        return [slot.outcome for slot in self._slots]

    @property
    def running(self) -> bool:
        """Whether the caller is the writer that holds the baton (not a timer's action, not a thread of its own)."""
        current = self._current
        return current is not None and not self._passing_time and current.worker.thread.ident == threading.get_ident()

    def point(self, op: str, path: str) -> None:
        """Called by the running writer before each operation: perhaps another goes first."""
        if self.preemptions_left == 0 or not self.running or not self._shared(op, path):
            return
        others = [slot for slot in self._slots if slot is not self._current and slot.runnable(self.clock.now_ns)]
        pick = self.choices.pick(1 + len(others), rare=True)
        if pick:
            self.preemptions_left -= 1
            self._yield_to(others[pick - 1])

    def wait(self, ready: Callable[[], bool], wake_ns: int | None) -> None:
        """Let others go until `ready()` or the clock reaches `wake_ns`."""
        me = self._current
        assert me is not None
        if ready():
            return
        me.ready, me.wake_ns = ready, wake_ns
        target = self._next()
        if target is not me:
            self._yield_to(target)
        elif self._stuck:
            raise FakeCrash
        me.ready = me.wake_ns = None

    def _live(self, slot: _Slot, program: Callable[[], Any]) -> None:
        try:
            if self._stuck:
                raise FakeCrash
            slot.outcome.value = program()
        except BaseException as error:
            slot.outcome.error = error
        slot.ended = True
        _Worker.idle.append(slot.worker)
        self._pass_on()

    def _pass_on(self) -> None:
        target = self._next()
        if target is None:
            self._done.release()
            return
        self._current = target
        target.turn.release()

    def _yield_to(self, target: _Slot | None) -> None:
        me = self._current
        assert me is not None and target is not None
        self._current = target
        target.turn.release()
        me.turn.acquire()
        if self._stuck:
            raise FakeCrash

    def _next(self) -> _Slot | None:
        """Who goes on when the one before cannot; passes time when all wait. None: all have ended."""
        while True:
            able = [slot for slot in self._slots if slot.runnable(self.clock.now_ns)]
            if able:
                return able[self.choices.pick(len(able))]
            living = [slot for slot in self._slots if not slot.ended]
            if not living:
                return None
            if self._stuck or not self._pass_time(living):
                self._stuck = True
                return living[0]

    def _pass_time(self, living: Iterable[_Slot]) -> bool:
        times = [slot.wake_ns for slot in living if slot.wake_ns is not None]
        timer = self.clock.next_ns()
        if timer is not None:
            times.append(timer)
        if not times:
            return False
        self._passing_time = True
        try:
            self.clock.advance(min(times))
        finally:
            self._passing_time = False
        return True
