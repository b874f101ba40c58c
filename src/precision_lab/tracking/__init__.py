"""W&B: a mirror of what a run folder holds, filled while it runs or later, and the way back to a comparison. No torch.

Local files are the truth. Nothing here stops a run, or loses what a folder holds.
"""
