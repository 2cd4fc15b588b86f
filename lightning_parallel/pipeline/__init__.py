"""Pipeline parallelism: from a module to stages, from a schedule to messages. It knows no Lightning.

In the order in which a batch meets them::

    partition.py      which layers a stage owns             balance.py, source_order.py, flow.py
    schedule.py       what each stage computes, in order    async_schedule.py, simulate.py
    engine.py         runs a schedule on a stage            weights.py, timeline.py
    stage.py          runs the user's step, cut to a stage  forward_pass.py, absent.py, arrival.py
    channel.py        sends and receives                    message.py
"""
