"""``specplug demo``: what proposers are worth in a real engine, on this machine."""
