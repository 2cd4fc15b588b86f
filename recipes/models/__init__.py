"""Example models: ordinary LightningModules in plain PyTorch, with nothing about parallelism in them."""
