"""Inference engines that sample instead of Megatron: how they are asked, by the gateway or by the workers beside which one stands."""
