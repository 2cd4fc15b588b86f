"""Which layout for this module, these devices and this memory, and what it will cost.

A plan runs nothing on several ranks: it is made of one dry run of the step, of each kind of layer tried once on this
machine's device (``costs/``), and of the schedules, simulated::

    layouts.py                            the layouts that there are for so many devices and such a batch
    cutting.py                            where one of them cuts the module, or why it can't
    memory.py, moments.py                 what its ranks hold, and at which moment the most
    communicators.py                      what NCCL holds for them
    step_time.py                          the seconds of its step
    planned_module.py                     the module, as one of some tensor ranks has it
    planner.py, table.py, picture.py      all layouts, refused or ranked

``comparison/`` tells whether a layout is right, this room what it costs. It cuts no module: ``cuts/`` does.
"""
