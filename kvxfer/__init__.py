"""kvxfer: a sidecar that moves KV caches and state snapshots between LLM engines."""

__version__ = "0.1.0"
