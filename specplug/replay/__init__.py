"""``specplug replay``: what proposers would have gained on recorded text, without any model."""
