"""The dry run of the user's step: it runs once without values, and a trace says what it does.

dry_run.py                          runs it
recorder.py, trace.py               records what happens; the trace
second_run.py                       what it does after it has asked for a value, and who uses plain values
snapshot.py, own_generators.py      put modules and generators back afterwards
plain_values.py                     watches attributes that aren't tensors
put_back.py                         what a stage puts back that leaves a step before its end
operations.py                       counts what the step costs
repeated.py                         finds layers that can't run twice
"""
