"""Runtime of vegas-tune: engines, KV selection policies, profiles."""

__version__ = "0.1.0"
