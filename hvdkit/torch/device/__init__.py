"""Reductions of tensors in device memory, by process groups of torch that hvdkit makes for itself.

A group is a bare backend object of torch.distributed (ProcessGroupNCCL on NVIDIA and AMD, ProcessGroupXCCL on Intel, or
what a plug-in has registered for its device type). It is beside any group of the script: nothing is registered, and its
ranks connect through hvdkit's own transport. The same code runs on tensors of the CPU over ProcessGroupGloo
(HVDKIT_DEVICE_TRANSPORT=torch), where the tests are; "auto" never does that.
"""
