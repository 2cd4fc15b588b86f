"""What the parts of a training take: tried on this machine's device, or described by numbers of its maker.

    devices.py, links.py             a device and its messages: rates, measured here, or of a data sheet
    layer_costs.py                   one call of a layer: seconds, and bytes held up to its backward
    code_around.py                   what the step's code computes between the layers
    profile.py                       all layers of a module by numbers of samples, and chunks of them
    updates.py                       the optimizer's step
    loading.py                       a batch of a loader

What layouts make of these costs belongs to ``planning/``.
"""
