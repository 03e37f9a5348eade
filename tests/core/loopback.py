"""A tiny HTTP server that behaves as badly as it is told: what a store of the tests answers, request by request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Request = tuple[str, str]
"""(method, path with query)."""
Behaviour = Callable[[socket.socket, Request, int], bool]
"""Given the connection, the request and its number from 1; False: close the connection."""


def reply(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """A response; `length` lies about the body's."""
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(head).encode() + body


def error(status: str, code: str) -> bytes:
    """As S3 writes it, with its prolog and on two lines."""
    prolog = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return reply(status, f"{prolog}<Error><Code>{code}</Code><Message>words</Message></Error>".encode())


def always(response: bytes) -> Behaviour:
    def behave(connection: socket.socket, request: Request, number: int) -> bool:
        connection.sendall(response if request[0] != "HEAD" else response.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        return True

    return behave


def hang(connection: socket.socket, request: Request, number: int) -> bool:
    """Never answers; returns when the client has gone."""
    while connection.recv(65536):
        continue
    return False


class BadServer:
    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.requests: list[Request] = []
        self.left = threading.Event()
        """A client closed a connection it was waiting on."""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                while (request := _read_request(connection)) is not None:
                    self.requests.append(request)
                    if not self._behave(connection, request, len(self.requests)):
                        break
        except OSError:
            pass
        self.left.set()

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()


@contextmanager
def bad_server(behave: Behaviour) -> Iterator[BadServer]:
    server = BadServer(behave)
    try:
        yield server
    finally:
        server.close()


def _read_request(connection: socket.socket) -> Request | None:
    """Method and path, once headers and body have arrived; None when the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return None
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    sizes = [int(line.partition(":")[2]) for line in lines if line.lower().startswith("content-length:")]
    while sizes and len(body) < sizes[0]:
        body += connection.recv(65536)
    method, path, _ = lines[0].split(" ")
    return method, path
