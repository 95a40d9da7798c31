"""What can be counted and found in a recording without drawing it: imports nothing of ``view``."""
