"""``specplug bench`` and ``specplug tune``: what speculation is worth in the real engine."""
