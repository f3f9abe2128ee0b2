"""`soloist serve` that gets into trouble, as `python -m server.troubled serve TROUBLE …`."""

import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

from server.running import Scripted, etude, scripted
from soloist.cli import main
from soloist.engine import Engine, EngineConfig
from soloist.engine.executor import Outcome, Picked
from soloist.engine.kernel import KernelModel
from soloist.engine.request import Request
from soloist.errors import KernelStuck
from soloist.megakernel.decoder import Decoder
from soloist.megakernel.header import Build
from soloist.server.metrics import Metrics

FOREVER_S = 10**6
LOAD = Engine.load  # before it is patched


class Hanging(Scripted):
    """After ten tokens it is in a call that does not return."""

    def rounds(self, running: Sequence[Request], most: int) -> Generator[list[Outcome], None, None]:
        for number, outcomes in enumerate(super().rounds(running, most)):
            yield outcomes
            if number == 10:
                time.sleep(FOREVER_S)


class StuckOnce(Scripted):
    """Its kernel gets stuck, unless it did so in an earlier life, of which a file tells."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def read(self, running: Request) -> Picked | None:
        if not self.file.exists():
            self.file.touch()
            raise KernelStuck("block 3", "the residual stream", "nothing")
        return super().read(running)


def broken(engine: Engine) -> Engine:
    """Its next decode step waits for a block that never publishes, for a tenth of a second."""
    assert isinstance(engine.model, KernelModel)
    assert isinstance(engine.model.decoder, Decoder)
    engine.model.decoder.load(Build(silent_block=3, stuck_ns=10**8))
    return engine


def spin(_: Metrics) -> bytes:
    while True:
        pass


def load(asked: EngineConfig) -> Engine:
    match asked.model.split(":"):
        case ["loading"]:
            time.sleep(FOREVER_S)
        case ["hanging"]:
            return scripted(Hanging())
        case ["spinning"]:
            Metrics.text = spin
        case ["stuck-once", file]:
            return scripted(StuckOnce(Path(file)))
        case ["stuck-kernel-once", file]:
            engine = LOAD(replace(asked, model="etude"))
            if Path(file).exists():
                return engine
            Path(file).touch()
            return broken(engine)
        case ["quick"]:
            return scripted(Scripted())
    return scripted(Scripted(tokens_per_s=200))


def patched(_: type, asked: EngineConfig, *__: object) -> Engine:
    return load(asked)


if __name__ == "__main__":
    etude()
    Engine.load = classmethod(patched)
    main(sys.argv[1:])
