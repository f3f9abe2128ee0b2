"""One request from text to text: load a model, generate, tell what happened and how fast."""

from soloist.engine.config import EngineConfig
from soloist.engine.engine import Engine
from soloist.engine.events import Cancel, Chunk, Completion, Timings

__all__ = ["Cancel", "Chunk", "Completion", "Engine", "EngineConfig", "Timings"]
