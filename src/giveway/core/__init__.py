"""Scheduling and KV bookkeeping over integers: standard library only, no clock, no randomness, no I/O."""
