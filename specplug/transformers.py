"""What ``generate`` of Hugging Face transformers is given: ``custom_generate=generate``.

``model.generate(**inputs, custom_generate=specplug.transformers.generate, proposer="suffix",
num_speculative_tokens=8)``; more in docs/how-to/transformers.md.
"""

from specplug.backends.transformers.generation import generate

__all__ = ["generate"]
