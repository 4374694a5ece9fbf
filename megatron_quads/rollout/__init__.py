"""Rollout: vLLM with NVFP4 experts and residual activation compensation, behind one interface."""

from .client import LocalRollout
from .http import HttpRollout
from .types import Rollout, RolloutInfo, Sample

__all__ = ["HttpRollout", "LocalRollout", "Rollout", "RolloutInfo", "Sample"]
