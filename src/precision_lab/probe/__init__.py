"""Instruments that look at one step: which dtype each operation runs in, which bytes are kept.

They are for outside the clock and leave no trace: losses are bit-equal with and without them.
"""
