"""What the parts of a training take: tried on this machine's device, or described by numbers of its maker.

    devices.py                       a device and its messages: rates, measured here, or of a data sheet
    layer_costs.py                   one call of a layer: seconds, and bytes held up to its backward
    code_around.py                   what the step's code computes between the layers
    profile.py                       all calls of a step, by the number of samples
    chunk_costs.py                   the chunks of a cut module: their calls, and what crosses the cuts
    updates.py                       the optimizer's step
    loading.py                       a batch of a loader

What layouts make of these costs belongs to ``planning/``.
"""
