"""megatron-quads: NVFP4 (W4A4) reinforcement learning for Mixture-of-Experts LLMs, stable by construction (QUADS)."""

__version__ = "0.1.0"
