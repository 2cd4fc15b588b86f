"""Sets variables of this process and of the workers that it starts. To be imported before torch is."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
# Without this, a process that has asked for GPUs cannot fork workers that use them.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# torch's TCPStore asks the name server for the name of 127.0.0.1: a lost packet costs 1 s then, not 5.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
