"""A proposer for vLLM's own ``custom_class``, without specplug in between."""


class Raising:
    """Fails like a matcher that meets a prompt shorter than its window."""

    def __init__(self, vllm_config): ...

    def load_model(self, target_model): ...

    def propose(self, *arguments, **more):
        raise IndexError("the window is longer than the prompt")
