"""Another device's mixed precision, carried out on a CPU: its autocast policy and its rounding."""
