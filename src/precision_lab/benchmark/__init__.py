"""Arms timed in alternation: blocks of real training steps, in one process or in processes that take turns."""
