"""vLLM: proposers inside both of its model runners."""
