"""Which operation or module a precision hurts, the smallest set that heals it in float32, and the proof."""
