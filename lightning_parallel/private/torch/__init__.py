"""Every private name of torch that the package uses, with the reason why no public one does.

``tensors.py`` has those about tensors and operators, ``autograd.py`` about the graph of a backward, ``modules.py``
about modules and optimizers, ``groups.py`` about process groups and collectives.

``tests/private/test_torch.py`` pins each of them: when a new version of torch breaks one, a test there fails and says
what depends on it. Nothing else in the package imports or reads a private name of torch. ``checkpoint/slices.py``
implements three private methods, by which torch's checkpoints get a tensor's parts.
"""
