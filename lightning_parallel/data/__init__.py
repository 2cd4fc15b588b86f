"""Data parallelism. Knows no Lightning.

Replicas in one process, a thread each: `scatter`, `replicate`, `threads`, `graphs`, `gather`, put together in
`parallel`; `metrics` for what they share. Replicas in processes: `averaging`, `units`.
"""
