"""Buckets of S3, Google and Azure through obstore, with deadlines that hold whatever the bucket does.

The client's own retries are off (they would double a create, and give up at times of their own). Each request runs on
one event loop of this process, where it can be cancelled for good at the instant its time is up; what failed in a
passing way is asked again, later and later, until the deadline.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, wait
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore import exceptions as refused
from obstore import store as clients

from packtrain.core.errors import BadValue, NameAbsent, NameTaken, PacktrainError, StoreRefused, StoreUnreachable
from packtrain.core.platform import Platform
from packtrain.core.s3 import S3Bucket, open_bucket
from packtrain.core.stores import (
    DAMAGED_ON_THE_WAY,
    PAGE_NAMES_MAX,
    Page,
    Plan,
    Store,
    StoreConfig,
    Upload,
    check_name,
    require_free,
    secret_of,
)
from packtrain.core.units import NS

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
LOOK_S = 0.5
"""How often a thread that waits for an answer wakes."""
END_S = 5.0
"""At most so long does the end of a process wait for requests to be cancelled, and then for the client's threads."""
QUIET_S = 0.02
"""Between two looks at those: several times as long as a thread waits for the interpreter before it wakes and waits on
(5 ms, `sys.getswitchinterval`)."""
CLIENT_THREADS = "tokio"
"""How the kernel's names of them begin."""
PARTS_AT_ONCE = 4
REPEATS_MAX = 3
"""Of a part of a streamed upload, which cannot be asked for again from here."""
ABSENT = ("NoSuchKey", "BlobNotFound")
"""What S3 and Google, and Azure, answer where a name is absent and its bucket present."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = (408, 425, 429)
_URL = re.compile(r"(s3|gs|az|memory)://([A-Za-z0-9._-]*)/?([A-Za-z0-9._=@+,/-]*)")
T = TypeVar("T")


class ObjectStore(Store):
    """A bucket, or the part of one under a prefix."""

    def __init__(
        self, platform: Platform, config: StoreConfig, once: Any, again: Any, bucket: S3Bucket | None = None
    ) -> None:
        """`once`, `again`: the bucket through a client that never repeats a request, and one that does; `bucket`: the
        same through boto3, where that is installed."""
        self.url = config.url
        self.bucket = bucket
        self._platform, self._config = platform, config
        self._once, self._again = once, again

    def size(self, name: str) -> int:
        check_name(name, self.url)
        try:
            meta = self._ask(name, lambda: self._once.head_async(name))
        except _NotSaid:
            self.read(name, 0, 1)  # an answer to HEAD has no words that say what is not there; this one has
            raise
        return int(meta["size"])

    def read(self, name: str, offset: int, size: int) -> bytes:
        check_name(name, self.url)
        if size <= 0:
            self.size(name)
            return b""
        try:
            data = self._ask(name, lambda: obstore.get_range_async(self._once, name, start=offset, length=size), size)
        except _BeyondTheEnd:
            return b""
        except _NoRange:
            return self._read_otherwise(name, offset, size)
        return bytes(data)

    def _read_otherwise(self, name: str, offset: int, size: int) -> bytes:
        """From a store that answers a range with the status of a whole object: `rclone serve s3` 1.75 does.

        Through boto3, which looks at the range in the answer; or the whole object, where the range means that.
        """
        if self.bucket is not None:
            return self.bucket.read(name, offset, size)
        if offset or self.size(name) > size:
            raise StoreRefused(
                "a range was asked for and something else came", where=f"{self.url} {name}",
                fix="use a store that knows ranges",
            )

        async def whole() -> Any:
            return await (await obstore.get_async(self._once, name)).bytes_async()

        return bytes(self._ask(name, whole, size))

    def create(self, name: str, data: bytes) -> None:
        check_name(name, self.url)
        self._ask(
            name, lambda: obstore.put_async(self._once, name, data, mode="create", use_multipart=False), len(data),
            repeat=False,
        )

    def upload(self, plan: Plan) -> Upload:
        check_name(plan.name, self.url)
        if plan.chunks == 1:
            return _OnePut(self, plan)
        if self.bucket is not None:
            return self.bucket.upload(self, plan)
        return _Stream(self, plan)

    def list(self, prefix: str, after: str = "") -> Page:
        if prefix:
            check_name(prefix, self.url)
        found = self._ask(prefix, lambda: self._first_page(prefix, after))
        names = tuple((item["path"], int(item["size"])) for item in found)
        return Page(names, names[-1][0] if len(names) == PAGE_NAMES_MAX else "")

    async def _first_page(self, prefix: str, after: str) -> Any:
        stream = self._once.list(prefix or None, offset=after or None, chunk_size=PAGE_NAMES_MAX)
        return await anext(stream, [])

    def erase(self, name: str) -> None:
        check_name(name, self.url)
        try:
            self._ask(name, lambda: self._once.delete_async(name))
        except NameAbsent:
            return

    # --- bulk, for the uploads below ---

    def put_whole(self, name: str, data: bytes) -> None:
        self._ask(name, lambda: obstore.put_async(self._once, name, data, use_multipart=False), len(data))

    def open_writer(self, name: str, chunk_bytes: int) -> Any:
        return obstore.open_writer_async(
            self._again, name, buffer_size=chunk_bytes, max_concurrency=PARTS_AT_ONCE
        )

    def feed(self, name: str, make: Callable[[], Awaitable[T]], n_bytes: int) -> T:
        return self._ask(name, make, n_bytes, repeat=False)

    # --- asking ---

    def _ask(self, name: str, make: Callable[[], Awaitable[T]], n_bytes: int = 0, repeat: bool = True) -> T:
        """The answer to the request `make` begins, by the deadline of `n_bytes`; asked again where that may help."""
        allowed_s = self._config.deadline_s + n_bytes / self._config.bytes_per_s_min
        end_ns, pause_s = self._platform.boot_ns() + int(allowed_s * NS), RETRY_S_MIN
        while True:
            left_s = max(0.001, (end_ns - self._platform.boot_ns()) / NS)
            try:
                return answer(make, left_s)
            except (refused.BaseError, OSError, ValueError) as error:
                failure = self._explain(error, name, allowed_s)
                if not repeat or not _may_pass(failure) or (end_ns - self._platform.boot_ns()) / NS <= pause_s:
                    raise failure from error
            self._platform.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def _explain(self, error: Exception, name: str, allowed_s: float) -> PacktrainError:
        """What a client's exception means, by what the store itself says."""
        where, text = f"{self.url} {name}".rstrip(), _message(error)
        code, status = _found(_CODE, text), int(_found(_STATUS, text) or 0)
        if isinstance(error, TimeoutError):
            return _gone(f"no answer in {allowed_s:.1f} s", where)
        if isinstance(error, FileNotFoundError):
            return _missing(code, text, where)
        if isinstance(error, refused.AlreadyExistsError) and code != "ConditionalRequestConflict":
            return NameTaken("this name is taken", where=where, fix="choose another name")
        if "non-partial response" in text:
            return _NoRange(text, where=where)
        if status == 416 or "StartTooLarge" in str(error):
            return _BeyondTheEnd(text, where=where)
        if code == "NoSuchBucket" or (_is_final(error, status) and code not in DAMAGED_ON_THE_WAY):
            return StoreRefused(
                f"the store refuses: {text}", where=where,
                fix="see the credentials, the rights of their owner, the name of the bucket, endpoint and region",
            )
        return _gone(text, where)


class _BeyondTheEnd(StoreRefused):
    """A range that begins behind the last byte."""


class _NoRange(StoreRefused):
    """A range was asked for, and the answer is not one."""


class _NotSaid(StoreUnreachable):
    """An absence without a word about what is absent: a proxy, a HEAD."""


def _may_pass(failure: PacktrainError) -> bool:
    return isinstance(failure, StoreUnreachable) and not isinstance(failure, _NotSaid)


def _missing(code: str, text: str, where: str) -> PacktrainError:
    if code in ABSENT or "No data in memory" in text:
        return NameAbsent("there is no such name", where=where, fix="see what is there with `packtrain ckpt ls`")
    if code:
        return StoreRefused(f"the store refuses: {code}", where=where, fix="see the bucket's name and the endpoint")
    return _NotSaid(
        f"something is not there, and the answer does not say what: {text}", where=where,
        fix="see that endpoint and bucket are right, and what stands between",
    )


def _is_final(error: Exception, status: int) -> bool:
    """Asking again gives the same: the client's fault or the caller's rights."""
    if isinstance(
        error, refused.PermissionDeniedError | refused.UnauthenticatedError | refused.NotSupportedError
        | refused.InvalidPathError | ValueError,
    ):
        return True
    redirect = "incorrectly configured region" in str(error)
    return redirect or status == 501 or (400 <= status < 500 and status not in _PASSING and status != 409)


def _gone(what: str, where: str) -> StoreUnreachable:
    return StoreUnreachable(
        what, where=where, fix="see that the store is up and the network lets through; then try again"
    )


def _message(error: Exception) -> str:
    """On one line, without its debugging tail, and without the queries of URLs: they can carry signatures."""
    text = str(error).partition("\n\nDebug source")[0] or type(error).__name__
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", " ".join(text.split()))[:600]


def _found(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


# --- waiting for an answer ---------------------------------------------------------------------------


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop, in a thread that ends before the interpreter does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="objects", daemon=True)
    thread.start()
    atexit.register(_end, loop, thread)
    return loop


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel what is under way and stop. A thread that the interpreter's end finds inside the client's code, or one of
    the client's that wants the interpreter then, aborts the whole process (4 of 150 short programs, obstore 0.12.1)."""

    async def drain() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=END_S)

    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(drain(), loop).result(2 * END_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(END_S)
    wait_for_threads(client_threads)


def wait_for_threads(look: Callable[[], list[list[str]]], looks_max: int = round(END_S / QUIET_S)) -> None:
    """Until those of the client have handed over, or let go of, what they had: all asleep, and none woke between two
    looks, each of which gives what the kernel says of every one."""
    before: list[list[str]] = []
    for _ in range(looks_max):
        seen = look()
        if seen == before and not any("State:\tR (running)" in one for one in seen):
            return
        before = seen
        threading.Event().wait(QUIET_S)


def client_threads() -> list[list[str]]:
    """Of each of the client's what the kernel says: its name, its state, how often it slept and was made to wait."""
    found = []
    for task in sorted(os.listdir("/proc/self/task")):
        with suppress(OSError), open(f"/proc/self/task/{task}/status") as file:
            status = [line for line in file.read().splitlines() if line.startswith(("Name", "State")) or "ctxt" in line]
            if status and status[0].startswith(f"Name:\t{CLIENT_THREADS}"):  # nothing: it ends just now
                found.append([task, *status])
    return found


def answer(make: Callable[[], Awaitable[T]], seconds: float) -> T:
    """What `make()` gives when awaited; TimeoutError after `seconds`, and then the request is cancelled."""

    async def bounded() -> T:
        return await asyncio.wait_for(make(), seconds)

    future = asyncio.run_coroutine_threadsafe(bounded(), _event_loop())
    try:
        while not future.done():
            wait([future], LOOK_S)  # in turns: a Ctrl-C that finds this thread falling asleep is seen at its next look
        return future.result()
    except CancelledError:  # by `_end`: the process is over, and this thread, a daemon, with it
        threading.Event().wait()
        raise
    finally:
        del future  # it holds the error, whose traceback holds this frame: the connection would outlive its request


# --- uploads -----------------------------------------------------------------------------------------


class _OnePut(Upload):
    """An object of one chunk: one request, which is all or nothing."""

    in_order, shows = True, False

    def __init__(self, store: ObjectStore, plan: Plan) -> None:
        self._store, self._plan = store, plan
        self._data = b""

    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        return False

    def put(self, index: int, data: bytes) -> int:
        self._data = data
        return 1

    def finish(self, replace: bool) -> None:
        if not replace:
            require_free(self._store, self._plan.name)
        self._store.put_whole(self._plan.name, self._data)


class _Stream(Upload):
    """Chunks one after the other into the client's own multipart upload, which cannot be taken up again later."""

    in_order, shows = True, False

    def __init__(self, store: ObjectStore, plan: Plan) -> None:
        self._store, self._plan = store, plan
        self._writer: Any = None

    def has(self, index: int, is_good: Callable[[bytes], bool]) -> bool:
        return False

    def put(self, index: int, data: bytes) -> int:
        if index == 0:
            self._writer = self._store.open_writer(self._plan.name, self._plan.chunk_bytes)
        self._store.feed(self._plan.name, lambda: self._writer.write(data), PARTS_AT_ONCE * len(data))
        return 1

    def finish(self, replace: bool) -> None:
        if not replace:
            require_free(self._store, self._plan.name)
        in_flight = PARTS_AT_ONCE * self._plan.chunk_bytes
        self._store.feed(self._plan.name, lambda: self._writer.close(), in_flight)


# --- opening -----------------------------------------------------------------------------------------


def open_objects(platform: Platform, config: StoreConfig) -> Store:
    """Raises BadValue for a URL or a reference that makes no sense. Nothing is asked of the store yet."""
    match = _URL.fullmatch(config.url)
    if match is None or (match[1] != "memory" and not match[2]):
        raise BadValue(
            "this is no address of a store", where=config.url.partition("?")[0].rpartition("@")[2],
            fix="write a path, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; no credentials in it",
        )
    kind, bucket, prefix = match.groups()
    if kind == "memory":
        memory = clients.MemoryStore()
        return ObjectStore(platform, config, memory, memory)
    make = _client(kind, bucket, prefix.strip("/"), platform, config)
    parts = open_bucket(platform, config, bucket, prefix.strip("/")) if kind == "s3" else None
    return ObjectStore(platform, config, make(0), make(REPEATS_MAX), parts)


def _client(
    kind: str, bucket: str, prefix: str, platform: Platform, config: StoreConfig
) -> Callable[[int], Any]:
    """A client for so many repeats of a request."""
    make = {"s3": clients.S3Store, "gs": clients.GCSStore, "az": clients.AzureStore}[kind]
    secret, key_id = secret_of(platform, config.secret), secret_of(platform, config.key_id)
    given = {
        "s3": {"access_key_id": key_id, "secret_access_key": secret, "region": config.region,
               "endpoint": config.endpoint},
        "gs": {"service_account_key": secret, "base_url": config.endpoint},
        "az": {"account_name": key_id, "account_key": secret, "endpoint": config.endpoint},
    }[kind]
    options = {name: value for name, value in given.items() if value}
    longest = timedelta(seconds=config.deadline_s + 3600)  # ours is always the shorter one

    def client(repeats: int) -> Any:
        retries = {"max_retries": repeats, "retry_timeout": timedelta(seconds=config.deadline_s)}
        http: dict[str, Any] = {"timeout": longest, "connect_timeout": timedelta(seconds=config.deadline_s)}
        if config.endpoint.startswith("http://"):
            http["allow_http"] = True
        try:
            return make(bucket, prefix=prefix or None, client_options=http, retry_config=retries, **options)
        except (refused.BaseError, ValueError) as error:
            raise BadValue(
                f"this store cannot be opened: {_message(error)}", where=config.url,
                fix="give key_id and secret as env:NAME or file:PATH, or neither; see endpoint and region",
            ) from None

    return client
