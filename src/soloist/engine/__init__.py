"""From text to text: load a model, generate, tell what happened and how fast."""

from soloist.engine.config import EngineConfig
from soloist.engine.engine import Engine
from soloist.engine.events import Cancel, Chunk, Completion, Event, Failure, Scored, Timings
from soloist.engine.request import Request

__all__ = [
    "Cancel", "Chunk", "Completion", "Engine", "EngineConfig", "Event", "Failure", "Request",
    "Scored", "Timings",
]  # fmt: skip
