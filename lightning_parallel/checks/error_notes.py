"""Adds a note to errors that end training and don't say what they have to do with the layout."""

from __future__ import annotations

from lightning_parallel.ranks.layout import Layout

_OF_A_MICROBATCH = (
    "The step sees one microbatch at a time, whose longest sequence may be shorter than the batch's. Where a shape "
    "follows from lengths, take it from the batch's tensors (pad_packed_sequence(..., total_length=x.size(1))), or use "
    "microbatches=1."
)

_OF_A_PART = (
    "Each tensor rank has a part of a divided layer's parameters, and of what the layer computes. A copy of the layer "
    "that training_step doesn't call, such as an average of the weights for the validation, is whole. Where code "
    "combines a part with something whole (such an average, or a teacher's features that a hook has taken), give a "
    'plan without this layer, or plan="none". Lightning\'s EMAWeightAveraging works: it averages the parts.'
)

# By a strategy's axis and words of the error.
_NOTES = {
    ("pipeline", "'NoneType' object has no attribute"): (
        "Hooks run on every stage, where parameters of other stages have no gradient. If this is a hook that reads "
        "gradients, it has to skip parameters whose grad is None."
    ),
    ("pipeline", "'NoneType' object is not subscriptable"): (
        "What an evaluation step returns is on the last stage. If this is a callback's on_validation_batch_end or "
        "on_test_batch_end, it has to skip outputs that are None. What the step logs is on all stages."
    ),
    ("pipeline", "KeyError: "): (
        "What training_step returns beside the loss is on the last stage. If this is a callback's on_train_batch_end, "
        "it has to skip outputs that aren't there. Or log the value in training_step: logs are on all stages."
    ),
    ("pipeline", "Expected target size"): _OF_A_MICROBATCH,
    ("pipeline", "must match the size of tensor"): _OF_A_MICROBATCH,
    ("tensor", "must match the size of tensor"): _OF_A_PART,
    ("tensor", "size mismatch for"): _OF_A_PART,
    ("pipeline", "Expected more than 1 value per channel when training"): (
        "BatchNorm sees one microbatch at a time, and an epoch's last batch may leave a microbatch one sample. Use "
        "drop_last=True in the DataLoader, or fewer microbatches."
    ),
    ("data", "but its data is not allocated yet"): (
        "Parameters and gradients are divided over replicas (DTensor), which torch.tensor([...]) can't read, so "
        "neither can Lightning's grad_norm. Use torch.stack([...])."
    ),
    ("data", "got mixed torch.Tensor and DTensor"): (
        "Some tensors are divided over replicas (DTensor), and some are whole. Code that computes with both needs "
        "strategy='ddp', or in a pipeline data_parallel_kind='replicate'."
    ),
}


def explain(error: BaseException, layout: Layout) -> None:
    """Add a note to an error of the user's code that has its cause in the layout."""
    for (axis, words), note in _NOTES.items():
        if layout.size(axis) > 1 and words in f"{type(error).__name__}: {error}":
            error.add_note(note)
