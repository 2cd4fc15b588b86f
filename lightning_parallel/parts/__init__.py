"""The parts that strategies are put together from. Each is given what it needs; those with state have a set-up and an
end of their own.

::

    run.py             what each part is given of a run
    process_group.py   joining and leaving the processes       collectives.py   what Lightning asks ranks to do together
    loaders.py         what data loaders have to give          checkpoints.py   Lightning's side of a checkpoint
    replicas.py        copies of the model                     clipping.py      the norm of the whole model
    tensor_shards.py   layers divided over ranks               stages.py        the module in stages
    cutting.py         where the module is cut                 first_batch.py   a batch to decide it by
    step_hooks.py      the user's hooks in that decision       once_a_batch.py  what a step changes itself
    first_look.py      what crosses the cuts in a step         microbatches.py  a batch's work
    splitting.py       a batch in microbatches                 other_lightning.py  modules of pytorch_lightning
    loss_means.py      what microbatches weigh                 options.py      the settings of strategies
    last_stage.py      what the last stage does for all        metric_board.py  metrics, the same on every stage
    batch_watch.py     does a step change its batch?           between_batches.py  do stages wait for each other?
    earlier_chunks.py  runs of a step that don't count
    evaluation.py      forward only                            several_passes.py  a prediction made token by token
    earlier_gradients.py  of batches before                    logs.py          self.log inside microbatches
    own_part.py        a hook for a divided module         gradient_watch.py  norms of a part of the gradients
    log_joins.py       numbers of microbatches joined      loss_pairs.py    two microbatches tried as one
    asynchronous.py    updates without a flush                 late_gradients.py, optimizer_options.py
    timelines.py       what ran when                           callbacks.py     brought along, or refused
    memory_snapshot.py what takes a GPU's memory               meeting.py       asks all ranks, between batches
    background.py      saves beside the training               preemption.py    saved and left at a signal
    exact_resume.py    what a resumed run goes on with         saved_moment.py  when it was saved
    finite_loss.py     warns and ends at a NaN loss            notice.py        a stop that nobody waits for
    late_values.py     awaited when they are read              common_stop.py   all stop after the same batch
    side_links.py      for small messages between stages       hook_changes.py  what an epoch's end sets, on all stages
    step_effects.py    what a step does to the whole run       left_by_steps.py what it leaves for later
    optimizer_trial.py is one the same on parts?              sample_mixing.py  layers that mix samples
    metric_sync.py     over which ranks metrics gather
"""
