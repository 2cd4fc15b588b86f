"""Fully sharded data parallelism (ZeRO-3, torch's ``fully_shard``): which modules are its units, and how a pipeline's
schedule uses them. It knows no Lightning."""
