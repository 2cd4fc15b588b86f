"""What stages send each other: formats, links, and the order in which sends and receives are posted.

``channel.py`` sends and receives through host memory, ``announced.py`` between GPUs; ``ends.py`` chooses between them,
and hands messages over between two chunks of one stage. ``message.py`` is the packet, ``arrival.py`` its tensors as
autograd sees them, ``posting.py`` and ``streams.py`` the thread and the CUDA streams.

From the inside out: a *wire* is a group and a tag, a *link* is one direction of it, at whose ends are a sender and a
receiver; a *way* has the activations and the gradients between two chunks; *ends* are all ways of a chunk.
"""
