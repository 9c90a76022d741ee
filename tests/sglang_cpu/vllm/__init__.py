"""Stands in for vLLM, of which SGLang imports one name on platforms without CUDA, and never calls it."""
