"""A store that damages what passes through it, so that tests can see it caught."""

from __future__ import annotations

from collections.abc import Callable

from packtrain.core.stores import Page, Plan, Store, Upload

Touch = Callable[[str, int, bytes], bytes]
"""(what: read, put, look, finish or finished; how many of these before; bytes) -> bytes that arrive. May raise."""


def untouched(what: str, number: int, data: bytes) -> bytes:
    return data


def flip(what: str, *numbers: int) -> Touch:
    """The lowest bit in the middle of the n-th read, put or look; of every one, without numbers."""

    def touch(kind: str, number: int, data: bytes) -> bytes:
        if kind != what or not data or (numbers and number not in numbers):
            return data
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    return touch


class Flipping(Store):
    """Another store, through a bad line. Counts what passes."""

    def __init__(self, inner: Store, touch: Touch = untouched) -> None:
        self.inner, self.touch, self.url = inner, touch, inner.url
        self.counts = {"read": 0, "put": 0, "look": 0, "finish": 0, "finished": 0}
        self.bytes = dict.fromkeys(self.counts, 0)

    def pass_through(self, what: str, data: bytes) -> bytes:
        number = self.counts[what]
        self.counts[what] += 1
        self.bytes[what] += len(data)
        return self.touch(what, number, data)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self.pass_through("read", self.inner.read(name, offset, size))

    def create(self, name: str, data: bytes) -> None:
        self.inner.create(name, data)

    def upload(self, plan: Plan) -> Upload:
        return _Flipping(self, self.inner.upload(plan))

    def settle(self, name: str) -> None:
        self.inner.settle(name)

    def list(self, prefix: str, after: str = "") -> Page:
        return self.inner.list(prefix, after)

    def erase(self, name: str) -> None:
        self.inner.erase(name)


class _Flipping(Upload):
    def __init__(self, store: Flipping, inner: Upload) -> None:
        self._store, self._inner = store, inner
        self.in_order, self.shows = inner.in_order, inner.shows

    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        return self._inner.has(index, is_good)

    def put(self, index: int, data: bytes) -> int:
        return self._inner.put(index, self._store.pass_through("put", data))

    def look(self, index: int) -> bytes:
        return self._store.pass_through("look", self._inner.look(index))

    def finish(self, replace: bool) -> None:
        self._store.pass_through("finish", b"")
        self._inner.finish(replace)
        self._store.pass_through("finished", b"")

    def leave(self) -> None:
        self._inner.leave()
