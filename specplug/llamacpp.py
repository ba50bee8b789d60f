"""What llama-cpp-python's ``Llama`` is given: ``Llama(path, draft_model=draft("suffix"))``."""

from specplug.backends.llamacpp.adapter import draft

__all__ = ["draft"]
