"""`soloist serve` that gets into trouble, as `python -m server.troubled serve TROUBLE …`."""

import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from server.running import Scripted, etude, scripted
from soloist.cli import main
from soloist.engine import Engine, EngineConfig
from soloist.engine.executor import Outcome, Picked, Running
from soloist.errors import KernelStuck
from soloist.server.metrics import Metrics

FOREVER_S = 10**6


class Hanging(Scripted):
    """After ten tokens it is in a call that does not return."""

    def rounds(self, running: Sequence[Running], most: int) -> Generator[list[Outcome], None, None]:
        for number, outcomes in enumerate(super().rounds(running, most)):
            yield outcomes
            if number == 10:
                time.sleep(FOREVER_S)


class StuckOnce(Scripted):
    """Its kernel gets stuck, unless it did so in an earlier life, of which a file tells."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def read(self, running: Running) -> Picked | None:
        if not self.file.exists():
            self.file.touch()
            raise KernelStuck("block 3", "the residual stream", "nothing")
        return super().read(running)


def spin(_: Metrics) -> bytes:
    while True:
        pass


def load(name: str) -> Engine:
    match name.split(":"):
        case ["loading"]:
            time.sleep(FOREVER_S)
        case ["hanging"]:
            return scripted(Hanging())
        case ["spinning"]:
            Metrics.text = spin
        case ["stuck-once", file]:
            return scripted(StuckOnce(Path(file)))
        case ["quick"]:
            return scripted(Scripted())
    return scripted(Scripted(tokens_per_s=200))


def patched(_: type, asked: EngineConfig, *__: object) -> Engine:
    return load(asked.model)


if __name__ == "__main__":
    etude()
    Engine.load = classmethod(patched)
    main(sys.argv[1:])
