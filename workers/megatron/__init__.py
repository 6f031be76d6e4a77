"""One rank of a Megatron group: the model, the adapter store, the optimizer layouts, the sampler, and the process that hosts them.

The only place that imports torch and megatron. Import `workers.megatron.cpu` before megatron on a machine without CUDA.
"""
