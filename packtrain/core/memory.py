"""How much memory is left to this process: of the machine, of a memory file system, and of what a container may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from packtrain.core.platform import Platform
from packtrain.core.units import bytes_text

MOUNT = "/sys/fs/cgroup"
NO_LIMIT = 1 << 62
"""How cgroup v1 writes that there is none: the largest number of whole pages below 2**63."""


class Left(NamedTuple):
    """So many bytes, and what sets that bound, as in `2.0 GiB free in /dev/shm`."""

    bytes: int
    where: str


def left_for(platform: Platform, folder: str) -> Left:
    """For files in `folder`, a memory file system: the tightest of its own room, the machine's memory and the limits
    of the container. Raises OSError where the folder cannot be asked."""
    bounds = [Left(platform.free_bytes(folder), f"free in {folder}")]
    machine, container = machine_left(platform), container_left(platform)
    if machine is not None:
        bounds.append(Left(machine, "free in this machine's memory"))
    if container is not None:
        bounds.append(Left(container, "left of the container's memory limit"))
    return min(bounds)


class Budget(NamedTuple):
    """What images in a memory file system may take of what is left there."""

    left: Left
    share: float
    ours_bytes: int = 0
    """That lie there already and are counted among the images."""

    @property
    def bytes(self) -> float:
        return self.share * (self.left.bytes + self.ours_bytes)

    def lack(self, images: int, image_bytes: int, besides_bytes: int = 0) -> str:
        """Why so many do not fit beside others, in words; empty: they do."""
        if images * image_bytes + besides_bytes <= self.bytes:
            return ""
        share = "half" if self.share == 0.5 else f"{self.share:.0%}"
        besides = f" and {bytes_text(besides_bytes)} of others" if besides_bytes else ""
        whole = f"{bytes_text(self.bytes / self.share)} {self.left.where}"
        return f"{images} x {bytes_text(image_bytes)}{besides} is over {share} of the {whole}"


def budget_for(platform: Platform, folder: str, share: float, ours_bytes: int = 0) -> Budget:
    """For images in `folder`, a memory file system. Raises OSError where it cannot be asked."""
    return Budget(left_for(platform, folder), share, ours_bytes)


def machine_left(platform: Platform) -> int | None:
    """MemAvailable of /proc/meminfo; None where it does not say."""
    for line in _text(platform, "/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def container_left(platform: Platform) -> int | None:
    """What the memory limits of this process's cgroup and those around it leave; None: there is no limit.

    Cached file data that nobody uses counts as free: the kernel drops it before anything is refused.
    """
    left = [
        bytes_ for group, version in _groups(platform) if (bytes_ := _group_left(platform, group, version)) is not None
    ]
    return min(left, default=None)


def _groups(platform: Platform) -> Iterator[tuple[str, int]]:
    """Folders of the cgroups that may bound our memory, with the version of their files, inmost first."""
    roots = {2: MOUNT, 1: f"{MOUNT}/memory"}
    for line in _text(platform, "/proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1 if "memory" in controllers.split(",") else 0
        if version:
            at = path.rstrip("/")
            while at:
                yield f"{roots[version]}{at}", version
                at = at.rpartition("/")[0]
    yield from ((root, version) for version, root in roots.items())  # in a container its own cgroup lies here


def _group_left(platform: Platform, group: str, version: int) -> int | None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit, used = (_text(platform, f"{group}/{name}").strip() for name in names[:2])
    if not (limit.isdigit() and used.isdigit()) or int(limit) >= NO_LIMIT:
        return None
    unused = 0
    for line in _text(platform, f"{group}/memory.stat").splitlines():
        name, _, value = line.partition(" ")
        unused = int(value) if name == names[2] and value.isdigit() else unused
    return max(0, int(limit) - max(0, int(used) - unused))


def _text(platform: Platform, path: str) -> str:
    """Empty where there is no such file, or it may not be read."""
    try:
        return platform.read(path).decode(errors="replace")
    except OSError:
        return ""
