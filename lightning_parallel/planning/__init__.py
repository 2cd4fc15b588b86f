"""Which layout for this module, these devices and this memory, and what it will cost.

A plan runs nothing on several ranks: it is made of one dry run of the step, of each kind of layer tried once on this
machine's device, and of the schedules, simulated::

    profile.py, layer_costs.py   what each layer takes: seconds, and bytes held up to its backward, by samples
    devices.py                   this machine's device and links, measured; or another one, described
    layouts.py                   the layouts that there are for so many devices and such a batch
    memory.py, step_time.py      what one of them takes on its fullest rank, and a step of it
    planned_module.py            the module as one of some tensor ranks has it, where it can be cut
    planner.py, table.py         all layouts, refused or ranked

``comparison/`` tells whether a layout is right, this room what it costs. It cuts no module: ``cuts/`` does.
"""
