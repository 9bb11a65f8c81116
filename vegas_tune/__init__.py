"""Tuner of vegas-tune: finds, proves and applies a speculation profile."""
