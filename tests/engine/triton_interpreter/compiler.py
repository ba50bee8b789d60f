from triton.backends.compiler import BaseBackend


class Compiler(BaseBackend):
    """Compiles nothing: the interpreter does not ask."""

    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language=None):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        return {}
