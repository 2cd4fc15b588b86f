"""What ``recipes.generate`` and its workers agree on. Imports nothing."""

TEXTS = "texts.jsonl"  # in the folder of a generation: a line for each prompt
CHOICE = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")  # settings of recipes.models.generation.Generation
SETTINGS = (*CHOICE, "chat", "batch_size")
