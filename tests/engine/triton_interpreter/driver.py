from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    """Claims a CPU; the interpreter never asks it to launch anything."""

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty):
        return ty

    def get_benchmarker(self):
        raise NotImplementedError
