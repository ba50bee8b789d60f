"""llama.cpp, through llama-cpp-python: proposers as its draft model."""
