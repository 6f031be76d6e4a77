"""What does the work: the worker contract, the simulated group, and the Ray-hosted Megatron group.

A worker knows slots, steps and bytes; it knows nothing of who owns a slot, of queues or of whose turn it is. Only
`workers/megatron` imports torch and megatron, only `workers/ray_group` imports ray.
"""
