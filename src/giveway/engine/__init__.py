"""The loop around the core: commands in, plan, execute, commit, events out. No tensors."""
