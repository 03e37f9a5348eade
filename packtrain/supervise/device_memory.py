"""Before an agent says that it is ready: the memory of its devices is free, or it is told who has it.

What a killed worker held on a device is given back when the driver has put it away, seconds after the process is gone;
an attempt that begins before that dies for want of memory, and its node is blamed. So a new agent, which has ended what
others left, waits `FREE_S_MAX` at most. After that it goes on, for a node may be all there is, and tells: the
coordinator chooses the node last. No tool, no device, or an answer that says nothing: nothing is waited for. Nor is it
where a device is listed without its figure, or one that decides: that is told, and nothing follows from it.

Asked is `nvidia-smi` (monitor/devices.py); other vendors' devices are not. Tried with a stand-in for that tool, not run
on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from packtrain.core.platform import Platform
from packtrain.core.units import NS
from packtrain.monitor.devices import FREE_MIB_MAX, HELD, UNKNOWN, Device, Holder, devices, holders
from packtrain.supervise.job import Job
from packtrain.supervise.messages import HardwareSeen
from packtrain.supervise.place import Place
from packtrain.supervise.processes import Processes

TOOL = "nvidia-smi"
QUERY_DEVICES, QUERY_HOLDERS = "--query-gpu=uuid,memory.used", "--query-compute-apps=pid,gpu_uuid,used_memory"
FORMAT = "--format=csv,noheader,nounits"
ASK_S_MAX = 20.0
"""A driver that is loaded for each question takes several seconds; one that takes longer than this hangs."""
FREE_S_MAX, AGAIN_S = 60.0, 1.0
ANSWER_BYTES_MAX = 1 << 20
NAMED_MAX = 8


@dataclass(frozen=True)
class Answer:
    """What the tool printed. `hung`: it did not end; `text` empty: it said nothing that counts."""

    text: str = ""
    hung: bool = False


def wait_until_free(
    platform: Platform, processes: Processes, place: Place, job: Job, env: Mapping[str, str]
) -> HardwareSeen | None:
    """None: it is free, or nobody can say. Otherwise what is to be told. `env`: what the tool is started with."""
    tool, chosen = _tool(platform, env), _chosen(job)
    if not tool or chosen is None:
        return None
    end_ns, told = platform.boot_ns() + round(FREE_S_MAX * NS), False
    while True:
        of_devices = _ask(platform, place, env, tool, QUERY_DEVICES, *chosen)
        of_holders = _ask(platform, place, env, tool, QUERY_HOLDERS) if of_devices.text else Answer()
        if of_devices.hung or of_holders.hung:
            return HardwareSeen(verdict=HELD, what=f"{TOOL} does not answer", where=place.host,
                                text=f"not within {ASK_S_MAX:g} s: its driver may hang")
        look = _Look(platform, processes, place, devices(of_devices.text), holders(of_holders.text))
        if not look.busy:
            return _untold(look.unknown)
        if platform.boot_ns() >= end_ns:
            return HardwareSeen(
                verdict=HELD, what="device memory is not free", where=_names(look.busy), text=look.words()
            )
        if not told:
            print(f"waits until device memory is free, at most {FREE_S_MAX:g} s: {look.words()}", flush=True)
        told = True
        platform.sleep(AGAIN_S)


def _untold(unknown: Sequence[Device]) -> HardwareSeen | None:
    text = f"{TOOL} does not tell how much is in use there, or how much of it other nodes of this run have"
    return HardwareSeen(
        verdict=UNKNOWN, what="device memory may not be free", where=_names(unknown), text=text
    ) if unknown else None


def _names(found: Sequence[Device]) -> str:
    return ", ".join(device.uuid for device in found[:NAMED_MAX])


def _chosen(job: Job) -> tuple[str, ...] | None:
    """What names the devices that workers may use, for the tool; None: they use none."""
    visible = job.env.get("CUDA_VISIBLE_DEVICES")
    if (not job.plain and job.env.get("JAX_PLATFORMS") == "cpu") or (visible is not None and visible[:2] in ("", "-1")):
        return None
    return (f"--id={visible}",) if visible is not None else ()


def _tool(platform: Platform, env: Mapping[str, str]) -> str:
    """Its path; empty: this machine has none, and no process is started to find that out."""
    with suppress(OSError):
        paths = (f"{folder}/{TOOL}" for folder in env.get("PATH", "").split(":") if folder)
        return next((path for path in paths if platform.exists(path)), "")
    return ""


def _ask(platform: Platform, place: Place, env: Mapping[str, str], tool: str, *words: str) -> Answer:
    log = f"{place.home}/{TOOL}.log"
    with suppress(OSError):
        platform.write_replacing(log, b"", durable=False)
        process = platform.spawn((tool, *words, FORMAT), env, log_path=log)
        status = process.wait(ASK_S_MAX)
        if status is None:
            process.send_signal(9)  # and not waited for: inside a driver that hangs it does not end
            return Answer(hung=True)
        said = platform.read(log, 0, ANSWER_BYTES_MAX).decode(errors="replace")
        if status == 0:
            return Answer(said)
        print(f"{TOOL} ended with {status}: {said.strip()[:200]!r}; device memory is not waited for", flush=True)
    return Answer()


class _Look:
    """At one moment."""

    def __init__(
        self, platform: Platform, processes: Processes, place: Place, found: list[Device], held: list[Holder]
    ) -> None:
        self._platform, self._place = platform, place
        self._marks = {one.pid: processes.mark(one.pid) for one in held}
        self._held = held
        unaccounted = [(device, self._unaccounted(device)) for device in found]
        self.busy = [device for device, mib in unaccounted if mib is not None and mib > FREE_MIB_MAX]
        self.unknown = [device for device, mib in unaccounted if mib is None]

    def _unaccounted(self, device: Device) -> int | None:
        """MiB in use on it, less what workers of other nodes of this run, on the same machine, are using. None: that
        may be much or nothing."""
        others = [one.used_mib for one in self._held if one.uuid == device.uuid and self._is_other_node(one.pid)]
        if device.used_mib is None:
            return None
        mib = device.used_mib - sum(one for one in others if one is not None)
        return None if None in others and mib > FREE_MIB_MAX else mib

    def _is_other_node(self, pid: int) -> bool:
        run, node, *_ = *self._marks[pid].split("/"), ""
        return run == self._place.run and node != self._place.node

    def words(self) -> str:
        return "; ".join(self._of(device) for device in self.busy[:NAMED_MAX])

    def _of(self, device: Device) -> str:
        by = [one for one in self._held if one.uuid == device.uuid and not self._is_other_node(one.pid)]
        who = ", ".join(self._named(one) for one in by[:NAMED_MAX]) or "nobody who can be seen from here"
        return f"{device.uuid} has {device.used_mib} MiB in use, by {who}"

    def _named(self, one: Holder) -> str:
        name = ""
        with suppress(OSError):
            name = self._platform.read(f"/proc/{one.pid}/comm", 0, 64).decode(errors="replace").strip()
        mark = self._marks[one.pid]
        whose = "not of packtrain" if not mark else "of another run"
        if mark.startswith(f"{self._place.run}/{self._place.node}/"):
            whose = "left by this node"
        mib = "?" if one.used_mib is None else one.used_mib
        return f"process {one.pid} ({name or '?'}, {mib} MiB, {whose})"
