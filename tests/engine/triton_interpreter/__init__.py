"""A Triton backend without a device, so that the interpreter runs vLLM's kernels on a CPU.

For tests only, with ``TRITON_INTERPRET=1``. Installed for their processes by ``conftest.py``.
"""
