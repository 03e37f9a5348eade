"""A worker with no framework in it: counts, saves through the real carrier, obeys, and fails the way it is told to.

`TOY` in the environment is JSON: steps, save_every, wait (until each save is published), remember (copy each step into
memory), step_s, deadline_s, losses (step -> what it is said to be on held-out text), and under `fail` per attempt
number what happens at which step:
{"2": [7, "kill"]}. How: "kill" (SIGKILL itself), "stop" (SIGSTOP: silent), "crash" (traceback), "deaf" (obeys nothing),
"child" (leaves a child behind and exits 1), "flip" (damages what it holds in memory, then SIGKILL), "back" (asks for a
rollback), or an exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np

from packtrain.checkpoint.commits import CommitLog
from packtrain.checkpoint.format import LocalTensor, TensorSpec
from packtrain.checkpoint.reader import restoring
from packtrain.checkpoint.saver import Saver
from packtrain.checkpoint.slots import choose_buffer_folder, memory_folder
from packtrain.core import contract
from packtrain.core.breaking import Faults
from packtrain.core.contract import Word
from packtrain.core.errors import CheckpointDamaged, GuardRollback, SaveFailed, SlotDamaged, WrongModel
from packtrain.core.journal import Journal
from packtrain.core.platform import LocalPlatform
from packtrain.core.records import ErrorSeen, EvalDone, PhaseTotals, SaveDone, StepDone, TrainingDone
from tests.supervise.noted import begun

SPEC = TensorSpec("state", "int64", (2,), ("pair",))
TOY = json.loads(os.environ.get("TOY", "{}"))
DEADLINE_S = TOY.get("deadline_s", 20.0)


def advance(state: np.ndarray) -> np.ndarray:
    """One step: the count, and a value that depends on every step before it."""
    step, value = int(state[0]) + 1, int(state[1])
    return np.array([step, (value * 6364136223846793005 + step) % (1 << 62)], np.int64)


class Toy:
    def __init__(self) -> None:
        self.platform = LocalPlatform()
        self.place = contract.Place.from_env(os.environ)
        print(f"{self.place.failures} attempts failed in {self.place.node_minutes} node-minutes", flush=True)
        self.beats = contract.Beats(self.place.socket, self.place.attempt, self.place.rank)
        self.control = contract.Control(self.place.control, sigterm=True)
        self.faults = Faults(self.place.faults)
        self.journal = Journal(self.platform, f"{self.place.run}/journal")
        self.at, self.how = TOY.get("fail", {}).get(str(self.place.attempt), [None, ""])
        self.state = self.restored()
        begun = CommitLog(self.platform, f"{self.place.run}/commits").begun() if TOY.get("remember") else None
        beside = f"{self.place.run}/buffers"
        self.saver = Saver(
            self.platform,
            choose_buffer_folder(self.platform, self.place.run, 4096, "r00000", begun) if begun else beside,
            contract.CarrierClient(self.place.carrier), self.place.attempt, "r00000", DEADLINE_S, begun,
        )
        self.published = -1

    def restored(self) -> np.ndarray:
        restore = contract.restore(os.environ)
        if restore is None:
            return np.zeros(2, np.int64)
        try:
            with restoring(self.platform, self.place.run, restore.commit, restore.digest) as checkpoint:
                return checkpoint.read("state")
        except (CheckpointDamaged, SlotDamaged) as error:
            self.journal.write(ErrorSeen(severity="error", **error.as_dict()), durable=True)
            sys.exit(error.exit_code)

    def main(self) -> int:
        if not contract.wait_for_go(self.place, self.control, {"step": str(self.state[0])}):
            return self.leave(contract.EXIT_AGAIN)
        self.beats.enter("step", int(self.state[0]))
        if TOY.get("losses"):
            self.journal.write(begun(self.place.attempt)[1])
        if not contract.wait_for_go(self.place, self.control, {"step": str(self.state[0])}):
            return contract.EXIT_AGAIN
        while self.state[0] < TOY.get("steps", 10):
            self.fail_as_told()
            self.faults.step()
            time.sleep(TOY.get("step_s", 0.0))
            self.state = advance(self.state)
            self.beats.step_done(int(self.state[0]))
            self.journal.write(StepDone(
                step=int(self.state[0]), loss=1.0, bits_per_byte=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1,
                seconds=0.01, mfu=0.5,
            ))
            order = self.control.poll() if self.how != "deaf" else None
            if order is not None and order.word == Word.STOP:
                return self.leave(contract.EXIT_AGAIN)
            if TOY.get("remember"):
                self.saver.remember(int(self.state[0]), *self.image())
            self.evaluate()
            if self.state[0] % TOY.get("save_every", 1 << 30) == 0:
                self.save_surely() if TOY.get("wait") else self.save()
        return self.leave(contract.EXIT_DONE)

    def evaluate(self) -> None:
        loss = TOY.get("losses", {}).get(str(self.state[0]))
        if loss is not None:
            done = EvalDone(step=int(self.state[0]), store="held_out", loss=loss, bits_per_byte=loss, tokens=100)
            self.journal.write(done, durable=True)

    def save(self) -> None:
        self.saver.save(int(self.state[0]), *self.image())
        self.write_down(self.saver.poll())

    def image(self) -> tuple[list[LocalTensor], dict]:
        return [LocalTensor(SPEC, ((0, 2),), self.state)], {"data_index": int(self.state[0])}

    def save_surely(self) -> None:
        """Until this step is published; a carrier may be lost on the way. Raises SaveFailed at the deadline."""
        end_ns = self.platform.boot_ns() + int(DEADLINE_S * 1e9)
        with self.beats.during("save"):
            while self.published != self.state[0]:
                self.write_down(self.saver.wait_all(DEADLINE_S))
                self.save()
                self.write_down(self.saver.wait_all(DEADLINE_S))
                self.platform.sleep(0.01)
                if self.platform.boot_ns() > end_ns and self.published != self.state[0]:
                    raise SaveFailed("the last save found no home", where="the toy", fix="make room")

    def write_down(self, results: list) -> None:
        for result in results:
            self.published = result.step if result.commit else self.published
            self.journal.write(SaveDone(
                step=result.step, commit=result.commit, bytes=result.bytes, stall_s=result.stall_s,
                write_s=result.write_s, error=(result.error or {}).get("name", ""),
            ))
        self.journal.flush()

    def leave(self, code: int) -> int:
        try:
            self.save_surely()
        except SaveFailed as error:
            self.journal.write(ErrorSeen(severity="error", **error.as_dict()), durable=True)
            return error.exit_code
        self.saver.close()
        self.beats.close()
        self.journal.write(PhaseTotals(attempt=self.place.attempt, rank=0, ns=self.beats.totals()))
        if code == contract.EXIT_DONE and TOY.get("losses"):
            done = TrainingDone(step=int(self.state[0]), updates_skipped=0, attempt=self.place.attempt)
            self.journal.write(done, durable=True)
        self.journal.close()
        return code

    def fail_as_told(self) -> None:
        if self.at is None or self.state[0] < self.at or self.how == "deaf":
            return
        match self.how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "flip":
                self.flip()
                os.kill(os.getpid(), signal.SIGKILL)
            case "back":
                back = GuardRollback("planted", where="the toy", fix="plant nothing")
                self.journal.write(ErrorSeen(severity="error", **back.as_dict()), durable=True)
                sys.exit(back.exit_code)
            case "crash":
                raise ValueError("planted")
            case "child":
                subprocess.Popen(["sleep", "1000"])
                os._exit(1)
            case "78":
                error = WrongModel("planted", where="the toy", fix="plant nothing")
                self.journal.write(ErrorSeen(severity="error", **error.as_dict()), durable=True)
        sys.exit(int(self.how))


    def flip(self) -> None:
        """A bit of each image this attempt holds, the last one's record written first."""
        folder = memory_folder(self.place.run, self.place.node)
        self.saver._wait_for_record()
        for name in os.listdir(folder):
            if not name.endswith(".json"):
                with open(f"{folder}/{name}", "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    last = file.read(1)[0]
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([last ^ 1]))


if __name__ == "__main__":
    sys.exit(Toy().main())
