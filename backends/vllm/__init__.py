"""vLLM: proposers inside the V1 model runner, through its ``custom_class`` method."""
