"""TensorRT-LLM: proposers behind the engine's user-provided drafter."""
