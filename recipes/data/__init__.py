"""Example data: LightningDataModules that need no download."""
