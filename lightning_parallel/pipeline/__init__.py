"""Pipeline parallelism: from a module to stages, from a schedule to messages. It knows no Lightning.

In the order in which a batch meets them::

    trace.py          what the user's step does             tracer.py, traced.py, operations.py, timing.py
                      on tensors without values             absent.py, origins.py, absent_module.py, absent_forward.py
                      put back afterwards                   kept_state.py, own_generators.py, plain_values.py
    partitioning.py   which layers a chunk owns             candidate.py, partition.py, layers.py, balance.py
    survey.py         what crosses the cuts                 flow.py, one_sided.py
    schedule.py       what each stage computes, in order    actions.py, schedule_checks.py, async_schedule.py
                      timed on paper, drawn as it ran       simulate.py, drawing.py, trace_file.py
    engine.py         runs a schedule on a stage            weights.py, timeline.py
    chunk.py          what a stage runs of the step         ends.py, handover.py, recompute.py
                      its backward in two halves            split_backward.py, matmuls.py
    stage.py          runs the user's step, cut to a chunk other_units.py, forward_pass.py, interception.py, arrival.py
    channel.py        sends and receives                    message.py, posting.py, streams.py
                      between GPUs, announced by hosts      announced.py
    normaliser.py     a batch's loss from microbatches'     loss_graph.py, loss_trial.py
"""
