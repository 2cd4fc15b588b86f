"""Which ranks there are, how they meet, and how they tell each other a value.

``layout.py`` has the axes, ``groups.py`` the process groups along them, ``process_group.py`` and ``rendezvous.py`` how
processes join and leave. ``collectives.py`` has what all ranks call together, ``user_collectives.py`` the ranks and the
collectives as the user's step sees them; ``meeting.py``, ``vote.py`` and ``notice.py`` are for agreements between
batches. ``run.py`` has the objects that all parts of a run share. ``local_model.py`` and ``shard.py`` describe what one
rank holds, and ``writes.py`` watches it.
"""
