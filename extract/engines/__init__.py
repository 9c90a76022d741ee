"""Engines that run the verifier in this process, by the name that `server.engine` gives; see also `sglang`, `vllm`."""

from extract.engines.base import Captured, Engine, EngineError, Generated
from extract.engines.inprocess import InProcessEngine

__all__ = ["ENGINES", "Captured", "Engine", "EngineError", "Generated", "InProcessEngine"]

ENGINES = {"inprocess": InProcessEngine}
