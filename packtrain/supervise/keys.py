"""Who may speak on the link of a run: a pair of keys for each node, and the folder of those that are allowed.

    <home>/key.secret         0600, of this node or of the coordinator; it never leaves the machine
    <home>/allowed/<node>     in the coordinator's home: the public key of each node that may join, or `revoked`
    <home>/address            where the coordinator listens, its public key and its term; replaced by each coordinator

Keys are those of CURVE (curvezmq.org), 40 characters of Z85.
"""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
import zmq

from packtrain.core.errors import BadValue, RunUnusable
from packtrain.core.platform import Platform

SECRET, ALLOWED, ADDRESS = "key.secret", "allowed", "address"
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens: `tcp://host:port`, and its public key."""

    address: str
    server_key: str
    term: int = 0


def make_keys(platform: Platform, home: str) -> str:
    """The public key of whoever lives in `home`; its pair is made where there is none. Raises RunUnusable, BadValue."""
    try:
        with suppress(FileExistsError):
            platform.write_new(f"{home}/{SECRET}", zmq.curve_keypair()[1] + b"\n", 0o600)
    except OSError as error:
        raise _unusable("no keys can be made", error, home) from error
    return read_keys(platform, home)[0]


def read_keys(platform: Platform, home: str) -> tuple[str, str]:
    """(public, secret). Raises RunUnusable, BadValue."""
    path = f"{home}/{SECRET}"
    try:
        secret = _key(platform.read(path, 0, 64), path)
        return zmq.curve_public(secret.encode()).decode(), secret
    except OSError as error:
        raise _unusable("the key cannot be read", error, home) from error
    except zmq.ZMQError as error:
        raise _no_key(path) from error


def allow(platform: Platform, home: str, node: str, public: str) -> None:
    """From now on `node` may join the coordinator whose `home` this is. Raises BadValue, RunUnusable."""
    if not _NODE.fullmatch(node):
        raise BadValue(f"{node[:80]!r} cannot name a node", where="node", fix="use letters, digits, . _ and -")
    _key(public.encode(), f"key of {node}")
    try:
        platform.mkdir(f"{home}/{ALLOWED}", 0o700)
        platform.write_replacing(f"{home}/{ALLOWED}/{node}", public.encode() + b"\n")
    except OSError as error:
        raise _unusable("a node cannot be allowed", error, home) from error


def revoke(platform: Platform, home: str, node: str) -> None:
    """From now on what `node` says is dropped, until it is allowed again. Raises RunUnusable."""
    try:
        platform.write_replacing(f"{home}/{ALLOWED}/{node}", b"revoked\n")
    except OSError as error:
        raise _unusable("a node cannot be revoked", error, home) from error


def read_allowed(platform: Platform, home: str) -> dict[str, str]:
    """Public key -> node. What is no key is left out. Raises OSError."""
    found = {}
    for node in platform.listdir(f"{home}/{ALLOWED}"):
        with suppress(BadValue, FileNotFoundError):
            found[_key(platform.read(f"{home}/{ALLOWED}/{node}", 0, 64), node)] = node
    return {key: node for key, node in found.items() if _NODE.fullmatch(node)}


def write_address(platform: Platform, home: str, address: Address) -> None:
    """Raises RunUnusable."""
    try:
        platform.write_replacing(f"{home}/{ADDRESS}", msgspec.json.encode(address))
    except OSError as error:
        raise _unusable("the coordinator's address cannot be written", error, home) from error


def read_address(platform: Platform, path: str) -> Address | None:
    """None while there is none, or none that can be read."""
    try:
        return msgspec.json.decode(platform.read(path, 0, 4096), type=Address)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _key(data: bytes, where: str) -> str:
    text = data.decode("ascii", errors="replace").strip()
    if not _KEY.fullmatch(text):
        raise _no_key(where)
    return text


def _no_key(where: str) -> BadValue:
    return BadValue("this is no key of 40 characters", where=where, fix="delete the file and start the run again")


def _unusable(what: str, error: OSError, home: str) -> RunUnusable:
    return RunUnusable(
        f"{what}: {error.strerror or error}", where=home,
        fix="see that the folder is there, writable and not full; then start the run again",
    )
